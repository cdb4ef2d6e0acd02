"""Finds rows that are sorted and put back, as mixtures of experts do: each rank may sort its own.

    order = sort(experts)             the order of all rows
    rows  = index(x, order // 2)      two rows of each token
    y     = grouped_mm(rows, w, offsets)
    z     = index(y, inverse)         the rows as they were

Sorting the whole batch would require the full batch on each rank. But the result of a row depends
only on that row, wherever the sort puts it. So each rank may sort its own rows, multiply them, and
put them back. In between, a rank's values are not slices of the unsharded model's values, and
offsets count the rank's own rows. So these values must not be converted, and may only feed ops
known to keep rows apart; otherwise the pass leaves the graph as it is.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Mapping

import torch
from torch import fx

from torchshard.core.choices import choices
from torchshard.core.errors import RuleError
from torchshard.core.layouts import Shard
from torchshard.core.mesh import MeshAxis
from torchshard.core.notation import dynamic_factor
from torchshard.core.rows import Choice, Row
from torchshard.custom_ops.experts import EXPERT_COUNTS
from torchshard.custom_ops.fx_types import Argument
from torchshard.custom_ops.whole import entry
from torchshard.ir.effects import uses_rng, writes
from torchshard.ir.fake_values import size_expr
from torchshard.ir.graph import (
    bound_args,
    call_of,
    is_tensor,
    is_tensor_op,
    multiples_of,
    node_row,
    operands,
    values,
    whole_choice,
)
from torchshard.passes.own_order_steps import OUTSIDE, PARTS, SORTS, STEPS, Kind, Step, by_sorting
from torchshard.rules.pointwise import CASTS

aten = torch.ops.aten

_SHAPED = (aten.view.default, aten.reshape.default, aten.unsqueeze.default)
_VIEWS = (*_SHAPED, aten.expand.default)
_PARTS_OF = (
    *_VIEWS, aten.flatten.using_ints, aten.select.int, aten.slice.Tensor, aten.contiguous.default, aten.clone.default,
    aten.transpose.int, aten.t.default, aten.squeeze.dim, aten.detach.default,
)  # fmt: skip
"""Ops with results made only of their operand's elements."""
_COUNTS = (aten.histc.default, aten.cumsum.default)
_LIKE = (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default)
_DIVISIONS = (aten.floor_divide.default, aten.div.Tensor_mode)
_VIEWED: Collection[Kind] = ("order", "tokens", "inverse")
"""Kinds that views preserve."""
_NUMBERS = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Dtypes that can represent the numbers of experts and rows."""


class _LeavesError(Exception):
    """An op is not known to keep rows apart."""


def keep_own_order(module: fx.GraphModule) -> bool:
    """Gives ops from a sort to the end rows that split the sorted dim; returns whether it gave any.

    Their meta 'own_order' is the kind of their result; `own_order_choice` is the only choice of
    each.
    """
    is_any = False
    for sort in list(module.graph.nodes):
        if sort.target in SORTS and "own_order" not in sort.meta:
            with contextlib.suppress(_LeavesError):
                _Followed(sort).mark()
                is_any = True
    return is_any


def own_order_choice(node: fx.Node, axis: MeshAxis) -> Choice:
    """The only choice of an op that keeps rows apart: it splits the rows, if the op has any."""
    row = node_row(node)
    if row is not None and node.target is EXPERT_COUNTS:
        return next(choice for choice in choices(row, axis.size) if choice.factors)
    return (_split(row, axis.size) if row is not None else None) or whole_choice(node)


def _split(row: Row, ranks: int) -> Choice | None:
    """The choice that splits rows, which are the first dim of each tensor that has them."""
    splits = (choice for choice in choices(row, ranks) if choice.splits_dynamic)
    tensors = ((c, [at for at in (*c.operands, *c.results) if isinstance(at, Shard)]) for c in splits)
    return next((choice for choice, split in tensors if all(at.dim == 0 for at in split)), None)


class _Followed:
    """Follows the results of a sort until rows are put back.

    Raises:
        _LeavesError: an op may mix rows.
    """

    def __init__(self, sort: fx.Node) -> None:
        (given,) = operands(sort)
        shape = given.meta["val"].shape
        self._count = size_expr(shape[0]) if len(shape) == 1 else 0
        """The number of rows."""
        if dynamic_factor(self._count, multiples_of(sort.graph)) is None:
            raise _LeavesError
        self._per_token = 0
        """The number of rows per token; 0 until it is known."""
        self._given = _source(given)
        self._kinds: dict[fx.Node, Kind] = {sort: SORTS[sort.target]}
        self.rows: dict[fx.Node, Row | None] = {sort: _row_of_sort(sort)}
        """The row of each op that keeps rows apart."""
        self._waiting = set(sort.users)
        """Users of these values that the walk has not reached yet."""
        self._counts_all = True
        """Whether every row is known to precede the last end."""
        node = self._given
        while self._waiting:
            node = node.next
            if node is not sort:
                self._follow(node)
        if "put back" not in self._kinds.values():
            raise _LeavesError

    def mark(self) -> None:
        """Writes rows and kinds to the ops' metadata."""
        for node, row in self.rows.items():
            node.meta |= {"row": row, "own_order": self._kinds[node]}
            if self._kinds[node] == "ends":
                node.meta["counts_all"] = self._counts_all

    def _follow(self, node: fx.Node) -> None:
        self._waiting.discard(node)
        taken = {n: self._kinds[n] for n in node.all_input_nodes if self._kinds.get(n, "plain") not in OUTSIDE}
        if node.target is aten.histc.default and not taken and _source(operands(node)[0]) is self._given:
            taken = dict.fromkeys(operands(node), "given")
        if not taken:
            return
        if node.target is operator.getitem:
            (whole,) = taken.values()
            kind = PARTS[whole].get(node.args[1]) if whole in PARTS else whole
            if kind is None:
                raise _LeavesError
            self._kinds[node] = kind
        elif is_tensor_op(node):
            self._kinds[node], self.rows[node] = self._step(node, taken)
        elif node.op == "output":
            raise _LeavesError
        if self._kinds.get(node, "plain") not in OUTSIDE:
            self._waiting.update(node.users)

    def _step(self, node: fx.Node, taken: Mapping[fx.Node, Kind]) -> tuple[Kind, Row | None]:
        """The kind of an op's result, and the op's row."""
        args = bound_args(node)
        by_name = {name: kind for name, value in args.items() if (kind := _kind_of(value, taken)) is not None}
        for step in entry(STEPS, node.target) or ():
            if by_name == step.takes:
                return step.gives, self._row(node, args, step)
        (kind, *others), row = dict.fromkeys(taken.values()), node_row(node)
        if kind == "order" and node.target in SORTS:
            return ("inverse" if SORTS[node.target] == "order" else "sorted order"), _row_of_sort(node)
        if kind == "order" and node.target in _DIVISIONS:
            self._note_divisor(args)
            return "tokens", row
        if node.target in _LIKE and self._is_of_each_row(node, taken):
            return "plain", row
        is_cast = _keeps_numbers(node) and kind != "rows"
        is_same = not others and (is_cast or (kind in _VIEWED and node.target in _VIEWS))
        if is_same and (kind in ("counts", "ends") or self._is_of_each_row(node, taken)):
            return kind, row
        if {kind, *others} <= {"keys", "rows"} and not uses_rng(node) and not writes(node):
            if self._is_of_each_row(node, taken):
                return "rows", row
        raise _LeavesError

    def _row(self, node: fx.Node, args: Mapping[str, Argument], step: Step) -> Row:
        """The row of a step; raises if the op's arguments do not fit the step."""
        indices, per_token = args.get("indices", [None]), self._per_token if "tokens" in step.takes.values() else 1
        is_indexing = not {"index", "indices"}.isdisjoint(args)
        whole = args["self"].meta["val"] if is_indexing and "self" not in step.takes else None
        is_written = step.gives == "inverse"
        fits = (
            isinstance(indices, (list, tuple))
            and len(indices) == 1
            and args.get("dim", 0) == 0
            and (per_token == 1 or args.get("accumulate", True))
            and (whole is None or size_expr(whole.shape[0]) * per_token == self._count)
            and (step.gives != "ends" or node.meta["val"].dtype in _NUMBERS)
            and (step.gives != "counts" or (args["min"] == 0 < args["max"] and _is_index(self._given)))
            and (not is_written or (self._is_count(args["values"]) and not args["accumulate"]))
        )
        if not fits:
            raise _LeavesError
        options = by_sorting(node.meta["val"].dtype) if is_written else step.options
        if step.gives in ("counts", "ends"):
            self._counts_all &= step.takes == {"self": "counts"} or _keys_below(self._given) <= _counted_below(node)
        text = step.row if per_token > 1 else step.row.replace("(t k)", "n").replace("t", "n")
        try:
            return call_of(node).row(text, sizes={"k": per_token} if per_token > 1 else None, **options)
        except RuleError as error:
            raise _LeavesError from error

    def _is_count(self, value: object) -> bool:
        """Whether a value is `arange` over the rows, from zero."""
        if not is_tensor(value) or not str(value.target).startswith("aten.arange."):
            return False
        args, count = bound_args(value), size_expr(value.meta["val"].shape[0])
        return (args.get("start", 0), args.get("step", 1), count) == (0, 1, self._count)

    def _note_divisor(self, args: Mapping[str, Argument]) -> None:
        divisor = args["other"]
        is_known = isinstance(divisor, int) and divisor > 0 and self._per_token in (0, divisor)
        if not is_known or args.get("rounding_mode", "floor") is None:
            raise _LeavesError
        self._per_token = divisor

    def _is_of_each_row(self, node: fx.Node, taken: Mapping[fx.Node, Kind]) -> bool:
        """Whether an op computes a row of its results from the same row of the sorted operands only."""
        row = node_row(node)
        choice = _split(row, 2) if row is not None else None
        if choice is None:
            return False
        pairs = zip(operands(node), choice.operands, strict=True)
        of_rows = all(isinstance(at, Shard) == (operand in taken) for operand, at in pairs)
        as_many = all(value.ndim and size_expr(value.shape[0]) == self._count for value in values(node))
        return of_rows and as_many and all(isinstance(at, Shard) for at in choice.results)


def _source(value: fx.Node) -> fx.Node:
    """The value that has the same elements, before reshapes and casts."""
    while value.target in (*_SHAPED, aten.flatten.using_ints) or _keeps_numbers(value):
        value = operands(value)[0]
    return value


def _keeps_numbers(node: fx.Node) -> bool:
    """Whether an op casts integers, or counts, to a dtype that represents them too."""
    if node.target not in CASTS:
        return False
    (operand, *_), result = operands(node), node.meta["val"].dtype
    is_counted = operand.meta["val"].dtype in _NUMBERS[:2] or operand.target in _COUNTS
    return is_counted and result in _NUMBERS


def _keys_below(value: fx.Node) -> float:
    """The exclusive upper bound of indices that PyTorch computed; infinity if unknown."""
    while value.target in _PARTS_OF:
        value = operands(value)[0]
    if not _is_index(value):
        return math.inf
    op = value.all_input_nodes[0] if value.target is operator.getitem else value
    dim, shape = bound_args(op).get("dim", -1), operands(op)[0].meta["val"].shape
    return shape[dim] if isinstance(dim, int) and isinstance(shape[dim], int) else math.inf


def _counted_below(node: fx.Node) -> float:
    """The exclusive upper bound of the keys that an op counts; 0 if unknown."""
    args = bound_args(node)
    if node.target is aten.histc.default:
        return float(args["max"]) + 1
    first, experts = args["self"], node.meta["val"].shape[0]
    counts_from_zero = str(first.target).startswith("aten.arange.") and bound_args(first).get("start", 0) == 0
    is_each = counts_from_zero and bound_args(first).get("step", 1) == 1 and (args["right"] or args["side"] == "right")
    return experts if is_each else 0


def _is_index(value: fx.Node) -> bool:
    """Whether PyTorch computed a value as an index, so never below zero, where a count would miss it."""
    while value.target in _PARTS_OF:
        value = operands(value)[0]
    if value.target is operator.getitem and value.args[1] == 1:
        return value.all_input_nodes[0].target in (*SORTS, aten.topk.default, aten.max.dim, aten.min.dim)
    return value.target in (aten.argmax.default, aten.argmin.default, aten.argsort.default, aten.argsort.stable)


def _kind_of(value: Argument, taken: Mapping[fx.Node, Kind]) -> Kind | None:
    """The kind of an argument, or of an item in a list of indices."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return next((taken[item] for item in values if isinstance(item, fx.Node) and item in taken), None)


def _row_of_sort(node: fx.Node) -> Row:
    if operands(node)[0].meta["val"].ndim != 1 or bound_args(node).get("descending"):
        raise _LeavesError
    return call_of(node).row("n -> n" if SORTS[node.target] == "order" else "n -> n, n")
