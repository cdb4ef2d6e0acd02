"""One call of one op, as a graph under one choice of its row, which all ranks run.

    x ─ scatter ─ op ─ gather ─ result           a split choice: the passes insert the conversions
    stack of addends ─ sum ─ op                  an operand that must be Partial is a sum that is split
    op ─ mul(split) ─ gather ─ result            a Replicate result is read by an op that is split

The reference is the op itself, on full operands.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from torchshard.capture import Captured, flatten_call
from torchshard.capture.carried import Changes
from torchshard.capture.signature import flatten
from torchshard.checking.check import check_program
from torchshard.checking.report import Report
from torchshard.compiler.program import Program
from torchshard.core.choices import Hint, choices
from torchshard.core.errors import RuleError
from torchshard.core.layouts import I, Layout, P, R, Shard
from torchshard.core.mesh import MeshAxis
from torchshard.core.rng_states import keeping_rng_states
from torchshard.core.rows import Choice, Row
from torchshard.custom_ops.fx_types import Args, Argument, Kwargs, Target
from torchshard.ir.editing import mark_needs_grad
from torchshard.ir.graph import node_row, operands, values
from torchshard.passes import rewrite
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.plans.data import AxisPlan
from torchshard.plans.machine import Machine
from torchshard.plans.plan import Plan
from torchshard.testing.calls import PlannedCall

aten = torch.ops.aten
ADDENDS = 4
"""The number of addends of an operand that must be Partial: on three ranks the last rank gets 0 of them."""


@dataclass(frozen=True)
class OpCall:
    """One call of one op."""

    target: Target
    args: Sequence[Argument]
    kwargs: Kwargs = field(default_factory=dict)
    hints: Sequence[Hint] = ()
    """(operand, layout): Shards to try in addition to plain, segmented and unit ones."""
    compares_values: bool = True
    """False for undefined results (`torch.empty`): then only shapes are compared."""
    fakes: Callable[[], FakeTensorMode] = FakeTensorMode
    """Makes the mode in which the op is recorded; a mode with a `ShapeEnv` may make sizes dynamic."""
    divides_dynamic: bool = False
    """Whether dynamic sizes are multiples of the number of ranks, so they may be split."""

    def row_and_choices(self, ranks: int, *, in_parts: bool = True) -> tuple[Row | None, list[Choice]]:
        """Returns the row of the op, and all choices that it allows.

        Args:
            in_parts: whether to try each dim in segments and in units as well.
        """
        model = _OneOp(self)
        node = _OpGraph(model, model.inputs, None, ranks).op
        row = node_row(node)
        if row is None:
            return None, [Choice("I", (I,) * len(operands(node)), (I,) * len(values(node)))]
        found = choices(row, ranks, [*self.hints, *(_part_hints(row) if in_parts else ())])
        distinct = {(c.name, c.operands, c.results): c for c in found}.values()
        flags = [n.meta["val"].dtype is torch.bool for n in operands(node)]  # no op returns a Partial of booleans
        return row, [c for c in distinct if not any(x == P and f for x, f in zip(c.operands, flags, strict=True))]

    def planned(self, choice: Choice, ranks: int) -> PlannedCall:
        """Returns the op's graph under one choice, with its collectives."""
        model = _OneOp(self, choice)
        made = _OpGraph(model, model.inputs, choice, ranks)
        made.finish()
        axis = MeshAxis(ranks)
        costs = CostModel(Machine(), axis)
        conversions = conversions_of(made.module.graph, costs, made.chosen, made.parameters)
        plan = AxisPlan(axis, made.parameters, made.chosen, conversions)
        inputs = [n for n in made.module.graph.find_nodes(op="placeholder") if n.meta["kind"] == "input"]
        names = tuple(n.meta["path"] for n in inputs)
        captured = Captured(made.module, names, {}, flatten(()), Changes(), lambda *_, **__: True)
        return PlannedCall(model, model.inputs, {}, Program(captured, Plan((plan,)), rewrite(made.module, plan)))

    def check(self, choice: Choice, ranks: int) -> Report:
        """Compares the split op with the full op: results, written buffers and input gradients.

        Raises:
            RuleError: some of these were not compared.
        """
        made, model = self.planned(choice, ranks), _OneOp(self, choice)
        report = check_program(made.model, made.program, made.graph, made.args, {})
        wanted = [len(model.results()), len(list(model.buffers())), sum(t.requires_grad for t in model.inputs)]
        kinds = [c.kind for c in report.comparisons]
        found = [kinds.count(kind) for kind in ("output", "buffer", "input gradient")]
        if found != wanted:
            raise RuleError(
                f"{self.target}: {found} of {wanted} outputs, buffers and input gradients were compared",
                where="testing.check_rule",
                attempt="an op that returns tensors",
            )
        return report


class _OneOp(nn.Module):
    """The op as a module, on the call's tensors: the reference for the sharded graph."""

    def __init__(self, call: OpCall, choice: Choice | None = None) -> None:
        super().__init__()
        self.call, self.choice = call, choice
        self.leaves, spec = pytree.tree_flatten((tuple(call.args), dict(call.kwargs)))
        self.rebuild = lambda made: pytree.tree_unflatten(made, spec)  # PyTorch warns if a module with a spec is copied
        layouts = iter(choice.operands if choice else ())
        self.inputs = list[Tensor]()
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                continue
            layout = next(layouts, I)
            if isinstance(leaf, nn.Buffer):
                self.register_buffer(f"b{i}", leaf.detach().clone())
            else:
                self.inputs.append(_addends(leaf) if layout == P else leaf)

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        given, layouts = iter(tensors), iter(self.choice.operands if self.choice else ())
        made = []
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, Tensor):
                made.append(leaf)
                continue
            is_partial = next(layouts, I) == P
            value = getattr(self, f"b{i}") if isinstance(leaf, nn.Buffer) else next(given)
            made.append(value.sum(0) if is_partial else value)
        args, kwargs = self.rebuild(made)
        found = self.call.target(*args, **kwargs)
        results = [r for r in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(r, Tensor)]
        results = results if self.call.compares_values else [torch.zeros_like(r) for r in results]
        wanted = self.choice.results if self.choice else (I,) * len(results)
        return [r.unsqueeze(0) if _wants_tail(x, r) else r for x, r in zip(wanted, results, strict=True)]

    def results(self) -> list[Tensor]:
        """Returns the op's results on the call's tensors; buffers and RNG states stay unchanged."""
        held = {name: b.clone() for name, b in self.named_buffers()}
        with keeping_rng_states(()):
            found = self(*[t.detach().clone() for t in self.inputs])
        for name, buffer in self.named_buffers():
            buffer.copy_(held[name])
        return found


def _wants_tail(layout: Layout, result: Tensor) -> bool:
    return layout == R and _has_grad(result) and result.ndim == 0


def _has_grad(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _addends(value: Tensor) -> Tensor:
    """Returns a stack of random addends that sum to a value."""
    held = value.detach()
    if _has_grad(held):
        rest = torch.randn(ADDENDS - 1, *held.shape, dtype=held.dtype, device=held.device)
    else:
        rest = torch.randint(-3, 4, (ADDENDS - 1, *held.shape), dtype=held.dtype, device=held.device)
    return torch.cat([rest, (held - rest.sum(0)).unsqueeze(0)]).requires_grad_(value.requires_grad)


class _OpGraph:
    """A graph of one op under one choice, built node by node."""

    def __init__(self, model: _OneOp, tensors: Sequence[Tensor], choice: Choice | None, ranks: int) -> None:
        self.module = fx.GraphModule(nn.Module(), fx.Graph())
        self.mode = model.call.fakes()
        self.model, self.choice, self.ranks = model, choice, ranks
        self.chosen: dict[str, Choice] = {}
        self.parameters: dict[str, Layout] = {}
        self.op = self._op(tensors)

    def _op(self, tensors: Sequence[Tensor]) -> fx.Node:
        given = self._placeholders(tensors)
        layouts = iter(self.choice.operands if self.choice else ())
        made = [
            self._operand(given[i], next(layouts, I)) if isinstance(leaf, Tensor) else leaf
            for i, leaf in enumerate(self.model.leaves)
        ]
        args, kwargs = self.model.rebuild(made)
        return self._call("op", self.model.call.target, args, kwargs, self.choice)

    def _placeholders(self, tensors: Sequence[Tensor]) -> dict[int, fx.Node]:
        """Adds the placeholders, buffers before inputs as in a captured graph; returns leaf -> its placeholder."""
        names = iter(flatten_call(self.model, tensors, {}).names)
        given, made = iter(tensors), dict[int, fx.Node]()
        leaves = [(i, leaf) for i, leaf in enumerate(self.model.leaves) if isinstance(leaf, Tensor)]
        for i, leaf in sorted(leaves, key=lambda pair: not isinstance(pair[1], nn.Buffer)):
            is_buffer = isinstance(leaf, nn.Buffer)
            value = getattr(self.model, f"b{i}") if is_buffer else next(given)
            node = made[i] = self.module.graph.placeholder(f"x{i}")
            kind, path = ("buffer", f"b{i}") if is_buffer else ("input", next(names))
            node.meta.update(val=self.mode.from_tensor(value), kind=kind, path=path, names=(path,))
            if self.model.call.divides_dynamic:
                dynamic = {s.node.expr for s in node.meta["val"].shape if isinstance(s, torch.SymInt)}
                self.module.meta["multiples"] = self.module.meta.get("multiples", frozenset()) | dynamic
        return made

    def _operand(self, node: fx.Node, layout: Layout) -> fx.Node:
        if node.meta["kind"] == "buffer":
            self.parameters[node.meta["path"]] = layout
        if layout != P:
            return node
        return self._follow(f"{node.name}_sum", aten.sum.dim_IntList, (node, [0]), name="split a")

    def _call(self, name: str, target: Target, args: Args, kwargs: Kwargs, choice: Choice | None) -> fx.Node:
        node = self.module.graph.create_node("call_function", target, tuple(args), dict(kwargs), name)
        fakes = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*fakes[0], **fakes[1])
        if choice is not None:
            self.chosen[node.name] = choice
        return node

    def _follow(self, node_name: str, target: Target, args: Args, **wanted: str | Sequence[Layout]) -> fx.Node:
        """Adds an op after or before the tested one, under its first choice with these fields."""
        node = self._call(node_name, target, args, {}, None)
        hints = [(i, x) for i, x in enumerate(wanted.get("operands", ())) if isinstance(x, Shard)]
        row = node_row(node)
        assert row is not None, node_name
        found = choices(row, self.ranks, hints)
        self.chosen[node.name] = next(c for c in found if all(getattr(c, k) == v for k, v in wanted.items()))
        return node

    def finish(self) -> None:
        """Adds the output, with every tensor result."""
        layouts = self.choice.results if self.choice else (I,) * len(values(self.op))
        self.module.graph.output(tuple(self._results(layouts)))
        inputs = self.module.graph.find_nodes(op="placeholder")
        mark_needs_grad(self.module, [n.meta["path"] for n in inputs if n.meta["val"].requires_grad])
        self.module.recompile()

    def _results(self, layouts: Sequence[Layout]) -> list[fx.Node]:
        found = []
        for i, (value, layout) in enumerate(zip(values(self.op), layouts, strict=True)):
            node = self.op
            if isinstance(self.op.meta["val"], (list, tuple)):
                node = self.module.graph.call_function(operator.getitem, (self.op, i))
                node.meta["val"] = value
            if isinstance(value, Tensor):
                found.append(self._tail(node, layout))
        return found

    def _tail(self, node: fx.Node, layout: Layout) -> fx.Node:
        if not self.model.call.compares_values:
            node = self._follow(f"{node.name}_zeros", aten.zeros_like.default, (node,), operands=(layout,))
        value = node.meta["val"]
        if layout != R or not _has_grad(value):
            return node
        if value.ndim == 0:
            node = self._follow(f"{node.name}_1", aten.unsqueeze.default, (node, 0), operands=(R,), results=(R,))
        sizes = list(node.meta["val"].shape)
        widest = Shard(sizes.index(max(sizes)))
        return self._follow(f"{node.name}_split", aten.mul.Scalar, (node, 1.0), operands=(widest,))


def _part_hints(row: Row) -> Iterator[Hint]:
    """Yields two Shards of every dim of every tensor: in two segments, and in units of two."""
    for position, dims in enumerate((*row.operands, *row.results)):
        sizes = [sum(math.prod(row.sizes[factor] for factor in term) for term in terms) for terms in dims]
        for dim, size in enumerate(sizes):
            if size > 2:
                yield position, Shard(dim, ((1, 1), (size - 1, 1)))
            if size > 2 and size % 2 == 0:
                yield position, Shard(dim, ((size // 2, 2),))
