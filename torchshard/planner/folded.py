"""A graph whose repeated blocks are planned once: the first three blocks and the last of each run represent all.

Four, because the first and the last block have other neighbours than the rest, the second is what the third reads, and
the third is what each later block reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from torchshard.custom_ops.whole import WholeCall, op_of
from torchshard.ir.graph import bound_args, is_tensor_op, node_row, tensor_type, values
from torchshard.planner.repeats import Item, Reference, Repetition, find_runs


@dataclass(frozen=True)
class Folded:
    """The nodes of a graph, and which of them are planned."""

    nodes: list[fx.Node]
    """All nodes that compute, in order."""
    runs: list[Repetition]
    position: dict[fx.Node, int]

    @staticmethod
    def of(graph: fx.Graph, keys: Mapping[fx.Node, object], *, fold: bool) -> Folded:
        """Finds the runs of a graph.

        Args:
            keys: a value per node that must be equal for nodes to be planned alike.
            fold: whether to look for runs at all.
        """
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        position = {node: i for i, node in enumerate(nodes)}
        folded = Folded(nodes, find_runs(_items(nodes, position, keys)) if fold else [], position)
        for i, node in enumerate(nodes):
            # the replacement in the row of a WholeCall holds that call, so each keeps the row of its own
            if folded.representative(i) != i and is_tensor_op(node) and not isinstance(node.target, WholeCall):
                node.meta["row"] = node_row(nodes[folded.representative(i)])
        return folded

    def representative(self, position: int) -> int:
        """The position of the planned node that represents the node at a position."""
        for run in self.runs:
            block = run.block_of(position)
            if 2 < block < run.count - 1:
                return position - (block - 2) * run.period
        return position

    def place(self, position: int) -> tuple[int, int] | None:
        """(run, which of its four planned blocks) of a planned node; None outside of runs."""
        for i, run in enumerate(self.runs):
            block = run.block_of(position)
            if 0 <= block < run.count:
                return i, min(block, 3)
        return None

    def planned(self) -> Iterator[int]:
        """The positions of the planned nodes."""
        return (i for i in range(len(self.nodes)) if self.representative(i) == i)

    def planned_node(self, node: fx.Node) -> fx.Node:
        """The planned node that represents a node; a placeholder is itself."""
        return node if node.op == "placeholder" else self.nodes[self.representative(self.position[node])]

    def first_use(self, placeholder: fx.Node) -> tuple[int, int]:
        """(position of the first op that reads a placeholder, which operand it is there); -1 where no op reads it."""
        first = min((self.position[user] for user in placeholder.users if user.op != "output"), default=-1)
        return first, self.nodes[first].all_input_nodes.index(placeholder) if first >= 0 else 0

    def planned_placeholder(self, node: fx.Node) -> fx.Node:
        """The placeholder that represents one in the planned blocks: what is read there where this is read first."""
        home, slot = self.first_use(node)
        return node if home < 0 else self.nodes[self.representative(home)].all_input_nodes[slot]


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
        # constants of a WholeCall are not among the node's arguments: by name they are all there
        arguments = fx.map_arg(bound_args(node), names.__getitem__)
        # functions of one name, as a factory makes them, are not one op
        op = op_of(node.target) if isinstance(node.target, WholeCall) else str(node.target)
        key = (op, str(arguments), _type_key(node), tuple(leaves), str(keys.get(node)))
        found.append(Item(numbers.setdefault(key, len(numbers)), tuple(references)))
    return found


def _type_key(node: fx.Node) -> tuple[object, bool]:
    types = tuple(tensor_type(v) if isinstance(v, Tensor) else str(v) for v in values(node))
    return types, bool(node.meta.get("needs_grad"))
