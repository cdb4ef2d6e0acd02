"""Writes the plan onto the graph: every op gets its choice, every value its layouts.

before    q = linear(x, q_weight)      f32[2,8,8]
after     q = linear(x, q_weight)      f32[2,8,8@tp]     split n: ... k, n k -> ... n
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from torchshard.core.choices import choices
from torchshard.core.errors import PlanError
from torchshard.core.layouts import I, Layout, Shard, is_whole
from torchshard.core.mesh import MeshAxis
from torchshard.core.paths import module_around
from torchshard.core.rows import Choice, Row
from torchshard.ir.effects import uses_rng
from torchshard.ir.graph import bound_args, is_tensor_op, layout_of, node_row, where, whole_choice
from torchshard.passes.nodes import int_arg, node_arg
from torchshard.plans.data import AxisPlan


def annotate(module: fx.GraphModule, plan: AxisPlan) -> bool:
    """Sets meta 'layouts', 'choice', 'row' and 'recompute'; always returns True.

    Raises:
        PlanError: the plan lacks a choice for an op or has an illegal one, or it splits an
            attention with dropout that a GPU's fused kernel draws.
    """
    layouts = plan.layouts
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.meta["layouts"] = (layouts.get(node.meta["path"], I),)
        elif is_tensor_op(node):
            node.meta["choice"] = planned_choice(node, plan)
            _refuse_fused_masks(node)
            node.meta["layouts"] = node.meta["choice"].results
        elif node.target is operator.getitem:
            layouts, index = node_arg(node).meta.get("layouts", ()), int_arg(node, 1)
            node.meta["layouts"] = (layouts[index],) if index < len(layouts) else (I,)
        elif node.op == "call_function":
            node.meta["layouts"] = (I,)
        if node.op == "call_function" and plan.recompute:
            region = module_around(node.meta.get("module", ""), plan.recompute)
            if region is not None:
                # a checkpoint in the model's code comes first
                node.meta.setdefault("recompute", region or "the model")
    return True


def _refuse_fused_masks(node: fx.Node) -> None:
    """Refuses split attention with dropout from a GPU's fused kernel.

    The kernel draws in an order of its own, which a rank with part of the heads can't repeat.
    """
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default or not node.meta["choice"].factors:
        return
    value, fused = node.meta["val"], torch.backends.cuda
    is_fused = fused.flash_sdp_enabled() or fused.mem_efficient_sdp_enabled() or fused.cudnn_sdp_enabled()
    if value.device.type == "cuda" and is_fused and uses_rng(node):
        raise PlanError(
            "split attention can't draw the dropout of a GPU's fused kernel",
            where=where(node),
            why=f"dropout_p={bound_args(node)['dropout_p']}: the kernel draws in an order of its own, so that training "
            "would differ from the unsharded model's",
            attempt="no dropout in attention (its p, HF's attention_dropout); or, here and around the unsharded model, "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which split heads can draw too (in length^2 memory)",
        )


def legal_choices(node: fx.Node, row: Row | None, axis: MeshAxis, planned: Choice) -> Iterable[Choice]:
    """The choices of a row, with the parts of the planned choice: a row does not list uneven parts."""
    if row is None:
        return [whole_choice(node)]
    layouts, rows = (*planned.operands, *planned.results), (*row.operands, *row.results)
    splits = []
    for position, (layout, dims) in enumerate(zip(layouts, rows, strict=False)):
        if isinstance(layout, Shard) and layout.dim < len(dims):
            splits.append((position, layout))
    return choices(row, axis.size, splits)


def serves(value: fx.Node, required: Layout) -> bool:
    """Whether an op may take a value as it is; without a gradient, R and I are interchangeable."""
    held = layout_of(value)
    return held == required or (not value.meta.get("needs_grad") and is_whole(held) and is_whole(required))


def planned_choice(node: fx.Node, plan: AxisPlan) -> Choice:
    """The plan's choice for an op.

    Raises:
        PlanError: the plan lacks a choice for the op, or has an illegal one.
    """
    row, planned = node_row(node), plan.choices.get(node.name)
    if planned is None:
        raise PlanError(
            "the plan has no choice for an op of the model",
            where=where(node),
            why="it was made for another model, another mode (train or eval) or other inputs",
            attempt="make a new plan, or give a dict of module styles",
        )
    for choice in legal_choices(node, row, plan.axis, planned):
        same_layouts = (choice.operands, choice.results) == (planned.operands, planned.results)
        if choice.name == planned.name and same_layouts:
            return choice
    layouts = ", ".join(map(str, planned.operands))
    row_text = row.text if row else "missing, so that it runs whole"
    raise PlanError(
        f"the plan's choice {planned.name!r} is not legal for an op",
        where=where(node),
        why=f"its operands would have the layouts {layouts}; the op's row is {row_text}",
        attempt="make a new plan for this model and this version of torchshard",
    )
