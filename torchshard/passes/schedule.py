"""Overlaps collectives with independent computation.

    before    grad_up, weight_grad_up, grad_ln2, reduce(grad_ln2), ...
    after     grad_up, grad_ln2, begin_reduce(grad_ln2), weight_grad_up, wait, ...

A collective becomes two nodes: it begins as soon as its operand is computed, and is waited for
where its result is needed. The ops recorded before the next collective that do not depend on the
result run in between. So the all-reduce of an input's gradient overlaps with the product that
computes the weight's gradient, as in Megatron-LM.

Except for `sums_behind`, collectives keep their order, and an op is delayed past at most one of
them, to limit memory: with gathered weights, one is in flight while another is used. The order
depends only on the graph's structure, which is the same on every rank.

Inductor reorders collectives too (`torch/_inductor/fx_passes/overlap_scheduling.py`, PyTorch 2.13),
in compiled graphs, by estimated run times that the ranks align first. The pass could go if a
compiler were required, and its order depended on the graph only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from torchshard.ir.effects import is_view, uses_rng, writes
from torchshard.ops import OPS, Begin, communicates, is_collective, wait
from torchshard.passes.nodes import node_arg, operator_of, upstream
from torchshard.passes.sums_behind import sums_behind

Order = dict[fx.Node, None]
"""Nodes in the order in which they are to run."""


def schedule(module: fx.GraphModule) -> bool:
    """Splits each collective of a forward or backward graph into begin and wait, and reorders ops."""
    collectives = [node for node in module.graph.nodes if communicates(node.target)]
    begun = [_split(module.graph, node) for node in collectives]
    recorded = [node for node in module.graph.nodes if node.op == "call_function"]
    before = _operands(recorded)
    ops = sums_behind(recorded, before)
    begun.sort(key={node: i for i, node in enumerate(ops)}.__getitem__)
    last: fx.Node | None = None
    for node in _ordered(ops, begun, before):
        if last is not None:
            last.append(node)
        last = node
    return bool(collectives)


def _split(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Replaces a collective with begin and wait; returns the begin."""
    with graph.inserting_before(node):
        begin = graph.call_function(Begin(operator_of(node), _may_take_operand(node)), node.args)
        waiting = graph.call_function(wait, (begin,))
    begin.meta = {key: node.meta[key] for key in ("module", "source", "note") if key in node.meta}
    waiting.meta, name = node.meta, node.name
    begin._rename(f"{name}_begun")
    node.replace_all_uses_with(waiting)
    graph.erase_node(node)
    waiting.name = name
    return begin


def _frees_memory(waiting: fx.Node) -> bool:
    """Whether the operand of a collective takes more memory than its result."""
    begin = node_arg(waiting).target
    return isinstance(begin, Begin) and OPS[begin.op].kernel == "reduce_scatter"


def _may_take_operand(node: fx.Node) -> bool:
    """Whether the result of an all-reduce may overwrite its operand, which is not used elsewhere."""
    value = node_arg(node)
    if OPS[node.target].kernel != "all_reduce":
        return False
    while len(value.users) == 1 and value.op == "call_function":
        if not is_view(value) and not is_collective(value.target):
            return True
        value = value.all_input_nodes[0]
    return False


def _operands(ops: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The ops that must run before each op.

    These are the ops of its operands, reads of a buffer before the op writes to it, and earlier
    draws.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    writers: dict[fx.Node, fx.Node] = {}
    drawn: list[fx.Node] = []
    for node in ops:
        before[node] = [n for n in node.all_input_nodes if n.op == "call_function"]
        arguments = [n for n in node.all_input_nodes if n.op == "placeholder"]
        before[node] += [writers[n] for n in arguments if n in writers]
        if uses_rng(node):
            before[node] += drawn
            drawn = [node]
        if writes(node):
            for argument in arguments:
                before[node] += users[argument]
                writers[argument] = node
        for argument in arguments:
            users[argument].append(node)
    return before


def _ordered(ops: list[fx.Node], begun: list[fx.Node], before: dict[fx.Node, list[fx.Node]]) -> Order:
    order: Order = {}
    place = {node: i for i, node in enumerate(ops)}
    waiting: list[fx.Node] = []
    """Ops recorded before the latest collective that have not run yet."""
    at = 0

    def not_run(node: fx.Node) -> list[fx.Node]:
        return [n for n in before[node] if n not in order]

    for number, begin in enumerate(begun):
        latest = place[begun[number - 1]] if number else 0
        # A wait comes as late as possible, unless ending the collective frees more memory than its
        # result takes.
        due = {begin, *(n for n in waiting if place[n] < latest and (n.target is not wait or _frees_memory(n)))}
        missing = due.union(*(upstream(n, not_run) for n in due))
        order |= dict.fromkeys(sorted(missing, key=place.__getitem__))
        end = place[begun[number + 1]] if number + 1 < len(begun) else len(ops)
        waiting, at = [*waiting, *ops[at:end]], end
        for node in waiting:
            if node.target is not wait and node not in order and all(n in order for n in before[node]):
                order[node] = None
        waiting = [node for node in waiting if node not in order]
    return order | dict.fromkeys(ops)
