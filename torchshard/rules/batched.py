"""Ops that process each matrix, image or signal of a batch on its own.

The batch dims are splittable; the dims of one item are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch

from torchshard.core.layouts import Size
from torchshard.core.notation import RowKeywords
from torchshard.core.rows import Row
from torchshard.custom_ops.fx_types import Target
from torchshard.rules.empty import anywhere
from torchshard.rules.registry import Call, broadcast, dims_of, letters, positive, rule, spaced, unsplittable

aten = torch.ops.aten


def batched(call: Call, items: Sequence[int], **options: Unpack[RowKeywords]) -> Row | None:
    """`f32[2,1,4,4], f32[3,4,5] -> f32[2,3,4,5]     a 1 !o00 !o01, b !o10 !o11 -> a b !r00 !r01`.

    Args:
        items: the number of dims of one item, per operand; the dims before them are broadcast.
    """
    shapes = [t.shape for t in call.tensors]
    if any(len(shape) < n for shape, n in zip(shapes, items, strict=True)):
        return None
    leads = [shape[: len(shape) - n] for shape, n in zip(shapes, items, strict=True)]
    ndim = max(map(len, leads))
    names = letters(ndim, used="or")
    batch: list[Size] = [1] * ndim
    for lead in leads:
        for i, size in enumerate(lead, ndim - len(lead)):
            batch[i] = size if batch[i] == 1 else batch[i]
    if any(list(r.shape[:ndim]) != batch for r in call.results):  # the op turns out not to broadcast
        return None
    left = []
    for j, (lead, n) in enumerate(zip(leads, items, strict=True)):
        left.append([*broadcast(names, lead, batch), *(f"!o{j}{k}" for k in range(n))])
    right = [[*names, *(f"!r{j}{k}" for k in range(len(r.shape) - ndim))] for j, r in enumerate(call.results)]
    return call.row(f"{spaced(*left)} -> {spaced(*right)}", **options)


# --- matrices --------------------------------------------------------------------------------------------------------

MATRICES: Mapping[Target, tuple[int, ...]] = {
    aten.linalg_cholesky_ex.default: (2,),
    aten.cholesky.default: (2,),
    aten.linalg_inv_ex.default: (2,),
    aten.linalg_lu.default: (2,),
    aten.linalg_lu_factor_ex.default: (2,),
    aten.linalg_ldl_factor_ex.default: (2,),
    aten.linalg_qr.default: (2,),
    aten.geqrf.default: (2,),
    aten.linalg_eig.default: (2,),
    aten._linalg_eigh.default: (2,),
    aten._linalg_svd.default: (2,),
    aten._linalg_det.default: (2,),
    aten._linalg_slogdet.default: (2,),
    aten.linalg_matrix_exp.default: (2,),
    aten.triangular_solve.default: (2, 2),
    aten.linalg_ldl_solve.default: (2, 1, 2),
    aten.linalg_householder_product.default: (2, 1),
    aten.lu_unpack.default: (2, 1),
    aten.linalg_pinv.atol_rtol_tensor: (2, 0, 0),
}
"""Op -> the number of dims of one item, per operand."""


@rule(*MATRICES)
def matrices(call: Call) -> Row | None:
    """`f32[5,4,4], f32[5,4,3] -> f32[5,4,3]     a !o00 !o01, a !o10 !o11 -> a !r00 !r01`."""
    return batched(call, MATRICES[call.target][: len(call.tensors)])


@rule(aten._linalg_solve_ex.default)
def solve(call: Call) -> Row | None:
    """`f32[5,4,4], f32[5,4] -> f32[5,4], ...     a !o00 !o01, a !o10 -> a !r00, ...`.

    The second operand is a batch of vectors or of matrices; PyTorch distinguishes them by its
    shape.
    """
    a, b = (t.shape for t in call.tensors)
    return batched(call, (2, 1 if len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1]) else 2))


@rule(aten._linalg_check_errors.default)
def check_errors(call: Call) -> Row:
    """`i32[5] -> nothing     !a -> `: every rank checks all items, so all ranks fail together."""
    names = letters(len(call.tensors[0].shape))
    return call.row(f"{spaced(unsplittable(names, range(len(names))))} -> ")


@rule(
    aten.linalg_solve_triangular.default, aten.cholesky_solve.default, aten.linalg_lu_solve.default, aten.ormqr.default,
)  # fmt: skip
def solve_columns(call: Call) -> Row | None:
    """`f32[5,4,4], f32[5,4,3] -> f32[5,4,3]     a !m !n, a !k c -> a !k c`: columns are independent."""
    right_side = 0 if call.target is aten.cholesky_solve.default else len(call.tensors) - 1
    sides = ["!k", "c"] if call.args.get("left", True) else ["c", "!k"]
    batch = call.results[0].shape[:-2]
    names = letters(len(batch), used="ckmn")
    left = []
    for i, t in enumerate(call.tensors):
        # pivots of an LU factorization, or ormqr's tau; in cholesky_solve it is the factor, perhaps
        # without batch dims
        is_vector = i == 1 and right_side != 0 and len(t.shape) <= len(batch) + 1
        own = sides if i == right_side else [f"!m{i}", f"!n{i}"][: 1 if is_vector else 2]
        left.append([*broadcast(names, t.shape[: len(t.shape) - len(own)], batch), *own])
    return call.row(f"{spaced(*left)} -> {spaced([*names, *sides])}", linear=[{right_side}])


rule(aten.cdist.default, row="... m !k, ... n !k -> ... m n")


@rule(aten.linalg_cross.default)
def cross(call: Call) -> Row:
    """`f32[5,3], f32[1,3] -> f32[5,3]     a !b, 1 !b -> a !b`."""
    shape = call.results[0].shape
    names = unsplittable(letters(len(shape)), [positive(call["dim"], len(shape))])
    left = [broadcast(names, t.shape, shape) for t in call.tensors]
    return call.row(f"{spaced(*left)} -> {spaced(names)}", linear=[{0}, {1}])


# --- images ----------------------------------------------------------------------------------------------------------

_IMAGES = tuple(
    getattr(getattr(aten, name), overload)
    for name in (
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
        "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    )
    for overload in ("default", "vec")
)  # fmt: skip


@rule(*_IMAGES)
def resized(call: Call) -> Row | None:
    """`f32[2,3,4,4] -> f32[2,3,8,8]     a b !o00 !o01 -> a b !r00 !r01`."""
    space = len(call.tensors[0].shape) - 2
    return batched(call, (space,), linear=[{0}], **anywhere(call))


POOLS: Mapping[Target, tuple[int, ...]] = {
    aten.max_pool2d_with_indices.default: (2,),
    aten.max_pool3d_with_indices.default: (3,),
    aten.adaptive_max_pool2d.default: (2,),
    aten.adaptive_max_pool3d.default: (3,),
    aten.fractional_max_pool2d.default: (2, 1),
    aten.fractional_max_pool3d.default: (3, 1),
}
UNPOOLS: Mapping[Target, tuple[int, ...]] = {
    aten.max_unpool2d.default: (2, 2),
    aten.max_unpool3d.default: (3, 3),
}


@rule(*POOLS)
def pooled(call: Call) -> Row | None:
    """`f32[2,3,8,8] -> f32[2,3,4,4], i64[2,3,4,4]     a b !o00 !o01 -> a b !r00 !r01, a b !r10 !r11`."""
    return batched(call, POOLS[call.target], **anywhere(call))


@rule(*UNPOOLS)
def unpooled(call: Call) -> Row | None:
    """`f32[2,3,4,4], i64[2,3,4,4] -> f32[2,3,8,8]     a b !o00 !o01, a b !o10 !o11 -> a b !r00 !r01`."""
    return batched(call, UNPOOLS[call.target], linear=[{0}], **anywhere(call))


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: Call) -> Row:
    """`f32[2,3,8,8], f32[2,4,5,2] -> f32[2,3,4,5]     n c !h0 !h1, n !z0 !z1 !x -> n c !z0 !z1`."""
    space = len(call.tensors[0].shape) - 2
    hs, zs = ([f"!{name}{i}" for i in range(space)] for name in "hz")
    return call.row(f"{spaced(['n', 'c', *hs], ['n', *zs, '!x'])} -> {spaced(['n', 'c', *zs])}", linear=[{0}])


@rule(aten.im2col.default, aten.col2im.default)
def columns(call: Call) -> Row | None:
    """`f32[2,3,8,8] -> f32[2,12,16]     n c !h0 !h1 -> n (c !k) !l`     k=4."""
    image, column = call.tensors[0].shape, call.results[0].shape
    if call.target is aten.col2im.default:
        image, column = column, image
    lead = ["n"] if len(image) == 4 else []
    sides = [spaced([*lead, "c", "!h0", "!h1"]), spaced([*lead, "(c !k)", "!l"])]
    if call.target is aten.col2im.default:
        sides.reverse()
    sizes = {"c": image[-3], "k": column[-2] // image[-3]}
    return call.row(" -> ".join(sides), sizes=sizes, linear=[{0}])


# --- signals ---------------------------------------------------------------------------------------------------------


@rule(aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
def fourier(call: Call) -> Row:
    """`f32[2,8,4] -> c64[2,5,4]     a !b c -> a !y1 c`: the transformed dims are unsplittable."""
    ndim = len(call.tensors[0].shape)
    dims, names = dims_of(call, ndim), letters(ndim, used="y")
    right = [f"!y{i}" if i in dims else name for i, name in enumerate(names)]
    return call.row(
        f"{spaced(unsplittable(names, dims))} -> {spaced(right)}",
        linear=[{0}],
        **anywhere(call),
    )
