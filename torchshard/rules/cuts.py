"""Ops that take parts of a tensor or join tensors: slice, select, split, cat, pad, diagonal.

All are linear: a Partial operand gives Partial results. The cut dim of a slice is the concatenation
of the elements before, within and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from torchshard.core.layouts import Size
from torchshard.core.rows import Local, LocalFn, Row
from torchshard.custom_ops.fx_types import Argument, Traced
from torchshard.rules.empty import anywhere
from torchshard.rules.registry import Call, letters, positive, rule, spaced, unsplittable
from torchshard.rules.shapes import LINEAR

aten = torch.ops.aten
BOTH = [{0, 1}]


class _CutOptions(TypedDict, total=False):
    sizes: dict[str, Size]
    local: dict[str, LocalFn]


def _cut(call: Call, piece: Size) -> tuple[str, str, _CutOptions]:
    """Returns the dims of a tensor and of its slice, and the options of the row.

    The cut dim is the concatenation of the elements before, within and after the slice, if their
    sizes are static.
    """
    shape = call.tensors[0].shape
    dim, names = positive(call["dim"], len(shape)), letters(len(shape), used="pqr")
    start, size = call["start"] or 0, shape[dim]

    def dims(cut: str) -> str:
        return spaced(cut if i == dim else name for i, name in enumerate(names))

    if call["step"] == 1 and size == piece:
        return spaced(names), spaced(names), {}
    if call["step"] != 1 or not all(isinstance(s, int) for s in (start, size, piece)):
        return dims(f"!{names[dim]}"), dims("!q"), {}
    # an out-of-range start is clamped, as in Python's slices
    start = max(start + size, 0) if start < 0 else min(start, size)
    widths = {"p": start, "q": piece, "r": size - start - piece}
    # omit empty parts before and after; q stays, because the result must have a dim
    sizes = {factor: width for factor, width in widths.items() if width or factor == "q"}

    def local(ctx: Local, *args: Argument, **kwargs: Argument) -> Traced:
        begin = ctx.size("p") if "p" in sizes else 0
        return call.target(*args[: len(call.tensors)], dim, begin, begin + ctx.size("q"))

    return dims("+".join(sizes)), dims("q"), {"sizes": sizes, "local": dict.fromkeys(sizes, local)}


@rule(aten.slice.Tensor)
def slice_(call: Call) -> Row:
    """`f32[2,9] -> f32[2,3]     a p+q+r -> a q     p=3 q=3 r=3`."""
    whole, piece, options = _cut(call, call.results[0].shape[call["dim"]])
    return call.row(f"{whole} -> {piece}", linear=LINEAR, **options)


@rule(aten.slice_scatter.default)
def slice_scatter(call: Call) -> Row:
    """`f32[2,9], f32[2,3] -> f32[2,9]     a p+q+r, a q -> a p+q+r     p=3 q=3 r=3`."""
    whole, piece, options = _cut(call, call.tensors[1].shape[call["dim"]])
    return call.row(f"{whole}, {piece} -> {whole}", linear=BOTH, **options)


def _apart(call: Call, *which: str) -> tuple[str, str]:
    """Returns a tensor's dims, with those that arguments name unsplittable, and its other dims.

    Args:
        which: the names of the arguments.
    """
    ndim = len(call.tensors[0].shape)
    names, dims = letters(ndim, used="y"), {positive(call[name], ndim) for name in which}
    return spaced(unsplittable(names, dims)), spaced(name for i, name in enumerate(names) if i not in dims)


@rule(aten.select.int)
def select(call: Call) -> Row:
    """`f32[3,2,8] -> f32[2,8]     !a b c -> b c`."""
    whole, rest = _apart(call, "dim")
    return call.row(f"{whole} -> {rest}", linear=LINEAR)


@rule(aten.select_scatter.default)
def select_scatter(call: Call) -> Row:
    """`f32[3,2,8], f32[2,8] -> f32[3,2,8]     !a b c, b c -> !a b c`."""
    whole, rest = _apart(call, "dim")
    return call.row(f"{whole}, {rest} -> {whole}", linear=BOTH)


@rule(aten.unbind.int)
def unbind(call: Call) -> Row:
    """`f32[3,8] -> f32[8], f32[8], f32[8]     !a b -> b, b, b`."""
    whole, rest = _apart(call, "dim")
    return call.row(f"{whole} -> {', '.join([rest] * len(call.results))}", linear=LINEAR)


@rule(
    aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)  # fmt: skip
def split(call: Call) -> Row:
    """`f32[2,9] -> f32[2,3], f32[2,6]     a x0+x1 -> a x0, a x1`: the pieces are split together."""
    ndim = len(call.tensors[0].shape)
    names, dim = letters(ndim), positive(call["dim"], ndim)
    pieces = [f"x{i}" for i in range(len(call.results))]
    left = [*names[:dim], "+".join(pieces), *names[dim + 1 :]]
    right = [[*names[:dim], piece, *names[dim + 1 :]] for piece in pieces]
    if not all(isinstance(r.shape[dim], int) for r in call.results):  # a dynamic dim has dynamic pieces
        left = [*names[:dim], f"!{names[dim]}", *names[dim + 1 :]]
        right = [[*names[:dim], f"!{piece}", *names[dim + 1 :]] for piece in pieces]

    def local(ctx: Local, x: Traced, size: Size | Sequence[Size], dim: int = 0) -> Traced:
        return aten.split_with_sizes.default(x, [ctx.size(piece) for piece in pieces], dim)

    sizes = {piece: r.shape[dim] for piece, r in zip(pieces, call.results, strict=True)}
    return call.row(
        f"{spaced(left)} -> {spaced(*right)}",
        sizes=sizes,
        linear=LINEAR,
        local=dict.fromkeys(pieces, local),
        by_size=True,
    )


@rule(aten.cat.default)
def cat(call: Call) -> Row | None:
    """`f32[2,3], f32[2,6] -> f32[2,9]     a x0, a x1 -> a x0+x1`."""
    tensors = call.tensors
    ndim = len(call.results[0].shape)
    if any(len(t.shape) != ndim for t in tensors):  # PyTorch skips empty tensors of one dim
        return None
    names, dim = letters(ndim), positive(call["dim"], ndim)
    pieces = [f"x{i}" for i in range(len(tensors))]
    left = [[*names[:dim], piece, *names[dim + 1 :]] for piece in pieces]
    right = [*names[:dim], "+".join(pieces), *names[dim + 1 :]]
    return call.row(f"{spaced(*left)} -> {spaced(right)}", linear=[set(range(len(tensors)))])


@rule(aten.stack.default)
def stack(call: Call) -> Row:
    """`f32[8], f32[8] -> f32[2,8]     a, a -> !s a`."""
    ndim = len(call.tensors[0].shape)
    names, dim = letters(ndim, used="s"), positive(call["dim"], ndim + 1)
    right = [*names[:dim], "!s", *names[dim:]]
    n = len(call.tensors)
    return call.row(f"{spaced(*([names] * n))} -> {spaced(right)}", linear=[set(range(n))])


@rule(
    aten.constant_pad_nd.default, aten.pad.default,
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default,
    aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default,
)  # fmt: skip
def pad(call: Call) -> Row:
    """`f32[2,8] -> f32[2,11]     a !b -> a !b0`: padded (or cropped) dims are unsplittable."""
    ndim = len(call.tensors[0].shape)
    amounts = call["pad" if "pad" in call.args else "padding"]
    left = letters(ndim)
    right = list(left)
    for i in range(len(amounts) // 2):
        if amounts[2 * i] or amounts[2 * i + 1]:
            dim = ndim - 1 - i
            left[dim], right[dim] = f"!{left[dim]}", f"!{left[dim]}0"
    linear = () if call.args.get("value") else LINEAR  # padding with nonzero values would be summed over the ranks
    return call.row(f"{spaced(left)} -> {spaced(right)}", linear=linear, **anywhere(call))


@rule(aten.roll.default, aten.flip.default)
def along_dims(call: Call) -> Row:
    """`f32[2,8] -> f32[2,8]     a !b -> a !b`: elements move along these dims."""
    ndim = len(call.tensors[0].shape)
    dims = call["dims"] or (range(ndim) if call.target is aten.roll.default else [])
    names = unsplittable(letters(ndim), [positive(d, ndim) for d in dims])
    return call.row(f"{spaced(names)} -> {spaced(names)}", linear=LINEAR)


@rule(aten.diagonal.default)
def diagonal(call: Call) -> Row:
    """`f32[4,2,5] over dims 0 and 2 -> f32[2,4]     !a b !c -> b !y`."""
    whole, rest = _apart(call, "dim1", "dim2")
    return call.row(f"{whole} -> {rest} !y", linear=LINEAR)


@rule(aten.diag_embed.default)
def diag_embed(call: Call) -> Row:
    """`f32[2,4] -> f32[2,4,4]     a !b -> a !y0 !y1`."""
    ndim = len(call.results[0].shape)
    names, dims = letters(ndim - 1, used="y"), [positive(call[name], ndim) for name in ("dim1", "dim2")]
    rest = iter(names[:-1])
    right = [f"!y{dims.index(i)}" if i in dims else next(rest) for i in range(ndim)]
    return call.row(f"{spaced(unsplittable(names, [ndim - 2]))} -> {spaced(right)}", linear=LINEAR)


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: Call) -> Row:
    """`f32[4,2,5], f32[2,4] -> f32[4,2,5]     !a b !c, b !y -> !a b !c`."""
    whole, rest = _apart(call, "dim1", "dim2")
    return call.row(f"{whole}, {rest} !y -> {whole}", linear=BOTH)


rule(aten.view_as_real.default, row="... -> ... !z", linear=LINEAR)
rule(aten.view_as_complex.default, row="... !z -> ...", linear=LINEAR)


@rule(aten.unfold.default)
def unfold(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,3,4,4]     a !b c -> a !w c !s`: windows of one dim."""
    ndim = len(call.tensors[0].shape)
    if not ndim:
        return call.row(" -> !s")
    names, dim = letters(ndim, used="sw"), positive(call["dimension"], ndim)
    right = ["!w" if i == dim else name for i, name in enumerate(names)]
    return call.row(f"{spaced(unsplittable(names, [dim]))} -> {spaced([*right, '!s'])}", linear=LINEAR)


@rule(aten.tril.default, aten.triu.default)
def triangle(call: Call) -> Row:
    """`f32[4,8,8] -> f32[4,8,8]     ... a b -> ... a b`: the diagonal is shifted by a slice's start."""

    def local(ctx: Local, x: Traced, diagonal: int = 0) -> Traced:
        # row i of a slice is row start + i of the full tensor: the diagonal moves right for rows,
        # left for columns
        (factor,) = (name for name, _ in ctx.choice.factors)
        start = ctx.start(factor)
        return call.target(x, diagonal + (start if factor == "a" else -start))

    return call.row("... a b -> ... a b", linear=LINEAR, local={"a": local, "b": local})
