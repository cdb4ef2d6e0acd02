"""The outline of a sharded graph: nested boxes for modules, a row per op, repeated layers folded.

    blocks.0 (norm, attn (q, k, v, o), mlp), blocks.1 (the same), ... -> 12 × blocks.* (norm, attn (q, k, v, o), mlp)

Consecutive modules fold, alone or with a few ops between them (`x = x + block(x)`), if their paths
differ only in numbers, and their rows and the edges between these are equal.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from torchshard.core.conversions import TABLE, kernels, sent_bytes, source_and_target
from torchshard.core.layouts import I, dtype_text, local_shape, whole_shape, with_parts
from torchshard.core.mesh import MeshAxis
from torchshard.core.paths import star_differences, star_node
from torchshard.core.sharding import Sharding, split_text
from torchshard.core.units import size_text
from torchshard.ir.axes import axes_of, axis_of, converted, layouts_of, tensors_typed
from torchshard.ir.effects import is_view
from torchshard.ir.fake_values import hint
from torchshard.ir.graph import is_own_collective, is_tensor, layout_of, op_name, values
from torchshard.ir.sizes import Names, size_names
from torchshard.ops import OPS, Begin, is_collective, is_or_begins_collective
from torchshard.planner.inside import calls_inside


@dataclass(eq=False)
class Row:
    """An op as three texts."""

    label: str
    """A collective's kind; for another op, the node's name without the names of the boxes around it."""
    detail: str
    """An op's parameters with their types; for a collective, the converted type and each rank's
    messages."""
    type: str
    """The type of the op's result, as `ir.axes.typed`."""
    kind: str
    """The kind of layout: 'S' if it is split, else 'P', 'R', or 'I'."""
    nodes: list[fx.Node]
    """The op itself, then the equal ops of the modules that the row represents."""


@dataclass(eq=False)
class Box:
    """A call of a module."""

    path: str
    title: str
    items: list[Box | Row] = field(default_factory=list)
    count: int = 1
    """The number of equal modules that it represents."""

    def rows(self) -> list[Row]:
        """All rows in the box and its inner boxes."""
        return _rows(self.items)


@dataclass(frozen=True)
class Frame:
    """Settings that outlines side by side share, so that they fold at the same places."""

    kept: Collection[str] = ()
    """The paths of boxes that stay boxes, even of one item."""
    starts: Collection[tuple[str, str]] = ()
    """The boxes that start a fold of their own, each as `_place`."""


def outline(graph: fx.Graph, frame: Frame = Frame()) -> Box:
    """The boxes and rows of a graph, with repeated layers folded, in an unnamed box."""
    root = _boxes(graph)
    _fold(root, frame)
    return root


def frame_of(graphs: Sequence[fx.Graph]) -> Frame:
    """The frame with which a box of one graph is a box in all, and all graphs fold at the same places."""
    frame = Frame({box.path for graph in graphs for box in _inner(_boxes(graph)) if len(box.items) > 1})
    return Frame(frame.kept, {_place(box) for graph in graphs for box in _inner(outline(graph, frame))})


def _inner(box: Box) -> Iterator[Box]:
    """All boxes within a box."""
    for item in box.items:
        if isinstance(item, Box):
            yield item
            yield from _inner(item)


def _place(box: Box) -> tuple[str, str]:
    """The path around a box, equal for all layers of a kind, and the box's name there."""
    around, _, name = box.path.rpartition(".")
    return star_node(around), name


def _boxes(graph: fx.Graph) -> Box:
    """A box for each call of a module, before folding."""
    root = Box("", "")
    for node in filter(_is_shown, graph.nodes):
        box, module = root, node.meta.get("module")
        for part in module.split(".") if module else ():
            path, last = f"{box.path}.{part}".lstrip("."), box.items[-1] if box.items else None
            if not isinstance(last, Box) or last.path != path:
                last = Box(path, part)
                box.items.append(last)
            box = last
        box.items.append(_row(node))
    return root


def sources(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes with the values that a node takes, looking through getitems and, in a step, views."""
    for source in node.all_input_nodes:
        yield from sources(source) if source.target is operator.getitem or _is_view_in_step(source) else (source,)


def _is_view_in_step(node: fx.Node) -> bool:
    """Whether a node of a step only views a value; half of a step's ops do."""
    return "is_backward" in node.meta and is_view(node)


def _is_shown(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "output" or node.meta["kind"] in ("input", "gradient")
    if isinstance(node.target, Begin):
        return True
    if node.target is operator.getitem or _is_view_in_step(node):
        return False
    return any(isinstance(v, Tensor) for v in values(node))


def _fold(box: Box, frame: Frame) -> None:
    """Folds equal consecutive boxes into one, and replaces a box with one item with the item.

    Such an item gets both titles.
    """
    items: list[Box | Row] = []
    for item in box.items:
        if isinstance(item, Box):
            _fold(item, frame)
            item = item if item.path in frame.kept else _unboxed(item)
        items.append(item)
    box.items = []
    while items:
        period, count = _repeated(items, frame)
        groups = [items[i * period : (i + 1) * period] for i in range(count)]
        box.items += groups[0] if count == 1 else [_stack(groups)]
        items = items[period * count :]


def _repeated(items: Sequence[Box | Row], frame: Frame) -> tuple[int, int]:
    """(number of first items that form a layer with a box, number of its consecutive repetitions)."""
    for period in range(1, min(LONGEST_LAYER, len(items) // 2) + 1):
        first = items[:period]
        if not any(isinstance(item, Box) for item in first):
            continue
        looks, count = _looks(first), 1
        while _looks(layer := items[period * count : period * (count + 1)]) == looks and not _starts(layer, frame):
            count += 1
        if count > 1:
            return period, count
    return 1, 1


def _starts(layer: Sequence[Box | Row], frame: Frame) -> bool:
    return any(isinstance(item, Box) and _place(item) in frame.starts for item in layer)


LONGEST_LAYER = 6
"""The largest number of consecutive boxes and rows that may be one layer."""


def _stack(groups: Sequence[Sequence[Box | Row]]) -> Box:
    """One box for several equal layers."""
    boxes = [next(item for item in group if isinstance(item, Box)) for group in groups]
    first = boxes[0]
    shown = first if len(groups[0]) == 1 else Box(first.path, first.title, list(groups[0]))
    shown.count = len(groups) * first.count
    shown.title = f"{shown.count} × {star_differences(*(box.path for box in boxes))}"
    for group in groups[1:]:
        for ours, theirs in zip(_rows(groups[0]), _rows(group), strict=True):
            ours.nodes += theirs.nodes
    return shown


def _rows(items: Sequence[Box | Row]) -> list[Row]:
    return [row for item in items for row in (item.rows() if isinstance(item, Box) else [item])]


def _unboxed(box: Box) -> Box | Row:
    if len(box.items) > 1:
        return box
    (only,) = box.items
    if isinstance(only, Row):
        only.label = f"{box.title} · {only.label}"
    elif only.count == 1:
        only.title = f"{box.title}.{only.title}"
    return only


def _looks(items: Sequence[Box | Row]) -> object:
    """A key that is equal for layers that may be shown as one."""
    rows = _rows(items)
    at = {node: i for i, row in enumerate(rows) for node in row.nodes}
    inputs = [[at.get(i, -1) for i in row.nodes[0].all_input_nodes if is_tensor(i)] for row in rows]
    texts = [(re.sub(r"_\d+$", "", row.label), row.detail, row.type) for row in rows]
    return [star_node(item.path) if isinstance(item, Box) else "" for item in items], texts, inputs


# --- texts -----------------------------------------------------------------------------------------------------------


def _row(node: fx.Node) -> Row:
    names = size_names(node.graph)
    types = _counted(tensors_typed(node, names))
    letters = {str(layout)[0] for of_axis in layouts_of(node).values() for layout in of_axis}
    if isinstance(node.target, Begin):
        detail = _begun(node, node.target)
    elif is_collective(node.target):
        detail = _moved(node, names)
    else:
        detail = ", ".join([*_parameters(node, names), *_inside(node)])
    return Row(_label(node), detail, types, max(letters, default=""), [node])


def _counted(texts: list[str]) -> str:
    return f"{len(texts)} × {texts[0]}" if len(texts) > 1 and len(set(texts)) == 1 else " ".join(texts)


def _label(node: fx.Node) -> str:
    if is_or_begins_collective(node.target):
        return op_name(node)
    name, prefix = node.name.lstrip("_"), str(node.meta.get("module") or "").replace(".", "_")
    while prefix and not f"{name}_".startswith(f"{prefix}_"):
        prefix = prefix.rpartition("_")[0]
    return name[len(prefix) :].lstrip("_") or op_name(node)


def _parameters(node: fx.Node, names: Names) -> list[str]:
    held = [n for n in node.all_input_nodes if n.op == "placeholder" and n.meta["kind"] != "input"]
    return [f"{n.meta['path'].rpartition('.')[2]} {' '.join(tensors_typed(n, names))}" for n in held]


def _inside(node: fx.Node) -> list[str]:
    """The collectives of a split op's local computation, which `localize` brings into the graph."""
    row, choice = node.meta.get("row"), node.meta.get("choice")
    if row is None or choice is None or "is_backward" in node.meta:
        return []
    calls = calls_inside(node, row, choice, axes_of(node.graph)[-1])
    forward = [kernels(call.step.name, needs_grad=False)[0] for call in calls]
    return [f"▼ {kernel.replace('_', '-')} inside" for kernel in dict.fromkeys(forward)]


def _moved(node: fx.Node, names: Names) -> str:
    name, value, axis = op_name(node), node.meta["val"], axis_of(node)
    source, target = source_and_target(name, node.args[1:]) if name in TABLE else (I, I)
    if "is_backward" in node.meta:  # in a step each collective that sends has separate nodes for begin and wait
        return ""
    if is_own_collective(node):
        source, target = layout_of(node.all_input_nodes[0]), layout_of(node)
        shape = [hint(size) for size in value.shape]
    else:  # for this rank's shard along the axis of the graph
        ranks, (operand,) = axes_of(node.graph)[-1].size, node.all_input_nodes
        part = local_shape(operand.meta["val"].shape, layout_of(operand), 0, ranks)
        source, target = with_parts(source, target, part, axis.size)
        shape = [hint(size) for size in whole_shape(local_shape(value.shape, layout_of(node), 0, ranks), target)]
    ways = zip("▼▲", kernels(name, needs_grad=bool(node.meta.get("needs_grad"))), strict=True)
    whole = math.prod(shape) * value.dtype.itemsize
    sent = [(sign, kernel, sent_bytes(kernel, whole, source, target, shape, axis.size)) for sign, kernel in ways]
    moves = [f"{sign} {kernel.replace('_', '-')} {size_text(count)}" for sign, kernel, count in sent if count]
    return ", ".join([f"{_over(axis, node)}from {converted(node, names)}", *moves])


def _over(axis: MeshAxis, node: fx.Node) -> str:
    """The axis as a prefix, if there are several."""
    return f"{axis}: " if len(axes_of(node.graph)) > 1 else ""


def _begun(node: fx.Node, begin: Begin) -> str:
    """Describes the conversion and the messages of a collective in a rank's step."""
    before, nbytes = begun_conversion(node, begin)
    sign, kernel = "▲" if node.meta["is_backward"] else "▼", OPS[begin.op].kernel.replace("_", "-")
    return f"{_over(axis_of(node), node)}from {before}, {sign} {kernel} {size_text(nbytes)}"


def begun_conversion(node: fx.Node, begin: Begin) -> tuple[str, float]:
    """The operand's type of a collective in a rank's step, and the bytes that a rank sends."""
    row, (waiting,), axis = OPS[begin.op], node.users, axis_of(node)
    source, target = source_and_target(row.name, node.args[1:])
    value = waiting.meta["val"]
    source, target = with_parts(source, target, node.all_input_nodes[0].meta["val"].shape, axis.size)
    shape = [hint(size) for size in whole_shape(value.shape, target)]
    sent = sent_bytes(row.kernel, math.prod(shape) * value.dtype.itemsize, source, target, shape, axis.size)
    return split_text(shape, Sharding.of((axis, source)), dtype_text(value.dtype)), sent
