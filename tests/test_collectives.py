"""The conversions on real ranks, compared with their definition by layouts.

A few spawns run everything: each returns descriptions of its failures, and the cases that it ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchshard as ts
import torchshard.distributed as tsd
from tests.conversion_cases import Case, cases, spread
from tests.helpers import nightly
from torchshard.checking.lockstep import convert
from torchshard.core.conversions import TABLE, step_args
from torchshard.core.layouts import Layout, P, R, Shard, dual, join, split
from torchshard.core.mesh import simulated_name
from torchshard.distributed.group import lookup
from torchshard.distributed.ops import direct
from torchshard.ops import hashable
from torchshard.testing import run_ranks

_ops = torch.ops.torchshard
STRIDES = ("plain", "transposed", "strided", "expanded")


def _restrided(x: Tensor, how: str) -> Tensor:
    """Equal values (for `expanded`, the first row's) in non-contiguous memory."""
    if how == "transposed" and x.ndim > 1:
        return x.mT.contiguous().mT
    if how == "strided" and x.ndim:
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    if how == "expanded" and x.ndim and x.shape[0]:
        return x[:1].expand(x.shape)
    return x


def _with_strides(pieces: list[Tensor], layout: Layout, how: str, mixed: int) -> list[Tensor]:
    """All ranks' pieces in these strides; `mixed`: in different ones. Shards aren't expanded, to keep their values."""
    rest = [s for s in STRIDES if s != "expanded"]
    hows = [rest[(rest.index(how) + mixed * rank) % 3] if how in rest else how for rank in range(len(pieces))]
    if how == "expanded" and isinstance(layout, Shard):
        return pieces
    return [_restrided(p, h) for p, h in zip(pieces, hows, strict=True)]


def _one(rank: int, case: Case, how: str, equal: bool) -> Iterator[str]:
    """Runs one conversion on this rank, as an operator and without PyTorch's dispatcher; yields its failures."""
    name, source, target, shape = case
    world = tsd.get_group_size()
    pieces = _with_strides(spread(source, shape, world), source, how, mixed=1)
    cotangents = _with_strides(spread(dual(target), shape, world, equal=equal), dual(target), how, mixed=2)
    op = getattr(_ops, name).default
    for call in (op, direct(op)):
        x, cotangent = (p[rank].detach().requires_grad_() for p in (pieces, cotangents))
        before = x.detach().clone()
        got = call(x, *hashable(step_args(source, target, shape)), "model")
        (grad,) = torch.autograd.grad(got, x, cotangent, create_graph=True)
        (again,) = torch.autograd.grad(grad, cotangent, pieces[rank]) if how == "plain" else (got,)
        found = {
            "value": _same(got, convert(pieces, source, target), target, rank),
            "gradient": _same(grad, convert(cotangents, dual(target), dual(source)), dual(source), rank),
            "gradient of the gradient": _same(again, convert(pieces, source, target), target, rank),
            "input kept": torch.equal(x.detach(), before),
            "no alias": got.untyped_storage()._cdata != x.untyped_storage()._cdata,
            "contiguous": got.is_contiguous() or name == "copy",
        }
        wrong = [what for what, holds in found.items() if not holds]
        if wrong:
            yield f"{call} {source} -> {target} of {shape}, {how}, {equal=}: {', '.join(wrong)}"


def _same(got: Tensor, expected: Sequence[Tensor], layout: Layout, rank: int) -> bool:
    """Whether this rank's part is as expected. Partial sums are reduced first, since their addends may differ."""
    if layout == P:
        got, expected = got.clone(memory_format=torch.contiguous_format), [join(expected, P)] * len(expected)
        dist.all_reduce(got, group=tsd.get_group())
    return got.shape == expected[rank].shape and torch.allclose(got, expected[rank], rtol=0, atol=1e-12)


def _in_groups_of(rank: int, sizes: tuple[int, ...]) -> dict[Any, Any]:
    """Runs all conversions in groups of each size."""
    found: dict[Any, Any] = {}
    for size in sizes:
        tsd.init_process_group(group_size=size)
        found[size] = _conversions(rank % size, size)
        tsd.destroy_process_group()
    return found


def _conversions(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(0)
    wrong, done = list[str](), set()
    for case in cases():
        for how in STRIDES:
            for equal in (False, True) if case[2] == R else (False,):  # only cotangents of R have addends
                wrong += _one(rank, case, how, equal)
                done.add((case[0], how))
    return {
        "wrong": wrong,
        "done": done,
        "max": _ops.all_reduce_max(torch.tensor([float(rank), -float(rank)]), "model").tolist(),
    }


@pytest.fixture(scope="module")
def four() -> list[dict[Any, Any]]:
    """The results of four ranks, in pairs and all together."""
    return run_ranks(_in_groups_of, 4, (2, 4))


@pytest.fixture(scope="module")
def three() -> list[dict[Any, Any]]:
    """The results of three ranks."""
    return run_ranks(_in_groups_of, 3, (3,))


@nightly("four-*")
@pytest.mark.parametrize(("ranks", "world"), [("four", 2), ("three", 3), ("four", 4)])
def test_on_real_ranks(ranks: str, world: int, request: pytest.FixtureRequest) -> None:
    for found in request.getfixturevalue(ranks):
        result = found[world]
        assert result["wrong"] == []
        assert result["done"] == {(name, how) for name in TABLE for how in STRIDES}
        assert result["max"] == [world - 1.0, 0.0]


def test_results_of_a_group_of_one_are_copies() -> None:
    tsd.init_process_group()
    for name, source, target, shape in cases():
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        got = getattr(_ops, name)(x, *step_args(source, target, shape), "model")
        (grad,) = torch.autograd.grad(got, x, torch.ones_like(got))
        assert torch.equal(got, x) and torch.equal(grad, torch.ones_like(x)), name
        assert not got.numel() or got.data_ptr() != x.data_ptr(), name


def test_a_simulated_group_has_shapes_and_no_values() -> None:
    name = simulated_name(2, 3)
    assert (lookup(name).rank, lookup(name).size, lookup(name).simulated) == (2, 3, True)
    assert _ops.scatter(torch.empty(7, 2, device="meta"), 0, [7, 1], name).shape == (1, 2)
    with pytest.raises(ts.DistributedError, match="made for simulated ranks can't communicate"):
        _ops.scatter(torch.empty(7, 2), 0, [7, 1], name)


@pytest.mark.parametrize("name", TABLE)
def test_fake_shapes_are_those_of_the_layouts(name: str) -> None:
    """Compares fake shapes with the layouts' shapes, for each of three ranks."""
    for _, source, target, shape in (c for c in cases() if c[0] == name):
        for rank in range(3):
            x = split(torch.empty(shape, device="meta"), source, rank, 3)
            got = getattr(_ops, name)(x, *step_args(source, target, shape), simulated_name(rank, 3))
            assert got.shape == split(torch.empty(shape, device="meta"), target, rank, 3).shape


@pytest.mark.parametrize("name", TABLE)
def test_custom_op_contracts(name: str) -> None:
    """PyTorch's own checks: schema, fake kernel, autograd registration, and dynamic shapes under AOT."""
    tsd.init_process_group()
    _, source, target, shape = next(c for c in cases() if c[0] == name)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    args = (x, *step_args(source, target, shape), "model")
    torch.library.opcheck(getattr(_ops, name).default, args)
