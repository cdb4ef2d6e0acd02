"""A picture of a sharded model's graph: modules as nested boxes, ops as rows, collectives as hexagons, top to bottom.

    draw(model, "model.svg")

Layers that repeat are drawn once, as "12 × blocks.*". A collective says what travels and when: ▼ in the forward pass,
▲ in the backward (one that moves nothing forward is dashed). Shapes are global; a row's tooltip has its line in the code.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape, quoteattr

from torch import Tensor, fx

from torchshard.conversions import TABLE, wire_bytes
from torchshard.distributed.ops import is_collective
from torchshard.errors import InputError
from torchshard.explain import value_text
from torchshard.graph import is_tensor, layout_of, nbytes, op_name, values, where

if TYPE_CHECKING:
    from torchshard.module import ShardedModule
    from torchshard.program import Program

CHAR, LINE, GAP, PAD, MARGIN, WIDEST = 6.63, 19, 4, 7, 14, 170
"""Pixels: a character, a row, between rows, between a box and what is in it, around all, the widest curve's reach."""
LONGEST = (44, 60, 28, 24)
"""Characters after which the texts of a row are cut: label, detail, shape, layout."""
LEGEND = (
    "⬡ collective: ▼ what each rank sends in the forward pass, ▲ in the backward",
    "S(d) split along dim d, P addends of a sum, R whole with the gradient in addends, I whole",
)
STYLE = """
text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#24292f}
.head{font-size:15px;font-weight:bold}.title{font-weight:bold}.page{fill:#fff}.detail{fill:#656d76}
.box{fill:#818b98;fill-opacity:.05;stroke:#afb8c1}.row{fill:#fff;stroke:#d8dee4}
.collective{fill:#ffd8a8;stroke:#bc4c00;stroke-width:1.3}.quiet{fill:#fff1e0;stroke-dasharray:4 2}
.edge{fill:none;stroke:#818b98;stroke-opacity:.8}.edge.S{stroke:#0969da}.edge.P{stroke:#bc4c00}.dot{fill:#818b98}
text.S{fill:#0550ae;font-weight:bold}text.P{fill:#953800;font-weight:bold}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.page{fill:#0d1117}.detail{fill:#9198a1}.box{stroke:#484f58}.row{fill:#161b22;stroke:#30363d}
.collective{fill:#6b3400;stroke:#f0883e}.quiet{fill:#2b1c0d}.edge.S{stroke:#58a6ff}.edge.P{stroke:#f0883e}
text.S{fill:#79c0ff}text.P{fill:#ffa657}}
"""


@dataclass
class Box:
    """One call of a module, or several alike."""

    path: str
    title: str
    items: list[Box | fx.Node] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    """All ops in it and in the boxes in it, in order."""
    count: int = 1


def draw(model: ShardedModule | Program, path: str | os.PathLike[str]) -> None:
    """Writes a picture of a sharded model's latest graph, with its collectives, to an SVG file.

    Raises:
        InputError: the file's suffix is not .svg, or there is no graph to draw.
    """
    if Path(path).suffix != ".svg":
        raise InputError(
            f"a picture can't be written as {Path(path).suffix or 'a file without a suffix'!r}",
            where=f"draw(..., {os.fspath(path)!r})",
            why="the suffix says the format, and the one format is .svg",
            attempt=repr(f"{Path(path).stem or 'model'}.svg"),
        )
    graph = getattr(model, "graph", None)
    if not isinstance(graph, fx.GraphModule):
        raise InputError(
            f"a {type(model).__name__} has no graph to draw",
            where="draw",
            why="what is drawn is the graph with its collectives, which sharding makes",
            attempt="draw the model that torchshard.shard returned",
        )
    Path(path).write_text(_picture(graph.graph, model.plan.world_size, model.plan.comm_bytes), encoding="utf-8")


# --- boxes -----------------------------------------------------------------------------------------------------------


def _is_drawn(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "output" or node.meta["kind"] == "input"
    return node.target is not operator.getitem and any(isinstance(v, Tensor) for v in values(node))


def _module(node: fx.Node) -> str:
    return str(node.meta.get("module") or "")


def _boxes(graph: fx.Graph) -> Box:
    root = Box("", "")
    for node in filter(_is_drawn, graph.nodes):
        box = root
        box.nodes.append(node)
        for part in _module(node).split(".") if _module(node) else ():
            path, last = f"{box.path}.{part}".lstrip("."), box.items[-1] if box.items else None
            if not isinstance(last, Box) or last.path != path:
                last = Box(path, part)
                box.items.append(last)
            box = last
            box.nodes.append(node)
        box.items.append(node)
    return root


def _fold(box: Box, stands_for: dict[fx.Node, fx.Node]) -> Box:
    """Keeps the first of boxes in a row that are alike; a box that holds one box and nothing else becomes that box."""
    kept: list[Box | fx.Node] = []
    for item in box.items:
        last = kept[-1] if kept else None
        inner = _fold(item, stands_for) if isinstance(item, Box) else item
        if isinstance(inner, Box) and isinstance(last, Box) and _looks(inner) == _looks(last):
            last.count += inner.count
            stands_for.update(zip(inner.nodes, last.nodes, strict=True))
        else:
            kept.append(inner)
    only = kept[0] if len(kept) == 1 and box.path else None
    if isinstance(only, Box):
        only.title = f"{box.title}.{only.title}"
        return only
    box.items = kept
    return box


def _looks(box: Box) -> object:
    """Equal for boxes that may be drawn as one."""
    at = {node: i for i, node in enumerate(box.nodes)}
    ops = [
        (_module(n).removeprefix(box.path), op_name(n), _shapes(n), _layouts(n), _held(n),
         [at.get(i, -1) for i in n.all_input_nodes if is_tensor(i)]) for n in box.nodes
    ]  # fmt: skip
    return re.sub(r"\d+$", "*", box.path), ops


# --- texts -----------------------------------------------------------------------------------------------------------


def _shapes(node: fx.Node) -> str:
    return " ".join(value_text(v) for v in values(node) if isinstance(v, Tensor))


def _layouts(node: fx.Node) -> str:
    return " ".join(dict.fromkeys(map(str, node.meta.get("layouts", ()))))


def _label(node: fx.Node) -> str:
    """The node's name without what the boxes around it say."""
    prefix = _module(node).replace(".", "_")
    while prefix and not f"{node.name}_".startswith(f"{prefix}_"):
        prefix = prefix.rpartition("_")[0]
    return node.name[len(prefix) :].lstrip("_") or op_name(node)


def _held(node: fx.Node) -> str:
    """The parameters and buffers that an op takes, and how they lie."""
    held = [n for n in node.all_input_nodes if n.op == "placeholder" and n.meta["kind"] != "input"]
    return ", ".join(f"{n.meta['path'].rpartition('.')[2]} {layout_of(n)}" for n in held)


def _moved(node: fx.Node, world: int) -> str:
    """What a collective converts, and what it moves forward and backward."""
    row, size = TABLE.get(op_name(node)), nbytes(node.meta["val"])
    kernels = [("▼", row.kernel if row else "all_reduce")]
    kernels += [("▲", TABLE[row.dual].kernel)] if row and node.meta.get("needs_grad") else []
    sent = [(sign, kernel, wire_bytes(kernel, size, world)) for sign, kernel in kernels]
    moves = [f"{sign} {kernel.replace('_', '-')} {_size(count)}" for sign, kernel, count in sent if count]
    return ", ".join([f"{layout_of(node.all_input_nodes[0])} → {layout_of(node)}", *moves])


def _size(count: float) -> str:
    power = next(p for p in (0, 1, 2, 3) if p == 3 or count < 1024 ** (p + 1))
    return f"{count / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


# --- the picture -----------------------------------------------------------------------------------------------------


def _walk(box: Box, depth: int = 0, name: str = "") -> Iterator[tuple[str, Any, int]]:
    """('open' or 'close', box, depth) and (label, node, depth), top to bottom; a box of one op is that op's row."""
    for item in box.items:
        if isinstance(item, fx.Node):
            yield f"{name}{_label(item)}", item, depth
        elif len(item.items) == 1 and item.count == 1:
            yield from _walk(item, depth, f"{item.title} · ")
        else:
            yield "open", item, depth
            yield from _walk(item, depth + 1)
            yield "close", item, depth


def _picture(graph: fx.Graph, world: int, comm_bytes: float) -> str:
    stands_for: dict[fx.Node, fx.Node] = {}
    steps = list(_walk(_fold(_boxes(graph), stands_for)))
    drawn = [(label, node) for label, node, _ in steps if isinstance(node, fx.Node)]
    texts = {node: _texts(label, node, world) for label, node in drawn}
    deep = PAD * (1 + max(depth for _, _, depth in steps))
    columns = [MARGIN + deep + 8.0]
    for cells, longest in zip(zip(*texts.values(), strict=True), LONGEST, strict=True):
        columns.append(columns[-1] + CHAR * (2 + min(longest, max(map(len, cells)))))
    edge, y = columns[-1] + deep, MARGIN + 62.0
    boxes: list[str] = []
    rows: list[str] = []
    tops: list[tuple[int, float]] = []
    ports: dict[fx.Node, tuple[float, float]] = {}
    names: dict[fx.Node, list[str]] = {}
    for node in stands_for:
        names.setdefault(_shown(node, stands_for), []).append(node.name)
    for kind, item, depth in steps:
        left, right = MARGIN + PAD * depth, edge - PAD * depth
        if isinstance(item, fx.Node):
            rows.append(_row(item, [item.name, *names.get(item, ())], texts[item], columns, (left, right, y)))
            ports[item] = (right, y + LINE / 2)
            y += LINE + GAP
        elif kind == "open":
            title = f"{item.count} × {re.sub(r'[0-9]+$', '*', item.path)}" if item.count > 1 else item.title
            rows.append(f'<text class="title" x="{left + PAD}" y="{y + 14}">{escape(title)}</text>')
            tops.append((len(boxes), y))
            boxes.append("")
            y += LINE + 2
        else:
            at, top = tops.pop()
            boxes[at] = _frame(left, top, right, y + PAD - GAP, min(item.count, 3))
            y += PAD + 3 * min(item.count - 1, 2)
    count = sum(is_collective(n.target) for n in graph.nodes)
    head = f"{world} ranks, {count} collectives, {_size(comm_bytes)} sent by each rank per step"
    heads = zip((head, *LEGEND), ("head", "detail", "detail"), (MARGIN + 12, MARGIN + 30, MARGIN + 46), strict=True)
    rows += [f'<text class="{kind}" x="{MARGIN}" y="{at}">{escape(text)}</text>' for text, kind, at in heads]
    curves, reach = _edges(graph, stands_for, ports, edge)
    width, height = round(max(edge + reach, CHAR * max(map(len, LEGEND)) + MARGIN) + MARGIN), round(y + MARGIN)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>", f'<rect class="page" width="{width}" height="{height}"/>',
        *boxes, *curves, *rows, "</svg>", "",
    ])  # fmt: skip


def _texts(label: str, node: fx.Node, world: int) -> tuple[str, str, str, str]:
    if is_collective(node.target):
        return f"⬡ {label}", _moved(node, world), _shapes(node), _layouts(node)
    return label, _held(node), _shapes(node), _layouts(node)


def _shown(node: fx.Node, stands_for: dict[fx.Node, fx.Node]) -> fx.Node:
    while node in stands_for:
        node = stands_for[node]
    return node


def _frame(left: float, top: float, right: float, bottom: float, sheets: int) -> str:
    size = f'width="{right - left}" height="{bottom - top}" rx="6"'
    return "".join(f'<rect class="box" x="{left + 3 * n}" y="{top + 3 * n}" {size}/>' for n in reversed(range(sheets)))


def _row(node: fx.Node, names: list[str], texts: tuple[str, ...], columns: list[float], at: tuple[float, ...]) -> str:
    left, right, top = at
    middle, bottom = top + LINE / 2, top + LINE
    kinds = ("", "detail", "detail", _layouts(node)[:1])
    if is_collective(node.target):
        corners = [(left, middle), (left + 8, top), (right - 8, top), (right, middle), (right - 8, bottom), (left + 8, bottom)]
        look = "collective" if "▼" in texts[1] else "collective quiet"
        shape = f'<polygon class="{look}" points="{" ".join(f"{x},{y}" for x, y in corners)}"/>'
    else:
        shape = f'<rect class="row" x="{left}" y="{top}" width="{right - left}" height="{LINE}" rx="4"/>'
    starts = [left + 8 + 4 * is_collective(node.target), *columns[1:]]
    cells = [
        f'<text class="{kind}" x="{x:.1f}" y="{top + 13.5}">{escape(_cut(text, longest))}</text>'
        for text, kind, x, longest in zip(texts, kinds, starts, LONGEST, strict=False)
        if text
    ]
    tip = "\n".join(filter(None, [where(node), op_name(node), node.meta.get("note"), *texts[1:]]))
    return f"<g data-nodes={quoteattr(' '.join(names))}><title>{escape(tip)}</title>{shape}{''.join(cells)}</g>"


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    for source in node.all_input_nodes:
        if source.target is operator.getitem:
            yield from _sources(source)
        elif _is_drawn(source):
            yield source


def _edges(
    graph: fx.Graph, stands_for: dict[fx.Node, fx.Node], ports: dict[fx.Node, tuple[float, float]], edge: float
) -> tuple[list[str], float]:
    """A curve on the right from each row to each that takes its result, and how far the curves reach."""
    order = {node: i for i, node in enumerate(ports)}
    pairs = [(_shown(s, stands_for), _shown(n, stands_for)) for n in graph.nodes if _is_drawn(n) for s in _sources(n)]
    curves, reach = [], 0.0
    for source, taker in dict.fromkeys(pairs):
        far = order[taker] - order[source]
        if far < 1:
            continue
        (x1, y1), (x2, y2), out = ports[source], ports[taker], min(10 + 9 * sqrt(far), WIDEST)
        curve = f"M{x1},{y1 + 3}C{edge + out:.1f},{y1 + 3} {edge + out:.1f},{y2 - 3} {x2},{y2 - 3}"
        curves.append(f'<path class="edge {_layouts(source)[:1]}" d="{curve}"/>')
        curves.append(f'<circle class="dot" cx="{x2}" cy="{y2 - 3}" r="2"/>')
        reach = max(reach, 0.75 * out)
    return curves, reach
