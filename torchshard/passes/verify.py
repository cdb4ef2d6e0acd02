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

import torch
from torch import Tensor, fx

from torchshard.core.conversions import source_and_target
from torchshard.core.errors import InternalError
from torchshard.core.layouts import I, Layout, Shard, canonical, is_whole
from torchshard.distributed.ops import OPS, is_collective
from torchshard.ir.graph import fake_mode, faking, hint, is_tensor, is_tensor_op, layout_of, operands, values, where
from torchshard.passes.annotate import legal_choices

STAGES = ("annotated", "inserted", "localized")
Seen = dict[str, Any]
"""A call of an op on fake values, as text -> what it gave."""


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
    world = module.meta["world_size"]
    for node in module.graph.nodes:
        if node.op in ("placeholder", "call_function") and node.meta.get("layouts") is None:
            yield node, "a value has no layout", "every pass must set meta['layouts']"
        elif is_tensor_op(node):
            yield from _choice_faults(node, world)
            if stage != "annotated":
                yield from _edge_faults(node, operands(node), node.meta["choice"].operands)
                yield from _write_faults(node)
        elif node.target in OPS:
            yield from _collective_faults(node, world)
        elif node.op == "output" and stage != "annotated":
            results = [n for n in node.all_input_nodes if is_tensor(n)]
            yield from _edge_faults(node, results, (I,) * len(results))


def _choice_faults(node: fx.Node, world: int) -> Iterator[Fault]:
    choice, row = node.meta.get("choice"), node.meta.get("row")
    if choice is None or choice not in list(legal_choices(node, row, world, choice)):
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


def _collective_faults(node: fx.Node, world: int) -> Iterator[Fault]:
    operand: Any = node.args[0]
    source, target = (_canonical(x, world) for x in source_and_target(OPS[node.target].name, node.args[1:]))
    if not _fits(layout_of(operand), source, operand):
        yield node, "a collective's operand does not lie as it says", f"{layout_of(operand)}, not {source}"
    elif layout_of(node) != target:
        yield node, "a collective's result does not lie as it says", f"{layout_of(node)}, not {target}"


def _canonical(layout: Layout, world: int) -> Layout:
    if not isinstance(layout, Shard):
        return layout
    return canonical(layout.dim, layout.parts or (), world, repeated=layout.repeated)


def _shape_faults(module: fx.GraphModule, seen: Seen) -> Iterator[Fault]:
    """Runs every op on the fake local values of its operands and compares what comes with what the layouts say."""
    with faking(fake_mode(module)):
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            try:
                got = _run(node, seen)
            except Exception as error:
                yield node, "an op can't run on its local operands", f"{type(error).__name__}: {error}"
                return
            known = ("layouts" in node.meta or is_collective(node.target)) and "val" in node.meta
            if known and _is_sized_by_values(node):
                continue  # of what is recorded more is known: the model may have compared such a size with another
            expected, node.meta["val"] = values(node), got
            if known:
                yield from _same_shapes(node, expected)


def _run(node: fx.Node, seen: Seen) -> Any:
    """What an op gives on fake values; the calls of layers that are alike give what the first of them gave."""
    target: Any = node.target
    call = repr((target, fx.map_arg((node.args, node.kwargs), lambda n: _looks(n.meta["val"]))))
    if call not in seen or _is_sized_by_values(node):
        seen[call] = target(*_vals(node.args), **_vals(node.kwargs))
    return seen[call]


def _is_sized_by_values(node: fx.Node) -> bool:
    """Whether the shapes of an op's results depend on values: they are new symbols each time that it runs."""
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def _vals(args: Any) -> Any:
    return fx.map_arg(args, lambda n: n.meta["val"])


def _looks(value: Any) -> Any:
    """All that an op on fake values may see of one."""
    if isinstance(value, (list, tuple)):
        return [_looks(v) for v in value]
    if not isinstance(value, Tensor):
        return value
    strides = value.stride() if value.layout == torch.strided else None
    return value.shape, strides, value.dtype, value.device, value.layout


def _same_shapes(node: fx.Node, wanted: list[Any]) -> Iterator[Fault]:
    several = isinstance(node.meta["val"], (list, tuple))
    taken = {user.args[1] for user in node.users} if several else {0}  # some ops give nothing of what nobody takes
    for value, expected in (pair for i, pair in enumerate(zip(values(node), wanted, strict=True)) if i in taken):
        if isinstance(value, Tensor) and [hint(s) for s in value.shape] != [hint(s) for s in expected.shape]:
            yield (
                node,
                "a local shape is not what its layout gives",
                f"{tuple(value.shape)}, not {tuple(expected.shape)}",
            )
