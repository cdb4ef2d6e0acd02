"""How long kernels take on a machine: products by their shape, and the bytes that other ops read and write.

Without a compiler, each op reads its operands and writes its results. A compiler fuses the ops between two products
into one kernel, which keeps intermediate values out of memory. docs/planning.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from torchshard.custom_ops.whole import entry
from torchshard.ir.effects import only_looks
from torchshard.ir.graph import is_tensor_op, operands
from torchshard.ops import is_collective
from torchshard.planner.constants import FUSED
from torchshard.planner.properties import LOOKUPS, PRODUCTS, Op
from torchshard.plans.machine import TILE, Machine

aten = torch.ops.aten
PASSED_ON = {aten.add.Tensor, aten.sub.Tensor}
"""Ops whose backward passes on the result's gradient as it is, to operands of its shape."""


def product_seconds(
    machine: Machine, rows: float, columns: float, depth: float, *, batch: float = 1, itemsize: int = 2
) -> float:
    """Returns the seconds of a product of rows x depth and depth x columns; the operands' traffic is not counted.

    It computes `TILE`s of the result, `machine.tiles` at once, in waves of which the last may be partly empty; a result
    of fewer tiles is divided along the depth instead (split-K). A tile of few columns uses fewer of the units that
    multiply. NVIDIA, "Matrix Multiplication Background User's Guide" (2023): tile and wave quantization.
    """
    rate = machine.flops if itemsize <= 2 or math.isinf(machine.float32_flops) else machine.float32_flops
    ideal = 2 * rows * columns * depth * batch / rate
    if not machine.tiles or not ideal:
        return ideal
    few, many = sorted((rows, columns))
    height, width = (
        min(side, 2 ** math.ceil(math.log2(max(n, 16)))) for side, n in zip(TILE, (few, many), strict=True)
    )
    tiles = math.ceil(few / height) * math.ceil(many / width) * batch
    filled = few * many * batch / (tiles * height * width)
    waves = tiles / (math.ceil(tiles / machine.tiles) * machine.tiles) if tiles >= machine.tiles else 1.0
    return ideal / (filled * waves * math.sqrt(height / TILE[0])) * (1 + machine.start_up / depth)


def note_fusion(graph: fx.Graph) -> None:
    """Notes in `meta["fused"]` of each op that a compiler may fuse how many products and collectives are before it.

    Ops of one number that use each other's results become one kernel. Views belong to what they view.
    """
    depths = dict[fx.Node, int]()
    for node in graph.nodes:
        before = [depths[n] + ("fused" not in n.meta and n.op == "call_function") for n in node.all_input_nodes]
        depths[node] = max(before, default=0)
        node.meta.pop("fused", None)
        if only_looks(node):
            of = node.all_input_nodes[0]
            depths[node] = depths[of]
            if "fused" in of.meta:
                node.meta["fused"] = depths[node]
        elif is_tensor_op(node) and not is_collective(node.target) and entry(PRODUCTS, node.target) is None:
            node.meta["fused"] = depths[node]


def fusion_of(node: fx.Node) -> tuple[object, ...]:
    """Returns what an op's traffic depends on beside its values: which are in its kernel, and how many ops use them."""
    around = ((_is_within(each, node), len([*_users(each)])) for each in operands(node))
    return *around, len(_products_after(node))


def kernels_of(op: Op, *, compiled: bool) -> tuple[int, int]:
    """Returns the kernels that an op starts in forward and in backward: none if it is fused into a later op's."""
    if op.is_view or (compiled and "fused" in op.node.meta and not _products_after(op.node)):
        return 0, 0
    gradients = sum(computed_gradients(op))
    return 1, gradients if op.products or _is_pointwise(op) else min(gradients, 1)


def computed_gradients(op: Op) -> list[bool]:
    """Returns of which operands backward computes the gradient: a sum's have the result's, unless one repeats."""
    if not op.trains:
        return [False] * len(op.operands)
    passed_on = op.results[0].shape if op.node.target in PASSED_ON else None
    return [value.needs_grad and value.shape != passed_on for value in op.operands]


def moved_bytes(op: Op, read: Sequence[float], written: Sequence[float], *, compiled: bool) -> tuple[float, float]:
    """Returns the bytes that an op without products reads and writes in forward, and in backward.

    Backward reads the gradient of the result, and the operands unless the op is linear, and writes the operands'
    gradients: a pointwise op one by one, a norm or a loss in one kernel. Gradients from several users are added.

    Args:
        read, written: the bytes of each operand and of each result.
    """
    gradient = sum(size for size, value in zip(written, op.results, strict=True) if value.dtype.is_floating_point)
    if op.node.target in LOOKUPS:
        return 2 * gradient, 3 * gradient * op.trains
    if compiled:
        return _fused(op, read, sum(written), gradient * op.trains)
    saved = 0.0 if op.is_linear else sum(read)
    computed = [size for size, gets in zip(read, computed_gradients(op), strict=True) if gets]
    times = len(computed) if _is_pointwise(op) else min(len(computed), 1)
    backward = (gradient + saved) * times + sum(computed)
    for size, node, value in zip(read, op.inputs, op.operands, strict=True):
        users = len([*_users(node)])
        backward += 3 * size * (users - 1) / users * (op.trains and value.needs_grad)
    return sum(read) + sum(written), backward


def _fused(op: Op, read: Sequence[float], written: float, gradient: float) -> tuple[float, float]:
    """Returns the bytes that an op adds to the kernel that it is fused into, in forward and in backward.

    If another fused kernel computes an operand, it writes the operand for this one, and reads the gradient that this
    one writes.
    """
    forward = backward = FUSED * (sum(read) + written)
    for size, node, value in zip(read, op.inputs, op.operands, strict=True):
        if not _is_within(node, op.node):
            times = 2 if "fused" in node.meta else 1
            forward += size * times
            backward += size * (times * value.needs_grad + (not op.is_linear))
    after = _products_after(op.node)
    backward += gradient * len([user for user in after if user.op != "output"])
    return forward + (written if after else 0.0), backward * (gradient > 0)


def _is_pointwise(op: Op) -> bool:
    return torch.Tag.pointwise in getattr(op.node.target, "tags", ())


def _is_within(operand: fx.Node, node: fx.Node) -> bool:
    """Returns whether the kernel of a fused op also computes its operand."""
    return "fused" in node.meta and operand.meta.get("fused") == node.meta["fused"]


def _products_after(node: fx.Node) -> list[fx.Node]:
    """Returns the users of a value that are not fused: products, collectives and the graph's output."""
    return [user for user in _users(node) if "fused" not in user.meta]


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Returns what uses a value, or a view of it."""
    for user in node.users:
        if only_looks(user):
            yield from _users(user)
        else:
            yield user
