"""The conversions on real ranks, compared with their definition by layouts, and in a group of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchshard.distributed as tsd
from tests.conversion_cases import STRIDES, cases, conversions
from tests.helpers import in_groups_of, nightly
from torchshard.testing import run_ranks, step_args

_ops = torch.ops.torchshard
NAMES = sorted({name for name, *_ in cases()})


def _conversions(rank: int, size: int) -> dict[str, Any]:
    """Runs all conversions in a group."""
    wrong, done = conversions(rank, lambda name: getattr(_ops, name).default)
    highest = _ops.all_reduce_max(torch.tensor([float(rank), -float(rank)]), "model")
    return {"wrong": wrong, "done": done, "max": highest.tolist()}


@pytest.fixture(scope="module")
def four() -> list[dict[Any, Any]]:
    """The results of four ranks, in pairs and all together."""
    return run_ranks(in_groups_of, 4, _conversions, (2, 4))


@pytest.fixture(scope="module")
def three() -> list[dict[Any, Any]]:
    """The results of three ranks."""
    return run_ranks(in_groups_of, 3, _conversions, (3,))


@nightly("four-*")
@pytest.mark.parametrize(("ranks", "world"), [("four", 2), ("three", 3), ("four", 4)])
def test_on_real_ranks(ranks: str, world: int, request: pytest.FixtureRequest) -> None:
    for found in request.getfixturevalue(ranks):
        result = found[world]
        assert result["wrong"] == []
        assert result["done"] == {(name, how) for name in NAMES for how in STRIDES}
        assert result["max"] == [world - 1.0, 0.0]


def test_results_of_a_group_of_one_are_copies() -> None:
    tsd.init_process_group()
    for name, source, target, shape in cases():
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        got = getattr(_ops, name)(x, *step_args(source, target, shape), "model")
        (grad,) = torch.autograd.grad(got, x, torch.ones_like(got))
        assert torch.equal(got, x) and torch.equal(grad, torch.ones_like(x)), name
        assert not got.numel() or got.data_ptr() != x.data_ptr(), name


@pytest.mark.parametrize("name", NAMES)
def test_custom_op_contracts(name: str) -> None:
    """PyTorch's own checks: schema, fake kernel, autograd registration, and dynamic shapes under AOT."""
    tsd.init_process_group()
    _, source, target, shape = next(c for c in cases() if c[0] == name)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    args = (x, *step_args(source, target, shape), "model")
    torch.library.opcheck(getattr(_ops, name).default, args)
