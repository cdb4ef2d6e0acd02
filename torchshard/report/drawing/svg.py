"""The picture as SVG, top to bottom: boxes, rows and hexagons, a curve from each value to its users.

Shapes are global; a row's tooltip names its source line. A collective that sends no data forward is
dashed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import sqrt
from xml.sax.saxutils import escape, quoteattr

from torch import fx

from torchshard.core.units import size_text
from torchshard.ir.axes import is_local
from torchshard.ir.graph import op_name, where
from torchshard.ops import is_or_begins_collective
from torchshard.plans.plan import Plan
from torchshard.plans.table import calls_text, mesh_text
from torchshard.report.drawing.outline import Box, Row, outline, sources

CHAR, LINE, GAP, PAD, MARGIN, HEAD = 6.63, 19, 4, 7, 14, 76
"""Pixels: a character, a row, between rows, between a box and its items, around all, the heading's
height."""
LONGEST, FARTHEST = (44, 68, 52), 170
"""Characters after which label, detail and type are cut; maximum pixels by which a curve bends to the
right."""
LEGEND = (
    "⬡ collective: ▼ what each rank sends in the forward pass, ▲ in the backward",
    "64@tp split over axis tp, P@tp partial sums, R@tp whole with its gradient in partial sums, else whole",
)
OF_STEP = (LEGEND[0], "types are those of what this rank holds: its parts, or the whole")
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML forbids."""
STYLE = """
text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#24292f}
.head{font-size:15px;font-weight:bold}.title{font-weight:bold}.page{fill:#fff}.detail{fill:#57606a}
.box{fill:#818b98;fill-opacity:.05;stroke:#afb8c1}.row{fill:#fff;stroke:#d8dee4}
.collective{fill:#ffd8a8;stroke:#bc4c00;stroke-width:1.3}.quiet{fill:#fff1e0;stroke-dasharray:4 2}
.edge{fill:none;stroke:#818b98}.edge.S{stroke:#0969da}.edge.P{stroke:#bc4c00}.dot{fill:#818b98}
text.S{fill:#0550ae;font-weight:bold}text.P{fill:#953800;font-weight:bold}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.page{fill:#0d1117}.detail{fill:#b1bac4}.box{stroke:#484f58}.row{fill:#161b22;stroke:#30363d}
.collective{fill:#6b3400;stroke:#f0883e}.quiet{fill:#2b1c0d}.edge.S{stroke:#58a6ff}.edge.P{stroke:#f0883e}
text.S{fill:#79c0ff}text.P{fill:#ffa657}}
"""


@dataclass(frozen=True)
class Extent:
    """The area of a box or row."""

    left: float
    right: float
    top: float
    bottom: float


Extents = dict[Box | Row, Extent]


def picture(graph: fx.Graph, plan: Plan) -> str:
    """The SVG text."""
    root = outline(graph)
    columns, edge = _columns(root)
    places: Extents = {}
    height = _place(root, MARGIN, edge, HEAD, places) + MARGIN - GAP
    curves, reach = _curves(graph, [(row, places[row]) for row in root.rows()], edge)
    legend = OF_STEP if is_local(graph) else LEGEND
    width = round(max(edge + reach, MARGIN + CHAR * max(map(len, legend))) + MARGIN)
    ahead, back = (sum(ways) for ways in zip(*(each.costs.calls for each in plan.in_order), strict=True))
    sent = size_text(sum(each.costs.nbytes for each in plan.in_order))
    head = f"{mesh_text(plan)}, {calls_text(ahead, back)}, {sent} sent by each rank per step"
    return _ILLEGAL.sub("�", "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<style>{STYLE}</style><rect class="page" width="{width}" height="{height}"/>',
        _text("head", MARGIN, 26, head), *(_text("detail", MARGIN, 44 + 16 * i, t) for i, t in enumerate(legend)),
        *(_row(item, at, columns) if isinstance(item, Row) else _frame(item, at) for item, at in places.items()),
        *curves, "</svg>", "",
    ]))  # fmt: skip


def _depth(box: Box) -> int:
    return max((1 + _depth(item) for item in box.items if isinstance(item, Box)), default=0)


def _columns(root: Box) -> tuple[list[float], float]:
    """The x at which detail and type begin, and at which the rows end."""
    deep, texts = PAD * _depth(root), zip(*((r.label, r.detail, r.type) for r in root.rows()), strict=True)
    widths = [CHAR * (2 + min(longest, max(map(len, cells)))) for cells, longest in zip(texts, LONGEST, strict=True)]
    *starts, end = accumulate(widths, initial=MARGIN + deep + 20)
    return starts[1:], end + deep


def _place(box: Box, left: float, right: float, y: float, places: Extents) -> float:
    """Places the items of a box from y on; returns the y after them."""
    for item in box.items:
        places[item] = Extent(left, right, y, y + LINE)
        if isinstance(item, Box):
            bottom = _place(item, left + PAD, right - PAD, y + LINE, places) - GAP + PAD
            places[item] = Extent(left, right, y, bottom)
        y = places[item].bottom + GAP
    return y


def _text(kind: str, x: float, y: float, text: str, longest: int = 999) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(shortened(text, longest))}</text>' if text else ""


def shortened(text: str, longest: int) -> str:
    """The text, cut after a number of characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _frame(box: Box, at: Extent) -> str:
    size = f'width="{at.right - at.left:.1f}" height="{at.bottom - at.top}" rx="6"'
    sheets = (0,) if box.count == 1 else (3, 0)
    drawn = [f'<rect class="box" x="{at.left + n}" y="{at.top + n}" {size}/>' for n in sheets]
    return "".join(drawn) + _text("title", at.left + PAD, at.top + 14, box.title)


def _row(row: Row, at: Extent, columns: Sequence[float]) -> str:
    node, sign = row.nodes[0], ""
    shape = f'<rect class="row" x="{at.left}" y="{at.top}" width="{at.right - at.left:.1f}" height="{LINE}" rx="4"/>'
    if is_or_begins_collective(node.target):
        sign, look = "⬡ ", "collective" if "▼" in row.detail else "collective quiet"
        x1, x2, y = at.left + 8, at.right - 8, (at.top + at.bottom) / 2
        points = [(at.left, y), (x1, at.top), (x2, at.top), (at.right, y), (x2, at.bottom), (x1, at.bottom)]
        shape = f'<polygon class="{look}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
    texts = (sign + row.label, row.detail, row.type)
    kinds, starts = ("label", "detail", f"detail {row.kind}"), (at.left + 10, *columns)
    cells = [_text(k, x, at.top + 13.5, t, n) for k, x, t, n in zip(kinds, starts, texts, LONGEST, strict=True)]
    tip = "\n".join(filter(None, [where(node), op_name(node), node.meta.get("note"), *texts[1:]]))
    names = quoteattr(" ".join(n.name for n in row.nodes))
    return f"<g data-nodes={names}><title>{escape(tip)}</title>{shape}{''.join(cells)}</g>"


def _curves(graph: fx.Graph, rows: Sequence[tuple[Row, Extent]], edge: float) -> tuple[list[str], float]:
    """A curve on the right from each row to each consumer of its result, and how far the curves reach."""
    at = {node: i for i, (row, _) in enumerate(rows) for node in row.nodes}
    pairs = dict.fromkeys((at[s], at[n]) for n in graph.nodes if n in at for s in sources(n) if s in at)
    curves, reach = [], 0.0
    for source, taker in (pair for pair in pairs if pair[0] < pair[1]):
        (row, a), (_, b), bend = rows[source], rows[taker], min(10 + 9 * sqrt(taker - source), FARTHEST)
        y1, y2, out = (a.top + a.bottom) / 2 + 3, (b.top + b.bottom) / 2 - 3, edge + bend
        curve = f"M{a.right:.1f},{y1}C{out:.1f},{y1} {out:.1f},{y2} {b.right:.1f},{y2}"
        curves.append(f'<path class="edge {row.kind}" d="{curve}"/>')
        curves.append(f'<circle class="dot" cx="{b.right:.1f}" cy="{y2}" r="2"/>')
        reach = max(reach, 0.75 * bend)
    return curves, reach
