"""Look-ups. A table split along the looked-up axis: each rank gives its own rows and zeros elsewhere, so Partial."""

from __future__ import annotations

from typing import Any

import torch

from torchshard.core.notation import Local, Row
from torchshard.rules.empty import filled
from torchshard.rules.registry import Call, TensorType, block, broadcast, letters, positive, rule, spaced

aten = torch.ops.aten


def own_index(ctx: Local, axis: str, index: Any, besides: Any = None) -> tuple[Any, Any]:
    """A global index as (this rank's index, outside): where outside, the index is 0 and the value must be masked.

    An index that is no rank's is the error that it is unsharded, except where `besides` is true.
    """
    within = aten.logical_and.default(aten.ge.Scalar(index, 0), aten.lt.Scalar(index, ctx.row.sizes[axis]))
    within = within if besides is None else aten.logical_or.default(within, besides)
    aten._assert_async.msg(aten.all.default(within), "index out of range")
    shifted = aten.sub.Tensor(index, ctx.start(axis))
    below, above = aten.lt.Scalar(shifted, 0), aten.ge.Scalar(shifted, ctx.size(axis))
    outside = aten.logical_or.default(below, above)
    return aten.masked_fill.Scalar(shifted, outside, 0), outside


def nonempty(ctx: Local, axis: str, table: Any, dim: int, ndim: int) -> Any:
    """The table, with a row of zeros where this rank holds none: every look-up is masked then."""
    return table if ctx.size(axis) else filled(table, dim, ndim)


@rule(aten.embedding.default)
def embedding(call: Call) -> Row:
    """`f32[97,16], i64[2,8] -> f32[2,8,16]     v e, a b -> a b e`; splitting v wants a masked look-up and gives P.

    A gradient that is scaled by frequency counts all indices: only e is open then.
    """
    names = letters(len(call["indices"].shape), used="ve")
    if call["scale_grad_by_freq"]:
        names = block(names, range(len(names)))
        return call.row(f"!v e, {spaced(names)} -> {spaced([*names, 'e'])}", linear=[{0}])

    def local(ctx: Local, weight: Any, indices: Any, padding_idx: int = -1, *flags: Any) -> Any:
        index, outside = own_index(ctx, "v", indices)
        mine = padding_idx - ctx.start("v") if padding_idx >= 0 else -1
        mine = mine if 0 <= mine < ctx.size("v") else -1
        found = aten.embedding.default(nonempty(ctx, "v", weight, 0, 2), index, mine)
        return aten.masked_fill.Scalar(found, aten.unsqueeze.default(outside, -1), 0.0)

    return call.row(f"v e, {spaced(names)} -> {spaced([*names, 'e'])}", linear=[{0}], local={"v": local})


@rule(aten.embedding_bag.padding_idx)
def embedding_bag(call: Call) -> Row:
    """`f32[97,16], i64[8], i64[2] -> f32[2,16], ...     !v e, !i0, !i1 -> !r0 e, ...`: bags are summed whole."""
    others = [[f"!i{j}{k}" for k in range(len(t.shape))] for j, t in enumerate(call.tensors[1:])]
    rest = [[f"!r{j}{k}" for k in range(len(r.shape))] for j, r in enumerate(call.results[1:])]
    if call["mode"] == MAX_OF_BAG:  # where in its bag the largest is found, of each column
        rest[-1][-1] = "e"
    return call.row(f"{spaced(['!v', 'e'], *others)} -> {spaced(['!r', 'e'], *rest)}", reduced={"e"})


MAX_OF_BAG = 2
"""PyTorch's number for bags of which the largest is taken."""


@rule(aten.index_select.default)
def index_select(call: Call) -> Row | None:
    """`f32[5,8], i64[3] -> f32[3,8]     v b, i -> i b`; splitting v gives P."""
    ndim = len(call.tensors[0].shape)
    if not ndim or not call["index"].shape:
        return None
    names, dim = letters(ndim, used="iv"), positive(call["dim"], ndim)
    left = ["v" if i == dim else n for i, n in enumerate(names)]
    right = ["i" if i == dim else n for i, n in enumerate(names)]

    def local(ctx: Local, x: Any, dim: int, index: Any) -> Any:
        own, outside = own_index(ctx, "v", index)
        found = aten.index_select.default(nonempty(ctx, "v", x, dim % ndim, ndim), dim, own)
        return aten.masked_fill.Scalar(found, aten.reshape.default(outside, [-1] + [1] * (ndim - 1 - dim % ndim)), 0.0)

    return call.row(f"{spaced(left)}, i -> {spaced(right)}", linear=[{0}], local={"v": local})


@rule(aten.gather.default)
def gather(call: Call) -> Row | None:
    """`f32[2,97], i64[2,3] -> f32[2,3]     a v, a i -> a i`; splitting v gives P."""
    x, index = call["self"].shape, call["index"].shape
    ndim = len(x)
    if not ndim or len(index) != ndim:
        return None
    names, dim = letters(ndim, used="iv"), positive(call["dim"], ndim)
    same = [n if a == b else f"!{n}" for n, a, b in zip(names, x, index, strict=True)]
    left = ["v" if i == dim else n for i, n in enumerate(same)]
    right = ["i" if i == dim else (n if not n.startswith("!") else n + "y") for i, n in enumerate(same)]

    def local(ctx: Local, x: Any, dim: int, index: Any, **kwargs: Any) -> Any:
        own, outside = own_index(ctx, "v", index)
        found = aten.gather.default(nonempty(ctx, "v", x, dim % ndim, ndim), dim, own)
        return aten.masked_fill.Scalar(found, outside, 0.0)

    return call.row(f"{spaced(left, right)} -> {spaced(right)}", linear=[{0}], local={"v": local})


@rule(
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_reduce.default,
)
def index_write(call: Call) -> Row | None:
    """`f32[2,5], i64[3], f32[2,3] -> f32[2,5]     a !v, !i, a !i -> a !v`: written at some places of one dim."""
    shape, index = call["self"].shape, call["index"].shape
    if not shape or not index:
        return None
    names, dim = letters(len(shape), used="iv"), positive(call["dim"], len(shape))
    whole, piece = (["!" + axis if i == dim else n for i, n in enumerate(names)] for axis in "vi")
    added = call.args.get("source", call.args.get("value"))
    values = [] if not isinstance(added, TensorType) else [piece if added.shape else []]
    return call.row(f"{spaced(whole, ['!i'], *values)} -> {spaced(whole)}")


@rule(
    aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default,
    aten.scatter_reduce.two,
)  # fmt: skip
def scatter(call: Call) -> Row | None:
    """`f32[2,5], i64[2,3], f32[2,3] -> f32[2,5]     a !v, a !i, a !i -> a !v`.

    Where the index is smaller than what is written to, or than what is written, which elements count is decided by
    their place in the whole: such dims stay whole.
    """
    tensors = [t.shape for t in call.tensors]
    ndim, dim = len(tensors[0]), positive(call["dim"], len(tensors[0]))
    if not ndim or any(len(shape) != ndim for shape in tensors):
        return None
    names = letters(ndim)
    alike = [d for d in range(ndim) if d != dim and all(shape[d] == tensors[0][d] for shape in tensors)]
    dims = [[n if d in alike else f"!{n}{j}" for d, n in enumerate(names)] for j in range(len(tensors))]
    return call.row(f"{spaced(*dims)} -> {spaced(dims[0])}")


rule(aten.searchsorted.Scalar, row="!n -> ")


@rule(aten.isin.Tensor_Tensor)
def isin(call: Call) -> Row:
    """`i64[2,8], i64[3] -> bool[2,8]     a b, !t -> a b`: each element is looked for among all that are tested for."""
    own, others = letters(len(call["elements"].shape), used="t"), len(call["test_elements"].shape)
    return call.row(f"{spaced(own, [f'!t{i}' for i in range(others)])} -> {spaced(own)}")


rule(aten.bucketize.Tensor, row="..., !n -> ...")


@rule(aten.searchsorted.Tensor)
def searchsorted(call: Call) -> Row | None:
    """`f32[5,8], f32[5,3] -> i64[5,3]     ... !n, ... v -> ... v`; one sorted sequence serves all values."""
    alone = len(call["sorted_sequence"].shape) == 1
    sequence, values = ("!n", "...") if alone else ("... !n", "... v")
    sorter = [sequence] if call.args.get("sorter") is not None else []
    return call.row(f"{', '.join([sequence, values, *sorter])} -> {values}")


@rule(aten.index.Tensor)
def index(call: Call) -> Row | None:
    """`f32[2,8,4], i64[3] at dim 1 -> f32[2,3,4]     a !b c, x0 -> a x0 c`."""
    x, indices = call["self"].shape, call["indices"]
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    names = letters(len(x), used="x")
    at = [d for d, i in enumerate(indices) if i is not None]
    wide = max(len(indices[d].shape) for d in at)
    first = _first(at)
    shape = call.results[0].shape[first : first + wide]
    axes = [f"x{i}" for i in range(wide)]
    rest = [n for d, n in enumerate(names) if d not in at]
    operands = [block(names, at), *(broadcast(axes, indices[d].shape, shape) for d in at)]
    right = [*rest[:first], *axes, *rest[first:]]
    return call.row(f"{spaced(*operands)} -> {spaced(right)}", linear=[{0}])


def _first(at: list[int]) -> int:
    """Where the dims of the indices stand in the result: in place of the indexed ones, or first if those lie apart."""
    return at[0] if at == list(range(at[0], at[-1] + 1)) else 0


@rule(aten.index_put.default)
def index_put(call: Call) -> Row | None:
    """`f32[2,8,4] at i64[3] of dim 1 = f32[2,3,4] -> f32[2,8,4]     a !b c, !x, a !y c -> a !b c`."""
    x, indices, values = call["self"].shape, call["indices"], call["values"].shape
    at = [d for d, i in enumerate(indices) if i is not None]
    if not at or any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    names = letters(len(x), used="xy")
    first, wide = _first(at), max(len(indices[d].shape) for d in at)
    rest = [(n, size) for d, (n, size) in enumerate(zip(names, x, strict=True)) if d not in at]
    wanted = [*rest[:first], *((f"!y{i}", None) for i in range(wide)), *rest[first:]]
    given = [n if full is None or size == full else "1" for (n, full), size in
             zip(wanted[len(wanted) - len(values) :], values, strict=True)]  # fmt: skip
    index = [[f"!x{d}_{k}" for k in range(len(indices[d].shape))] for d in at]
    whole = block(names, at)
    return call.row(f"{spaced(whole, *index, given)} -> {spaced(whole)}")
