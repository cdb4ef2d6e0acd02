"""The properties of values and ops that costs depend on: shapes, bytes, and the products that an op computes.

Dynamic sizes have the example inputs' values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from torchshard.core.conversions import ConversionStep
from torchshard.core.layouts import Layout, Shard, largest_share
from torchshard.core.rows import Dim, Row
from torchshard.custom_ops.recurrent import RECURRENCES
from torchshard.custom_ops.whole import OpKey, entry
from torchshard.ir.buckets import Bucket, bucket_of, summed_dtype
from torchshard.ir.effects import only_looks
from torchshard.ir.fake_values import hint, nbytes
from torchshard.ir.gathered_again import dims_gathered_again
from torchshard.ir.graph import bound_args, is_weight, node_row, operands, values
from torchshard.rules.convolution import CONVOLUTIONS
from torchshard.rules.linear_algebra import GROUPED

aten = torch.ops.aten


class Product(NamedTuple):
    """A product within an op: one multiply-add per point of its factors."""

    rows: tuple[str, ...]
    """The factors of the result that the first operand brings."""
    columns: tuple[str, ...] = ()
    """The factors of the result that the second operand brings."""
    depth: tuple[str, ...] = ()
    """The factors that are summed over."""
    batch: tuple[str, ...] = ()
    """The factors of both operands and the result: each point of these has a product of its own."""
    divided: tuple[str, ...] = ()
    """Factors that the points are divided among, such as experts: a rank with half of one has half of the points."""

    @property
    def axes(self) -> tuple[str, ...]:
        """All factors, without those that points are divided among."""
        return self.rows + self.columns + self.depth + self.batch


def _factors(*tensors: Sequence[Dim]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for dims in tensors for dim in dims for term in dim for axis in term))


def _of(first: Sequence[str], second: Sequence[str], result: Sequence[str], divided: tuple[str, ...] = ()) -> Product:
    """Sorts the factors of the second operand and of the result; a convolution's first one has positions of its own."""
    return Product(
        tuple(f for f in result if f not in second),
        tuple(f for f in result if f in second and f not in first),
        tuple(f for f in second if f not in result and f not in divided),
        tuple(f for f in result if f in second and f in first),
        divided,
    )


def _product(row: Row) -> list[Product]:
    return [_of(_factors(row.operands[0]), _factors(*row.operands[1:]), _factors(row.results[0]))]


def _transposed(row: Row) -> list[Product]:
    first, second = (_factors(dims) for dims in row.operands[:2])
    return [_of(first, second, [f for f in (*first, *second) if (f in first) != (f in second)])]


def _grouped(row: Row) -> list[Product]:
    first, second, result = map(_factors, (*row.operands[:2], row.results[0]))
    return [_of(first, second, result, divided=("e",))]


def _attention(row: Row) -> list[Product]:
    query, key, value = row.operands[:3]
    return [Product(_factors(query, key)), Product(_factors(row.results[0], value))]


def _recurrence(row: Row) -> list[Product]:
    steps = row.operands[0][:2]
    return [Product(_factors(steps), *((each,) for each in _factors(w))) for w in row.operands[1:] if len(w) == 2]


PRODUCTS: Mapping[OpKey, Callable[[Row], list[Product]]] = {
    **dict.fromkeys(
        (aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default, aten.mv.default, aten.dot.default,
         aten.outer.default, aten.einsum.default, *CONVOLUTIONS),
        _product,
    ),
    aten.convolution.default: _transposed,
    **dict.fromkeys(GROUPED, _grouped),
    aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys(RECURRENCES, _recurrence),
}  # fmt: skip
"""Op, or its name if its library may be missing -> a function from the op's row to its products."""


WITH_WEIGHTS = {aten.linear.default, aten.mm.default, aten.matmul.default, *CONVOLUTIONS}
"""Products with weights: a collective of the input's gradient overlaps with computing the weight's gradient."""


LOOKUPS = {aten.embedding.default}
"""Ops that read only the part of their table that they return."""


ATTENTION = aten.scaled_dot_product_attention.default
ATTENTION_BACKWARD = 2.5
"""The work of attention's backward over its forward's, five products instead of two: Dao, "FlashAttention-2" (2023)."""


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
        return only_looks(self.node)

    @property
    def trains(self) -> bool:
        """Whether a gradient flows back through it."""
        return bool(self.node.meta.get("needs_grad"))

    @property
    def is_causal(self) -> bool:
        """Whether it is attention in which a position sees no later ones."""
        return self.node.target == ATTENTION and bool(bound_args(self.node)["is_causal"])

    @property
    def is_linear(self) -> bool:
        """Whether it is linear in all of its operands together, so that backward needs none of them."""
        linear = self.row.options.linear if self.row is not None else ()
        return any(len(together) == len(self.inputs) for together in linear)


def _weight_gradients(node: fx.Node) -> float:
    """Returns the FLOPs of the gradients of the weights that a value is multiplied with."""
    flops = 0.0
    for user in node.users:
        if user.target in WITH_WEIGHTS and any(is_weight(other) for other in operands(user) if other is not node):
            op = Op.of(user)
            flops += sum(2 * math.prod(op.sizes.get(axis, 1) for axis in each.axes) for each in op.products)
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
