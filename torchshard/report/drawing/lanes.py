"""A module as a figure, with a lane for each rank, its slices, and collectives as joins of all lanes.

The figure follows figure 3 of Shoeybi et al., "Megatron-LM" (2019), but is made from the graph. A
square is a weight or a value, its filled part the rank's slice; a striped one is a partial sum, of
which the ranks' total is the value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape, quoteattr

from torch import Tensor, fx

from torchshard.core.layouts import P, Shard, local_shape, parts_of, ranges
from torchshard.ir.axes import tensors_typed
from torchshard.ir.fake_values import hint
from torchshard.ir.graph import layout_of, op_name, values
from torchshard.ir.sizes import Names, size_names
from torchshard.plans.plan import Plan
from torchshard.plans.table import mesh_text
from torchshard.report.drawing.stations import LETTERS, MOST_STATIONS, Station, is_parameter, sent, stations

WIDE, JOIN, GAP, ROW, ICON, MARGIN, HEAD = 92, 34, 26, 66, 26, 16, 62
"""Pixels: a station, a join, between columns, a row, a square, around all, above the lanes."""
LONGEST = 15
"""Maximum length of a label in characters."""
MOST_LANES = 4
"""The number of lanes that are drawn; the last lane is the last rank's."""
STYLE = """
.lanes{font:10px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#24292f}
.l-name{font-weight:bold;font-size:12px}.l-letter{font:italic bold 20px Georgia,serif;text-anchor:middle}
.l-dim{fill:#57606a}.l-mid{text-anchor:middle}.l-page{fill:#fff}.l-lane{fill:#818b98;fill-opacity:.07;stroke:#afb8c1}
.l-whole{fill:#fff;stroke:#818b98}.l-weight{fill:#0969da}.l-value{fill:#1a7f37}.l-addend{fill:url(#stripes)}
.l-stripe{stroke:#bc4c00}.l-join{fill:#ffd8a8;stroke:#bc4c00}
.l-quiet{fill:#fff1e0;stroke:#bc4c00;stroke-dasharray:4 2}.l-edge{fill:none;stroke:#818b98;stroke-width:1.2}
@media (prefers-color-scheme:dark){
.lanes{fill:#e6edf3}.l-dim{fill:#b1bac4}.l-page,.l-whole{fill:#0d1117}.l-lane{stroke:#484f58}.l-weight{fill:#58a6ff}
.l-value{fill:#3fb950}.l-stripe{stroke:#f0883e}.l-join{fill:#6b3400;stroke:#f0883e}
.l-quiet{fill:#2b1c0d;stroke:#f0883e}}
"""
STRIPES = (
    '<defs><pattern id="stripes" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="l-stripe" x1="0" y1="0" x2="0" y2="5" stroke-width="4"/></pattern></defs>'
)


def lanes(plan: Plan, module: str, prefix: str = "") -> str:
    """The SVG text; '' if a module has too many stations or none, or the plan lacks a graph.

    Args:
        prefix: prefix of the figure's ids, unique among the figures of a page.
    """
    if plan.graph is None:
        return ""
    graph = plan.graph.graph
    shown = stations(graph, module)
    return _Figure(plan, graph, module, shown, prefix).svg() if 0 < len(shown) <= MOST_STATIONS else ""


class _Figure:
    def __init__(self, plan: Plan, graph: fx.Graph, module: str, shown: Sequence[Station], prefix: str) -> None:
        self.module, self.shown, self.world = module, shown, plan.world_size
        self.paths, self.stripes = f"{prefix}paths", f"{prefix}stripes"
        others = f" along {plan.last.axis}, of {mesh_text(plan)}; what goes over others is left out"
        self.over = others if plan.across else ""
        self.names: Names = size_names(graph)
        self.ranks = [*range(min(self.world, MOST_LANES))]
        if self.world > MOST_LANES:
            self.ranks[-1] = self.world - 1
        joins = {one.level for one in shown if one.is_join}
        self.left = [float(MARGIN + 58)]
        for level in range(max(one.level for one in shown) + 1):
            self.left.append(self.left[-1] + (JOIN if level in joins else WIDE) + GAP)
        self.height = ROW * (1 + max(one.row for one in shown)) + 26
        self.bottom = HEAD + len(self.ranks) * (self.height + 12)

    def svg(self) -> str:
        """The whole figure as SVG text."""
        width, height = round(self.left[-1] + MARGIN), round(self.bottom + 60)
        title = f"{self.module or 'the model'} on {self.world} rank{'s' * (self.world > 1)}{self.over}"
        tail = "" if self.world == len(self.ranks) else f" (ranks {len(self.ranks) - 1} to {self.world - 2} left out)"
        key = "blue: the slice of a weight; green: of a value; striped: a partial sum; forward from left to right"
        parts = [
            f'<svg class="lanes" xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(self._described(title))}>',
            f"<style>{STYLE.replace('stripes', self.stripes)}</style>{STRIPES.replace('stripes', self.stripes)}"
            f'<rect class="l-page" width="{width}" height="{height}"/>',
            _text("name", MARGIN, 20, title + tail),
            _text("dim", MARGIN, 36, key),
            f'<defs><g id="{self.paths}">{"".join(self._common())}</g></defs>',
            *(self._lane(i) for i in range(len(self.ranks))),
            *(self._bar(one) for one in self.shown if one.is_join),
            *(f'<use href="#{self.paths}" y="{self._top(i)}"/>' for i in range(len(self.ranks))),
            *(self._station(one, i) for i in range(len(self.ranks)) for one in self.shown if not one.is_join),
            "</svg>",
        ]
        return "".join(parts)

    def _described(self, title: str) -> str:
        """The figure in words."""
        steps = []
        for one in self.shown:
            held = ", ".join(f"{_leaf(w)} {layout_of(w)}" for w in one.weights)
            steps.append(f"{one.label} ({held})" if held else one.label)
        return f"{title}: {', then '.join(steps)}"

    def _top(self, lane: int) -> float:
        return HEAD + lane * (self.height + 12)

    def _lane(self, lane: int) -> str:
        top, right = self._top(lane), self.left[-1]
        box = (
            f'<rect class="l-lane" x="{MARGIN}" y="{top}" width="{right - MARGIN:.0f}" height="{self.height}" rx="8"/>'
        )
        return box + _text("name", MARGIN + 8, top + self.height / 2 + 4, f"rank {self.ranks[lane]}")

    def _middle(self, one: Station) -> float:
        """The y of a station's middle, below the top of its lane."""
        return 20 + ROW * one.row + ROW / 2

    def _bar(self, one: Station) -> str:
        """Draws a collective across the lanes."""
        x, top, name = self.left[one.level], HEAD - 8, op_name(one.node)
        sends = sent(one.node)
        look = "join" if "▼" in dict(sends) else "quiet"
        box = f'<rect class="l-{look}" x="{x}" y="{top}" width="{JOIN}" height="{self.bottom - top:.0f}" rx="10"/>'
        tip = f"{name} {one.node.meta.get('note', '')}\n{_place(one.node)}"
        letter = _text("letter", x + JOIN / 2, top + 24, LETTERS.get(name, ""))
        below = [name, *(f"{sign}{kernel.replace('_', '-')}" for sign, kernel in sends)]
        y = self.bottom + 13 + (0 if self._is_spaced(one) else 26)
        texts = (_text("dim mid", x + JOIN / 2, y + 12 * i, text) for i, text in enumerate(below[:2]))
        return f"<g><title>{escape(tip)}</title>{box}{letter}{''.join(texts)}</g>"

    def _is_spaced(self, one: Station) -> bool:
        """Whether the caption of a join has room next to the captions of the joins before it.

        Neighbouring captions alternate between two heights.
        """
        levels = {other.level for other in self.shown if other.is_join}
        return next(n for n in range(one.level + 2) if one.level - n not in levels) % 2 == 1

    def _common(self) -> Iterator[str]:
        """The parts that all lanes share: names of stations, empty squares, edges."""
        for one in self.shown:
            for source in one.sources:
                yield self._edge(source, one)
            if not one.is_join:
                x, y, label = self.left[one.level], self._middle(one), one.label
                cut = label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"
                first = self._squares_at(one)
                yield f'<path class="l-edge" d="M{x:g} {y:g}H{first:g}M{2 * x + WIDE - first:g} {y:g}H{x + WIDE:g}"/>'
                yield _text("mid", x + WIDE / 2, y - ICON / 2 - 5, cut)
                for i, (node, _) in enumerate(_squares(one)):
                    high = _height(node)
                    yield _rect("whole", first + i * (ICON + 10), y - high / 2, ICON, high)

    def _right(self, one: Station) -> float:
        return self.left[one.level] + (JOIN if one.is_join else WIDE)

    def _edge(self, source: Station, taker: Station) -> str:
        """A curve between two stations; it runs above the stations if one is in the way."""
        x1, x2, y1, y2 = self._right(source), self.left[taker.level], self._middle(source), self._middle(taker)
        out, over = min((x2 - x1) / 2, 40), 10
        way = f"C{x1 + out:g} {y1:g} {x2 - out:g} {y2:g} {x2:g} {y2:g}"
        if self._is_between(source, taker):
            way = (
                f"C{x1 + GAP:g} {y1:g} {x1:g} {over} {x1 + GAP:g} {over}H{x2 - GAP:g}"
                f"C{x2:g} {over} {x2 - GAP:g} {y2:g} {x2:g} {y2:g}"
            )
        return f'<path class="l-edge" d="M{x1:g} {y1:g}{way}"/>'

    def _is_between(self, source: Station, taker: Station) -> bool:
        """Whether another station is in the way of a direct line between two."""
        rows = range(min(source.row, taker.row), max(source.row, taker.row) + 1)
        return any(source.level < one.level < taker.level and one.row in rows for one in self.shown)

    def _squares_at(self, one: Station) -> float:
        """The x of a station's first square."""
        return self.left[one.level] + (WIDE - (ICON + 10) * (1 + bool(one.weights)) + 10) / 2

    def _station(self, one: Station, lane: int) -> str:
        """Fills the squares of a station with a rank's slices of its weight and value."""
        y, rank = self._top(lane) + self._middle(one), self.ranks[lane]
        first = self._squares_at(one)
        drawn = [self._filled(node, kind, first + i * (ICON + 10), y, rank)
                 for i, (node, kind) in enumerate(_squares(one))]  # fmt: skip
        tip = [_place(one.node)] if lane == 0 else []
        tip += [f"{_leaf(w)} {self._held(w, rank)}" for w in one.weights]
        tip += [f"{one.label} {self._held(one.node, rank)}"]
        shape = _local_text(one.weights[0], rank, self.world) if one.weights else ""
        below = _text("dim mid", self.left[one.level] + WIDE / 2, y + ICON / 2 + 11, shape)
        return f"<g><title>{escape(chr(10).join(tip))}</title>{''.join(drawn)}{below}</g>"

    def _held(self, node: fx.Node, rank: int) -> str:
        """A rank's slice of a value, in words."""
        value, layout = _tensor(node), layout_of(node)
        held = "a partial sum" if layout == P else "all"
        if isinstance(layout, Shard):
            spans = (f"{a}-{b - 1}" for a, b in self._spans(value, layout, rank))
            held = ", ".join(spans) or "nothing"
        return f"{tensors_typed(node, self.names)[0]}: {held}" if rank == 0 else held

    def _spans(self, value: Tensor, layout: Shard, rank: int) -> list[tuple[int, int]]:
        """The ranges of a split dim that a rank stores."""
        return _merged(ranges(parts_of(hint(value.shape[layout.dim]), layout), rank, self.world))

    def _filled(self, node: fx.Node, kind: str, x: float, middle: float, rank: int) -> str:
        """Fills a rank's slice of a weight or a value within its square."""
        value, layout, high = _tensor(node), layout_of(node), _height(node)
        y = middle - high / 2
        if not isinstance(layout, Shard):
            return _rect("addend" if layout == P else kind, x, y, ICON, high)
        size = hint(value.shape[layout.dim])
        spans = [(a / size, b / size) for a, b in self._spans(value, layout, rank)]
        if layout.dim == value.ndim - 1:
            return "".join(_rect(kind, x + a * ICON, y, (b - a) * ICON, high) for a, b in spans)
        return "".join(_rect(kind, x, y + a * high, ICON, (b - a) * high) for a, b in spans)


def _place(node: fx.Node) -> str:
    """The module and the user's line."""
    return ", ".join(filter(None, [node.meta.get("module", ""), os.path.basename(node.meta.get("source", ""))]))


def _squares(one: Station) -> list[tuple[fx.Node, str]]:
    """The nodes that a station shows as squares, with the kind of each."""
    if is_parameter(one.node):
        return [(one.node, "weight")]
    return [*((weight, "weight") for weight in one.weights[:1]), (one.node, "value")]


def _height(node: fx.Node) -> float:
    """The height of a weight's or value's square; 1-D tensors are bars."""
    return ICON if _tensor(node).ndim > 1 else 8


def _tensor(node: fx.Node) -> Tensor:
    return next(v for v in values(node) if isinstance(v, Tensor))


def _leaf(weight: fx.Node) -> str:
    return str(weight.meta["path"]).rpartition(".")[2]


def _local_text(weight: fx.Node, rank: int, world: int) -> str:
    """The shape of a rank's slice of a weight: '512×128'."""
    return "×".join(map(str, local_shape(_tensor(weight).shape, layout_of(weight), rank, world)))


MOST_SPANS = 8
"""The number of stripes drawn in a square; slices of more parts show only the first ones."""


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Non-empty spans, with adjacent ones merged."""
    found: list[tuple[int, int]] = []
    for a, b in spans:
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        elif a < b:
            found.append((a, b))
    return found[:MOST_SPANS]


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<path class="l-{kind}" d="M{x:.5g} {y:g}h{width:.3g}v{height:.3g}h-{width:.3g}z"/>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    look = " ".join(f"l-{one}" for one in kind.split())
    return f'<text class="{look}" x="{x:g}" y="{y:g}">{escape(text)}</text>' if text else ""
