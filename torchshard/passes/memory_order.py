"""Makes ops independent of the order of a tensor's dims in memory, which collectives change.

    dropout(x)                          ->    permute(dropout(permute(x)))
    as_strided(x, [3, 4], [2, 1], 3)    ->    as_strided(x.permute(1, 0).flatten()[3:], [3, 4], [2, 1])

Random numbers are drawn in the order of indices. Other ops that may read memory, such as users' own, are kept; their
operands' orders are noted for `localize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, fx

from torchshard.core.errors import CaptureError
from torchshard.ir.editing import emit
from torchshard.ir.effects import reads_memory
from torchshard.ir.fake_values import hint
from torchshard.ir.graph import bound_args, is_tensor, op_name, where
from torchshard.passes.nodes import named_as, node_arg

aten = torch.ops.aten


def by_index(module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Draws random numbers in the order of indices. PyTorch draws in the order of memory, which collectives change.

    For a value that is transposed in memory, the draw moves before the transposition:
    `dropout(x)` is `permute(dropout(permute(x)))`, and the inner `permute` is contiguous.
    """
    order = order_in_memory(node.meta["val"])
    kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
    if order == list(range(len(order))) and kwargs == dict(node.kwargs):
        return None
    in_order = emit(module, aten.permute.default, (node_arg(node), order), node)
    drawn = emit(module, node.target, (in_order, *node.args[1:]), node, **kwargs)
    inverse = [order.index(d) for d in range(len(order))]
    return named_as(node, emit(module, aten.permute.default, (drawn, inverse), node))


def order_in_memory(value: Tensor) -> list[int]:
    """The dims from the outermost in memory to the innermost, in a new tensor like this one."""
    # `empty_like` decides, because it drops gaps and overlaps, as the results of ops do
    with getattr(value, "fake_mode", nullcontext()):
        strides = [hint(stride) for stride in torch.empty_like(value).stride()]
    # dims of size 1 stay in place: their strides are arbitrary
    longer = [d for d in range(value.ndim) if hint(value.shape[d]) != 1]
    ordered = iter(sorted(longer, key=lambda d: -strides[d]))
    return [next(ordered) if d in longer else d for d in range(value.ndim)]


def note_memory_orders(module: fx.GraphModule) -> bool:
    """Records the memory order of operands for ops that may read memory; `localize` uses it."""
    for node in filter(reads_memory, module.graph.nodes):
        operands = [n for n in node.all_input_nodes if is_tensor(n) and n.meta["val"].layout == torch.strided]
        orders = {node.all_input_nodes.index(n): order_in_memory(n.meta["val"]) for n in operands}
        node.meta["memory_orders"] = {i: order for i, order in orders.items() if order != list(range(len(order)))}
    return False


def from_memory(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Reads the memory of x through a flat, contiguous tensor.

    `as_strided(x, [3, 4], [2, 1], 3)` reads `flat = x.permute(1, 0).flatten()[3:]`.

    Raises:
        CaptureError: the memory of x has gaps.
    """
    args = bound_args(node)
    x, size, stride = args["self"], args["size"], args["stride"]
    value, order = x.meta["val"], order_in_memory(x.meta["val"])
    if not _is_dense(value, order):
        raise CaptureError(
            "the model reads the memory between the elements of a tensor",
            where=where(node),
            why=f"it has strides {tuple(map(hint, value.stride()))} and shape {tuple(map(hint, value.shape))}",
            attempt=f"{op_name(node)} of x.contiguous()",
        )
    start = 0 if args["storage_offset"] is None else args["storage_offset"] - value.storage_offset()
    flat = emit(module, aten.reshape.default, (emit(module, aten.permute.default, (x, order), node), [-1]), node)
    if start:
        flat = emit(module, aten.slice.Tensor, (flat, 0, start), node)
    return named_as(node, emit(module, aten.as_strided.default, (flat, size, stride), node))


def _is_dense(value: Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor is free of gaps and overlaps in memory, with its dims in this order."""
    expected = 1
    for dim in reversed(order):
        if hint(value.shape[dim]) != 1:
            if hint(value.stride(dim)) != expected:
                return False
            expected *= hint(value.shape[dim])
    return True
