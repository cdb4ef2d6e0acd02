"""Verifies the graph that a pass has produced; errors name the guilty pass.

Passes do not check their inputs, because the error would then name the pass after the guilty one.

annotated    every value has layouts, and every choice is one that the op's row allows
inserted     also: every operand has the layout that its consumer requires, every collective
             converts between the layouts that it names, and no result leaves the model as R, S or P
localized    recomputing each op on fake tensors gives the local shapes that the layouts predict
lowered      every collective is one that compilers know, and has the shapes that the layouts of
             its results predict
joint        collectives of the backward convert gradients between the duals of the layouts of the
             forward's values

I and R differ only in their gradients, so either serves for the other if the value needs no
gradient.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Literal

from torch import SymInt, Tensor, fx
from torch.fx.node import Argument

from torchshard.core.conversions import source_and_target
from torchshard.core.errors import InternalError, RuleError
from torchshard.core.layouts import Layout, Shard, canonical, dual, has_blocks
from torchshard.core.mesh import MeshAxis
from torchshard.ir.axes import axes_of, typed_as
from torchshard.ir.fake_values import faking, hint
from torchshard.ir.graph import fake_mode, is_tensor_op, layout_of, operands, required_layouts, values, where
from torchshard.ir.sizes import size_names
from torchshard.ops import OPS, is_or_begins_collective
from torchshard.passes.annotate import legal_choices, serves
from torchshard.passes.nodes import int_arg, node_arg, operator_of
from torchshard.passes.propagate import Seen, is_sized_by_values, run
from torchshard.rules import has_users_rule

Stage = Literal["annotated", "inserted", "localized", "joint", "lowered"]
"""The progress of a graph through the passes, which decides the invariants to check."""
Fault = tuple[fx.Node, str, str]
"""A node that breaks an invariant, the invariant, and how the node breaks it."""
Faults = Generator[Fault, None, None]


def verify(module: fx.GraphModule, stage: Stage, after: str, seen: Seen | None = None) -> None:
    """Raises an error for the first node that breaks an invariant.

    Args:
        stage: how far the passes have come: "annotated", "inserted", "localized", "joint" or "lowered".
        after: the name of the pass that produced the graph.
        seen: cached results of ops on fake values; results from this graph are added.

    Raises:
        InternalError: a pass broke the invariant.
        RuleError: a user's rule did.
    """
    module.graph.lint()
    if stage == "localized":
        faults = _shape_faults(module, Seen() if seen is None else seen)
    elif stage == "joint":
        faults = _joint_faults(module)
    elif stage == "lowered":
        faults = _lowered_faults(module)
    else:
        faults = _layout_faults(module, stage)
    with closing(faults):  # an error that is kept alive would also keep the generator and all fake values
        fault = next(faults, None)
    if fault is not None:
        node, what, why = fault
        op = node.meta.get("in_place_of", node.target)
        if stage == "localized" and node.op == "call_function" and has_users_rule(op):
            raise RuleError(
                f"the rule of {op} is wrong",
                where=where(node),
                why=f"{what}: {why}",
                attempt="! behind the axes that may not be split; or local={axis: function} for what a rank computes",
            )
        raise InternalError(f"after {after}: {what}", where=where(node), why=why)


def _layout_faults(module: fx.GraphModule, stage: Stage) -> Faults:
    axis: MeshAxis = module.meta["axis"]
    for node in module.graph.nodes:
        if node.op in ("placeholder", "call_function") and node.meta.get("layouts") is None:
            yield node, "a value has no layout", "every pass must set meta['layouts']"
        elif is_tensor_op(node):
            yield from _choice_faults(node, axis)
            if stage != "annotated":
                yield from _edge_faults(node, operands(node), node.meta["choice"].operands)
                yield from _write_faults(node)
        elif node.target in OPS:
            yield from _collective_faults(node, axis)
        elif node.op == "output" and stage != "annotated":
            for result, layout in required_layouts(node, None):
                yield from _edge_faults(node, [result], (layout,))


def _choice_faults(node: fx.Node, axis: MeshAxis) -> Faults:
    choice, row = node.meta.get("choice"), node.meta.get("row")
    if choice is None or choice not in list(legal_choices(node, row, axis, choice)):
        row_text = row.text if row is not None else None
        yield node, "an op's choice is not one that its row allows", f"{choice} of row {row_text}"
    elif choice.results != node.meta["layouts"]:
        yield node, "an op's layouts are not its choice's", f"{node.meta['layouts']} and {choice.results}"


def _edge_faults(node: fx.Node, inputs: list[fx.Node], required: tuple[Layout, ...]) -> Faults:
    for operand, layout in zip(inputs, required, strict=True):
        if not serves(operand, layout):
            why = f"{operand.name} is {_typed(operand)}, {node.name} requires {_typed(operand, layout)}"
            yield node, "an operand has another layout than its consumer requires", why


def _typed(node: fx.Node, layout: Layout | None = None) -> str:
    """The type of a value, with its own layout or the given one."""
    names = size_names(node.graph)
    return typed_as(node, axes_of(node.graph)[-1], layout_of(node) if layout is None else layout, names)


def _write_faults(node: fx.Node) -> Faults:
    row = node.meta.get("row")
    for i in row.options.mutates if row is not None else ():
        written = operands(node)[i]
        if written.op != "placeholder":
            yield node, "a write goes to a copy", f"{written.name} is a collective's result, not the buffer itself"


def _collective_faults(node: fx.Node, axis: MeshAxis) -> Faults:
    operand = node_arg(node)
    layouts = source_and_target(OPS[operator_of(node)].name, node.args[1:])
    source, target = (_canonical(layout, axis) for layout in layouts)
    if not serves(operand, source):
        why = f"{_typed(operand)}, not {_typed(operand, source)}"
        yield node, "a collective's operand has another layout than it converts", why
    elif layout_of(node) != target:
        why = f"{_typed(node)}, not {_typed(node, target)}"
        yield node, "a collective's result has another layout than it converts to", why


def _joint_faults(module: fx.GraphModule) -> Faults:
    axis, group = module.meta["axis"], module.meta["group"]
    by_name = {node.name: node for node in module.graph.nodes}
    for node in module.graph.nodes:
        if node.target not in OPS or not node.meta["is_backward"] or node.args[-1] != group:
            continue
        layouts = source_and_target(OPS[operator_of(node)].name, node.args[1:])
        for end, layout in zip((node_arg(node), node), layouts, strict=True):
            # several values may share one gradient, if a broadcast dim has slices of one element
            found = [by_name[name] for name in end.meta.get("gradient_of", ()) if name in by_name]
            known = {dual(layout_of(value)) for value in found if value.meta.get("layouts")}
            if known and _canonical(layout, axis) not in known:
                yield node, "a collective converts another layout than that of a gradient", f"{layout}, not {known}"


def _lowered_faults(module: fx.GraphModule) -> Faults:
    for node in module.graph.nodes:
        if is_or_begins_collective(node.target):
            yield node, "a collective is not lowered", "a compiler would not know it"
        elif "lowered" in node.meta:
            yield from _wrong_shapes(node, node.meta["lowered"])


def _canonical(layout: Layout, axis: MeshAxis) -> Layout:
    if not isinstance(layout, Shard) or has_blocks(layout):
        return layout
    return canonical(layout.dim, layout.listed, axis.size, repeated=layout.repeated)


def _shape_faults(module: fx.GraphModule, seen: Seen) -> Faults:
    """Runs every op on fake values, in order, and compares the shapes with the recorded ones.

    Dynamic sizes are tried second: they take longer, and PyTorch treats some ops differently with
    them: on the meta device it gives losses no dim.
    """
    if _has_sizes_of_values(module.graph) or any(_faults_of_results(module, seen, numbers=True)):
        yield from _faults_of_results(module, seen, numbers=False)


def _faults_of_results(module: fx.GraphModule, seen: Seen, *, numbers: bool) -> Faults:
    computed: dict[fx.Node, Argument] = {}  # an op must not start from a recorded value, which may be the wrong one

    def value_of(node: fx.Node) -> Argument:
        if node in computed:
            return computed[node]
        return seen.in_numbers(node.meta["val"]) if numbers else node.meta["val"]

    with faking(seen.numbers if numbers else fake_mode(module.graph)):
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            if "val" not in node.meta:
                yield node, "an op has no value", "every pass must set meta['val']"
                return
            if is_sized_by_values(node):
                continue  # the recorded value knows more: the model may have compared its size with another
            try:
                computed[node] = run(node, value_of, seen, numbers=numbers)
            except Exception as error:
                yield node, "an op can't run on its local operands", f"{type(error).__name__}: {error}"
                return
            yield from _wrong_shapes(node, computed[node])


def _has_sizes_of_values(graph: fx.Graph) -> bool:
    """Whether the graph has a data-dependent size, which the example inputs leave unknown."""
    sizes = (size for node in graph.nodes for value in values(node) for size in getattr(value, "shape", (value,)))
    return any(isinstance(size, SymInt) and size.node.hint is None for size in sizes)


def _wrong_shapes(node: fx.Node, computed: Argument) -> Faults:
    if computed is None:
        return  # assertions return None
    results: list[Argument] = [computed]
    used = {0}
    if isinstance(computed, (list, tuple)):
        # some ops return None for unused results
        results, used = list(computed), {int_arg(user, 1) for user in node.users}
    for i, (result, recorded) in enumerate(zip(results, values(node), strict=True)):
        if i not in used or not isinstance(result, Tensor):
            continue
        if [hint(s) for s in result.shape] != [hint(s) for s in recorded.shape]:
            why = f"{tuple(result.shape)}, not {tuple(recorded.shape)}"
            yield node, "a local shape is not what its layout gives", why
