"""The states of decisions: the choices that rules allow, within the pins and the search space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from torchshard.core.choices import choices
from torchshard.core.conversions import ConversionStep
from torchshard.core.layouts import EQUAL, Blocks, I, Layout, Shard, has_blocks, is_dynamic, local_size
from torchshard.core.rows import Choice
from torchshard.custom_ops.store import STORE
from torchshard.ir.graph import is_carried, is_tensor_op, passes_on_weight, required_layouts, where, whole_choice
from torchshard.planner.axes import tensors_of, wanted_parts, weight_axes
from torchshard.planner.folded import Folded
from torchshard.planner.pins import Pin, cannot_have, pinned_layout_conflict
from torchshard.planner.properties import Op
from torchshard.plans.optimizers import Optimizer


@dataclass(frozen=True)
class GraphConstraints:
    """The constraints of the user and of earlier calls on the nodes of one graph."""

    options: Mapping[fx.Node, list[Choice]] = field(default_factory=dict)
    """Op -> the only choices that it may have."""
    pins: Mapping[fx.Node, Pin] = field(default_factory=dict)
    """Op -> the user's pin."""
    parameters: Mapping[str, Layout] = field(default_factory=dict)
    """Parameter -> its fixed layout, by name."""
    vetoed: frozenset[tuple[fx.Node, ConversionStep]] = frozenset()
    """Forbidden conversions."""
    all_axes: bool = False
    """Whether dims that no weight touches (batch, sequence) may be split too."""
    dynamic: bool = True
    """Whether dynamic sizes divisible by the number of ranks may be split without a pin."""
    weights: bool = True
    """Whether dims of weights may be split."""
    divides: bool = False
    """Whether every op that can split the batch, or the sequence, does."""
    optimizer: Optimizer | None = None
    """What updates the parameters; None without a memory limit: then only the bytes of weights count."""
    slices: int = 1
    """The number of slices that other axes cut a trained parameter into."""
    trains: bool = True
    """Whether a step has a backward, so weights have gradients and optimizer states."""
    steady: bool = False
    """Whether a value that a call writes into its arguments keeps the layout of the input that it replaces."""

    @property
    def splits(self) -> bool:
        """Whether pins or earlier calls already fix a split."""
        return bool(self.pins) or any(isinstance(layout, Shard) for layout in self.parameters.values())

    def differences(self, graph: fx.Graph) -> dict[fx.Node, object]:
        """Returns a value per constrained node; it differs if nodes of equal structure are constrained differently."""
        keys: dict[fx.Node, object] = dict(self.options)
        keys |= {node: (pin.style, pin.axes) for node, pin in self.pins.items()}
        for node, step in sorted(self.vetoed, key=str):
            keys[node] = (keys.get(node), step)
        stored = (node for node in graph.nodes if node.op == "placeholder" and node.meta["path"] in self.parameters)
        return keys | {node: self.parameters[node.meta["path"]] for node in stored}


class PlannedOps:
    """The planned ops of a graph, with their operands and results among the planned nodes."""

    def __init__(self, graph: fx.Graph, folded: Folded) -> None:
        self.nodes = [folded.nodes[i] for i in folded.planned()]
        self.ops = [Op.of(node) for node in self.nodes if is_tensor_op(node)]
        self.tensors = {op.node: [n and folded.planned_node(n) for n in tensors_of(op.node)] for op in self.ops}
        self.consumers: dict[fx.Node, list[Op]] = {}
        """Value -> the ops that read it."""
        for op in self.ops:
            for operand in dict.fromkeys(self.inputs(op)):
                self.consumers.setdefault(operand, []).append(op)
        self.results = {folded.planned_node(n) for n, _ in required_layouts(graph.output_node(), None)}
        self.stored = [n for n in graph.nodes if n.op == "placeholder" and n in self.consumers]

    def inputs(self, op: Op) -> list[fx.Node]:
        """Returns the planned nodes of an op's operands."""
        return [n for n in self.tensors[op.node][: len(op.inputs)] if n is not None]

    def places(self, node: fx.Node, op: Op) -> list[int]:
        """Returns the positions of a value among an op's operands."""
        return [i for i, operand in enumerate(self.inputs(op)) if operand is node]


class States:
    """The states of ops, and of parameters and inputs."""

    def __init__(self, planned: PlannedOps, constraints: GraphConstraints, ranks: int) -> None:
        self._planned, self._constraints, self._ranks = planned, constraints, ranks
        self._wanted = wanted_parts(planned.ops, planned.tensors, ranks)
        self._axes = None if constraints.all_axes else weight_axes(planned.ops, planned.tensors)

    def of_op(self, op: Op) -> list[Choice]:
        """Returns the choices of an op.

        Raises:
            PlanError: the op can't be split as its pin requires.
        """
        c, node = self._constraints, op.node
        if node in c.options:
            return c.options[node]
        legal = self._legal(op)
        states = pinned_choices(op, c.pins[node], legal, self._ranks) if node in c.pins else self._unpinned(op, legal)
        if c.divides:
            states = _dividing(states)
        elif is_carried(node):  # its size grows, so the next call would slice it differently
            states = [choice for choice in states if not choice.splits_dynamic]
        if is_carried(node) or not any(value.needs_grad for value in (*op.operands, *op.results)):
            # without a gradient R equals I, and a carried value that is not split must be I
            states = [choice for choice in states if choice.name != "R"]
        return states

    def _legal(self, op: Op) -> list[Choice]:
        if op.row is None:
            return [whole_choice(op.node)]
        around = enumerate(self._planned.tensors[op.node])
        hints = [(i, s) for i, t in around if t is not None for s in self._wanted.get(t, ())]
        return choices(op.row, self._ranks, hints)

    def _unpinned(self, op: Op, legal: list[Choice]) -> list[Choice]:
        states = [choice for choice in legal if self._axes is None or self._may_split(op, choice, self._axes[op.node])]
        if self._ranks > 1 or self._constraints.splits:
            return states
        return [choice for choice in states if not choice.factors] or states  # one rank gains nothing by splitting

    def _may_split(self, op: Op, choice: Choice, axes: set[str]) -> bool:
        """Returns whether a choice splits only these factors and dynamic sizes, as the constraints allow."""
        c = self._constraints
        weights = c.weights or passes_on_weight(op.node) or op.node.target is STORE
        return all((axis in axes and weights) or (is_dynamic(parts) and c.dynamic) for axis, parts in choice.factors)

    def of_stored(self, node: fx.Node, chosen: Mapping[fx.Node, Sequence[Choice]], *, is_left: bool) -> list[Layout]:
        """Returns the layouts that a parameter or input may be stored in.

        Args:
            chosen: the states of the ops.
            is_left: whether a call writes a value in its place, so the input may be split too.

        Raises:
            PlanError: two pinned ops require different layouts.
        """
        path = node.meta["path"]
        if path in self._constraints.parameters:
            return [self._constraints.parameters[path]]
        if node.meta["kind"] not in ("parameter", "buffer") and not is_left:
            return [I]
        readers = [(op, i) for op in self._planned.consumers[node] for i in self._planned.places(node, op)]
        wanted = (choice.operands[i] for op, i in readers for choice in chosen[op.node])
        found: list[Layout] = [*dict.fromkeys(layout for layout in wanted if isinstance(layout, Shard)), I]
        return self._pinned_layouts(node, chosen) or found

    def _pinned_layouts(self, node: fx.Node, chosen: Mapping[fx.Node, Sequence[Choice]]) -> list[Layout]:
        """Returns the layouts in which all pinned ops accept a parameter; [] if no pinned op reads it."""
        allowed: list[Layout] = []
        for op in self._planned.consumers[node]:
            if op.node not in self._constraints.pins:
                continue
            taken = ((c, c.operands[i]) for i in self._planned.places(node, op) for c in chosen[op.node])
            pinned = [layout for c, layout in taken if isinstance(layout, Shard) or c.name == "I"]
            common = [layout for layout in allowed if layout in pinned] if allowed and pinned else allowed or pinned
            if allowed and pinned and not common:
                raise pinned_layout_conflict(node.meta["path"], str(allowed[0]), str(pinned[0]), op.node)
            allowed = list(dict.fromkeys(common))
        return allowed


def _dividing(states: list[Choice]) -> list[Choice]:
    """Returns the choices that split the batch or the sequence, and others if those have blocks.

    A value in blocks has no conversion, so an op after it may need the full value.
    """
    dividing = [choice for choice in states if choice.splits_dynamic]
    is_forced = dividing and not any(has_blocks(x) for choice in dividing for x in (*choice.operands, *choice.results))
    return dividing if is_forced else states


def pinned_choices(op: Op, pin: Pin, legal: Sequence[Choice], ranks: int) -> list[Choice]:
    """Returns the choices that a pin allows an op.

    Raises:
        PlanError: the op can't be split as its pin requires.
    """
    if not pin.axes:
        return [whole_choice(op.node)]
    for axis in pin.axes:
        named = [c for c in legal if c.name == f"split {axis}"]
        if named:
            return [c for c in named if _fills_ranks(op, c, ranks)] or named
    if pin.style.name == "sequence":  # an op that has the factor may still be unable to split it
        return list(legal)
    module = op.node.meta.get("module", "")
    why = f"{where(op.node)} can't be split along {pin.axes[0]}"
    raise cannot_have(pin.key, module, pin.style.name, why, ())


def _fills_ranks(op: Op, choice: Choice, ranks: int) -> bool:
    """Returns whether every rank gets a slice of each split factor, or the factors are too small for that."""
    sizes = [op.sizes[axis] for axis, _ in choice.factors]
    static = [parts for _, parts in choice.factors if parts != EQUAL and not isinstance(parts, Blocks)]
    return all(s < ranks for s in sizes) or all(local_size(parts, ranks - 1, ranks) > 0 for parts in static)
