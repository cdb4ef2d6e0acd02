"""One op, whole and in parts: the op is put into a graph of its own under one choice of its row, and the graph of all
ranks is compared with the op itself, results and input gradients, in float64.

    x ─ scatter ─ op ─ gather ─ result           a split choice: the real passes insert the conversions
    stack of addends ─ sum ─ op                  an operand that must be Partial is a sum that is split
    op ─ mul(split) ─ gather ─ result          a Replicate result is consumed by an op that is split
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from torchshard.capture import Captured, flatten_call
from torchshard.capture.carried import Changes
from torchshard.capture.signature import flatten
from torchshard.checking.check import Report, check_program
from torchshard.compiler.program import Program
from torchshard.core.choices import Hint, choices
from torchshard.core.layouts import I, Layout, P, R, Shard
from torchshard.core.mesh import MeshAxis
from torchshard.core.notation import Choice, Row
from torchshard.ir.graph import mark_needs_grad, node_row, operands, values
from torchshard.passes import rewrite
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.plans.machine import Machine
from torchshard.plans.plan import Plan

aten = torch.ops.aten
TOLERANCE = 1e-10
ADDENDS = 4
"""Addends that a Partial operand is the sum of: with 3 ranks the last has none."""


@dataclass(frozen=True)
class T:
    """An example tensor of a case, made anew (from a fixed seed) at each run."""

    shape: tuple[int, ...]
    kind: str = "normal"
    """'normal', 'positive' (0.1 to 1), 'int' (below `high`), 'bool', 'apart' (all values different), 'ties' (few),
    'rows' (equal elements in the first), 'masked' (its first columns are -inf), 'complex', 'definite' (matrices,
    symmetric and positive definite), 'pivots' (of a factorization that swaps no rows), or 'offsets' (rising to at most
    `high`)."""
    high: int = 2
    grad: bool = True
    buffer: bool = False
    """A buffer of the model, which the op may write to."""

    def make(self) -> Tensor:
        if self.kind == "int":
            return torch.randint(self.high, self.shape)
        if self.kind == "bool":
            return torch.rand(self.shape) < 0.6
        if self.kind == "offsets":
            return torch.randint(self.high + 1, self.shape).sort().values.to(torch.int32)
        if self.kind == "pivots":
            return torch.arange(1, self.shape[-1] + 1, dtype=torch.int32).expand(self.shape).contiguous()
        made = torch.randn(self.shape, dtype=torch.complex128 if self.kind == "complex" else torch.float64)
        if self.kind == "definite":
            made = made @ made.mT + torch.eye(self.shape[-1], dtype=torch.float64)
        if self.kind == "positive":
            made = 0.9 * torch.rand(self.shape, dtype=torch.float64) + 0.1
        if self.kind == "apart":
            made = torch.randperm(made.numel()).to(torch.float64).reshape(self.shape) / 3 - 1
        if self.kind == "ties":
            made = torch.randint(3, self.shape) / torch.tensor(3, dtype=torch.float64) - 0.4
        if self.kind == "rows":  # one of them of equal elements
            made[0] = 0.1
        if self.kind == "masked":  # more than a rank holds
            made[..., :3] = -torch.inf
        return made.requires_grad_(self.grad and not self.buffer)


@dataclass(frozen=True)
class Case:
    """One call of one op."""

    target: Any
    splits: str | None
    """The axes that the row allows to be split, in its letters: "a b p+q"; None where there must be no row."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    hints: tuple[Hint, ...] = ()
    """Shards to try besides the plain ones and those of `part_hints`."""
    values: bool = True
    """False: the op's values are undefined (`empty`), only shapes are compared."""


class OneOp(nn.Module):
    """The op itself, on the call's tensors; what the sharded graph is compared with."""

    def __init__(self, case: Case, leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.case, self.leaves = case, leaves
        self.rebuild = lambda made: pytree.tree_unflatten(made, spec)
        self.choice: Choice | None = None
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, T) and leaf.buffer:
                self.register_buffer(f"b{i}", leaf.make())

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        given, layouts = iter(tensors), iter(self.choice.operands if self.choice else ())
        made = []
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, T):
                made.append(leaf)
                continue
            is_partial = next(layouts, I) == P
            value = getattr(self, f"b{i}") if leaf.buffer else next(given)
            made.append(value.sum(0) if is_partial else value)
        args, kwargs = self.rebuild(made)
        found = self.case.target(*args, **kwargs)
        results = [r for r in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(r, Tensor)]
        results = results if self.case.values else [torch.zeros_like(r) for r in results]
        layouts = self.choice.results if self.choice else (I,) * len(results)
        return [r.unsqueeze(0) if _wants_tail(x, r) else r for x, r in zip(layouts, results, strict=True)]


def _wants_tail(layout: Layout, result: Tensor) -> bool:
    return layout == R and _has_grad(result) and result.ndim == 0


def _has_grad(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


class Graph:
    """A graph of one op under one choice, made node by node."""

    multiples = False
    """Whether dynamic sizes are multiples of the number of ranks."""

    def __init__(self, model: OneOp, tensors: list[Tensor], choice: Choice | None, world: int) -> None:
        self.module = fx.GraphModule(nn.Module(), fx.Graph())
        self.mode = FakeTensorMode()
        self.model, self.choice, self.world = model, choice, world
        self.chosen: dict[str, Choice] = {}
        self.parameters: dict[str, Layout] = {}
        self.op = self._op(tensors)

    def _op(self, tensors: list[Tensor]) -> fx.Node:
        given = self._placeholders(tensors)
        layouts = iter(self.choice.operands if self.choice else ())
        made = [
            self._operand(node, next(layouts, I)) if isinstance(leaf, T) else leaf
            for leaf, node in zip(self.model.leaves, given, strict=True)
        ]
        args, kwargs = self.model.rebuild(made)
        return self.call("op", self.model.case.target, args, kwargs, self.choice)

    def _placeholders(self, tensors: list[Tensor]) -> list[Any]:
        """Buffers before inputs, as a captured graph has them."""
        names = iter(flatten_call(self.model, tensors, {}).names)
        given, made = iter(tensors), dict[int, fx.Node]()
        leaves = [(i, leaf) for i, leaf in enumerate(self.model.leaves) if isinstance(leaf, T)]
        for i, leaf in sorted(leaves, key=lambda pair: not pair[1].buffer):
            value = getattr(self.model, f"b{i}") if leaf.buffer else next(given)
            node = made[i] = self.module.graph.placeholder(f"x{i}")
            kind, path = ("buffer", f"b{i}") if leaf.buffer else ("input", next(names))
            node.meta.update(val=self.mode.from_tensor(value), kind=kind, path=path, names=(path,))
            if self.multiples:
                dynamic = {s.node.expr for s in node.meta["val"].shape if isinstance(s, torch.SymInt)}
                self.module.meta["multiples"] = self.module.meta.get("multiples", frozenset()) | dynamic
        return [made.get(i) for i in range(len(self.model.leaves))]

    def _operand(self, node: fx.Node, layout: Layout) -> fx.Node:
        if node.meta["kind"] == "buffer":
            self.parameters[node.meta["path"]] = layout
        if layout != P:
            return node
        return self.follow(f"{node.name}_sum", aten.sum.dim_IntList, (node, [0]), name="split a")

    def call(self, name: str, target: Any, args: Any, kwargs: Any, choice: Choice | None) -> fx.Node:
        node = self.module.graph.create_node("call_function", target, tuple(args), dict(kwargs), name)
        fakes = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*fakes[0], **fakes[1])
        if choice is not None:
            self.chosen[node.name] = choice
        return node

    def follow(self, node_name: str, target: Any, args: Any, **wanted: Any) -> fx.Node:
        """An op after (or before) the tested one, under the first of its choices with these fields."""
        node = self.call(node_name, target, args, {}, None)
        hints = [(i, x) for i, x in enumerate(wanted.get("operands", ())) if isinstance(x, Shard)]
        found = choices(node_row(node), self.world, hints)
        self.chosen[node.name] = next(c for c in found if all(getattr(c, k) == v for k, v in wanted.items()))
        return node

    def finish(self) -> None:
        """The output: every tensor result."""
        self.module.graph.output(tuple(self._results()))
        names = [n.meta["path"] for n in self.module.graph.nodes if n.op == "placeholder"]
        fakes = [n.meta["val"] for n in self.module.graph.nodes if n.op == "placeholder"]
        mark_needs_grad(self.module, [n for n, v in zip(names, fakes, strict=True) if v.requires_grad])
        self.module.recompile()

    def _results(self) -> list[fx.Node]:
        found = []
        for i, (value, layout) in enumerate(zip(values(self.op), self.choice.results, strict=True)):
            node = self.op
            if isinstance(self.op.meta["val"], (list, tuple)):
                node = self.module.graph.call_function(operator.getitem, (self.op, i))
                node.meta["val"] = value
            if isinstance(value, Tensor):
                found.append(self._tail(node, layout))
        return found

    def _tail(self, node: fx.Node, layout: Layout) -> fx.Node:
        if not self.model.case.values:
            node = self.follow(f"{node.name}_zeros", aten.zeros_like.default, (node,), operands=(layout,))
        value = node.meta["val"]
        if layout != R or not _has_grad(value):
            return node
        if value.ndim == 0:
            node = self.follow(f"{node.name}_1", aten.unsqueeze.default, (node, 0), operands=(R,), results=(R,))
        sizes = list(node.meta["val"].shape)
        widest = Shard(sizes.index(max(sizes)))
        return self.follow(f"{node.name}_split", aten.mul.Scalar, (node, 1.0), operands=(widest,))


def example(case: Case, seed: int = 0) -> tuple[OneOp, list[Tensor]]:
    """The op as a module, and the tensors that it is called with."""
    torch.default_generator.manual_seed(seed)
    leaves, spec = pytree.tree_flatten((case.args, dict(case.kwargs)))
    model = OneOp(case, leaves, spec)
    return model, [leaf.make() for leaf in leaves if isinstance(leaf, T) and not leaf.buffer]


def row_and_choices(case: Case, world: int, *, in_parts: bool = True) -> tuple[Row | None, list[Choice]]:
    """The row of a case's op, and all its choices, in parts and units too; no op makes a Partial of booleans."""
    model, tensors = example(case)
    node = Graph(model, tensors, None, world).op
    row = node_row(node)
    if row is None:
        return None, [Choice("I", (I,) * len(operands(node)), (I,) * len(values(node)))]
    found = choices(row, world, [*case.hints, *(part_hints(row) if in_parts else ())])
    distinct = {(c.name, c.operands, c.results): c for c in found}.values()
    flags = [n.meta["val"].dtype is torch.bool for n in operands(node)]
    return row, [c for c in distinct if not any(x == P and f for x, f in zip(c.operands, flags, strict=True))]


def part_hints(row: Row) -> Iterator[Hint]:
    """For every dim of every tensor: split as two segments, and as units of two."""
    shapes = [[sum(_size(term, row) for term in dim) for dim in dims] for dims in (*row.operands, *row.results)]
    for position, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if size > 2:
                yield position, Shard(dim, ((1, 1), (size - 1, 1)))
            if size > 2 and size % 2 == 0:
                yield position, Shard(dim, ((size // 2, 2),))


def _size(term: tuple[str, ...], row: Row) -> int:
    total = 1
    for axis in term:
        total *= row.sizes[axis]
    return total


def build(case: Case, choice: Choice, world: int, seed: int = 0) -> tuple[OneOp, Program, list[Tensor]]:
    """The op's graph under one choice, with its collectives."""
    model, tensors = example(case, seed)
    tensors = _with_addends(case, model, tensors, choice)
    model.choice = choice
    made = Graph(model, tensors, choice, world)
    made.finish()
    decided = made.chosen, made.parameters
    conversions = conversions_of(made.module.graph, CostModel(Machine(), MeshAxis(world)), *decided)
    plan = Plan(world, made.parameters, made.chosen, conversions)
    placeholders = (n for n in made.module.graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input")
    captured = Captured(
        made.module,
        tuple(n.meta["path"] for n in placeholders),
        {},
        flatten(()),
        Changes(),
        lambda tensors: True,
    )
    return model, Program(captured, plan, rewrite(made.module, plan)), tensors


def _with_addends(case: Case, model: OneOp, tensors: list[Tensor], choice: Choice) -> list[Tensor]:
    """Partial operands become stacks of random addends that sum to them."""
    given, made = iter(tensors), []
    leaves = [leaf for leaf in model.leaves if isinstance(leaf, T)]
    for leaf, layout in zip(leaves, choice.operands, strict=True):
        if leaf.buffer:
            continue
        value = next(given)
        made.append(_addends(value) if layout == P else value)
    return made


def _addends(value: Tensor) -> Tensor:
    held = value.detach()
    if held.dtype.is_floating_point or held.is_complex():
        rest = torch.randn(ADDENDS - 1, *held.shape, dtype=held.dtype)
    else:
        rest = torch.randint(-3, 4, (ADDENDS - 1, *held.shape), dtype=held.dtype)
    return torch.cat([rest, (held - rest.sum(0)).unsqueeze(0)]).requires_grad_(value.requires_grad)


def run(case: Case, choice: Choice, world: int, seed: int = 0) -> Report:
    """The comparison of one case under one choice."""
    model, made, tensors = build(case, choice, world, seed)
    torch.default_generator.manual_seed(seed + 1)
    report = check_program(model, made, made.graph, tensors, {})
    counts = [len(values_of(model, tensors)), len(list(model.buffers())), sum(t.requires_grad for t in tensors)]
    kinds = [c.kind for c in report.comparisons]
    assert [kinds.count(k) for k in ("output", "buffer", "input gradient")] == counts
    return replace(report, tolerance=TOLERANCE)


def values_of(model: OneOp, tensors: list[Tensor]) -> list[Tensor]:
    """The op's results on the case's tensors; buffers are left as they were."""
    held = {name: b.clone() for name, b in model.named_buffers()}
    found = model(*[t.detach().clone() for t in tensors])
    for name, buffer in model.named_buffers():
        buffer.copy_(held[name])
    return found
