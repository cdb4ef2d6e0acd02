"""The modules of a page as a tree that opens and closes, with several plans side by side.

A row's texts are part of the page; its other facts are in one JSON block, as numbers of texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from html import escape
from typing import Any

from torch import fx

from torchshard.core.conversions import TABLE
from torchshard.core.paths import star_differences, star_node
from torchshard.core.units import size_text, time_text
from torchshard.ir.axes import axes_of, axis_of, layouts_of
from torchshard.ir.effects import is_view
from torchshard.ir.graph import op_name
from torchshard.ops import Begin, is_collective, is_or_begins_collective
from torchshard.planner.styles import style_of
from torchshard.plans.costs import Collective
from torchshard.plans.plan import Plan
from torchshard.report.drawing.outline import Box, Frame, Row, begun_conversion, outline, sources
from torchshard.report.drawing.stations import busiest_layer, main_values
from torchshard.report.why import MOST_USERS, REASONS

Item = Box | Row
TOLD = ("op", "node", "module", "source", "row", "choice", "key", "why", "for", "costs", "runs")
"""The facts about a row apart from its texts, in the order of the JSON."""


class Texts(dict[str, int]):
    """Text -> its number, in order of first use."""

    def number(self, text: str) -> int:
        """The number of a text, which is new if needed; 0 is the empty text."""
        return self.setdefault(text, len(self))


class Side:
    """One plan's graph as a tree, with the facts about its rows."""

    def __init__(self, plan: Plan, graph: fx.Graph, prefix: str, texts: Texts, frame: Frame) -> None:
        self.plan, self.prefix, self.texts, self.layer = plan, prefix, texts, busiest_layer(plan)
        self.root = outline(graph, frame)
        self.rows = self.root.rows()
        self.ids = {node: f"{prefix}{i}" for i, row in enumerate(self.rows) for node in row.nodes}
        self.main = main_values(graph)
        self.costs: dict[tuple[str, ...], Collective] = {}
        self.inside: dict[str, list[Collective]] = {}
        for axis, of_axis in zip(axes_of(graph), plan.in_order, strict=True):
            for c in of_axis.costs.collectives:
                self.costs[axis.name, c.value, c.name, str(c.target)] = c
                if c.is_inside:
                    self.inside.setdefault(c.value, []).append(c)

    def record(self, node: fx.Node) -> Collective | None:
        """The plan's record of a collective node."""
        if not is_collective(node.target) or op_name(node) not in TABLE:
            return None
        axis = axis_of(node).name
        targets = layouts_of(node).get(axis)
        if targets is None:
            return None
        value = node.all_input_nodes[0]  # skips earlier conversions: several may convert one value in sequence
        while (axis, value.name, op_name(node), str(targets[0])) not in self.costs and is_collective(value.target):
            value = value.all_input_nodes[0]
        return self.costs.get((axis, value.name, op_name(node), str(targets[0])))

    def row_of(self, c: Collective) -> str:
        """The id of the row that shows a collective, or ''."""
        same = (lambda n: n.name == c.value) if c.is_inside else (lambda n: self.record(n) is c)
        return next((i for n, i in self.ids.items() if same(n)), "")

    def is_bookkeeping(self, row: Row) -> bool:
        """Whether a row only concerns shapes, masks and positions, or is a view."""
        node = row.nodes[0]
        is_end = node.op != "call_function" or is_or_begins_collective(node.target)
        return not is_end and (node not in self.main or is_view(node))

    def facts(self) -> list[list[object]]:
        """The facts about each row: the rows of its operands, then the numbers of its texts.

        Trailing zeros are cut.
        """
        return [self._facts(row) for row in self.rows]

    def _facts(self, row: Row) -> list[object]:
        node, count = row.nodes[0], len(row.nodes)
        record, style = self.record(node), style_of(node)
        told = {
            "op": f"{op_name(node)}{f', in {count} equal layers' if count > 1 else ''}",
            "node": node.name,
            "module": node.meta.get("module", ""),
            "runs": _when(node),
            "row": getattr(node.meta.get("row"), "text", ""),
            "choice": getattr(node.meta.get("choice"), "name", ""),
            "source": node.meta.get("source", ""),
        }
        if record is not None:
            in_all = f"; {size_text(count * record.nbytes)} in all layers" if count > 1 else ""
            told |= {
                "why": REASONS[record.name],
                "for": ", ".join(record.consumers[:MOST_USERS]),
                "costs": f"{size_text(record.nbytes)}, {time_text(record.seconds)}{in_all}",
            }
        if style and node.meta.get("module"):
            told["key"] = f'"{star_differences(*(n.meta["module"] for n in row.nodes))}": "{style}"'
        numbers = [self.texts.number(told.get(name, "")) for name in TOLD]
        before = dict.fromkeys(self.ids[s] for s in sources(node) if s in self.ids)
        while not numbers[-1]:
            numbers.pop()
        return [[int(near[1:]) for near in before], *numbers]


def _when(node: fx.Node) -> str:
    """The pass of a step in which an op runs."""
    if "is_backward" not in node.meta:
        return ""
    return "backward" + (", again" if node.meta.get("is_again") else "") if node.meta["is_backward"] else "forward"


# --- HTML ------------------------------------------------------------------------------------------------------------


def tree(sides: Sequence[Side]) -> str:
    """The modules of all sides; equal names share a line, which is marked if the sides differ."""
    return "".join(_Tree(sides).items([side.root.items for side in sides]))


class _Tree:
    def __init__(self, sides: Sequence[Side]) -> None:
        self.sides = sides

    def items(self, sequences: Sequence[Sequence[Item]]) -> Iterator[str]:
        for together in _aligned(sequences):
            first = next(item for item in together if item is not None)
            yield self._box(together) if isinstance(first, Box) else self._line(together)

    def _box(self, boxes: Sequence[Any]) -> str:
        first = next(box for box in boxes if box is not None)
        rows = [[] if box is None else box.rows() for box in boxes]
        looks = ["stack"] if first.count > 1 else []
        both = [*zip(self.sides, rows, strict=True)]
        looks += ["book"] if all(side.is_bookkeeping(row) for side, of_side in both for row in of_side) else []
        badges = "".join(self._badge(side, of_side) if of_side else "" for side, of_side in both)
        differs = '<span class="differs">differs</span>' if len({_texts(of_side) for of_side in rows}) > 1 else ""
        title, path = escape(first.title), escape(first.title.rpartition(" × ")[2] if first.count > 1 else first.path)
        copy = f'<button data-key="{path}">key</button>'
        inner = "".join(self.items([[] if box is None else box.items for box in boxes]))
        look = f' class="{" ".join(looks)}"' if looks else ""
        return (
            f'<details{look}><summary><span class="title">{title}</span>{badges}{differs}{copy}'
            f"</summary>{inner}</details>"
        )

    def _badge(self, side: Side, rows: Sequence[Row]) -> str:
        """The data sent in a module."""
        nodes = [node for row in rows for node in row.nodes]
        begun = [begun_conversion(node, node.target)[1] for node in nodes if isinstance(node.target, Begin)]
        if begun:  # a rank's step, which a plan does not price
            return f'<span class="badge">⬡ {len(begun)} · {size_text(sum(begun))}</span>'
        records = [r for n in nodes for r in (side.record(n), *side.inside.get(n.name, ())) if r is not None]
        sent = [r for r in records if r.nbytes]
        if not sent:
            is_known = len(self.sides) > 1 and not any(is_or_begins_collective(n.target) for n in nodes)
            return '<span class="badge none">nothing sent</span>' if is_known else ""
        told = size_text(sum(r.nbytes for r in sent)), time_text(sum(r.seconds for r in sent))
        return f'<span class="badge">⬡ {sum(r.calls for r in sent)} · {told[0]} · {told[1]}</span>'

    def _line(self, rows: Sequence[Any]) -> str:
        cells = [self._row(side, row) for side, row in zip(self.sides, rows, strict=True)]
        if len(cells) == 1:
            return cells[0]
        look = "line" + (" differs" if len({_text(row) for row in rows}) > 1 else "")
        return f'<div class="{look}">{"".join(cell or "<div></div>" for cell in cells)}</div>'

    def _row(self, side: Side, row: Row | None) -> str:
        if row is None:
            return ""
        kind, sign = "row", ""
        if is_or_begins_collective(row.nodes[0].target):
            kind, sign = ("row collective" if "▼" in row.detail else "row collective quiet"), "⬡ "
        elif side.is_bookkeeping(row):
            kind = "row book"
        label, detail, type_ = map(escape, _text(row))
        told = f"<i>{detail}</i>" if detail else ""
        return (
            f'<div class="{kind}" id="{side.ids[row.nodes[0]]}"><b>{sign}{label}</b>{told}'
            f'<u class="{row.kind}">{type_}</u></div>'
        )


def _aligned(sequences: Sequence[Sequence[Item]]) -> list[tuple[Item | None, ...]]:
    """Puts items with equal names side by side, in an order that respects all sequences."""
    together: list[tuple[Item | None, ...]] = [(item,) for item in sequences[0]]
    for width, sequence in enumerate(sequences[1:], start=1):
        ours = [_name(next(item for item in line if item is not None)) for line in together]
        merged: list[tuple[Item | None, ...]] = []
        for _, a, b, c, d in SequenceMatcher(None, ours, [*map(_name, sequence)], autojunk=False).get_opcodes():
            if b - a == d - c and ours[a:b] == [*map(_name, sequence[c:d])]:
                merged += [(*line, item) for line, item in zip(together[a:b], sequence[c:d], strict=True)]
            else:
                merged += [(*line, None) for line in together[a:b]]
                merged += [(*(None,) * width, item) for item in sequence[c:d]]
        together = merged
    return together


def _name(item: Item) -> tuple[str, ...]:
    if isinstance(item, Box):
        return "box", star_node(item.path), str(item.count)
    return "row", item.label


def _text(row: Row | None) -> tuple[str, ...]:
    return () if row is None else (row.label, row.detail, row.type)


def _texts(rows: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    return tuple(map(_text, rows))
