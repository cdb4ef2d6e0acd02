"""A module as a few stations, as a paper draws it: its products, collectives, and ops between them.

    x -> norm -> f -> q, k, v -> rotary -> attention -> o -> g -> add

A product and a collective are a station each; consecutive other ops in one module form one station,
and views are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, count, groupby

from torch import fx

from torchshard.core.conversions import kernels
from torchshard.core.paths import is_part, layer_of
from torchshard.custom_ops.whole import entry
from torchshard.ir.effects import only_looks
from torchshard.ir.graph import is_float, is_weight, op_name, values
from torchshard.ir.listing import is_within
from torchshard.ops import is_collective
from torchshard.planner.properties import LOOKUPS, PRODUCTS
from torchshard.plans.plan import Plan
from torchshard.report.times import shares

LETTERS = {"copy": "f", "reduce": "g"}
"""The names in Shoeybi et al., "Megatron-LM" (2019), of the two collectives of tensor parallelism."""
NAMES = {"mul": "×", "add": "+", "sub": "−", "div": "÷", "scaled_dot_product_attention": "attention"}
LEAST_STATIONS, MOST_STATIONS = 4, 60
"""A layer with fewer stations is drawn with its surroundings; modules with more are not drawn."""
MOST_OPS = 2
"""The number of ops in a station's label."""


@dataclass(eq=False)
class Station:
    """A product, a collective, or other ops of one module."""

    label: str
    node: fx.Node
    """The node with the value that later stations use."""
    nodes: list[fx.Node]
    weights: list[fx.Node] = field(default_factory=list)
    sources: list[Station] = field(default_factory=list)
    is_outer: bool = False
    """Whether it represents a value from outside of the module."""
    level: int = 0
    """The column; collectives have columns of their own."""
    row: int = 0
    """The row within a rank's lane."""

    @property
    def is_join(self) -> bool:
        """Whether it is a collective that sends data, forward or backward."""
        return not self.is_outer and is_join(self.node)


def is_join(node: fx.Node) -> bool:
    """Whether a node is a collective that sends data, forward or backward."""
    return is_collective(node.target) and bool(sent(node))


def sent(collective: fx.Node) -> list[tuple[str, str]]:
    """A collective's messages: '▼' with the kernel of its forward, '▲' with the backward's."""
    needs_grad = any(bool(n.meta.get("needs_grad")) for n in (collective, *collective.all_input_nodes))
    both = zip("▼▲", kernels(op_name(collective), needs_grad=needs_grad), strict=True)
    return [(sign, kernel) for sign, kernel in both if kernel not in ("none", "slice", "pad")]


def is_parameter(node: fx.Node) -> bool:
    """Whether a node is a parameter, of any number of dims."""
    return node.op == "placeholder" and node.meta["kind"] == "parameter"


def main_values(graph: fx.Graph) -> set[fx.Node]:
    """The values that depend on a parameter or a float input, unlike masks and positions."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_first = node.op == "placeholder" and (
            is_parameter(node) or (node.meta["kind"] in ("input", "gradient") and is_float(node.meta["val"]))
        )
        has_float = any(is_float(v) for v in values(node)) or node.op == "output"
        if is_first or (has_float and any(n in found for n in node.all_input_nodes)):
            found.add(node)
    return found


def stations(graph: fx.Graph, module: str) -> list[Station]:
    """The stations of a module, preceded by the outer ones that feed it, each with its column and row."""
    main = main_values(graph)
    inside = [n for n in graph.nodes if n in main and is_within(n, module)]
    of: dict[fx.Node, list[Station]] = {}
    """A value -> the stations that it comes from."""
    made: list[Station] = []

    def came_from(node: fx.Node) -> list[Station]:
        if node not in of:  # from outside of the module
            outer = Station(_outer_label(node), node, [node], is_outer=True)
            made.append(outer)
            of[node] = [outer]
        return of[node]

    def taken(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in main and (is_join(node) or not _is_held(n))]

    for _, run in groupby(inside, _run_key(inside)):
        nodes: list[fx.Node] = []
        for node in run:
            if only_looks(node) and not any(n in nodes for n in node.all_input_nodes):
                of[node] = list(dict.fromkeys(s for n in taken(node) for s in came_from(n)))
            else:
                nodes.append(node)
        if nodes:
            sources = dict.fromkeys(s for n in nodes for t in taken(n) if t not in nodes for s in came_from(t))
            given = (s for n in nodes if not is_join(n) for s in n.all_input_nodes)
            weights = dict.fromkeys(s for s in given if is_parameter(s))
            last = next(n for n in reversed(nodes) if not only_looks(n))
            one = Station(_label(nodes, module, inside), last, nodes, [*weights], [*sources])
            made.append(one)
            of |= {node: [one] for node in nodes}
    return _placed(made)


def _is_held(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["kind"] != "input"


def _is_alone(node: fx.Node) -> bool:
    """Whether a node is a station of its own."""
    return is_join(node) or entry(PRODUCTS, node.target) is not None or node.target in LOOKUPS


def _run_key(nodes: list[fx.Node]) -> Callable[[fx.Node], object]:
    """A key that groups neighbouring ops; a module's other ops join its product if it has only one."""
    products = Counter(map(_module, filter(_multiplies_weight, nodes)))
    keys: dict[fx.Node, object] = {}
    for number, node in enumerate(nodes):
        is_one = _multiplies_weight(node) and products[_module(node)] == 1
        keys[node] = number if _is_alone(node) and not is_one else _module(node)
    return keys.__getitem__


def _multiplies_weight(node: fx.Node) -> bool:
    return _is_alone(node) and not is_join(node) and any(map(is_weight, node.all_input_nodes))


def _module(node: fx.Node) -> str:
    return str(node.meta.get("module", ""))


def _label(nodes: list[fx.Node], module: str, inside: list[fx.Node]) -> str:
    if is_join(nodes[0]):
        return op_name(nodes[0])
    path = _module(nodes[0])
    others = (n for n in inside if is_part(_module(n), path) and n not in nodes and not only_looks(n))
    if path != module and (any(map(_multiplies_weight, nodes)) or all(map(is_join, others))):
        return path.rpartition(".")[2]
    ops = (n for n in nodes if not only_looks(n))
    names = list(dict.fromkeys(NAMES.get(op_name(n), op_name(n)) for n in ops))
    return " ".join(names[:MOST_OPS]) + (" …" if len(names) > MOST_OPS else "")


def _outer_label(node: fx.Node) -> str:
    if node.op == "placeholder":
        return ".".join(str(node.meta["path"]).split(".")[-2:])
    named = re.search(r"[^.]*(\.\d+)*$", _module(node))
    return (named and named[0]) or op_name(node)


def _placed(made: list[Station]) -> list[Station]:
    """Gives each station its column and row: joins have their own columns, parallel stations share one."""
    joins: set[int] = set()
    used: dict[int, set[int]] = {}
    for one in made:
        level = 1 + max((s.level for s in one.sources), default=-1)
        while level in joins or (one.is_join and used.get(level)):
            level += 1
        if one.is_join:
            joins.add(level)
        rows = used.setdefault(level, set())
        wanted = min((s.row for s in one.sources), default=0)
        row = next(r for r in chain([wanted], count()) if r not in rows)
        rows.add(row)
        one.level, one.row = level, row
    return made


def busiest_layer(plan: Plan) -> str:
    """The path of a layer that represents the layers that take the largest share of a step.

    Of several equal layers it is the second, because the first may be different. A layer with too
    few stations is replaced by the module around it. If it has too many, or the model lacks layers,
    the most expensive part is returned; '' is the whole model.
    """
    if plan.graph is None:
        return ""
    of_layers, path = [part for part in shares(plan) if any(map(layer_of, part.modules))], ""
    if of_layers:
        most = max(of_layers, key=lambda part: part.seconds)
        path = sorted(most.modules, key=lambda path: (len(path), path))[len(most.modules) > 1]
    while path and len(stations(plan.graph.graph, path)) < LEAST_STATIONS:
        path = path.rpartition(".")[0]
    while len(stations(plan.graph.graph, path)) > MOST_STATIONS and (parts := _parts(plan, path)):
        path = max(parts, key=parts.__getitem__)
    return path


def _parts(plan: Plan, module: str) -> dict[str, float]:
    """Submodule directly within a module -> the seconds that it takes in a step."""
    found, depth = dict[str, float](), len(module.split(".")) if module else 0
    for path, seconds in (*plan.costs.compute.items(), *((c.place, c.seconds) for c in plan.costs.collectives)):
        if path != module and is_part(path, module):
            part = ".".join(path.split(".")[: depth + 1])
            found[part] = found.get(part, 0.0) + seconds
    return found
