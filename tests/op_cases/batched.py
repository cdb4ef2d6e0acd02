"""Calls of ops that only their batch dims may split: decompositions of matrices, interpolation, FFT."""

from __future__ import annotations

import torch

from tests.op_cases.notation import c, case, f, plain, spd
from tests.oracle import T

aten = torch.ops.aten

BATCHED = [
    case(aten.linalg_cholesky_ex.default, "a", spd(5, 3, 3)),
    case(aten.linalg_cholesky_ex.default, "", spd(3, 3)),
    case(aten.cholesky.default, "a b", spd(2, 5, 3, 3)),
    case(aten.linalg_inv_ex.default, "a", spd(5, 3, 3)),
    case(aten.linalg_lu.default, "a", f(5, 3, 3)),
    case(aten.linalg_lu_factor_ex.default, "a", f(5, 3, 3)),
    case(aten.linalg_ldl_factor_ex.default, "a", plain(5, 3, 3)),
    case(aten.linalg_qr.default, "a b", f(2, 5, 4, 3)),
    case(aten.geqrf.default, "a", plain(5, 4, 3)),
    case(aten.linalg_eig.default, "a", plain(5, 3, 3)),
    case(aten._linalg_eigh.default, "a", spd(5, 3, 3)),
    case(aten._linalg_svd.default, "a", f(5, 4, 3)),
    case(aten._linalg_det.default, "a", f(5, 3, 3)),
    case(aten._linalg_slogdet.default, "a", f(5, 3, 3)),
    case(aten.linalg_matrix_exp.default, "a", f(5, 3, 3)),
    case(aten._linalg_solve_ex.default, "a", spd(5, 3, 3), f(5, 3, 4)),
    case(aten._linalg_solve_ex.default, "a", spd(5, 3, 3), f(5, 3)),
    case(aten.linalg_solve_triangular.default, "b a c", spd(5, 3, 3), f(4, 1, 3, 5), upper=True),
    case(aten.linalg_solve_triangular.default, "a c", spd(5, 3, 3), f(5, 2, 3), upper=True, left=False),
    case(aten.triangular_solve.default, "a", f(5, 3, 2), spd(5, 3, 3)),
    case(aten.cholesky_solve.default, "a c", f(5, 3, 2), spd(5, 3, 3)),
    case(aten.cholesky_solve.default, "a c", f(5, 4, 3), spd(4, 4)),
    case(aten.linalg_lu_solve.default, "a c", spd(5, 3, 3), T((5, 3), "pivots"), f(5, 3, 2)),
    case(aten.linalg_lu_solve.default, "a c", spd(5, 3, 3), T((5, 3), "pivots"), f(5, 2, 3), left=False),
    case(aten.linalg_ldl_solve.default, "a", plain(5, 2, 2), T((5, 2), "pivots"), plain(5, 2, 2)),
    case(aten.linalg_householder_product.default, "a", f(5, 4, 3), f(5, 3)),
    case(aten.ormqr.default, "a c", f(5, 4, 3), f(5, 3), f(5, 4, 2)),
    case(aten.lu_unpack.default, "a", f(5, 3, 3), T((5, 3), "pivots")),
    case(aten.linalg_pinv.atol_rtol_tensor, "a", f(5, 4, 3)),
    case(aten.cdist.default, "_0 m n", f(3, 5, 2), f(3, 4, 2)),
    case(aten.cdist.default, "m n", f(5, 2), f(4, 2), 1.0),
    case(aten.linalg_cross.default, "a", f(5, 3), f(1, 3)),
    *(
        case(getattr(aten, f"upsample_{how}1d").default, "a b", f(2, 5, 4), *said)
        for how, said in (("nearest", ([6],)), ("linear", ([6], True)))
    ),
    *(
        case(getattr(aten, f"upsample_{how}1d").vec, "a b", f(2, 5, 4), *said, [1.5])
        for how, said in (("nearest", (None,)), ("linear", (None, True)))
    ),
    *(
        case(getattr(aten, f"_upsample_nearest_exact{n}d").default, "a b", f(3, 5, *[4] * n), [6] * n)
        for n in (1, 2, 3)
    ),
    *(
        case(getattr(aten, f"_upsample_nearest_exact{n}d").vec, "a b", f(3, 5, *[2] * n), None, [2.0] * n)
        for n in (1, 2, 3)
    ),
    *(case(getattr(aten, f"upsample_nearest{n}d").default, "a b", f(3, 5, *[2] * n), [3] * n) for n in (2, 3)),
    *(case(getattr(aten, f"upsample_nearest{n}d").vec, "a b", f(3, 5, *[2] * n), None, [2.0] * n) for n in (2, 3)),
    *(
        case(getattr(aten, f"{how}2d{tail}").default, "a b", f(3, 5, 4, 2), [3, 3], False)
        for how in ("upsample_bilinear", "upsample_bicubic")
        for tail in ("",)
    ),
    *(
        case(getattr(aten, how).default, "a b", f(3, 5, 4, 2), [3, 3], False)
        for how in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    ),
    *(
        case(getattr(aten, how).vec, "a b", f(3, 5, 4, 2), [3, 3], False, None)
        for how in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    ),
    case(aten.upsample_trilinear3d.default, "a b", f(3, 5, 2, 2, 2), [3, 3, 3], True),
    case(aten.upsample_trilinear3d.vec, "a b", f(3, 5, 2, 2, 2), [3, 3, 3], True, None),
    case(aten.max_pool2d_with_indices.default, "a b", f(3, 5, 4, 4), [2, 2]),
    case(aten.max_pool2d_with_indices.default, "a", f(5, 4, 4), [2, 2]),
    case(aten.max_pool3d_with_indices.default, "a b", f(2, 5, 2, 4, 4), [2, 2, 2]),
    case(aten.adaptive_max_pool2d.default, "a b", f(3, 5, 5, 4), [2, 3]),
    case(aten.adaptive_max_pool3d.default, "a", f(5, 3, 4, 4), [2, 2, 3]),
    case(aten.max_unpool2d.default, "a b", f(2, 5, 1, 1), T((2, 5, 1, 1), "int", 4), [2, 2]),
    case(
        aten.max_unpool3d.default,
        "a b",
        f(3, 5, 1, 1, 1),
        T((3, 5, 1, 1, 1), "int", 8),
        [2, 2, 2],
        [2, 2, 2],
        [0, 0, 0],
    ),
    case(
        aten.fractional_max_pool2d.default, "a b", f(3, 5, 6, 6), [2, 2], [3, 3], T((3, 5, 2), "positive", grad=False)
    ),
    case(
        aten.fractional_max_pool3d.default,
        "a b",
        f(2, 5, 4, 4, 4),
        [2] * 3,
        [2] * 3,
        T((2, 5, 3), "positive", grad=False),
    ),
    case(aten.grid_sampler_2d.default, "n c", f(3, 5, 4, 4), f(3, 2, 3, 2), 0, 0, False),
    case(aten.grid_sampler_3d.default, "n c", f(2, 5, 3, 4, 4), f(2, 2, 3, 2, 3), 0, 1, True),
    case(aten.im2col.default, "c n", f(3, 5, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    case(aten.im2col.default, "c", f(5, 4, 4), [2, 2], [1, 1], [1, 0], [2, 2]),
    case(aten.col2im.default, "c n", f(3, 20, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    case(aten._fft_r2c.default, "a c", f(5, 8, 3), [1], 0, True),
    case(aten._fft_c2c.default, "a", c(5, 4, 3), [1, 2], 1, False),
    case(aten._fft_c2r.default, "a", c(5, 4), [1], 0, 6),
]
