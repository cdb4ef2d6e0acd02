"""The network of a plan's decisions as a picture, as Graphviz text, and as GraphML.

Stored tensors are on the left, ops in the middle, values that several ops read on the right, from top to bottom as the
model computes. An edge is thicker the more seconds its worst conversion takes.
"""

from __future__ import annotations

import json
from math import log10
from typing import Any
from xml.sax.saxutils import escape

import networkx as nx

from torchshard.core.units import time_text
from torchshard.report.drawing.svg import STYLE, shortened
from torchshard.report.network import plain

SHAPES = {"op": "box", "stored": "cylinder", "value": "ellipse", "read": "ellipse"}
COLUMNS = {"stored": 20, "op": 340, "value": 660, "read": 660}
"""Kind -> pixels from the left."""
WIDE, ROW, LONGEST = 280, 30, 40
"""Pixels: width of a node, from row to row; characters after which a text is cut."""


def network_text(suffix: str, network: nx.Graph) -> str:
    """The text of a file with this suffix: .svg, .dot or .graphml."""
    graph = plain(network)
    if suffix == ".graphml":
        return "\n".join(nx.generate_graphml(graph)) + "\n"
    return _dot(graph) if suffix == ".dot" else _svg(graph)


def _lines(name: str, data: dict[str, Any]) -> list[str]:
    """What a node says: its name, how many states it has, and the plan's state with its time."""
    many = f" ×{data['blocks']}" if data["blocks"] > 1 else ""
    count = data["states"].count(" | ") + 1
    state = data.get("chosen", f"from {time_text(data['least_seconds'])}").partition(":")[0]
    time = f", {time_text(data['seconds'])}" if data.get("seconds") else ""
    return [f"{name}{many}", f"{count} state{'s' * (count > 1)}: {state}{time}"]


def _width(data: dict[str, Any]) -> float:
    """The stroke of an edge: from 1 for a free conversion to 5 for one of a second."""
    return max(1.0, min(5.0, 5 + log10(data["most_seconds"]) / 2)) if data["most_seconds"] else 1.0


def _dot(graph: nx.Graph) -> str:
    lines = ["graph network {", '  node [fontname="monospace"];']
    for name, data in graph.nodes(data=True):
        label = json.dumps("\n".join(_lines(name, data)), ensure_ascii=False)
        lines.append(f"  {json.dumps(name)} [shape={SHAPES[data['kind']]}, label={label}];")
    for a, b, data in graph.edges(data=True):
        tip = json.dumps(f"{time_text(data['least_seconds'])} to {time_text(data['most_seconds'])}", ensure_ascii=False)
        lines.append(f"  {json.dumps(a)} -- {json.dumps(b)} [penwidth={_width(data):.1f}, tooltip={tip}];")
    return "\n".join([*lines, "}", ""])


def _svg(graph: nx.Graph) -> str:
    order = sorted(graph, key=lambda name: (graph.nodes[name]["position"], COLUMNS[graph.nodes[name]["kind"]]))
    at = {name: (COLUMNS[graph.nodes[name]["kind"]], 20 + ROW * row) for row, name in enumerate(order)}
    width, height = COLUMNS["value"] + WIDE + 20, 20 + ROW * len(order) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<style>{STYLE}</style><rect class="page" width="{width}" height="{height}"/>',
    ]
    for a, b, data in graph.edges(data=True):
        (left, y1), (right, y2) = sorted((at[a], at[b]))
        start, (y1, y2) = left + WIDE, (y1 + ROW // 2 - 3, y2 + ROW // 2 - 3)
        end, bend = (right, -30) if right > left else (start, 60)  # ends in one column: around its right side
        curve = f"M{start},{y1}C{start + abs(bend)},{y1} {end + bend},{y2} {end},{y2}"
        tip = f"{a} – {b}: {time_text(data['least_seconds'])} to {time_text(data['most_seconds'])}"
        drawn = f'<path class="edge" style="stroke-width:{_width(data):.1f}" d="{curve}"/>'
        lines.append(f"<g><title>{escape(tip)}</title>{drawn}</g>")
    for name, (x, y) in at.items():
        data = graph.nodes[name]
        first, second = (escape(shortened(text, LONGEST)) for text in _lines(name, data))
        tip = escape("\n".join([f"{data['label']} in {data['module'] or 'the model'}", *data["states"].split(" | ")]))
        box = f'<rect class="row" x="{x}" y="{y}" width="{WIDE}" height="{ROW - 5}" rx="4"/>'
        texts = f'<text x="{x + 6}" y="{y + 10}">{first}</text><text class="detail" x="{x + 6}" y="{y + 21}">{second}'
        lines.append(f"<g><title>{tip}</title>{box}{texts}</text></g>")
    return "\n".join([*lines, "</svg>", ""])
