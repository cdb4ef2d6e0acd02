"""Sums gradients of cast parameters in the parameters' own, wider dtype.

    before    reduce = reduce(grad);  cast = _to_copy(reduce, float32)
    after     cast = _to_copy(grad, float32);  reduce = reduce(cast)

Under autocast, weights are gathered in bfloat16 and their gradients summed in float32, as by
FSDP2's `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`.
"""

from __future__ import annotations

import torch
from torch import fx

from torchshard.ir.buckets import summed_dtype
from torchshard.ir.editing import emit
from torchshard.ir.graph import is_tensor
from torchshard.ops import is_collective
from torchshard.passes.nodes import node_arg
from torchshard.rules.pointwise import CASTS

SUMS = {torch.ops.torchshard.reduce.default, torch.ops.torchshard.reduce_scatter.default}


def sums_wider(local: fx.GraphModule) -> bool:
    """Whether the backward of a rank's graph sums gradients in a wider dtype than they have."""
    converted = (node_arg(node) for node in local.graph.nodes if is_collective(node.target))
    return any(v.meta.get("needs_grad") and summed_dtype(v) != v.meta["val"].dtype for v in converted)


def widen(joint: fx.GraphModule) -> bool:
    """Puts the casts of gradients before their sums in a joint graph; returns whether there are any."""
    known = {node.name: node for node in joint.graph.nodes}
    found = False
    for cast in list(joint.graph.nodes):
        while cast.target in CASTS and _is_summed_in(node_arg(cast), known, cast.meta["val"].dtype):
            found = True
            total = node_arg(cast)
            with joint.graph.inserting_before(total):
                wide = emit(joint, cast.target, (node_arg(total), *cast.args[1:]), total, **cast.kwargs)
            total.replace_input_with(node_arg(total), wide)
            total.meta["val"] = total.meta["val"].to(cast.meta["val"].dtype)
            total.meta = cast.meta | total.meta
            cast.replace_all_uses_with(total)
            joint.graph.erase_node(cast)
            cast = wide
    return found


def _is_summed_in(total: fx.Node, known: dict[str, fx.Node], dtype: torch.dtype) -> bool:
    """Whether a node sums gradients that should be summed in `dtype`, which is not their own dtype."""
    if total.target not in SUMS or not total.meta.get("is_backward") or len(total.users) > 1:
        return False
    of = [known[name] for name in total.meta.get("gradient_of", ()) if name in known]
    return dtype != total.meta["val"].dtype and any(is_tensor(v) and summed_dtype(v) == dtype for v in of)
