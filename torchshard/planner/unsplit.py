"""What a plan leaves whole though it weighs: ops that every rank runs, and values that are gathered for an op.

    run whole   its weights are a good part of the model's, or its work one of the step's
    gathered    what is split is wanted whole, since the op has no rule, or one that forbids to split that dim

Ops that are alike in layers that are alike are one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from torchshard.graph import consumers, is_tensor, is_tensor_op, is_weight, nbytes, node_row, operands, where
from torchshard.layouts import I, Layout, Shard, is_whole
from torchshard.notation import Choice, Row, axis_groups
from torchshard.planner.costs import CostModel, Op
from torchshard.planner.plan import Collective, Whole
from torchshard.planner.table import layered

WEIGHTS, WORK, SENT = 0.05, 0.1, 0.1
"""The parts of the model's weights, of the step's computation, and of what is sent, from which on an op with a rule is
told of."""
NEAR = 12
"""So many ops before one that runs whole, and after it, may be why it does."""


@dataclass
class _Kind:
    node: fx.Node
    modules: list[str]
    count: int = 0
    gathered: float = 0.0
    weights: float = 0.0
    seconds: float = 0.0


def unsplit(
    graph: fx.Graph,
    model: CostModel,
    choices: Mapping[str, Choice],
    parameters: Mapping[str, Layout],
    collectives: Iterable[Collective],
    pinned: Iterable[fx.Node] = (),
) -> tuple[Whole, ...]:
    """The kinds of ops that are told of, those that cost most first.

    Args:
        pinned: ops that the user's plan wants whole.
    """
    if model.world == 1:
        return ()
    nodes = [node for node in consumers(graph) if node.name in choices]
    collectives = list(collectives)
    gathered, sent_in_all = dict(_gathered(nodes, collectives)), sum(c.nbytes for c in collectives)
    weights = _weights(graph)
    asked, everything = set(pinned), sum(weights.values())
    kinds: dict[object, _Kind] = {}
    work = 0.0
    for node in nodes:
        choice, op = choices[node.name], Op.of(node)
        seconds = model.seconds(op, choice)
        work += seconds
        whole = not choice.axes and node not in asked
        held = sum(weights[w] for w in _weights_of(node) if parameters.get(w.meta["path"], I) == I) if whole else 0
        sent = gathered.get(node, 0.0)
        if not sent and not held and not (whole and op.products):
            continue
        key = (str(node.target), op.row, layered(node.meta.get("module", "")), bool(sent))
        kind = kinds.setdefault(key, _Kind(node, []))
        kind.modules.append(node.meta.get("module", ""))
        kind.count, kind.gathered, kind.weights = kind.count + 1, kind.gathered + sent, kind.weights + held
        kind.seconds += seconds if whole and op.products else 0.0
    found = [
        Whole(
            str(kind.node.target), where(kind.node), tuple(dict.fromkeys(kind.modules)), kind.count,
            kind.gathered, kind.weights, kind.seconds / work if work else 0.0, _why(kind.node, kind.gathered, gathered),
        )
        for kind in kinds.values()
        if kind.weights > WEIGHTS * everything
        or kind.seconds > WORK * work
        or kind.gathered > (SENT * sent_in_all if node_row(kind.node) is not None else 0.0)
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda kind: (-kind.nbytes, -kind.weights, -kind.work)))


def _gathered(nodes: Iterable[fx.Node], collectives: Iterable[Collective]) -> Iterator[tuple[fx.Node, float]]:
    """The ops that have values gathered since they can't take them in slices, and the bytes that each rank sends."""
    named = {node.name: node for node in nodes}
    sent: dict[fx.Node, float] = {}
    for c in collectives:
        for taker in (named[name] for name in c.consumers if name in named and c.calls and not c.is_inside):
            row = node_row(taker)
            if is_tensor_op(taker) and (row is None or _is_closed(row, taker, c)):
                sent[taker] = sent.get(taker, 0.0) + c.nbytes
    yield from sent.items()


def _is_closed(row: Row, node: fx.Node, c: Collective) -> bool:
    """Whether the row forbids to split the dim that was split."""
    if not isinstance(c.source, Shard) or not is_whole(c.target):
        return False
    dims = [dims for operand, dims in zip(operands(node), row.operands, strict=True) if operand.name == c.value]
    return any(axis in row.blocked for at in dims for term in at[c.source.dim] for axis in term)


def _weights(graph: fx.Graph) -> dict[fx.Node, int]:
    """The weights with their bytes."""
    return {n: nbytes(n.meta["val"]) for n in graph.nodes if is_weight(n)}


def _weights_of(node: fx.Node) -> Iterator[fx.Node]:
    """The weights that an op takes, or views and casts of."""
    for source in operands(node):
        while source.op == "call_function" and len(source.all_input_nodes) == 1 and is_tensor(source):
            (source,) = source.all_input_nodes
        if is_weight(source):
            yield source


def _why(node: fx.Node, sent: float, gathered: Mapping[fx.Node, float]) -> str:
    """Why an op is not split: its own rule, or what comes before it."""
    row = node_row(node)
    if row is None:
        return f"no sharding rule; one of a few lines, @torchshard.rule({node.target}), would keep it split"
    if sent or not any(row.sizes[axis] > 1 for group in axis_groups(row) for axis in group):
        return f"what is marked ! may not be split: {row.text}"
    blame = next((n for n in _near(node) if n in gathered), None)
    if blame is not None:
        return f"{where(blame)} wants whole what is split"
    return "to split it, or what is around it, is not legal or costs more than it saves"


def _near(node: fx.Node) -> Iterator[fx.Node]:
    """The ops that an op's operands come from, and those that its results go to, the nearest first."""
    for step in (lambda n: n.all_input_nodes, lambda n: list(n.users)):
        waiting, seen = step(node), set[fx.Node]()
        while waiting and len(seen) < NEAR:
            found = waiting.pop(0)
            if found not in seen and found.op == "call_function":
                seen.add(found)
                yield found
                waiting += step(found)
