"""A graph as Graphviz text.

Modules are clusters, collectives hexagons, with an edge from each value to its consumers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from torch import fx

from torchshard.ops import is_or_begins_collective
from torchshard.report.drawing.outline import Box, Row, outline, sources


def dot(graph: fx.Graph) -> str:
    """The Graphviz text, with repeated layers only once."""
    root = outline(graph)
    rows = root.rows()
    names = {node: f"n{i}" for i, row in enumerate(rows) for node in row.nodes}
    pairs = dict.fromkeys((names[s], names[n]) for n in graph.nodes if n in names for s in sources(n) if s in names)
    edges = (f"  {a} -> {b};" for a, b in pairs if int(a[1:]) < int(b[1:]))
    lines = _box(root, names, "  ")
    return "\n".join(['digraph model {\n  node [shape=box, fontname="monospace"];', *lines, *edges, "}", ""])


def _box(box: Box, names: dict[fx.Node, str], indent: str) -> Iterator[str]:
    for item in box.items:
        if isinstance(item, Row):
            shape = ", shape=hexagon" if is_or_begins_collective(item.nodes[0].target) else ""
            label = "\n".join(filter(None, [item.label, item.detail, item.type]))
            yield f"{indent}{names[item.nodes[0]]} [label={json.dumps(label, ensure_ascii=False)}{shape}];"
        else:
            title = json.dumps(item.title, ensure_ascii=False)
            yield f"{indent}subgraph {json.dumps('cluster_' + item.path)} {{ label={title};"
            yield from _box(item, names, indent + "  ")
            yield f"{indent}}}"
