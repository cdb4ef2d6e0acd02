"""Ops that move elements without computing. All are linear: a Partial operand gives Partial results.

A reshape's row writes both shapes as products of common factors (`common_factors`). If a size is an
argument of the op, the replacement passes this rank's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from torchshard.core.layouts import Size
from torchshard.core.rows import Dim, Local, LocalFn, Row
from torchshard.custom_ops.fx_types import Argument, Traced
from torchshard.rules.common_factors import equal_runs, refine
from torchshard.rules.registry import Call, broadcast, dims_of, letters, positive, rule, spaced, unsplittable

aten = torch.ops.aten
LINEAR = [{0}]


def reshape_row(
    call: Call, source: Sequence[Size], target: Sequence[Size], local: LocalFn | None, *, fills_ranks: bool = False
) -> Row:
    """`f32[2,8,64] -> f32[2,8,4,16]     a b (c d) -> a b c d     c=4 d=16`."""
    # omit dims of size one, which belong to no particular run
    kept = [[i for i, size in enumerate(shape) if size != 1] for shape in (source, target)]
    left, right = [source[i] for i in kept[0]], [target[i] for i in kept[1]]
    names, sizes = letters(len(left) + len(right) + 16), dict[str, Size]()
    sides: tuple[list[str], list[str]] = (["1"] * len(source), ["1"] * len(target))
    runs = equal_runs(left, right)
    for run in runs or [(range(len(left)), range(len(right)))]:
        refined = None
        if left and right and runs:
            refined = refine([left[i] for i in run[0]], [right[j] for j in run[1]], names, sizes)
        for which, indices in enumerate(run):
            for position, index in enumerate(indices):
                factors = refined[which][position] if refined else ["!" + names.pop(0)]
                sides[which][kept[which][index]] = factors[0] if len(factors) == 1 else f"({' '.join(factors)})"
    replacements = {} if local is None else {"*": local}
    text = f"{spaced(sides[0])} -> {spaced(sides[1])}"
    return call.row(text, sizes=sizes, linear=LINEAR, local=replacements, fills_ranks=fills_ranks, any_size="*")


def _resized(local: Local, x: Traced, size: Sequence[Size]) -> Traced:
    """The replacement of a reshape: it passes this rank's sizes."""
    sizes = local.resize(size)
    plain = [s if isinstance(s, int) else None for s in sizes]
    if 0 in plain and -1 in plain:  # PyTorch can't infer a size of an empty tensor
        inferred = plain.index(-1)
        sizes[inferred] = _dim_size(local, x, local.row.results[0][inferred])
    return aten.reshape.default(x, sizes)


def _dim_size(local: Local, x: Traced, dim: Dim) -> Size:
    """Returns this rank's size of a dim; a dynamic one is read from operand dims with its factors."""
    dims = local.row.operands[0]
    if dim in dims:
        return aten.sym_size.int(x, dims.index(dim))
    size: Size = math.prod(_static(local, dim[0]))
    for factor in dim[0]:
        if not isinstance(local.row.sizes[factor], int):
            index, term = next((i, terms[0]) for i, terms in enumerate(dims) if factor in terms[0])
            size = aten.sym_size.int(x, index) // math.prod(_static(local, term)) * size
    return size


def _static(local: Local, factors: Iterable[str]) -> list[Size]:
    """Returns this rank's sizes of those factors that have static sizes."""
    return [local.size(factor) for factor in factors if isinstance(local.row.sizes[factor], int)]


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def reshape(call: Call) -> Row:
    """`f32[2,8,64] -> f32[2,8,4,16]     a b (c d) -> a b c d     c=4 d=16`.

    With a size of -1 every rank must have elements, from which PyTorch infers it.
    """
    inferred = -1 in call.args.get("size", call.args.get("shape"))
    return reshape_row(call, call.tensors[0].shape, call.results[0].shape, _resized, fills_ranks=inferred)


@rule(aten.new_ones.default, aten.new_zeros.default, aten.new_full.default)
def new(call: Call) -> Row:
    """`f32[8,16] -> f32[2,8,4]     a !b -> !c a !d`: a dim may be split like the operand's dim of equal size."""
    source, target = call.tensors[0].shape, call.results[0].shape
    names, found, rest = letters(len(source) + len(target)), list[int | None](), range(len(source))
    for size in target:
        found.append(next((i for i in rest if source[i] == size), None))
        rest = rest if found[-1] is None else range(found[-1] + 1, len(source))

    def local(ctx: Local, x: Traced, size: Sequence[Size], *others: Argument, **options: Argument) -> Traced:
        return call.target(x, ctx.resize(size), *others, **options)

    left = unsplittable(names[: len(source)], {*range(len(source))}.difference(found))
    right = [f"!{name}" if i is None else names[i] for i, name in zip(found, names[len(source) :], strict=True)]
    return call.row(f"{spaced(left)} -> {spaced(right)}", local={"*": local}, any_size="*")


SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


@rule(aten.unsqueeze.default, *SQUEEZES, aten.flatten.using_ints)
def shape_only(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,32]     a b c -> a (b c)`: sizes are not among the arguments."""
    source, target = call.tensors[0].shape, call.results[0].shape
    if call.target not in SQUEEZES:
        return reshape_row(call, source, target, None)
    named = dims_of(call, len(source))
    squeezed = [i for i in named if source and source[i] == 1]

    def local(ctx: Local, x: Traced, *args: Argument) -> Traced:
        """Names the dims: a dim of size one on this rank only must not be squeezed."""
        return aten.squeeze.dims(x, squeezed)

    return reshape_row(call, source, target, local)


@rule(aten.unflatten.int)
def unflatten(call: Call) -> Row:
    """`f32[2,64] -> f32[2,4,16]     a (b c) -> a b c`."""

    def local(ctx: Local, x: Traced, dim: int, sizes: Sequence[Size]) -> Traced:
        start = positive(dim, len(call.tensors[0].shape))
        # resize takes a size for every dim of the result; only the new dims' sizes are used
        whole = [-1] * start + list(sizes) + [-1] * (len(call.tensors[0].shape) - start - 1)
        return aten.unflatten.int(x, dim, ctx.resize(whole)[start : start + len(sizes)])

    return reshape_row(call, call.tensors[0].shape, call.results[0].shape, local)


@rule(aten.permute.default, aten.transpose.int, aten.t.default, aten.mT.default, aten.numpy_T.default)
def permute(call: Call) -> Row:
    """`f32[2,8,4] -> f32[2,4,8]     a b c -> a c b`."""
    ndim = len(call.tensors[0].shape)
    names = letters(ndim)
    order = list(range(ndim))
    if "dims" in call.args:
        order = [positive(d, ndim) for d in call["dims"]]
    elif "dim0" in call.args and ndim:
        a, b = positive(call["dim0"], ndim), positive(call["dim1"], ndim)
        order[a], order[b] = b, a
    elif ndim > 1:  # t and mT swap the last two dims, numpy_T reverses all
        order = list(reversed(order)) if call.target is aten.numpy_T.default else [*order[:-2], order[-1], order[-2]]
    return call.row(f"{spaced(names)} -> {spaced(names[i] for i in order)}", linear=LINEAR)


@rule(aten.movedim.int, aten.movedim.intlist)
def movedim(call: Call) -> Row:
    """`f32[2,8,4] -> f32[4,2,8]     a b c -> c a b`."""
    ndim = len(call.tensors[0].shape)
    source, target = (
        [positive(d, ndim) for d in (v if isinstance(v, (list, tuple)) else [v])]
        for v in (call["source"], call["destination"])
    )
    names = letters(ndim)
    rest = [i for i in range(ndim) if i not in source]
    placed = dict(zip(target, source, strict=True))
    order = [placed[i] if i in placed else rest.pop(0) for i in range(ndim)]
    return call.row(f"{spaced(names)} -> {spaced(names[i] for i in order)}", linear=LINEAR)


@rule(aten.expand.default)
def expand(call: Call) -> Row:
    """`f32[2,1,4] -> f32[2,8,4]     a 1 c -> a b c`."""
    source, target = call.tensors[0].shape, call.results[0].shape
    names = letters(len(target))

    def local(ctx: Local, x: Traced, size: Sequence[Size], implicit: bool = False) -> Traced:
        return aten.expand.default(x, ctx.resize(size))

    left = broadcast(names, source, target)
    return call.row(f"{spaced(left)} -> {spaced(names)}", linear=LINEAR, local={"*": local}, any_size="*")


@rule(aten.expand_as.default)
def expand_as(call: Call) -> Row:
    """`f32[1,4], f32[8,4] -> f32[8,4]     1 b, a b -> a b`."""
    source, target = call.tensors[0].shape, call.results[0].shape
    names = letters(len(target))
    return call.row(f"{spaced(broadcast(names, source, target), names)} -> {spaced(names)}", linear=LINEAR)


@rule(aten.repeat.default)
def repeat(call: Call) -> Row:
    """`f32[2,4] -> f32[2,12]     a b -> a (r b)     r=3`: the whole dim is repeated."""
    source, repeats = call.tensors[0].shape, call["repeats"]
    names = letters(len(source), used="r")
    extra = len(repeats) - len(source)
    sizes: dict[str, Size] = {}
    dims = []
    for i, times in enumerate(repeats):
        if i < extra:  # repeat adds leading dims, which contain only copies
            dims.append(f"!r{i}")
        elif times == 1:
            dims.append(names[i - extra])
        else:
            sizes[f"r{i}"] = times
            dims.append(f"(!r{i} {names[i - extra]})")
    return call.row(f"{spaced(names)} -> {spaced(dims)}", sizes=sizes, linear=LINEAR)


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> Row | None:
    """`f32[2,2,8] -> f32[2,6,8]     a b c -> a (b r) c     r=3`: each element is repeated."""
    if call["dim"] is None:
        return None
    ndim = len(call.tensors[0].shape)
    dim, names = positive(call["dim"], ndim), letters(ndim, used="r")
    out = [f"({n} !r)" if i == dim else n for i, n in enumerate(names)]

    def local(ctx: Local, x: Traced, repeats: int, dim: int, output_size: Size | None = None) -> Traced:
        """Drops `output_size`, which is the global size of the repeated dim."""
        return aten.repeat_interleave.self_int(x, repeats, dim)

    text, sizes = f"{spaced(names)} -> {spaced(out)}", {"r": call["repeats"]}
    return call.row(text, sizes=sizes, linear=LINEAR, local={"*": local}, any_size="*")
