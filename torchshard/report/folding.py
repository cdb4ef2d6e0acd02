"""Listings that show equal layers once, so that 80 layers take no longer to read than one.

* model_layers_0_input_layernorm_copy = copy(...)
  ...
  and 79 times more: the same 42 lines for model.layers.1-79
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from torchshard.core.paths import layer_of, number_ranges
from torchshard.ir.listing import lines, rows_of
from torchshard.planner.folded import layer_begins
from torchshard.planner.repeats import Item, find_runs


def folded_lines(nodes: Sequence[fx.Node]) -> str:
    """Lists nodes of a graph, wrapped to the terminal's width; equal layers are listed once.

    Layers are equal if their lines differ in the numbers of names alone.
    """
    rows = rows_of(nodes)
    keys = (_key(node, row) for node, row in zip(nodes, rows, strict=True))
    items = [Item(key, begins=begins) for key, begins in zip(keys, layer_begins(nodes), strict=True)]
    shown, last = list[Sequence[str]](), 0
    for run in find_runs(items):
        second = run.start + run.period
        middles = nodes[second + run.period // 2 : run.stop : run.period]
        layers = dict.fromkeys(filter(None, (layer_of(node.meta.get("module", "")) for node in middles)))
        names = f" for {', '.join(number_ranges(sorted(layers, key=_numbers)))}" if layers else ""
        shown += [*rows[last:second], [f"  and {run.count - 1} times more: the same {run.period} lines{names}"]]
        last = run.stop
    return lines([*shown, *rows[last:]], fits=True)


def _key(node: fx.Node, row: Sequence[str]) -> tuple[str, ...]:
    """Returns the content of a node's line, with a star in place of each number in a name."""
    name, _, types, why, source = row
    named = f"{name} = {node.target}{node.args}{node.kwargs} {why}"
    return re.sub(r"[A-Za-z_]\w*", lambda found: re.sub(r"\d+", "*", found[0]), named), types, source


def _numbers(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]
