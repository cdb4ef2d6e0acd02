"""Finds the expensive ops that a plan does not split: they run replicated, or on gathered values.

    replicated  the op has a large fraction of the model's weights or of the step's work
    gathered    the op lacks a rule, or its rule makes the split dim unsplittable

Equal ops of repeated layers are reported together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import fx

from torchshard.core.choices import factor_groups
from torchshard.core.layouts import I, Layout, Shard, is_whole
from torchshard.core.paths import star_numbers
from torchshard.core.rows import Choice, Row
from torchshard.custom_ops.whole import HookCall, op_of
from torchshard.ir.fake_values import nbytes
from torchshard.ir.graph import consumers, is_tensor, is_tensor_op, is_weight, node_row, operands, where
from torchshard.planner.constants import NEAR, SENT, WEIGHTS, WORK
from torchshard.planner.costs import CostModel
from torchshard.planner.properties import Op
from torchshard.plans.costs import Collective, Costs, GatheredOps
from torchshard.rules import has_rule

OWN_CHOICE = "to split it, or what is around it, is not legal or costs more than it saves"
"""The reason for an unsplit op that could be split: the planner prefers it, so a warning is unnecessary."""
Gathered: TypeAlias = Mapping[fx.Node, tuple[Collective, ...]]


class _Op(NamedTuple):
    """The costs of one op that is not split."""

    node: fx.Node
    gathered: tuple[Collective, ...] = ()
    """The collectives that gather its operands; ops that read the same value share one."""
    weights: frozenset[fx.Node] = frozenset()
    """The weights that every rank stores in full."""
    seconds: float = 0.0
    """Seconds of its products, which every rank computes."""


def unsplit(
    graph: fx.Graph,
    model: CostModel,
    choices: Mapping[str, Choice],
    parameters: Mapping[str, Layout],
    costs: Costs,
    pinned: Iterable[fx.Node] = (),
) -> tuple[GatheredOps, ...]:
    """Returns the kinds of ops to report, the most expensive first.

    Args:
        costs: the costs of the plan with these choices and parameters.
        pinned: ops that the user's plan keeps replicated.
    """
    if model.axis.size == 1:
        return ()
    nodes, asked = [node for node in consumers(graph) if node.name in choices], set(pinned)
    gathered = _gathered(nodes, costs.collectives)
    kinds: dict[object, list[_Op]] = {}
    for node in nodes:
        whole = not choices[node.name].factors and node not in asked
        found = _Op(node, gathered.get(node, ()))
        if whole:
            op = Op.of(node)
            held = frozenset(w for w in _weights_of(node) if parameters.get(w.meta["path"], I) == I)
            seconds = model.seconds(op, choices[node.name]) if op.products else 0.0
            found = found._replace(weights=held, seconds=seconds)
        if any(found[1:]):
            key = str(node.target), node_row(node), star_numbers(node.meta.get("module", "")), bool(found.gathered)
            kinds.setdefault(key, []).append(found)
    all_weights = sum(nbytes(node.meta["val"]) for node in graph.nodes if is_weight(node))
    work = sum(costs.compute.values())

    def weighs(ops: Sequence[_Op]) -> bool:
        sent, held, seconds = _sums(ops)
        least = 0.0 if node_row(ops[0].node) is None else SENT * costs.nbytes
        return sent > least or held > WEIGHTS * all_weights or seconds > WORK * work

    told = [_kind(ops, work, gathered) for ops in kinds.values() if weighs(ops)]
    return tuple(sorted(told, key=lambda kind: (-kind.nbytes, -kind.weights, -kind.work)))


def _sums(ops: Sequence[_Op]) -> tuple[float, float, float]:
    """Returns the bytes that each rank sends to gather operands, the bytes of weights, and the seconds of work."""
    sent = {id(c): c.nbytes for op in ops for c in op.gathered}
    held = {weight: nbytes(weight.meta["val"]) for op in ops for weight in op.weights}
    return sum(sent.values()), sum(held.values()), sum(op.seconds for op in ops)


def _kind(ops: Sequence[_Op], work: float, gathered: Gathered) -> GatheredOps:
    """Describes ops of one kind by the first of them."""
    first, modules = ops[0].node, dict.fromkeys(op.node.meta.get("module", "") for op in ops)
    sent, held, seconds = _sums(ops)
    part, why = seconds / work if work else 0.0, _why(first, sent, gathered)
    return GatheredOps(str(first.target), where(first), tuple(modules), len(ops), sent, held, part, why)


def _gathered(nodes: Iterable[fx.Node], collectives: Iterable[Collective]) -> Gathered:
    """Returns the ops that can't use slices of a value, with the collectives that gather it."""
    named = {node.name: node for node in nodes}
    sent: dict[fx.Node, tuple[Collective, ...]] = {}
    for c in collectives:
        for taker in (named[name] for name in c.consumers if name in named and c.calls and not c.is_inside):
            row = node_row(taker)
            if is_tensor_op(taker) and (row is None or _is_closed(row, taker, c)):
                sent[taker] = (*sent.get(taker, ()), c)
    return sent


def _is_closed(row: Row, node: fx.Node, c: Collective) -> bool:
    """Returns whether the op's row forbids splitting the dim that the collective gathers."""
    if not isinstance(c.source, Shard) or not is_whole(c.target):
        return False
    dims = [dims for operand, dims in zip(operands(node), row.operands, strict=True) if operand.name == c.value]
    return any(axis in row.unsplittable for at in dims for term in at[c.source.dim] for axis in term)


def _weights_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the weights that an op reads, directly or through views and casts."""
    for source in operands(node):
        while source.op == "call_function" and len(source.all_input_nodes) == 1 and is_tensor(source):
            (source,) = source.all_input_nodes
        if is_weight(source):
            yield source


def _without_row(node: fx.Node) -> str:
    op = op_of(node.target)
    if isinstance(node.target, HookCall):
        return "the hook takes the whole gradient"
    if has_rule(node.target):
        return "its rule does not split a call with these arguments"
    name = op.__qualname__ if isinstance(op, type) else f'"{op}"'
    return f"no sharding rule; one of a few lines, @torchshard.rule({name}), would keep it split"


def _why(node: fx.Node, sent: float, gathered: Gathered) -> str:
    """Returns the reason why an op is not split: its own rule, or an op near it."""
    row = node_row(node)
    if row is None:
        return _without_row(node)
    if sent or not any(row.sizes[axis] != 1 for group in factor_groups(row) for axis in group):
        return f"what is marked ! may not be split: {row.text}"
    blame = next((n for n in _near(node) if n in gathered), None)
    if blame is not None:
        return f"{where(blame)} wants whole what is split"
    return OWN_CHOICE


def _near(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the ops before an op, then the ops after it, each the nearest first."""
    for step in (lambda n: n.all_input_nodes, lambda n: list(n.users)):
        waiting, seen = step(node), set[fx.Node]()
        while waiting and len(seen) < NEAR:
            found = waiting.pop(0)
            if found not in seen and found.op == "call_function":
                seen.add(found)
                yield found
                waiting += step(found)
