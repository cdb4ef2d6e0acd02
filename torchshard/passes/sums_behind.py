"""Delays sums of parameters' gradients until after collectives that the backward waits for.

    before    grad_weight, begin_sum(grad_weight), grad_input, begin_reduce(grad_input), wait, ...
    after     grad_input, begin_reduce(grad_input), grad_weight, begin_sum(grad_weight), ..., wait, ...

With several mesh axes, a backward communicates over two. It sums gradients of parameters over the
batch axis, which only its end waits for, and gradients of values over the weight axis, which the
layer before needs. In autograd's order the parameters' sums come first, together with the ops that
compute them, which then overlap with no collective of the weight axis. This pass moves both right
after the next such collective; the next weights are gathered meanwhile.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from torchshard.ir.effects import is_view, uses_rng, writes
from torchshard.ops import Begin, wait
from torchshard.passes.nodes import behind_needs, upstream

aten = torch.ops.aten
PASS_ON = (aten.clone.default, aten.cat.default, aten.split_with_sizes.default, aten._to_copy.default, wait)
"""Besides views, the ops between a gradient and its sum, or a parameter and its gather."""


def sums_behind(ops: Sequence[fx.Node], before: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
    """Reorders the ops of a graph; collectives of one kind over one group keep their order.

    Args:
        ops: in recorded order, with each collective split into begin and wait.
        before: op -> the ops that must run before it.
    """
    begun = [node for node in ops if isinstance(node.target, Begin)]
    if len({begin.args[-1] for begin in begun}) < 2:
        return list(ops)
    sums, gathers = _sums(ops), _gathers(ops)
    place = {node: i for i, node in enumerate(ops)}
    awaited = [begin for begin in begun if begin not in sums and begin not in gathers]
    behind = defaultdict[fx.Node | None, list[fx.Node]](list)
    """Op -> the ops to run right after it, in this order; ops under the key None run at the end."""
    for earlier, begin, after in zip([None, *awaited], awaited, [*awaited[1:], None], strict=False):
        stretch = ops[0 if earlier is None else place[earlier] : place[begin]]
        own = {node for node in stretch if node in sums and node.args[-1] != begin.args[-1]}
        if own and _is_backward(begin):
            computed, ends = _of_sums(own, stretch)
            behind[begin] += [*_gathered_next(begin, begun, sums, gathers, place), *computed]
            behind[after] += sorted(ends, key=place.__getitem__)
    return behind_needs(_moved(ops, behind), before.__getitem__, place)


def _is_backward(begin: fx.Node) -> bool:
    (waiting,) = begin.users
    return bool(waiting.meta.get("is_backward"))


def _passes_on(node: fx.Node) -> bool:
    return node.op != "call_function" or isinstance(node.target, Begin) or node.target in PASS_ON or is_view(node)


def _sums(ops: Sequence[fx.Node]) -> set[fx.Node]:
    """Collectives with results that no op computes with."""
    is_end = dict[fx.Node, bool]()
    for node in reversed(ops):
        is_end[node] = all(user not in is_end or (_passes_on(user) and is_end[user]) for user in node.users)
    return {node for node in ops if isinstance(node.target, Begin) and is_end[node] and _is_backward(node)}


def _gathers(ops: Sequence[fx.Node]) -> set[fx.Node]:
    """Collectives with parameters as operands, instead of computed values."""
    is_given = dict[fx.Node, bool]()
    for node in ops:
        is_given[node] = _passes_on(node) and all(is_given.get(operand, True) for operand in node.all_input_nodes)
    return {node for node in ops if isinstance(node.target, Begin) and is_given[node]}


def _of_sums(own: set[fx.Node], stretch: Sequence[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """The ops that compute only these sums, with the sums, and the ops that depend on them."""
    within = set(stretch)
    needed = set[fx.Node]().union(*(upstream(n, lambda n: within.intersection(n.all_input_nodes)) for n in own))
    ends = {node for each in own for node in upstream(each, lambda node: node.users) if node.op == "call_function"}
    ends -= needed | own
    computed = set(own)
    for node in reversed(stretch):
        is_fixed = uses_rng(node) or writes(node) or isinstance(node.target, Begin) or node.target is wait
        is_own = node.target is wait and node.all_input_nodes[0] in own
        if node in needed and (is_own or not is_fixed) and all(u in computed or u in ends for u in node.users):
            computed.add(node)
    return [node for node in stretch if node in computed], ends


def _gathered_next(
    begin: fx.Node, begun: Sequence[fx.Node], sums: set[fx.Node], gathers: set[fx.Node], place: Mapping[fx.Node, int]
) -> list[fx.Node]:
    """The gather of the next weights with its dependencies; empty if another collective comes first."""
    later = [node for node in begun if place[node] > place[begin] and node not in sums]
    if not later or later[0] not in gathers:
        return []
    found = {later[0], *upstream(later[0], lambda node: node.all_input_nodes)}
    return sorted((node for node in found if place.get(node, 0) > place[begin]), key=place.__getitem__)


def _moved(ops: Sequence[fx.Node], behind: Mapping[fx.Node | None, Sequence[fx.Node]]) -> Iterator[fx.Node]:
    elsewhere = set(itertools.chain(*behind.values()))
    for node in ops:
        if node not in elsewhere:
            yield node
            yield from behind.get(node, ())
    yield from behind.get(None, ())
