"""Calls of losses, with each reduction."""

from __future__ import annotations

import torch

from tests.op_cases.notation import apart, case, f, ids, plain, pos
from tests.oracle import T

aten = torch.ops.aten
ctc = torch.ops.torchshard.ctc_losses.default
NONE, MEAN, SUM = 0, 1, 2
LOSSES = [
    case(aten.binary_cross_entropy.default, "a b", pos(5, 3), T((5, 3), "positive", grad=False), None, SUM),
    case(aten.binary_cross_entropy.default, "a b", pos(5, 3), T((5, 3), "positive", grad=False)),
    case(aten.soft_margin_loss.default, "a b", f(5, 3), plain(5, 3)),
    *(
        case(target, "a b", apart(5, 7), f(5, 7), reduction)
        for target in (
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
        )
        for reduction in (NONE, MEAN, SUM)
    ),
    case(aten.mse_loss.default, "a", f(7), f(7)),
    case(aten.mse_loss.default, None, plain(3, 1), plain(3, 4)),
    case(aten.smooth_l1_loss.default, "a b", f(5, 3), f(5, 3), MEAN, 0.3),
    case(aten.huber_loss.default, "a b", f(5, 3), f(5, 3), MEAN, 0.3),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3)),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3), plain(5, 3), None, NONE),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3), None, plain(5, 3), SUM),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3), None, plain(3), SUM),
    case(aten.binary_cross_entropy_with_logits.default, "a b", f(5, 3), pos(5, 3), plain(5, 1), plain(3)),
    case(ctc, "n", f(5, 3, 7), ids(7, 3, 2), ids(6, 3), ids(3, 3), 0, True),
    case(aten.cross_entropy_loss.default, "n v", f(5, 7), ids(7, 5)),
    case(aten.cross_entropy_loss.default, "n v", f(5, 7), ids(7, 5), None, NONE),
    case(aten.cross_entropy_loss.default, "n v", f(6, 4), ids(4, 6), plain(4), MEAN),
    case(aten.cross_entropy_loss.default, "n v", f(6, 4), ids(4, 6), None, SUM, 2, 0.1),
    case(aten.cross_entropy_loss.default, "n v", f(6, 4), ids(4, 6), T((4,), "positive", grad=False), MEAN, 2, 0.3),
    case(aten.cross_entropy_loss.default, "n v", f(6, 5), ids(5, 6), T((5,), "positive", grad=False), NONE, 0, 0.2),
    case(aten.cross_entropy_loss.default, "n v", f(6, 5), ids(5, 6), None, MEAN, -100, 0.2),
    case(aten.cross_entropy_loss.default, "n v s0", f(3, 5, 4), ids(5, 3, 4), None, MEAN, 1),
    case(aten.cross_entropy_loss.default, "n v s0", f(3, 5, 4), ids(5, 3, 4), T((5,), "positive", grad=False), NONE),
    case(aten.cross_entropy_loss.default, "v", f(7), ids(7)),
    case(aten.cross_entropy_loss.default, "n v", f(5, 1), ids(1, 5)),
    case(aten.cross_entropy_loss.default, "n v", f(5, 4), ids(4, 5), plain(4), SUM, 2),
    case(aten.cross_entropy_loss.default, "n", f(5, 4), pos(5, 4)),
    case(aten.cross_entropy_loss.default, "n", f(5, 4), pos(5, 4), T((4,), "positive", grad=False), MEAN, -100, 0.2),
    case(aten.cross_entropy_loss.default, "n s0", f(5, 4, 3), pos(5, 4, 3), None, SUM),
    case(aten.cross_entropy_loss.default, "", f(4), pos(4)),
    case(aten.nll_loss_nd.default, "n", f(5, 4), ids(4, 5)),
    case(aten.nll_loss_nd.default, "n", f(5, 4), ids(4, 5), T((4,), "positive", grad=False), MEAN, 2),
    case(aten.nll_loss_nd.default, "n s0", f(2, 4, 5), ids(4, 2, 5), None, NONE),
    case(aten.nll_loss_nd.default, "n", f(6, 4), ids(4, 6), None, SUM, 1),
]
