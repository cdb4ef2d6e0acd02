"""Look-ups and writes by index.

If a table is split along the looked-up dim, each rank returns its own rows and zeros elsewhere, so
the result is Partial.
"""

from __future__ import annotations

import torch

from torchshard.core.rows import Local, Row
from torchshard.custom_ops.fx_types import Argument, Traced
from torchshard.rules.empty import append_zeros
from torchshard.rules.registry import Call, TensorType, broadcast, letters, positive, rule, spaced, unsplittable

aten = torch.ops.aten


def own_index(ctx: Local, factor: str, index: Traced, exempt: Traced | None = None) -> tuple[Traced, Traced]:
    """Returns a global index as (this rank's index, mask of the indices that belong to other ranks).

    Masked indices are 0, so they are valid for a look-up; the caller masks the values.

    Args:
        exempt: a mask of indices that may be out of range, such as ignored labels. Any other index
            out of range is an error, as in the unsharded op; the masks would hide it.
    """
    valid = aten.logical_and.default(aten.ge.Scalar(index, 0), aten.lt.Scalar(index, ctx.row.sizes[factor]))
    valid = valid if exempt is None else aten.logical_or.default(valid, exempt)
    aten._assert_async.msg(aten.all.default(valid), "index out of range")
    shifted = aten.sub.Tensor(index, ctx.start(factor))
    below, above = aten.lt.Scalar(shifted, 0), aten.ge.Scalar(shifted, ctx.size(factor))
    outside = aten.logical_or.default(below, above)
    return aten.masked_fill.Scalar(shifted, outside, 0), outside


def nonempty(ctx: Local, factor: str, table: Traced, dim: int, ndim: int) -> Traced:
    """Returns the table, or one row of zeros if this rank's is empty: it masks all its look-ups."""
    return table if ctx.size(factor) else append_zeros(table, dim, ndim)


@rule(aten.embedding.default)
def embedding(call: Call) -> Row:
    """`f32[97,16], i64[2,8] -> f32[2,8,16]     v e, a b -> a b e`; splitting v masks the look-up and gives P.

    A gradient scaled by frequency counts all indices, so only e is splittable then.
    """
    names = letters(len(call["indices"].shape), used="ve")
    if call["scale_grad_by_freq"]:
        names = unsplittable(names, range(len(names)))
        return call.row(f"!v e, {spaced(names)} -> {spaced([*names, 'e'])}", linear=[{0}])

    def local(ctx: Local, weight: Traced, indices: Traced, padding_idx: int = -1, *flags: Argument) -> Traced:
        index, outside = own_index(ctx, "v", indices)
        # the padding row gets no gradient; other ranks have no padding row
        own_padding = padding_idx - ctx.start("v") if padding_idx >= 0 else -1
        own_padding = own_padding if 0 <= own_padding < ctx.size("v") else -1
        rows = aten.embedding.default(nonempty(ctx, "v", weight, 0, 2), index, own_padding)
        return aten.masked_fill.Scalar(rows, aten.unsqueeze.default(outside, -1), 0.0)

    return call.row(f"v e, {spaced(names)} -> {spaced([*names, 'e'])}", linear=[{0}], local={"v": local})


@rule(aten.embedding_bag.padding_idx)
def embedding_bag(call: Call) -> Row:
    """`f32[97,16], i64[8], i64[2] -> f32[2,16], ...     !v e, !i0, !i1 -> !r0 e, ...`: a rank sums whole bags."""
    others = [[f"!i{j}{k}" for k in range(len(t.shape))] for j, t in enumerate(call.tensors[1:])]
    rest = [[f"!r{j}{k}" for k in range(len(r.shape))] for j, r in enumerate(call.results[1:])]
    if call["mode"] == MAX_OF_BAG:  # the last result has the largest element's position for each column
        rest[-1][-1] = "e"
    return call.row(f"{spaced(['!v', 'e'], *others)} -> {spaced(['!r', 'e'], *rest)}", reduced={"e"})


MAX_OF_BAG = 2
"""PyTorch's number for the mode that takes the maximum of each bag."""


@rule(aten.index_select.default)
def index_select(call: Call) -> Row | None:
    """`f32[5,8], i64[3] -> f32[3,8]     v b, i -> i b`; splitting v gives P."""
    ndim = len(call.tensors[0].shape)
    if not ndim or not call["index"].shape:
        return None
    names, dim = letters(ndim, used="iv"), positive(call["dim"], ndim)
    left = ["v" if i == dim else n for i, n in enumerate(names)]
    right = ["i" if i == dim else n for i, n in enumerate(names)]

    def local(ctx: Local, x: Traced, dim: int, index: Traced) -> Traced:
        own, outside = own_index(ctx, "v", index)
        rows = aten.index_select.default(nonempty(ctx, "v", x, dim % ndim, ndim), dim, own)
        return aten.masked_fill.Scalar(rows, aten.reshape.default(outside, [-1] + [1] * (ndim - 1 - dim % ndim)), 0.0)

    return call.row(f"{spaced(left)}, i -> {spaced(right)}", linear=[{0}], local={"v": local})


@rule(aten.gather.default)
def gather(call: Call) -> Row | None:
    """`f32[2,97], i64[2,3] -> f32[2,3]     a v, a i -> a i`; splitting v gives P."""
    x, index = call["self"].shape, call["index"].shape
    ndim = len(x)
    if not ndim or len(index) != ndim:
        return None
    names, dim = letters(ndim, used="iv"), positive(call["dim"], ndim)
    # gather reads only the first elements of a dim where the index is smaller, so the two dims are
    # different factors
    smaller = [a != b for a, b in zip(x, index, strict=True)]
    left = [f"!{n}" if s else n for n, s in zip(names, smaller, strict=True)]
    right = [f"!{n}y" if s else n for n, s in zip(names, smaller, strict=True)]
    left[dim], right[dim] = "v", "i"

    def local(ctx: Local, x: Traced, dim: int, index: Traced, **kwargs: Argument) -> Traced:
        own, outside = own_index(ctx, "v", index)
        values = aten.gather.default(nonempty(ctx, "v", x, dim % ndim, ndim), dim, own)
        return aten.masked_fill.Scalar(values, outside, 0.0)

    return call.row(f"{spaced(left, right)} -> {spaced(right)}", linear=[{0}], local={"v": local})


@rule(
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_reduce.default,
)
def index_write(call: Call) -> Row | None:
    """`f32[2,5], i64[3], f32[2,3] -> f32[2,5]     a !v, !i, a !i -> a !v`: writes at some indices of one dim."""
    shape, index = call["self"].shape, call["index"].shape
    if not shape or not index:
        return None
    names, dim = letters(len(shape), used="iv"), positive(call["dim"], len(shape))
    whole, piece = (["!" + factor if i == dim else n for i, n in enumerate(names)] for factor in "vi")
    value = call.args.get("source", call.args.get("value"))
    values = [piece if value.shape else []] if isinstance(value, TensorType) else []
    return call.row(f"{spaced(whole, ['!i'], *values)} -> {spaced(whole)}")


@rule(
    aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default,
    aten.scatter_reduce.two,
)  # fmt: skip
def scatter(call: Call) -> Row | None:
    """`f32[2,5], i64[2,3], f32[2,3] -> f32[2,5]     a !v, a !i, a !i -> a !v`.

    If the index is smaller than the other tensors in a dim, scatter uses only their first elements
    there. A rank would use the first elements of its slice, so such dims are unsplittable.
    """
    tensors = [t.shape for t in call.tensors]
    ndim, dim = len(tensors[0]), positive(call["dim"], len(tensors[0]))
    if not ndim or any(len(shape) != ndim for shape in tensors):
        return None
    names = letters(ndim)
    equal = [d for d in range(ndim) if d != dim and all(shape[d] == tensors[0][d] for shape in tensors)]
    dims = [[n if d in equal else f"!{n}{j}" for d, n in enumerate(names)] for j in range(len(tensors))]
    return call.row(f"{spaced(*dims)} -> {spaced(dims[0])}")


rule(aten.searchsorted.Scalar, row="!n -> ")


@rule(aten.isin.Tensor_Tensor)
def isin(call: Call) -> Row:
    """`i64[2,8], i64[3] -> bool[2,8]     a b, !t -> a b`: each element is compared with all test elements."""
    own, others = letters(len(call["elements"].shape), used="t"), len(call["test_elements"].shape)
    return call.row(f"{spaced(own, [f'!t{i}' for i in range(others)])} -> {spaced(own)}")


rule(aten.bucketize.Tensor, row="..., !n -> ...")


@rule(aten.searchsorted.Tensor)
def searchsorted(call: Call) -> Row | None:
    """`f32[5,8], f32[5,3] -> i64[5,3]     ... !n, ... v -> ... v`.

    A sequence of one dim is shared by all values.
    """
    shared = len(call["sorted_sequence"].shape) == 1
    sequence, values = ("!n", "...") if shared else ("... !n", "... v")
    sorter = [sequence] if call.args.get("sorter") is not None else []
    return call.row(f"{', '.join([sequence, values, *sorter])} -> {values}")


@rule(aten.index.Tensor)
def index(call: Call) -> Row | None:
    """`f32[2,8,4], i64[3] at dim 1 -> f32[2,3,4]     a !b c, x0 -> a x0 c`."""
    x, indices = call["self"].shape, call["indices"]
    # a mask selects a number of elements that is known only at the call
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    names = letters(len(x), used="x")
    indexed = [d for d, i in enumerate(indices) if i is not None]
    ndim = max(len(indices[d].shape) for d in indexed)
    first = _first_index_dim(indexed)
    shape = call.results[0].shape[first : first + ndim]
    factors = [f"x{i}" for i in range(ndim)]
    rest = [n for d, n in enumerate(names) if d not in indexed]
    operands = [unsplittable(names, indexed), *(broadcast(factors, indices[d].shape, shape) for d in indexed)]
    right = [*rest[:first], *factors, *rest[first:]]
    return call.row(f"{spaced(*operands)} -> {spaced(right)}", linear=[{0}])


def _first_index_dim(indexed: list[int]) -> int:
    """Returns the position of the indices' dims in the result.

    Like numpy, PyTorch puts them at the indexed dims, or in front if those are not adjacent.
    """
    return indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0


@rule(aten.index_put.default)
def index_put(call: Call) -> Row | None:
    """`f32[2,8,4] at i64[3] of dim 1 = f32[2,3,4] -> f32[2,8,4]     a !b c, !x, a !y c -> a !b c`."""
    x, indices, values = call["self"].shape, call["indices"], call["values"].shape
    indexed = [d for d, i in enumerate(indices) if i is not None]
    if not indexed or any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    names = letters(len(x), used="xy")
    first, ndim = _first_index_dim(indexed), max(len(indices[d].shape) for d in indexed)
    rest = [(n, size) for d, (n, size) in enumerate(zip(names, x, strict=True)) if d not in indexed]
    region = [*rest[:first], *((f"!y{i}", None) for i in range(ndim)), *rest[first:]]
    # the values are broadcast to the region that is written
    aligned = zip(region[len(region) - len(values) :], values, strict=True)
    value_names = [n if full is None or size == full else "1" for (n, full), size in aligned]
    index_names = [[f"!x{d}_{k}" for k in range(len(indices[d].shape))] for d in indexed]
    whole = unsplittable(names, indexed)
    return call.row(f"{spaced(whole, *index_names, value_names)} -> {spaced(whole)}")
