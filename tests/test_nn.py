"""Parallel functions match PyTorch's: values, and the gradients of inputs and parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchshard.distributed as tsd
import torchshard.nn.functional as tsf
from torchshard.testing import Shard, run_ranks, split

TOLERANCE = 1e-10
LINEAR_STYLES = ("column", "row", "replicate")
EMBEDDING_STYLES = ("vocab", "column", "replicate")
Claim = tuple[str, bool]


def own(whole: Tensor, dim: int | None) -> Tensor:
    """Returns this rank's slice as a separate leaf tensor."""
    held = whole if dim is None else split(whole, Shard(dim % whole.ndim), tsd.get_rank(), tsd.get_group_size())
    return held.detach().clone().requires_grad_(whole.requires_grad)


def draw(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


def close(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def compared(
    name: str,
    whole: Callable[..., Tensor],
    mine: Callable[..., Tensor],
    tensors: list[Tensor],
    dims: list[int | None],
    result_dim: int | None = None,
) -> Iterator[Claim]:
    """Compares a function of full tensors with the parallel one of slices along `dims`."""
    expected = whole(*tensors)
    slices = [own(t, d) for t, d in zip(tensors, dims, strict=True)]
    got = mine(*slices)
    yield f"{name}: value", close(got, own(expected, result_dim))
    cotangent = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(cotangent)
    got.backward(own(cotangent, result_dim))
    for i, (t, s, d) in enumerate(zip(tensors, slices, dims, strict=True)):
        if t.requires_grad:
            yield f"{name}: gradient {i}", t.grad is not None and close(s.grad, own(t.grad, d))
            t.grad = None


def _linears() -> Iterator[Claim]:
    for features, results in ((8, 12), (7, 5), (3, 1), (1, 3)):
        for bias in (True, False):
            x, w = draw(2, 3, features), draw(results, features)
            tensors = [x, w, *([draw(results)] if bias else [])]
            name = f"linear {features} -> {results}, {bias=}"
            for dim in (1, -1):
                by_columns: list[int | None] = [None, 0, 0][: len(tensors)]
                call = lambda x, w, b=None, **kw: tsf.parallel_linear(x, w, b, dim, **kw)  # noqa: B023, E731
                yield from compared(f"{name}, {dim=}", F.linear, call, tensors, by_columns, -1)
                gathered = lambda *t: call(*t, gather_output=True, size=results)  # noqa: B023, E731
                yield from compared(f"{name}, {dim=} gathered", F.linear, gathered, tensors, by_columns)
            by_rows: list[int | None] = [None, 1, None][: len(tensors)]
            call = lambda x, w, b=None, **kw: tsf.parallel_linear(x, w, b, 0, **kw)  # noqa: E731
            yield from compared(f"{name}, dim=0", F.linear, call, tensors, by_rows)
            parallel = lambda *t: call(*t, input_is_parallel=True, size=features)  # noqa: B023, E731
            yield from compared(f"{name}, dim=0 of slices", F.linear, parallel, tensors, [-1, *by_rows[1:]])
            call = lambda x, w, b=None: tsf.parallel_linear(x, w, b)  # noqa: E731
            yield from compared(f"{name}, dim=None", F.linear, call, tensors, [None] * len(tensors))


def _embeddings() -> Iterator[Claim]:
    for rows in (8, 7, 2):
        table = draw(rows, 5)
        ids = torch.randint(rows, (3, 4))
        for padding in (None, *range(rows), -1):
            for by_frequency in (False, True):
                options: dict[str, Any] = {"padding_idx": padding, "scale_grad_by_freq": by_frequency}
                whole = lambda t: F.embedding(ids, t, **options)  # noqa: B023, E731
                for dim, weight_dim in ((0, 0), (1, 1), (-1, 1), (None, None)):
                    mine = lambda t: tsf.parallel_embedding(ids, t, dim=dim, **options)  # noqa: B023, E731
                    name = f"embedding of {rows}, {dim=}, {options}"
                    yield from compared(name, whole, mine, [table], [weight_dim])


def _losses() -> Iterator[Claim]:
    for shape in ((6, 8), (6, 7), (7,), (4, 5, 3), (5, 2)):
        logits, classes = draw(*shape), shape[min(1, len(shape) - 1)]
        target = torch.randint(classes, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
        weight = torch.rand(classes, dtype=torch.float64)
        some = target.clone()
        some.view(-1)[::2] = -100
        probabilities = torch.rand(shape, dtype=torch.float64)
        for reduction in ("none", "mean", "sum"):
            for smoothing in (0.0, 0.1):
                for t, w, ignored in (
                    (target, None, -100),
                    (target, weight, -100),
                    (some, weight, -100),
                    (target, None, 1),
                    (probabilities, weight, -100),
                ):
                    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
                    whole = lambda x: F.cross_entropy(x, t, w, **options)  # noqa: B023, E731
                    for dim in range(-1, len(shape)):
                        mine = lambda x: tsf.parallel_cross_entropy(x, t, w, dim=dim, **options)  # noqa: B023, E731
                        yield from compared(f"loss of {shape}, {dim=}, {options}", whole, mine, [logits], [dim])


def _functions(rank: int, group_size: int) -> tuple[int, list[str]]:
    tsd.init_process_group(group_size)
    torch.manual_seed(0)
    claims = [*_linears(), *_embeddings(), *_losses()]
    return len(claims), [what for what, holds in claims if not holds]


@pytest.mark.nightly
@pytest.mark.parametrize("world, group_size", [(3, -1), (4, 2)])
def test_functions(world: int, group_size: int) -> None:
    for count, wrong in run_ranks(_functions, world, group_size):
        assert count > 900 and not wrong, wrong[:20]


def _without_copies(rank: int) -> list[str]:
    """Returns the claims that fail without the input's copy: only gradients."""
    tsd.init_process_group()
    torch.manual_seed(0)
    whole = sys.modules["torchshard.nn.one_op"].plan_conversion

    def without(*ends: Any, **options: Any) -> tuple[Any, ...]:
        return tuple(step for step in whole(*ends, **options) or () if step.name != "copy")

    call = lambda x, w: tsf.parallel_linear(x, w, dim=1)  # noqa: E731
    with mock.patch("torchshard.nn.one_op.plan_conversion", without):
        claims = [*compared("linear", F.linear, call, [draw(3, 4), draw(6, 4)], [None, 0], -1)]
    return [what for what, holds in claims if not holds]


def test_the_comparison_sees_a_missing_copy() -> None:
    assert run_ranks(_without_copies, 2) == [["linear: gradient 0"]] * 2
