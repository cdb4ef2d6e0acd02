"""A graph with repeated blocks planned once: the first three blocks and the last of each run represent all.

Four are needed: the first and the last have different neighbours, the third represents all later inner blocks, and the
second is its predecessor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor, fx

from torchshard.core.paths import layer_of
from torchshard.custom_ops.whole import WholeCall, op_of
from torchshard.ir.graph import bound_args, is_tensor_op, node_row, tensor_type, values
from torchshard.planner.repeats import Item, Reference, Repetition, find_runs


@dataclass(frozen=True)
class Folded:
    """The nodes of a graph, and the runs that determine the planned ones."""

    nodes: list[fx.Node]
    """All nodes that call functions, in order."""
    runs: list[Repetition]
    position: dict[fx.Node, int]

    @staticmethod
    def of(graph: fx.Graph, keys: Mapping[fx.Node, object], *, fold: bool = True, by_layer: bool = False) -> Folded:
        """Finds the runs of a graph.

        Args:
            keys: a value per node; one node represents others only if their values are equal.
            fold: whether to search for runs.
            by_layer: whether blocks begin where a layer does, and not where the fewest values cross.
        """
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        position = {node: i for i, node in enumerate(nodes)}
        items = _items(nodes, position, keys) if fold else []
        if by_layer:
            items = [replace(item, begins=begins) for item, begins in zip(items, layer_begins(nodes), strict=True)]
        return Folded(nodes, find_runs(items), position)

    def share_rows(self) -> None:
        """Gives all nodes the rows of those that represent them."""
        for i, node in enumerate(self.nodes):
            # a WholeCall's row has a replacement for this call only, so each node keeps its own row
            if self.representative(i) != i and is_tensor_op(node) and not isinstance(node.target, WholeCall):
                node.meta["row"] = node_row(self.nodes[self.representative(i)])

    def representative(self, position: int) -> int:
        """Returns the position of the planned node that represents the node at a position."""
        for run in self.runs:
            block = run.block_of(position)
            if 2 < block < run.count - 1:
                return position - (block - 2) * run.period
        return position

    def place(self, position: int) -> tuple[int, int] | None:
        """Returns the run of a planned node and its planned block (0 to 3); None outside of runs."""
        for i, run in enumerate(self.runs):
            block = run.block_of(position)
            if 0 <= block < run.count:
                return i, min(block, 3)
        return None

    def planned(self) -> Iterator[int]:
        """Returns the positions of the planned nodes."""
        return (i for i in range(len(self.nodes)) if self.representative(i) == i)

    def planned_node(self, node: fx.Node) -> fx.Node:
        """Returns the planned node that represents a node; a placeholder represents itself."""
        return node if node.op == "placeholder" else self.nodes[self.representative(self.position[node])]

    def first_use(self, placeholder: fx.Node) -> tuple[int, int]:
        """Returns the position of the first op that reads a placeholder (-1 without any), and its place there."""
        first = min((self.position[user] for user in placeholder.users if user.op != "output"), default=-1)
        return first, self.nodes[first].all_input_nodes.index(placeholder) if first >= 0 else 0

    def planned_placeholder(self, node: fx.Node) -> fx.Node:
        """Returns the placeholder that the planned blocks read in the place where this one is read first."""
        home, slot = self.first_use(node)
        return node if home < 0 else self.nodes[self.representative(home)].all_input_nodes[slot]


def layer_begins(nodes: Sequence[fx.Node]) -> list[bool]:
    """Returns whether each node is in another layer than the one before."""
    layers = [layer_of(node.meta.get("module", "")) for node in nodes]
    return [layer is not None and layer != before for before, layer in pairwise([None, *layers])]


def _items(nodes: Sequence[fx.Node], position: Mapping[fx.Node, int], keys: Mapping[fx.Node, object]) -> list[Item]:
    homes: dict[fx.Node, tuple[int, int]] = {}
    numbers: dict[object, int] = {}
    found = []
    for i, node in enumerate(nodes):
        references, leaves = [], []
        for slot, operand in enumerate(node.all_input_nodes):
            if operand.op == "placeholder":
                home, at = homes.setdefault(operand, (i, slot))
                references.append(Reference(-1 - id(operand), home, at))
                leaves.append((operand.meta["kind"], _type_key(operand), keys.get(operand)))
            else:
                references.append(Reference(position[operand], position[operand]))
        names = {operand: f"%{slot}" for slot, operand in enumerate(node.all_input_nodes)}
        # a WholeCall binds constants that are missing in the node's arguments; bound_args has both
        arguments = fx.map_arg(bound_args(node), names.__getitem__)
        # functions made by a factory share a name, but are different ops
        op = op_of(node.target) if isinstance(node.target, WholeCall) else str(node.target)
        key = (op, str(arguments), _type_key(node), tuple(leaves), str(keys.get(node)))
        found.append(Item(numbers.setdefault(key, len(numbers)), tuple(references)))
    return found


def _type_key(node: fx.Node) -> tuple[object, bool]:
    types = tuple(tensor_type(v) if isinstance(v, Tensor) else str(v) for v in values(node))
    return types, bool(node.meta.get("needs_grad"))
