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

CHAR, LINE, PAD, MARGIN, GUTTER = 6.63, 19, 7, 14, 130
"""Pixels: one character, one row, the space between a box and what is in it, around all, for the curves on the right."""
LONGEST = (44, 46, 28, 24)
"""Characters after which the texts of a row are cut: label, detail, shape, layout."""
LEGEND = (
    "⬡ collective   ▼ bytes that each rank sends forward   ▲ backward",
    "layouts   S(d) split along dim d   P addends of a sum   R whole, its gradient in addends   I whole",
)
STYLE = """
text{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#24292f;white-space:pre}
.head{font-size:15px;font-weight:bold}.title{font-weight:bold}.page{fill:#fff}.detail{fill:#656d76}
.box{fill:#818b98;fill-opacity:.07;stroke:#afb8c1}.row{fill:#fff;stroke:#d8dee4}
.collective{fill:#ffd8a8;stroke:#bc4c00;stroke-width:1.3}.quiet{fill:#fff1e0;stroke-dasharray:4 2}
.edge{fill:none;stroke:#818b98;stroke-opacity:.8}.edge.S{stroke:#0969da}.edge.P{stroke:#bc4c00}
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


def _moved(node: fx.Node, world: int) -> list[str]:
    """What a collective moves forward and backward, and how much."""
    row, size = TABLE.get(op_name(node)), nbytes(node.meta["val"])
    kernels = [("▼", row.kernel if row else "all_reduce")]
    kernels += [("▲", TABLE[row.dual].kernel)] if row and node.meta.get("needs_grad") else []
    sent = [(sign, kernel, wire_bytes(kernel, size, world)) for sign, kernel in kernels]
    return [f"{sign} {kernel.replace('_', '-')} {_size(count)}" for sign, kernel, count in sent if count]


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
    ...
    return ""
