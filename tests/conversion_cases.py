"""Conversions with the sizes, layouts and strides that tests run on ranks, compared with what the layouts say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import torchshard.distributed as tsd
from torchshard import I, P, R, S
from torchshard.testing import Layout, Shard, dual, join, split, step_args

Case = tuple[str, Layout, Layout, tuple[int, ...]]
"""The conversion's name, the layouts from which and to which, and the full shape."""
Operator = Callable[..., Any]
"""Runs a conversion: takes a tensor, `step_args` with tuples, and the name of the group."""
STRIDES = ("plain", "transposed", "strided", "expanded")


def cases() -> Iterator[Case]:
    """Every conversion along first, middle and last dims: even, uneven, fewer than ranks, in segments and in units."""
    shards: list[tuple[Shard, Shard, tuple[int, ...]]] = [
        (S(0), S(1), (12, 4)),
        (S(1), S(0), (5, 7)),
        (S(0), S(2), (1, 3, 5)),
        (S(1, ((4, 1), (3, 1))), S(0), (4, 7)),
        (S(2, ((3, 2),)), S(0, ((2, 1), (4, 1))), (6, 2, 6)),
        (S(0, ((5, 2), (1, 3))), S(1), (13, 2)),
    ]
    for a, b, shape in shards:
        yield "scatter", I, a, shape
        yield "gather", a, I, shape
        yield "reduce_scatter", P, a, shape
        yield "all_gather", a, R, shape
        yield "narrow", R, a, shape
        yield "all_to_all", a, b, shape
        yield "all_to_all", b, a, shape
        yield "pad", a, P, shape
    for shape in [(5, 4), (1,), (), (0, 3)]:
        yield "copy", I, R, shape
        yield "reduce", P, I, shape
        yield "all_reduce", P, R, shape


def spread(layout: Layout, shape: tuple[int, ...], world: int, *, equal: bool = False) -> list[Tensor]:
    """The ranks' parts of a random value; `equal`: a partial sum has equal addends."""
    if layout == P:
        made = [torch.randn(shape, dtype=torch.float64) for _ in range(world)]
        return made[:1] * world if equal else made
    whole = torch.randn(shape, dtype=torch.float64)
    return [split(whole, layout, rank, world).clone() for rank in range(world)]


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


def _failures(call: Operator, rank: int, case: Case, how: str, equal: bool) -> list[str]:
    """Runs one conversion on this rank; returns what is wrong."""
    name, source, target, shape = case
    world = tsd.get_group_size()
    pieces = _with_strides(spread(source, shape, world), source, how, mixed=1)
    cotangents = _with_strides(spread(dual(target), shape, world, equal=equal), dual(target), how, mixed=2)
    x, cotangent = (p[rank].detach().requires_grad_() for p in (pieces, cotangents))
    before = x.detach().clone()
    args = (tuple(a) if isinstance(a, list) else a for a in step_args(source, target, shape))
    got = call(x, *args, "model")
    (grad,) = torch.autograd.grad(got, x, cotangent, create_graph=True)
    (again,) = torch.autograd.grad(grad, cotangent, pieces[rank]) if how == "plain" else (got,)
    value, gradient = join(pieces, source), join(cotangents, dual(target))
    found = {
        "value": _same(got, value, target, rank),
        "gradient": _same(grad, gradient, dual(source), rank),
        "gradient of the gradient": _same(again, value, target, rank),
        "input kept": torch.equal(x.detach(), before),
        "no alias": got.untyped_storage()._cdata != x.untyped_storage()._cdata,
        "contiguous": got.is_contiguous() or name == "copy",
    }
    wrong = [what for what, holds in found.items() if not holds]
    return [f"{call} {source} -> {target} of {shape}, {how}, {equal=}: {', '.join(wrong)}"] if wrong else []


def _same(got: Tensor, whole: Tensor, layout: Layout, rank: int) -> bool:
    """Whether this rank's part of a value is as its layout says. Partial sums are reduced, since addends may differ."""
    if layout == P:
        got, expected = got.clone(memory_format=torch.contiguous_format), whole
        dist.all_reduce(got, group=tsd.get_group())
    else:
        expected = split(whole, layout, rank, tsd.get_group_size())
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=0, atol=1e-12)


def conversions(rank: int, function_of: Callable[[str], Operator]) -> tuple[list[str], set[tuple[str, str]]]:
    """Runs all conversions on this rank; returns what is wrong, and the conversions and strides that have run.

    Args:
        rank: the rank in its group.
        function_of: from a conversion's name to the function that runs it.
    """
    torch.manual_seed(0)
    wrong, done = list[str](), set[tuple[str, str]]()
    for case in cases():
        for how in STRIDES:
            for equal in (False, True) if case[2] == R else (False,):  # only cotangents of R have addends
                wrong += _failures(function_of(case[0]), rank, case, how, equal)
                done.add((case[0], how))
    return wrong, done
