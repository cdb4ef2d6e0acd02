"""Prints a graph as text, one line per op: golden tests compare it, and errors point into it.

    * x_copy      = copy(x)                      f32[2,8,16] R@tp   from f32[2,8,16], for q, k, v          mlp.py:12
      q           = linear(x_copy, q.weight)     f32[2,8,8@tp]      split n: ... k, n k -> ... n
    * out_reduce  = reduce(out)                  f32[2,8,16]        from f32[2,8,16] P@tp, for add

A star marks a collective. Types have global shapes and shardings; after `localize`, local shapes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import fx

from torchshard.core.columns import GAP, paragraph, terminal_width
from torchshard.core.paths import is_part
from torchshard.ir.axes import axes_of, axis_of, converted, typed
from torchshard.ir.graph import op_name
from torchshard.ir.sizes import Names, size_names
from torchshard.ops import OPS, Begin, is_collective, is_or_begins_collective


def _argument(value: object) -> str:
    if isinstance(value, fx.Node):
        return str(value.meta["path"]) if value.op == "placeholder" else value.name
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_argument, value))}]"
    return str(value)


def _call(node: fx.Node) -> str:
    args = node.args[:1] if node.target in OPS or isinstance(node.target, Begin) else node.args
    texts = [_argument(a) for a in args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{op_name(node)}({', '.join(texts)})"


def _why(node: fx.Node, names: Names) -> str:
    is_named = is_or_begins_collective(node.target) and len(axes_of(node.graph)) > 1
    return f"{axis_of(node)}: {_reason(node, names)}" if is_named else _reason(node, names)


def _reason(node: fx.Node, names: Names) -> str:
    if isinstance(node.target, Begin):
        (waiting,) = node.users
        return purpose(waiting, names)
    if node.meta.get("is_again"):
        return "computed again"
    if is_collective(node.target):
        return purpose(node, names)
    choice, row = node.meta.get("choice"), node.meta.get("row")
    if choice is None:
        return ""
    if row is None:
        return "no rule: runs whole"
    return f"{choice.name}: {row.text}" if choice.factors or choice.name == "P" else ""


def purpose(collective: fx.Node, names: Names) -> str:
    """Returns a collective's reason: its operand's type and consumers, or the gradient it sums."""
    if collective.meta.get("is_backward") and "gradient_of" in collective.meta:
        return f"gradient of {', '.join(collective.meta['gradient_of'])}"
    if "note" not in collective.meta:
        return f"inside {collective.meta.get('inside', '')}"
    before = converted(collective, names)
    return f"from {before}, {collective.meta['note']}" if before else str(collective.meta["note"])


def listing(module: fx.GraphModule, *, sources: bool = True, within: str = "", fits: bool = False) -> str:
    """Returns one line per op of a graph, in order; parameters and inputs appear as arguments only.

    Args:
        sources: whether to print the user's file and line.
        within: the path of a module, to list only its ops and its children's.
        fits: whether to wrap lines that are too long for the terminal.
    """
    return lines(rows_of(shown_nodes(module, within), sources=sources), fits=fits)


def shown_nodes(module: fx.GraphModule, within: str = "") -> list[fx.Node]:
    """Returns the nodes of a graph that have a line: the ops of a module, or all ops and the results."""
    return [node for node in module.graph.nodes if is_within(node, within) or (node.op == "output" and not within)]


def rows_of(nodes: Sequence[fx.Node], *, sources: bool = True) -> list[list[str]]:
    """Returns a row for each node: its name, call, types, reason, and the user's line."""
    names = size_names(nodes[0].graph) if nodes else {}
    return [_row(node, sources, names) for node in nodes]


def lines(rows: Sequence[Sequence[str]], *, fits: bool = False) -> str:
    """Returns rows of `rows_of` as aligned lines; a row of one cell is a line of its own."""
    if fits and any(len(GAP.join(filter(None, row))) > terminal_width() for row in rows):
        return "\n".join(row[0] if len(row) == 1 else _wrapped(*row) for row in rows)
    full = [row for row in rows if len(row) > 1]
    widths = [min(max(map(len, column)), _MOST_COLUMNS) for column in zip(*full, strict=True)]
    return "\n".join(row[0] if len(row) == 1 else _line(row, widths) for row in rows)


def _wrapped(name: str, call: str, *facts: str) -> str:
    return f"{paragraph(f'{name} {call}', 8)}\n{paragraph(_facts(*facts), 2)}"


def _facts(*facts: str) -> str:
    """Joins the facts about an op into an indented line, to go below its call."""
    return " " * 6 + GAP.join(filter(None, facts))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
    return GAP.join(cells).rstrip()


_MOST_COLUMNS = 60
"""The width up to which cells are padded: a longer call must not move all shapes to the right."""


def is_within(node: fx.Node, module: str) -> bool:
    """Returns whether a node is an op of a module or of its children; '' is the model."""
    return node.op == "call_function" and is_part(node.meta.get("module", ""), module)


def _row(node: fx.Node, sources: bool, names: Names) -> list[str]:
    if node.op == "output":
        return ["  return", _argument(node.args[0]), "", "", ""]
    star = "* " if is_or_begins_collective(node.target) else "  "
    source = os.path.basename(node.meta.get("source", "")) if sources else ""
    return [star + node.name, f"= {_call(node)}", " ".join(typed(node, names)), _why(node, names), source]
