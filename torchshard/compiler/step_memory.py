"""The peak memory of a rank's step without its parameters, read off its graphs.

A value's memory is allocated by the op that computes it, and freed after the last op that uses it.
Values saved by forward live until backward has used them; results and gradients live to the end. A
collective keeps the tensors that it sends and receives until it has ended. The ops do not run, so
memory within kernels is not counted.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx

from torchshard.compiler.shortened import Gap, Shortened
from torchshard.ir.effects import is_view
from torchshard.ir.fake_values import hint, nbytes
from torchshard.ir.graph import is_float, is_weight, placeholders, results_of, values
from torchshard.ops import OPS, Begin, OpArgs, hashable, kernels, wait
from torchshard.passes import Partition, Segment, segments, step_graphs
from torchshard.passes.nodes import int_arg, node_arg

Block = int
"""An id of a piece of memory, which several values may share."""
Blocks = tuple[Block | None, ...]
"""One block per result of an op; None for results that are not tensors."""


@dataclass
class _Memory:
    """Reference-counted blocks of memory."""

    peak: float = 0.0
    _held: float = 0.0
    _sizes: dict[Block, int] = field(default_factory=dict)
    _holders: Counter[Block] = field(default_factory=Counter)
    gaps: Sequence[Gap] = ()
    """The layers that the graphs lack."""
    _passed: dict[tuple[int, bool], tuple[int, float]] = field(default_factory=dict)
    """(number of a gap, whether in backward) -> the first of the layers beside it that was reached, and the bytes held
    then; -1 once the gap was passed too."""

    def new(self, size: int) -> Block:
        """Allocates a block; the caller adds the first reference."""
        block = len(self._sizes)
        self._sizes[block] = size
        self._held += size
        self.peak = max(self.peak, self._held)
        return block

    def shrink(self, block: Block, size: int, times: int) -> None:
        """Changes a block to a smaller size, which stands for some equal ones."""
        self._held -= times * (self._sizes[block] - size)
        self._sizes[block] = size

    def hold(self, blocks: Iterable[Block | None]) -> None:
        """Adds a reference to each block."""
        self._holders.update(block for block in blocks if block is not None)

    def release(self, blocks: Iterable[Block | None]) -> None:
        """Removes a reference to each block; frees those without references."""
        for block in blocks:
            if block is not None:
                self._holders[block] -= 1
                if not self._holders[block]:
                    self._held -= self._sizes[block]

    def run(
        self, graph: fx.Graph, arguments: Sequence[Block | None], *, in_backward: bool = False
    ) -> list[Block | None]:
        """Runs a graph, and consumes one of the caller's references to each argument.

        Returns:
            the blocks of its results, with one reference each.
        """
        places: dict[fx.Node, Blocks] = {}
        last = {used: node for node in graph.nodes for used in node.all_input_nodes}
        ends: list[Block | None] = []
        rest = iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                places[node] = (next(rest),)
            elif node.op == "output":
                ends = [places[r][0] if isinstance(r, fx.Node) else None for r in results_of(graph)]
                self.hold(ends)
            else:
                self._pass(node, in_backward)
                places[node] = self._places(node, places)
                self.hold(places[node])
            for used in (n for n in node.all_input_nodes if last[n] is node):
                self.release(places[used])
            if node not in last and node.op != "output":
                self.release(places[node])
        return ends

    def _pass(self, node: fx.Node, in_backward: bool) -> None:
        """Adds the bytes of the removed layers once two kept layers have shown how many bytes one adds."""
        names = (node.name, *node.meta.get("gradient_of", ()), node.meta.get("inside", ""))
        for number, gap in enumerate(self.gaps):
            layer = next((i for i, inside in enumerate(gap.inside) if not inside.isdisjoint(names)), None)
            if layer is None:
                continue
            first, held = self._passed.setdefault((number, in_backward), (layer, self._held))
            if layer != first >= 0:
                self._held += gap.count * (self._held - held)
                self.peak = max(self.peak, self._held)
                self._passed[number, in_backward] = (-1, held)

    def _places(self, node: fx.Node, places: Mapping[fx.Node, Blocks]) -> Blocks:
        if node.target is operator.getitem:
            held = places[node_arg(node)]
            return (held[int_arg(node, 1)],) if len(held) > 1 else held
        if isinstance(node.target, Begin):
            (operand,) = places[node_arg(node)]
            return tuple(operand if size is None else self.new(size) for size in _moved_by(node).held)
        if node.target is wait:
            result = _moved_by(node_arg(node)).result
            return (self.new(nbytes(node.meta["val"])) if result is None else places[node_arg(node)][result],)
        if is_view(node) or (node.target in OPS and OPS[node.target].kernel == "none"):
            return places[node_arg(node)] * len(values(node))
        return tuple(self.new(nbytes(value)) if isinstance(value, Tensor) else None for value in values(node))


class _Moved(NamedTuple):
    """The memory of a collective between its begin and its end."""

    held: tuple[int | None, ...]
    """Bytes of the tensors that it sends and receives; None for its operand's memory."""
    result: int | None
    """The index of the tensor that shares the result's memory, if any does."""


def _moved_by(begin: fx.Node) -> _Moved:
    value = node_arg(begin).meta["val"]
    shape, strides = (tuple(map(hint, sizes)) for sizes in (value.shape, value.stride()))
    return _moved(begin.target, hashable(cast(OpArgs, begin.args[1:])), shape, strides, value.dtype)


@lru_cache(maxsize=4096)
def _moved(begin: object, args: OpArgs, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> _Moved:
    """Runs a collective's kernel on a meta tensor; cached, because layers send equal tensors."""
    assert isinstance(begin, Begin)
    operand = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    made = begin.part(operand, args)
    if isinstance(made, Tensor):
        taken, result = [made], made
    else:
        taken = [made.sent, received := made.received(kernels().lookup(str(args[-1])).size)]
        result = made.result(received)
    held = {tensor.untyped_storage()._cdata: tensor for tensor in taken}  # an all-reduce receives in place
    of_operand, of_result = (tensor.untyped_storage()._cdata for tensor in (operand, result))
    sizes = [None if of == of_operand else tensor.untyped_storage().nbytes() for of, tensor in held.items()]
    return _Moved(tuple(sizes), [*held].index(of_result) if of_result in held else None)


def call_peak(local: Shortened) -> float:
    """Peak bytes of one call of a rank without gradients: its results and temporary values."""
    memory = _Memory(gaps=local.gaps)
    arguments = [memory.new(0) for _ in placeholders(local.module.graph)]
    memory.hold([*arguments, *arguments])  # the caller keeps a reference
    memory.run(local.module.graph, arguments)
    return memory.peak


def step_peak(local: Shortened, slices: int = 1) -> float:
    """Peak bytes of one training step of a rank: activations, gradients and temporary values.

    The gradient starts at the first scalar result, as a loss is, or at all results. Parameters,
    buffers and the call's arguments are not counted, because the caller keeps them.

    Args:
        slices: the number of ranks that split the gradient of each weight as soon as it is
            computed.

    Raises:
        NotImplementedError, CaptureError: a backward graph can't be made.
    """
    module = local.module
    parts = segments(module)
    graphs = {number: step_graphs(part.graph) for number, part in enumerate(parts) if not part.is_view}
    memory = _Memory(gaps=local.gaps)
    blocks: dict[str, Block | None] = defaultdict(partial(memory.new, 0))
    """Name of a value -> its memory; the caller's values count zero bytes."""
    saved: dict[int, list[Block | None]] = {}
    for number, part in enumerate(parts):
        taken = [blocks[name] for name in part.arguments]
        memory.hold(taken)
        if part.is_view:
            blocks |= dict.fromkeys(part.results, taken[0])
            continue
        ends = memory.run(graphs[number].forward.graph, taken)
        blocks |= zip(part.results, ends, strict=False)
        saved[number] = ends[len(part.results) :]
    wanted = {node.name: memory.new(nbytes(node.meta["val"])) for node in _losses(module)}
    memory.hold(wanted.values())
    weights = {n.name: nbytes(n.meta["val"]) for n in placeholders(module.graph) if is_weight(n)}
    for number, part in reversed([*enumerate(parts)]):
        _backward(memory, part, graphs.get(number), saved.get(number, []), wanted)
        for name in weights.keys() & wanted.keys() & set(part.arguments):
            memory.shrink(wanted[name], weights[name] // slices, local.times.get(name, 1))
    return memory.peak


def _losses(local: fx.GraphModule) -> list[fx.Node]:
    results = [r for r in results_of(local.graph) if isinstance(r, fx.Node) and is_float(r.meta.get("val"))]
    losses = [r for r in results if r.meta.get("needs_grad")]
    return [r for r in losses if r.meta["val"].numel() == 1][:1] or losses


def _backward(
    memory: _Memory, part: Segment, parts: Partition | None, saved: Sequence[Block | None], wanted: dict[str, Block]
) -> None:
    """Runs a segment's backward: replaces its results' gradients in `wanted` with its arguments'."""
    given = tuple(name in wanted for name in part.results)
    taken = {name: wanted.pop(name) for name in part.results if name in wanted}
    if parts is None:  # the gradient of a view is a view
        wanted |= dict.fromkeys(part.arguments[: len(taken)], *taken.values())
        return
    if not any(given):
        memory.release(saved)
        return
    for_given = parts if given == parts.given else step_graphs(part.graph, given, kept=parts.saved)
    by_name = dict(zip(parts.saved, saved, strict=True))
    arguments = [by_name[name] for name in for_given.saved]
    memory.release(block for name, block in by_name.items() if name not in for_given.saved)
    memory.hold(taken.values())  # autograd keeps them until the segment's backward has run
    found = memory.run(for_given.backward.graph, [*arguments, *taken.values()], in_backward=True)
    memory.release(taken.values())
    for name, block in zip(part.arguments, found, strict=True):
        if block is not None and wanted.setdefault(name, block) != block:
            memory.release([block])  # autograd adds it to the other
