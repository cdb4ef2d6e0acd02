"""Prices of ops and conversions on a machine, in seconds and bytes, forward and backward.

docs/planning.md has the formulas. Dynamic sizes have the example inputs' values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from torchshard.core.conversions import ROUNDS, ConversionStep, Steps, kernels, plan_conversions, sent_bytes
from torchshard.core.layouts import EQUAL, Layout, Shard, largest_share, local_size, type_text
from torchshard.core.mesh import MeshAxis
from torchshard.core.paths import module_around
from torchshard.core.rows import Choice, Dim, Row
from torchshard.custom_ops.recurrent import RECURRENCES
from torchshard.custom_ops.whole import OpKey, entry
from torchshard.ir.buckets import Bucket, bucket_of, summed_dtype
from torchshard.ir.fake_values import hint, nbytes
from torchshard.ir.gathered_again import dims_gathered_again, is_gathered_again
from torchshard.ir.graph import is_weight, node_row, operands, values
from torchshard.planner.constants import BUCKETED, FUSED
from torchshard.planner.inside import calls_inside
from torchshard.plans.costs import Sent
from torchshard.plans.machine import Machine
from torchshard.rules.convolution import CONVOLUTIONS
from torchshard.rules.linear_algebra import GROUPED

aten = torch.ops.aten


class Product(NamedTuple):
    """A product within an op: one multiply-add per point of some factors."""

    axes: tuple[str, ...]
    divided: tuple[str, ...] = ()
    """Factors that the points are divided among, such as experts: a rank with half of one has half of the points."""


def _over(*tensors: Sequence[Dim], divided: tuple[str, ...] = ()) -> Product:
    axes = dict.fromkeys(axis for dims in tensors for dim in dims for term in dim for axis in term)
    return Product(tuple(axes), divided)


def _product(row: Row) -> list[Product]:
    return [_over(*row.operands[1:], row.results[0])]


def _attention(row: Row) -> list[Product]:
    query, key, value = row.operands[:3]
    return [_over(query, key), _over(row.results[0], value)]


def _recurrence(row: Row) -> list[Product]:
    steps = row.operands[0][:2]
    return [_over(steps, weight) for weight in row.operands[1:] if len(weight) == 2]


PRODUCTS: Mapping[OpKey, Callable[[Row], list[Product]]] = {
    **dict.fromkeys(
        (aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default,
         aten.outer.default, aten.einsum.default, *CONVOLUTIONS),
        _product,
    ),
    aten.convolution.default: lambda row: [_over(*row.operands[:2])],  # transposed
    **dict.fromkeys(GROUPED, lambda row: [_over(row.operands[0], row.results[0], divided=("e",))]),
    aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys(RECURRENCES, _recurrence),
}  # fmt: skip
"""Op, or its name if its library may be missing -> a function from the op's row to its products."""
WITH_WEIGHTS = {aten.linear.default, aten.mm.default, aten.matmul.default, *CONVOLUTIONS}
"""Products with weights: a collective of the input's gradient overlaps with computing the weight's gradient."""
LOOKUPS = {aten.embedding.default}
"""Ops that read only the part of their table that they return."""
ATTENTION = aten.scaled_dot_product_attention.default
NOTHING = Sent("none", 0.0, 0.0)


@dataclass(frozen=True)
class Value:
    """The properties of a tensor that costs depend on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    needs_grad: bool
    hides: float = 0.0
    """FLOPs of the gradients of the weights that it is multiplied with. They overlap with a collective of its own
    gradient."""
    gathered_again: frozenset[int] = frozenset()
    """The dims along which backward gathers it again."""
    bucket: Bucket | None = None
    """The message that sums its gradient together with others; None for a separate message."""
    summed_dtype: torch.dtype | None = None
    """The dtype in which its gradient is summed, if it differs from the value's."""

    @staticmethod
    def of(node: fx.Node, val: Tensor | None = None) -> Value:
        """Returns the Value of a node's only result, or of `val`, one of its results."""
        val = node.meta["val"] if val is None else val
        return Value(tuple(map(hint, val.shape)), val.dtype, nbytes(val), bool(node.meta.get("needs_grad")))

    @staticmethod
    def converted(node: fx.Node) -> Value:
        """Returns the Value of a node's only result, with the fields that prices of conversions depend on."""
        value = replace(Value.of(node), gathered_again=dims_gathered_again(node, node.users))
        if not value.needs_grad:
            return value
        return replace(value, hides=_weight_gradients(node), bucket=bucket_of(node), summed_dtype=summed_dtype(node))

    @property
    def gradient(self) -> Value:
        """The gradient, in the dtype in which the ranks sum it."""
        itemsize = self.dtype.itemsize if self.summed_dtype is None else self.summed_dtype.itemsize
        return replace(self, nbytes=self.nbytes * itemsize // self.dtype.itemsize)

    def is_bucketed(self, step: ConversionStep) -> bool:
        """Whether a conversion shares its message with other gradients or weights."""
        if self.bucket is None:
            return False
        if step.name == "all_gather" and self.bucket.gathered is not None:
            return isinstance(step.source, Shard) and step.source.dim == 0
        return step.name == "copy"

    def held(self, layout: Layout, ranks: int) -> float:
        """Returns the bytes on the first rank, which stores the most."""
        return self.nbytes * largest_share(layout, self.shape, ranks)


NO_TENSOR = Value((), torch.int64, 0, False)
"""The Value of a result that is a number or a list."""


@dataclass(frozen=True)
class Op:
    """The properties of an op that costs depend on."""

    node: fx.Node
    row: Row | None
    inputs: tuple[fx.Node, ...]
    """The nodes of its operands."""
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    sizes: Mapping[str, int]
    """The size of each factor of the row; a dynamic factor needs a dim in which it is the only dynamic one."""
    products: Sequence[Product] = ()
    """The products that the op computes."""

    @staticmethod
    def of(node: fx.Node) -> Op:
        """Reads a node and its row."""
        row = node_row(node)
        results = tuple(Value.of(node, v) if isinstance(v, Tensor) else NO_TENSOR for v in values(node))
        nodes = tuple(operands(node))
        inputs = tuple(map(Value.of, nodes))
        if row is None:
            return Op(node, row, nodes, inputs, results, {})
        products = entry(PRODUCTS, node.target)
        sizes = _sizes(row, (*inputs, *results))
        return Op(node, row, nodes, inputs, results, sizes, products(row) if products is not None else ())

    @property
    def is_view(self) -> bool:
        """Whether the result shares the operand's memory."""
        returns = getattr(getattr(self.node.target, "_schema", None), "returns", ())
        return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)

    @property
    def backward_ratio(self) -> float:
        """The backward's work as a multiple of the forward's."""
        if not self.node.meta.get("needs_grad"):
            return 0.0
        if self.node.target == ATTENTION:
            return 2.5  # five products instead of two: Dao, "FlashAttention-2" (2023)
        if self.products:
            return float(min(sum(value.needs_grad for value in self.operands), 2))
        return 1.0


def _weight_gradients(node: fx.Node) -> float:
    """Returns the FLOPs of the gradients of the weights that a value is multiplied with."""
    flops = 0.0
    for user in node.users:
        if user.target in WITH_WEIGHTS and any(is_weight(other) for other in operands(user) if other is not node):
            op = Op.of(user)
            flops += sum(2 * math.prod(op.sizes.get(axis, 1) for axis in axes) for axes, _ in op.products)
    return flops


def _sizes(row: Row, tensors: Sequence[Value]) -> dict[str, int]:
    """Returns the sizes of a row's factors; dynamic ones are read from the tensors' shapes."""
    sizes = {axis: size for axis, size in row.sizes.items() if isinstance(size, int)}
    for dims, value in zip((*row.operands, *row.results), tensors, strict=False):
        for dim, size in zip(dims, value.shape, strict=True):
            dynamic = [axis for axis in dim[0] if not isinstance(row.sizes[axis], int)] if len(dim) == 1 else []
            if len(dynamic) == 1:
                sizes[dynamic[0]] = size // math.prod(row.sizes[axis] for axis in dim[0] if axis not in dynamic)
    return sizes


@dataclass(frozen=True)
class CostModel:
    """The costs of a step on a machine."""

    machine: Machine
    axis: MeshAxis
    recompute: tuple[str, ...] = field(default=(), kw_only=True)
    """The modules with values that backward recomputes."""
    _prices: dict[Value, dict[ConversionStep, float]] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )
    """The seconds of each conversion of a value."""
    _cheapest: dict[tuple[Value, Layout, frozenset[Layout]], Steps | None] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )
    """The cheapest conversions of a value, from the produced to the required layouts."""

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
        back = self._sent(backward, value.gradient, target, source)
        if back.nbytes and value.hides:
            # the schedule begins it before the weights' gradients, and waits for it after them
            meanwhile = value.hides / self.axis.size / self.machine.flops
            waits = max(back.seconds - meanwhile, self.machine.launch)
            back = replace(back, seconds=waits, hidden=back.seconds - waits)
        there = self._sent(forward, value, source, target)
        if value.is_bucketed(step):
            back, there = map(self._beside_others, (back, there))
        return there, back, there if is_gathered_again(step, value.gathered_again) else NOTHING

    def _beside_others(self, sent: Sent) -> Sent:
        """Returns the cost of one part of a shared message: its bytes, and a share of the latency."""
        by_bytes = sent.nbytes / self.machine.link(self.axis.size)[0]
        return replace(sent, seconds=by_bytes + (sent.seconds - by_bytes) / BUCKETED)

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
        sent = sent_bytes(kernel, value.nbytes, source, target, value.shape, self.axis.size)
        steps = ROUNDS[kernel] * (self.axis.size - 1)
        packed = sum(2 * value.nbytes for end in (source, target) if _is_strided(end, value.shape))
        bandwidth, latency = self.machine.link(self.axis.size)
        ring = self.machine.launch + steps * latency + sent / bandwidth
        return Sent(kernel, sent, ring + packed / self.machine.memory_bandwidth)

    # --- computation -------------------------------------------------------------------------------------------------

    def seconds(self, op: Op, choice: Choice) -> float:
        """Returns the seconds of an op in forward and backward together, on the rank with the most work."""
        return sum(self.ways(op, choice))

    def ways(self, op: Op, choice: Choice) -> tuple[float, float]:
        """Returns the seconds of an op in forward, and in backward including its recomputation."""
        m = self.machine
        if op.is_view:
            work = 0.0
        elif op.products:
            work = max(self.flops(op, choice) / m.flops, self.traffic(op, choice) / m.memory_bandwidth)
        else:
            bandwidth = min(m.elementwise_bandwidth, m.memory_bandwidth / FUSED)
            work = self.traffic(op, choice) / bandwidth
        forward = m.op_overhead + work
        return forward, forward * (self.is_recomputed(op.node) + op.backward_ratio)

    def is_recomputed(self, node: fx.Node) -> bool:
        """Returns whether backward recomputes the values of an op."""
        if not node.meta.get("needs_grad"):
            return False
        return "recompute" in node.meta or module_around(node.meta.get("module", ""), self.recompute) is not None

    def flops(self, op: Op, choice: Choice) -> float:
        """Returns the FLOPs of an op's products in forward, on the rank with the most work."""
        sizes, flops = self._local_sizes(op, choice), 0.0
        for axes, divided in op.products:
            share = _points(divided, sizes) / max(_points(divided, op.sizes), 1)
            flops += 2 * math.prod(sizes.get(axis, 1) for axis in axes) * share
        return flops

    def _local_sizes(self, op: Op, choice: Choice) -> dict[str, int]:
        """Returns the sizes of a row's factors on the first rank, which has the largest slices."""
        sizes, ranks = dict(op.sizes), self.axis.size
        for axis, parts in choice.factors:
            sizes[axis] = sizes[axis] // ranks if parts == EQUAL else local_size(parts, 0, ranks)
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
        linear = op.row.options.linear if op.row is not None else ()
        is_linear = any(len(together) == len(op.inputs) for together in linear)
        if not op.backward_ratio or op.is_view or is_linear or self.is_recomputed(op.node):
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
    return math.prod(shape[: layout.dim]) > 1 or (layout.parts is not None and len(layout.parts) > 1)
