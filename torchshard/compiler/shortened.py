"""A graph with few of its equal layers: estimates then take a time that does not grow with the depth of a model.

    before    embedding, layer 0, layer 1, layer 2, layer 3, layer 4, ... layer 79, head
    after     embedding, layer 0, layer 1, layer 2, layer 3, layer 4, head;    a gap of 75 layers after layer 4

From layer 1 to layer 2 a step gains as many bytes as from each layer to the next (and loses as many in backward), so a
gap's bytes are known at layer 2. Layers 0, 3 and 4 keep these two apart from what precedes and follows the layers:
messages begin up to a layer early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from torchshard.ir.editing import empty_module
from torchshard.ir.graph import result_layouts, results_of
from torchshard.planner.folded import Folded
from torchshard.planner.repeats import Repetition

KEPT = 5
"""The number of equal layers that a shortened graph keeps."""


@dataclass(frozen=True)
class Gap:
    """Removed layers."""

    count: int
    """How many were removed."""
    inside: tuple[frozenset[str], frozenset[str]]
    """The names of values in the middle of the second and of the third kept layer."""


@dataclass(frozen=True)
class Shortened:
    """A graph without most of its equal layers."""

    module: fx.GraphModule
    full: Callable[[], fx.GraphModule]
    """Returns the graph with all layers."""
    gaps: tuple[Gap, ...] = ()
    times: Mapping[str, int] = field(default_factory=dict)
    """Name of a placeholder -> how many of the full graph it stands for, itself included; those that are missing: 1."""


def shortened(module: fx.GraphModule, keys: Mapping[fx.Node, object]) -> Shortened:
    """Removes all but `KEPT` of each run of equal layers.

    Args:
        keys: a value per node beside its op, arguments and type; nodes of equal layers have equal values.
    """
    results = {node for node in results_of(module.graph) if isinstance(node, fx.Node)}
    differences = {n: (keys.get(n), n in results) for n in module.graph.nodes}
    folded = Folded.of(module.graph, differences, by_layer=True)  # a part of a layer must not meet a part of another
    runs = [run for run in folded.runs if run.count > KEPT]
    if not runs:
        return Shortened(module, lambda: module)
    stand_ins = _stand_ins(folded, runs)
    removed = Counter(stand_in.name for node, stand_in in stand_ins.items() if node.op == "placeholder")
    times = {name: count + 1 for name, count in removed.items()}
    gaps = tuple(Gap(run.count - KEPT, (_middle(folded, run, 1), _middle(folded, run, 2))) for run in runs)
    return Shortened(_without(module, stand_ins), lambda: module, gaps, times)


def _stand_ins(folded: Folded, runs: Sequence[Repetition]) -> dict[fx.Node, fx.Node]:
    """Each removed node, and the node of the last kept layer in its place."""
    found = dict[fx.Node, fx.Node]()
    for run in runs:
        for position in range(run.start + KEPT * run.period, run.stop):
            layers = run.block_of(position) - KEPT + 1
            found[folded.nodes[position]] = folded.nodes[position - layers * run.period]
    for node, stand_in in [*found.items()]:
        for own, other in zip(node.all_input_nodes, stand_in.all_input_nodes, strict=True):
            if own.op == "placeholder" and all(user in found for user in own.users):
                found[own] = other
    return found


def _middle(folded: Folded, run: Repetition, block: int) -> frozenset[str]:
    start = run.start + block * run.period
    return frozenset(n.name for n in folded.nodes[start + run.period // 4 : start + (3 * run.period + 3) // 4])


def _without(module: fx.GraphModule, stand_ins: Mapping[fx.Node, fx.Node]) -> fx.GraphModule:
    """A copy of a graph without some nodes; the users of their values take those of their stand-ins."""
    module.meta.setdefault("recordings", {})  # the copy shares them
    made, copies = empty_module(module.meta), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node in stand_ins:
            continue
        if node.op != "output":
            copies[node] = made.graph.node_copy(node, lambda n: copies[stand_ins.get(n, n)])
            copies[node].meta = {**node.meta}
            continue
        results = [
            (r, layout) for r, layout in zip(results_of(module.graph), result_layouts(module.graph), strict=True)
        ]
        kept = [(copies.get(r, r), layout) for r, layout in results if r not in stand_ins]
        output = made.graph.output(tuple(r for r, _ in kept))
        output.meta = {**node.meta, "layouts": tuple(layout for _, layout in kept)}
    return made
