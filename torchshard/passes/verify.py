"""What must hold of a graph after each pass; a pass's result is checked, never its input.

    annotated    every value has layouts, every choice is one that its op's row allows
    inserted     and every operand lies as the op that takes it wants, every collective converts what it says, and no
                 result leaves the model as R, S or P
    localized    and local shapes computed anew on fake tensors are those that the layouts give

A value that needs no gradient may be R where I is wanted, and I where R is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from torchshard.core.conversions import source_and_target
from torchshard.core.errors import InternalError
from torchshard.core.layouts import I, Layout, Shard, canonical, is_whole
from torchshard.core.mesh import MeshAxis
from torchshard.distributed.ops import OPS
from torchshard.ir.graph import fake_mode, faking, hint, is_tensor, is_tensor_op, layout_of, operands, values, where
from torchshard.passes.annotate import legal_choices
from torchshard.passes.propagate import Seen, is_sized_by_values, run

STAGES = ("annotated", "inserted", "localized")


def verify(module: fx.GraphModule, stage: str, after: str, seen: Seen | None = None) -> None:
    """Raises InternalError, with the listing's node, for the first thing that does not hold.

    Args:
        stage: what must hold, one of STAGES.
        after: the name of the pass whose result this is.
        seen: calls that need not run again; those of this graph are added.
    """
    module.graph.lint()
    local = stage == "localized"
    found = next(_shape_faults(module, {} if seen is None else seen) if local else _faults(module, stage), None)
    if found is not None:
        node, what, why = found
        raise InternalError(f"after {after}: {what}", where=where(node), why=why)


Fault = tuple[fx.Node, str, str]


def _faults(module: fx.GraphModule, stage: str) -> Iterator[Fault]:
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
            results = [n for n in node.all_input_nodes if is_tensor(n)]
            yield from _edge_faults(node, results, (I,) * len(results))


def _choice_faults(node: fx.Node, axis: MeshAxis) -> Iterator[Fault]:
    choice, row = node.meta.get("choice"), node.meta.get("row")
    if choice is None or choice not in list(legal_choices(node, row, axis, choice)):
        yield node, "an op's choice is not one that its row allows", f"{choice} of row {row.text if row else None}"
    elif choice.results != node.meta["layouts"]:
        yield node, "an op's layouts are not its choice's", f"{node.meta['layouts']} and {choice.results}"


def _edge_faults(node: fx.Node, inputs: list[fx.Node], wanted: tuple[Layout, ...]) -> Iterator[Fault]:
    for operand, layout in zip(inputs, wanted, strict=True):
        if not _fits(layout_of(operand), layout, operand):
            yield node, "an operand does not lie as it must", f"{operand.name} is {layout_of(operand)}, wanted {layout}"


def _write_faults(node: fx.Node) -> Iterator[Fault]:
    row = node.meta.get("row")
    for i in row.options.mutates if row is not None else ():
        written = operands(node)[i]
        if written.op != "placeholder":
            yield node, "a write goes to a copy", f"{written.name} is a collective's result, not the buffer itself"


def _fits(have: Layout, want: Layout, value: fx.Node) -> bool:
    return have == want or (not value.meta.get("needs_grad") and is_whole(have) and is_whole(want))


def _collective_faults(node: fx.Node, axis: MeshAxis) -> Iterator[Fault]:
    operand: Any = node.args[0]
    source, target = (_canonical(x, axis) for x in source_and_target(OPS[node.target].name, node.args[1:]))
    if not _fits(layout_of(operand), source, operand):
        yield node, "a collective's operand does not lie as it says", f"{layout_of(operand)}, not {source}"
    elif layout_of(node) != target:
        yield node, "a collective's result does not lie as it says", f"{layout_of(node)}, not {target}"


def _canonical(layout: Layout, axis: MeshAxis) -> Layout:
    if not isinstance(layout, Shard):
        return layout
    return canonical(layout.dim, layout.parts or (), axis.size, repeated=layout.repeated)


def _shape_faults(module: fx.GraphModule, seen: Seen) -> Iterator[Fault]:
    """Runs every op on the fake values that its operands gave, and compares what it gives with the recorded value."""
    computed: dict[fx.Node, Any] = {}  # never the graph's own: what is wrong there must not be mended here
    with faking(fake_mode(module)):
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            if "val" not in node.meta:
                yield node, "an op has no value", "every pass must set meta['val']"
                return
            if is_sized_by_values(node):
                continue  # the recorded value knows more: the model may have compared its size with another
            try:
                computed[node] = run(node, lambda n: computed.get(n, n.meta["val"]), seen)
            except Exception as error:
                yield node, "an op can't run on its local operands", f"{type(error).__name__}: {error}"
                return
            yield from _same_shapes(node, computed[node])


def _same_shapes(node: fx.Node, computed: Any) -> Iterator[Fault]:
    if computed is None:
        return  # an assertion gives nothing
    several = isinstance(computed, (list, tuple))
    used = {user.args[1] for user in node.users} if several else {0}  # some ops give None for results that nobody uses
    pairs = zip(computed if several else [computed], values(node), strict=True)
    for value, expected in (pair for i, pair in enumerate(pairs) if i in used):
        if isinstance(value, Tensor) and [hint(s) for s in value.shape] != [hint(s) for s in expected.shape]:
            yield (
                node,
                "a local shape is not what its layout gives",
                f"{tuple(value.shape)}, not {tuple(expected.shape)}",
            )
