"""Prices of ops and conversions on a machine, in seconds and bytes, forward and backward.

docs/planning.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import fx

from torchshard.core.conversions import ConversionStep, Steps, kernels, plan_conversions, sent_bytes
from torchshard.core.layouts import EQUAL, Blocks, Layout, Parts, Shard, has_blocks, local_size, type_text
from torchshard.core.mesh import MeshAxis
from torchshard.core.paths import module_around
from torchshard.core.rows import Choice
from torchshard.ir.gathered_again import is_gathered_again
from torchshard.planner.constants import BUCKETED
from torchshard.planner.inside import calls_inside
from torchshard.planner.kernels import kernels_of, moved_bytes, product_seconds
from torchshard.planner.properties import ATTENTION, ATTENTION_BACKWARD, LOOKUPS, Op, Value
from torchshard.plans.costs import Sent
from torchshard.plans.machine import Machine

NOTHING = Sent("none", 0.0, 0.0)


@dataclass(frozen=True)
class CostModel:
    """The costs of a step on a machine."""

    machine: Machine
    axis: MeshAxis
    recompute: tuple[str, ...] = field(default=(), kw_only=True)
    """The modules with values that backward recomputes."""
    compiled: bool = field(default=False, kw_only=True)
    """Whether a compiler fuses ops between products."""
    _prices: dict[Value, dict[ConversionStep, float]] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )
    """The seconds of each conversion of a value."""
    _cheapest: dict[tuple[Value, Layout, frozenset[Layout]], Steps | None] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )
    """The cheapest conversions of a value, from the produced to the required layouts."""

    def on(self, ranks: int) -> CostModel:
        """Returns the costs on another number of ranks."""
        return CostModel(self.machine, MeshAxis(ranks), recompute=self.recompute, compiled=self.compiled)

    # --- communication -----------------------------------------------------------------------------------------------

    def plan_conversions(self, value: Value, produced: Layout, required: Iterable[Layout]) -> Steps | None:
        """Returns the fastest conversions that give a value all required layouts; None if impossible."""
        key = value, produced, frozenset(required)
        if key not in self._cheapest:
            price = self._price(value)
            self._cheapest[key] = plan_conversions(produced, key[2], needs_grad=value.needs_grad, price=price)
        return self._cheapest[key]

    def _price(self, value: Value) -> Callable[[ConversionStep], float]:
        known = self._prices.setdefault(value, {})

        def price(step: ConversionStep) -> float:
            if step not in known:
                known[step] = sum(sent.seconds for sent in self.sent(value, step))
            return known[step]

        return price

    def sent(self, value: Value, step: ConversionStep) -> tuple[Sent, Sent, Sent]:
        """Returns the costs of a conversion: in forward, of its own backward, and of a repetition in backward."""
        forward, backward = kernels(step.name, needs_grad=value.needs_grad)
        source, target = step.source, step.target
        there, back = self._sent(forward, value, source, target), self._sent(backward, value.gradient, target, source)
        again = there if is_gathered_again(step, value.gathered_again) else NOTHING
        # the schedule begins both in backward before the products of the value's weights: the first of these give the
        # value's gradient and wait for no gather, the others give the weights' and wait for no sum
        back, again = (self._behind_products(sent, value) for sent in (back, again))
        if value.is_bucketed(step):
            back, there, again = map(self._beside_others, (back, there, again))
        return there, back, again

    def _behind_products(self, sent: Sent, value: Value) -> Sent:
        """Returns the cost of a collective while products with a value's weights run."""
        if not sent.nbytes or not value.hides:
            return sent
        meanwhile = value.hides / self.axis.size / self.machine.flops
        waits = min(max(sent.seconds - meanwhile, self.machine.begins(sent.kernel, self.axis.size)), sent.seconds)
        return replace(sent, seconds=waits, hidden=sent.seconds - waits)

    def _beside_others(self, sent: Sent) -> Sent:
        """Returns the cost of one part of a shared message: its bytes, and a share of the latency."""
        begins = self.machine.begins(sent.kernel, self.axis.size) if sent.nbytes else 0.0
        return replace(sent, seconds=sent.seconds - begins + begins / BUCKETED)

    def inside(self, op: Op, choice: Choice) -> list[tuple[str, str, Sent, Sent]]:
        """Returns (name, type, forward, backward) of each collective within a split op's local computation."""
        if op.row is None:
            return []
        prices = []
        for call in calls_inside(op.node, op.row, choice, self.axis):
            value = Value(call.shape, call.dtype, call.nbytes, bool(op.node.meta.get("needs_grad")))
            forward, backward, _ = self.sent(value, call.step)
            text = type_text(call.dtype, call.shape)
            prices.append((call.step.name, text, forward.often(call.times), backward.often(call.times)))
        return prices

    def _sent(self, kernel: str, value: Value, source: Layout, target: Layout) -> Sent:
        if self.axis.size == 1 or kernel == "none" or not value.nbytes:
            return NOTHING
        if kernel in ("slice", "pad"):
            return Sent("none", 0.0, value.nbytes / self.machine.memory_bandwidth)
        ranks, machine = self.axis.size, self.machine
        sent = sent_bytes(kernel, value.nbytes, source, target, value.shape, ranks)
        packed = sum(2 * value.nbytes for end in (source, target) if _is_strided(end, value.shape))
        seconds = machine.begins(kernel, ranks) + machine.sends(kernel, value.nbytes, sent, ranks)
        return Sent(kernel, sent, seconds + packed / machine.memory_bandwidth)

    # --- computation -------------------------------------------------------------------------------------------------

    def seconds(self, op: Op, choice: Choice) -> float:
        """Returns the seconds of an op in forward and backward together, on the rank with the most work."""
        return sum(self.ways(op, choice))

    def ways(self, op: Op, choice: Choice) -> tuple[float, float]:
        """Returns the seconds of an op in forward, and in backward including its recomputation."""
        forward, backward = (0.0, 0.0) if op.is_view else self._work(op, choice)
        ahead, back = (count * self.machine.op_overhead for count in kernels_of(op, compiled=self.compiled))
        return forward + ahead, (forward + ahead) * self.is_recomputed(op.node) + backward + back

    def _work(self, op: Op, choice: Choice) -> tuple[float, float]:
        """Returns the seconds of an op's kernels in forward and in backward, without their overhead."""
        if not op.products:
            held = partial(Value.held, ranks=self.axis.size)
            read, written = [*map(held, op.operands, choice.operands)], [*map(held, op.results, choice.results)]
            forward, backward = moved_bytes(op, read, written, compiled=self.compiled)
            bandwidth = min(self.machine.elementwise_bandwidth, self.machine.memory_bandwidth)
            return forward / bandwidth, backward / bandwidth
        memory = self.traffic(op, choice) / self.machine.memory_bandwidth
        if op.node.target == ATTENTION:
            rate = min(self.machine.attention_flops, self.machine.flops)
            forward = max(self.flops(op, choice) / rate, memory)
            return forward, forward * ATTENTION_BACKWARD * op.trains
        forward, *gradients = self._products(op, choice)
        needed = [value.needs_grad and op.trains for value in op.operands[:2]]
        backward = sum(max(seconds, memory) for seconds, needs in zip(gradients, needed, strict=False) if needs)
        return max(forward, memory), backward

    def _products(self, op: Op, choice: Choice) -> tuple[float, float, float]:
        """Returns the seconds of an op's products, and of those for the first and the second operand's gradients."""
        forward, first, second = 0.0, 0.0, 0.0
        for rows, columns, depth, batch in self._local_products(op, choice):
            seconds = partial(product_seconds, self.machine, batch=batch, itemsize=op.operands[0].dtype.itemsize)
            forward += seconds(rows, columns, depth)
            first += seconds(rows, depth, columns)
            second += seconds(depth, columns, rows)
        return forward, first, second

    def is_recomputed(self, node: fx.Node) -> bool:
        """Returns whether backward recomputes the values of an op."""
        if not node.meta.get("needs_grad"):
            return False
        return "recompute" in node.meta or module_around(node.meta.get("module", ""), self.recompute) is not None

    def flops(self, op: Op, choice: Choice) -> float:
        """Returns the FLOPs of an op's products in forward, on the rank with the most work."""
        flops = sum(2.0 * math.prod(sizes) for sizes in self._local_products(op, choice))
        is_by_rows = any(factor == "l" for factor, _ in choice.factors)  # the last rank's queries see all keys
        return flops / 2 if op.is_causal and not is_by_rows else flops

    def _local_products(self, op: Op, choice: Choice) -> Iterator[tuple[float, float, float, float]]:
        """Yields rows, columns and depth of an op's products, and their number, on the rank with the most work."""
        sizes = self._local_sizes(op, choice)
        for each in op.products:
            share = _points(each.divided, sizes) / max(_points(each.divided, op.sizes), 1)
            rows, columns, depth, batch = (math.prod(sizes.get(f, 1) for f in factors) for factors in each[:4])
            yield rows, columns, depth, batch * share

    def _local_sizes(self, op: Op, choice: Choice) -> dict[str, int]:
        """Returns the sizes of a row's factors on the first rank, which has the largest slices."""
        sizes, ranks = dict(op.sizes), self.axis.size
        for axis, parts in choice.factors:
            sizes[axis] = _local(sizes[axis], parts, ranks)
        return sizes

    def traffic(self, op: Op, choice: Choice) -> float:
        """Returns the bytes that an op reads and writes in forward, on the rank with the most."""
        results = list(zip(op.results, choice.results, strict=True))
        read = results if op.node.target in LOOKUPS else list(zip(op.operands, choice.operands, strict=True))
        return sum(value.held(layout, self.axis.size) for value, layout in [*read, *results])

    # --- memory ------------------------------------------------------------------------------------------------------

    def saved(self, op: Op, choice: Choice) -> float:
        """Estimates the bytes that autograd saves for an op's backward.

        It saves floating-point operands that ops compute, unless the op is linear in all operands.
        """
        if not op.trains or op.is_view or op.is_linear or self.is_recomputed(op.node):
            return 0.0
        kept = [(value, at) for node, value, at in zip(op.inputs, op.operands, choice.operands, strict=True)
                if node.op != "placeholder" and value.dtype.is_floating_point]  # fmt: skip
        return sum(value.held(layout, self.axis.size) for value, layout in kept)


def _points(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Returns the product of some factors' sizes; the row may have divided one in two, `e` and `e*`."""
    return math.prod(sizes.get(axis, 1) * sizes.get(f"{axis}*", 1) for axis in axes)


def _is_strided(layout: Layout, shape: Sequence[int]) -> bool:
    """Returns whether slices are not contiguous in memory, so sending requires packing."""
    if not isinstance(layout, Shard):
        return False
    return math.prod(shape[: layout.dim]) > 1 or has_blocks(layout) or len(layout.listed) > 1


def _local(size: int, parts: Parts, ranks: int) -> int:
    """Returns the first rank's size of a factor."""
    return size // ranks if parts == EQUAL or isinstance(parts, Blocks) else local_size(parts, 0, ranks)
