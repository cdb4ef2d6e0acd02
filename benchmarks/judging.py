"""One graph, as `spmd_types` sees it: each op judged by that library's typing rules. `referee.py` runs it on models.

A node's operands are fake tensors that carry types. The local rules of `spmd_types` (R, I, V, P) type its result; where
something is split, so do the global rules, which ask DTensor for the dims. What torchshard recorded is compared with
that, and stands for the nodes that follow. The types are of the first rank's graph; numbers in it that the other ranks
have otherwise (where a slice begins) are typed as varying.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from torchshard.core.conversions import TABLE
from torchshard.core.layouts import Layout, Part, Shard
from torchshard.custom_ops.stepwise import Stepwise
from torchshard.custom_ops.whole import WholeCall
from torchshard.ir.fake_values import hint, size_expr
from torchshard.ops import OPS, is_collective

AXIS = "tp"
aten = torch.ops.aten
R, I, V, P = spmd.R, spmd.I, spmd.V, spmd.P  # noqa: E741 - the field's names

# --- the tables ------------------------------------------------------------------------------------------------------

SHARD = spmd.Shard
"""In `COLLECTIVES`: S(dim), of the dims that the node's arguments name, in order."""
COLLECTIVES: dict[str, tuple[Callable[..., Tensor], Any, Any]] = {
    "copy": (spmd.convert, I, R),
    "reduce": (spmd.all_reduce, P, I),
    "gather": (spmd.all_gather, SHARD, I),
    "scatter": (spmd.convert, I, SHARD),
    "reduce_scatter": (spmd.reduce_scatter, P, SHARD),
    "all_gather": (spmd.all_gather, SHARD, R),
    "all_to_all": (spmd.all_to_all, SHARD, SHARD),
    "narrow": (spmd.convert, R, SHARD),
    "pad": (partial(spmd.convert, expert_mode=True), SHARD, P),
    "all_reduce": (spmd.all_reduce, P, R),
}
"""torchshard's collective -> the primitive that it is judged as, with its types before and after."""

DECLARED = {
    "maximum": "spmd_types sums over ranks and takes no maximum: V -> R, without a gradient",
    "look-up": "zero where another rank holds the row: that P is the sum is in the values, not in the types",
    "memory": "memory that the graph fills before it reads it: R",
    "random": "spmd_types knows no generators; those of the ranks are in one state, so all draw the same: R",
    "own code": "Python of the model's own, which the checker can't see into: of operands that are I it gives I",
    "values": "a shape that depends on values, which fake tensors do not have: of operands that are I it gives I",
}
"""What the checker can't know, and what is declared in its place."""
SUMS = {aten.masked_fill.Scalar: "look-up"}
"""Ops whose results may be P at their word, where the checker knows that they vary, and not along which dim."""


def _full(value: Any = None) -> Callable[..., Tensor]:
    """`new_ones` and its like, without the tensor whose values they do not look at."""

    def new(like: Tensor, sizes: Sequence[int], *given: Any, dtype: Any = None, **_: Any) -> Tensor:
        return torch.full(sizes, *([value] if value is not None else given), dtype=dtype or like.dtype)

    return new


EXACT: dict[Any, Callable[..., Any]] = {
    aten.scalar_tensor.default: lambda value, dtype=None, **_: torch.full((), value, dtype=dtype),
    aten.new_ones.default: _full(1),
    aten.new_zeros.default: _full(0),
    aten.new_full.default: _full(),
}
"""Ops that the checker has no rule for, or a wrong one (its global rule for `new_ones` keeps a Shard) -> what they are.
"""


def _run_of_dim(x: Tensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Tensor:
    begin, end, stride = slice(start, stop, step).indices(x.shape[dim])
    if stride != 1:
        return aten.slice.Tensor(x, dim, start, stop, step)
    return torch.narrow(x, dim, begin, max(end - begin, 0))


def _runs_of_dim(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    starts = itertools.accumulate(sizes, initial=0)
    return [torch.narrow(x, dim, start, size) for start, size in zip(starts, sizes, strict=False)]


LINEAR: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _run_of_dim,
    aten.split_with_sizes.default: _runs_of_dim,
}
"""Linear ops that the checker does not know to be linear -> the same, of those that it knows. For what is P alone."""


def _triangle(x: Tensor, diagonal: Any = 0) -> Tensor:
    return torch.mul(x, torch.tril(torch.ones(x.shape[-2:], dtype=x.dtype), diagonal))


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *_: Any, **options: Any) -> Tensor:
    if grouped := options.get("enable_gqa", False):
        q = torch.unflatten(q, 1, (-1, q.shape[1] // k.shape[1]))
        k, v = (torch.unsqueeze(x, 2) for x in (k, v))
    scores = torch.matmul(q, torch.transpose(k, -1, -2))
    if mask is not None:
        scores = torch.where(mask, scores, 0.0) if mask.dtype == torch.bool else torch.add(scores, mask)
    made = torch.matmul(torch.softmax(scores, -1), v)
    return torch.flatten(made, 1, 2) if grouped else made


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **_: Any) -> Tensor:
    """Batch and channels of a convolution: sums over the window and over where it stands split nothing."""
    groups = options[3] if len(options) > 3 else 1
    x, weight = (torch.sum(t, list(range(2, t.ndim))) for t in (x, weight))
    if groups == 1:
        return torch.nn.functional.linear(x, weight, bias)
    apart = torch.unflatten(weight, 0, (-1, weight.shape[0] // (x.shape[1] // weight.shape[1])))
    made = torch.mul(torch.unsqueeze(torch.unflatten(x, 1, (-1, weight.shape[1])), 2), apart)
    made = torch.flatten(torch.sum(made, 3), 1, 2)
    return made if bias is None else torch.add(made, bias)


BY_DIMS: dict[Any, Callable[..., Tensor]] = {
    aten.tril.default: _triangle,
    aten.scaled_dot_product_attention.default: _attention,
    **{getattr(aten, f"conv{n}d").default: _convolution for n in (1, 2, 3)},
}
"""Ops that the global rules refuse -> simpler ones that treat the dims the same way, of which only those are asked."""

STRETCHED = {aten.expand.default, aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format}
"""Ops that repeat one value along a dim: to stretch it over this rank's part is to keep that part of it all, stretched.
"""
VIEWS = {"view", "reshape", "_unsafe_view"}
PUBLIC = {*VIEWS, "expand"}
"""Ops whose sizes the global rules read where the public function is called, not the operator."""

# --- types of tensors ------------------------------------------------------------------------------------------------


def type_of(layout: Layout) -> Any:
    """A layout as a type."""
    return spmd.S(layout.dim) if isinstance(layout, Shard) else {"I": I, "R": R, "P": P}[str(layout)]


def parts_in(layout: Layout | None) -> tuple[Part, ...] | None:
    """The parts of a Shard that has several, or that repeat: a plain Shard's dim in another order, which they are."""
    parts = layout.parts if isinstance(layout, Shard) else None
    if isinstance(layout, Shard) and layout.repeated:
        return (REPEATED, *(parts or ()))
    return parts if parts is not None and len(parts) > 1 else None


REPEATED: Part = (0, 0)
"""Stands before parts that repeat."""


def local_type(tensor: Tensor) -> Any:
    """R, I, V or P, or None."""
    return spmd.maybe_get_axis_local_type(tensor, AXIS)


def full_type(tensor: Tensor) -> Any:
    """The type, with the dim where one is known."""
    spec = spmd.get_partition_spec(tensor) or ()
    return next((spmd.S(dim) for dim, entry in enumerate(spec) if entry is not None), local_type(tensor))


def typed(shape: Sequence[int], dtype: torch.dtype, kind: Any, *, grad: bool = False, parts: Any = None) -> Tensor:
    """A new fake tensor of this type."""
    with spmd.no_typecheck():
        made: Any = torch.empty(list(shape), dtype=dtype).requires_grad_(grad)
    made.parts = parts
    return made if kind is None else spmd.assert_type(made, {AXIS: kind})


def typed_like(tensor: Tensor, kind: Any, **changes: Any) -> Tensor:
    """A new tensor of another type."""
    return typed(tensor.shape, tensor.dtype, kind, **{"grad": tensor.requires_grad, **changes})


def copied(tree: Any) -> Any:
    """Copies of the arguments: ops that write to theirs leave ours alone."""
    return tree_map_only(Tensor, lambda t: typed_like(t, full_type(t), parts=getattr(t, "parts", None)), tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of some arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def as_list(value: Any) -> list[Any]:
    """Several results, or one, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def sizes_of(shape: Sequence[Any]) -> list[int]:
    """A shape at the sizes of the example inputs."""
    return [hint(size) for size in shape]


def same(have: Any, want: Any, *, grad: bool) -> bool:
    """Whether two types are one: R and I are where there is no gradient."""
    return have is want or (not grad and {have, want} == {R, I})


# --- the checker -----------------------------------------------------------------------------------------------------


UNKNOWABLE = (DataDependentOutputException, DynamicOutputShapeException)
"""What fake tensors raise where a result's shape depends on values."""


class RefusedError(Exception):
    """The checker, or the op itself, does not take these operands."""


@contextmanager
def mesh(world: int) -> Iterator[None]:
    """A mesh of so many ranks, without processes."""
    dist.init_process_group(backend="fake", rank=0, world_size=world)
    try:
        with spmd.set_current_mesh(init_device_mesh("cpu", (world,), mesh_dim_names=(AXIS,))):
            # At its first global rule the checker makes a mesh of its own, which can't be made of fake tensors.
            checked(torch.neg, (typed([world], torch.float32, spmd.S(0)),), {}, by_dim=True)
            yield
    finally:
        dist.destroy_process_group()


def checked(function: Callable[..., Any], args: Any, kwargs: Any, *, by_dim: bool) -> Any:
    """Runs a function under the strict checker: by its local rules, or by its global ones, which know dims.

    Raises:
        RefusedError: "type" or "size", and the error: of the checker, or of the op, which can't run on such operands.
    """
    try:
        with typecheck("strict", local=not by_dim):
            return function(*copied(args), **copied(kwargs))
    except UNKNOWABLE:
        raise
    except Exception as error:
        text = " ".join(str(error).split()).partition(" Set SPMD_TYPES")[0].partition(" In ")[0]
        kind = "type" if isinstance(error, spmd.SpmdTypeError) else "size"
        raise RefusedError(f"{kind}: {type(error).__name__}: {text[:160]}") from error


# --- one node --------------------------------------------------------------------------------------------------------

BY_DIM, BY_TYPE, BY_DECLARATION = "dims too", "type only", "declared"


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What is said of a node."""

    value: Any = None
    """Its result with types: the recorded ones, where any are recorded."""
    level: str = BY_DIM
    """How much was judged: `BY_DIM` is all that there is, for a value that is not split its type."""
    why: str = ""
    """Why no more was."""
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What one rank runs."""

    graph: fx.GraphModule
    numbers: Mapping[str, Mapping[Any, tuple[Any, ...]]]
    """Node -> its arguments (by place or name) that the ranks have otherwise, rank by rank."""
    live: set[fx.Node]
    """The values that a gradient flows back through."""


def _check_table(node: fx.Node, args: Sequence[Any]) -> None:
    """A table is looked up at indices that count from this rank's first row: its rows must be this rank's.

    Raises:
        RefusedError: they are not. No type tells, for what is looked up has the same size and varies.
    """
    if node.target is aten.embedding.default:
        recorded_table: Any = node.args[0]
        expected = sizes_of(recorded_table.meta["val"].shape)
        if list(args[0].shape) != expected:
            raise RefusedError(f"size: a table of {list(args[0].shape)}, recorded {expected}")


def judge(node: fx.Node, values: Mapping[fx.Node, Any], subject: Subject) -> Judgement:
    """One node, on operands with types."""
    args, kwargs = copied(fx.map_arg((node.args, node.kwargs), lambda n: values[n]))
    if node.op == "output":
        return Judgement(fault=_not_whole(args))
    if node.target is operator.getitem:
        return Judgement(args[0][args[1]])
    try:
        if is_collective(node.target):
            found = _collective(node.target, args)
        elif isinstance(node.target, Stepwise):
            found = _stepwise(node.target, args)
        elif isinstance(node.target, WholeCall):
            found = _opaque(node, (args, kwargs), "own code", subject)
        else:
            _check_table(node, args)
            found = _op(node, args, kwargs, subject.numbers.get(node.name, {}))
    except RefusedError as refused:
        return Judgement(recorded(node, subject), BY_TYPE, fault=str(refused))
    except UNKNOWABLE:
        found = _opaque(node, (args, kwargs), "values", subject)
    return _compared(node, found, subject)


def _not_whole(operands: Any) -> str:
    """The fault of what must be I, and is not."""
    wrong = [t for t in tensors_in(operands) if not same(local_type(t), I, grad=t.requires_grad)]
    return f"type: {full_type(wrong[0])} where only I may be" if wrong else ""


def _opaque(node: fx.Node, operands: Any, why: str, subject: Subject) -> Judgement:
    """What the checker can't see into: of operands that are I it gives I."""
    made = tree_map_only(Tensor, lambda t: typed_like(t, I), recorded(node, subject))
    return Judgement(made, BY_DECLARATION, why, _not_whole(operands))


def _collective(op: Any, args: Sequence[Any]) -> Judgement:
    """The shape by the op's own fake kernel; the type by the primitive, of a small tensor of the operand's type."""
    x = args[0]
    with torch.no_grad():
        shape = checked(_unchecked, (op, *args), {}, by_dim=False).shape
    if op is torch.ops.torchshard.all_reduce_max.default:
        if local_type(x) is not V:
            raise RefusedError(f"type: the maximum over the ranks of what is {full_type(x)}")
        return Judgement(typed(shape, x.dtype, R), BY_DECLARATION, "maximum")
    primitive, source, target = COLLECTIVES[OPS[op].name]
    dims = (spmd.S(arg) for arg in args[1:-1] if isinstance(arg, int))
    source, target = (next(dims) if end is SHARD else end for end in (source, target))
    small, by_dim = typed([4] * x.ndim, x.dtype, full_type(x), grad=x.requires_grad), full_type(x) is not V
    made = checked(primitive, (small, AXIS), {"src": source, "dst": target}, by_dim=by_dim)
    return Judgement(
        typed(shape, x.dtype, full_type(made), grad=made.requires_grad),
        BY_DIM if by_dim else BY_TYPE,
        "" if by_dim else "its operand varies along no one dim",
    )


def _stepwise(op: Stepwise, args: Sequence[Any]) -> Judgement:
    """An op that communicates in the middle: its own steps by the local rules, each collective as if it were a node."""

    judged = dataclasses.replace(op, collective=lambda call: lambda *given: _collective(call, given).value)
    made = checked(partial(Stepwise.__call__, judged), args, {}, by_dim=False)
    return Judgement(made, BY_TYPE, "its steps are judged by the local rules")


def _unchecked(function: Callable[..., Any], *args: Any) -> Any:
    with spmd.no_typecheck():
        return function(*args)


def _op(node: fx.Node, args: Any, kwargs: Any, numbers: Mapping[Any, tuple[Any, ...]]) -> Judgement:
    """An op: by the local rules, then, where something varies, by the global ones."""
    operands = tensors_in((args, kwargs))
    args = [spmd.Scalar(x, {AXIS: V}) if i in numbers else x for i, x in enumerate(args)]
    kwargs = {name: spmd.Scalar(x, {AXIS: V}) if name in numbers else x for name, x in kwargs.items()}
    function = _function(node, operands)
    made = checked(function, args, kwargs, by_dim=False)
    if not operands and any(local_type(t) is None for t in tensors_in(made)):
        why = "random" if torch.Tag.nondeterministic_seeded in node.target.tags else "memory"
        return Judgement(tree_map_only(Tensor, lambda t: typed_like(t, R), made), BY_DECLARATION, why)
    dim = _own_dim(node)
    if dim is not None and node.target in STRETCHED and local_type(made) in (I, R):
        return _narrowed(made, typed_like(made, local_type(made)), dim)
    if not any(local_type(t) is V for t in tensors_in(made)):
        return Judgement(made)
    if node.target is aten.slice.Tensor and _is_own_slice(args, numbers):
        return _narrowed(made, args[0], args[1] % made.ndim)
    varying = [t for t in operands if local_type(t) is V]
    orders = {getattr(t, "parts", None) for t in varying}
    if not varying or any(full_type(t) is V for t in varying):
        return Judgement(made, BY_TYPE, "an operand varies along no one dim")
    if len(orders) > 1 or (orders != {None} and _name(node) in VIEWS):
        return Judgement(made, BY_TYPE, "a dim of several parts is cut or joined")
    try:
        by_dim = checked(BY_DIMS.get(node.target, function), args, kwargs, by_dim=True)
    except RefusedError as refused:
        return Judgement(made, BY_TYPE, str(refused))
    kinds, order = (full_type(t) for t in tensors_in(by_dim)), orders.pop()
    return Judgement(tree_map_only(Tensor, lambda t: typed_like(t, next(kinds), parts=order), made))


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _function(node: fx.Node, operands: Sequence[Tensor]) -> Callable[..., Any]:
    """What to call: public functions where the checker's rules name them (linear ones, those that make tensors)."""
    target: Any = node.target
    if target in EXACT:
        return EXACT[target]
    name = _name(node)
    if name in VIEWS and (groups := _grouped(node)):
        return partial(_regrouped, groups)
    if getattr(target, "namespace", "") != "aten":
        return target
    partial_sums = any(local_type(t) is P for t in operands)
    if partial_sums and target in LINEAR:
        return LINEAR[target]
    if operands and name not in PUBLIC and not partial_sums:
        return target
    name = "reshape" if name == "_unsafe_view" else name
    return getattr(torch, name, None) or getattr(Tensor, name, target)


Group = tuple[int, int, tuple[int, ...]]
"""Dims of the operand, from and to, and the sizes that they become."""


def _grouped(node: fx.Node) -> list[Group] | None:
    """A reshape as flattened and unflattened dims, which is how the global rules can follow a split dim.

    Over two ranks `[2,7,12] -> [2,7,2,6]` is `[2,7,6] -> [2,7,1,6]`: by these sizes alone, the last dim might be the
    split one. So groups come from the global shapes, and a size that is this rank's own is left to the op (-1).
    """
    shapes = [(n.meta.get("global_shapes") or (None,))[0] for n in (node.args[0], node) if isinstance(n, fx.Node)]
    if len(shapes) < 2 or not all(shapes):
        return None
    before, after = (sizes_of(shape) for shape in shapes)
    if 0 in before or 0 in after:
        return None
    own = [-1 if n != whole else n for n, whole in zip(sizes_of(node.meta["val"].shape), after, strict=True)]
    groups, i, j = list[Group](), 0, 0
    while i < len(before) and j < len(after):
        start, first, i, j = i, j, i + 1, j + 1
        while math.prod(before[start:i]) != math.prod(after[first:j]):
            smaller = math.prod(before[start:i]) < math.prod(after[first:j])
            i, j = (i + 1, j) if smaller else (i, j + 1)
        i = len(before) if j == len(after) else i
        j = len(after) if i == len(before) else j
        groups.append((start, i, tuple(own[first:j])))
    return groups


def _regrouped(groups: Sequence[Group], x: Tensor, *_: Any) -> Tensor:
    for start, stop, sizes in reversed(groups):
        x = torch.flatten(x, start, stop - 1) if stop - start > 1 else x
        x = torch.unflatten(x, start, sizes) if len(sizes) > 1 else x
    return x


def _is_own_slice(args: Any, numbers: Mapping[Any, tuple[Any, ...]]) -> bool:
    """Whether the ranks' slices of a whole value, in order, are all of it: then they are its Shard."""
    if local_type(args[0]) is V or len(args) != 4 or not numbers:
        return False
    starts, stops = numbers.get(2, ()), numbers.get(3, ())
    return (0, *stops) == (*starts, args[0].shape[args[1]])


def _narrowed(made: Tensor, whole: Tensor, dim: int) -> Judgement:
    """This rank's slice of a whole value that is R, or has no gradient."""
    small = typed([4] * made.ndim, made.dtype, local_type(whole), grad=whole.requires_grad)
    result = checked(spmd.convert, (small, AXIS), {"src": R, "dst": spmd.S(dim)}, by_dim=True)
    return Judgement(typed_like(made, full_type(result)))


def _own_dim(node: fx.Node) -> int | None:
    """The dim of a result of which this rank has a part, by its sizes."""
    val, (whole, *_) = node.meta.get("val"), node.meta.get("global_shapes") or (None,)
    if not isinstance(val, Tensor) or whole is None or len(whole) != val.ndim:
        return None
    pairs = zip(sizes_of(val.shape), sizes_of(whole), strict=True)
    return next((dim for dim, (own, size) in enumerate(pairs) if own != size), None)


def recorded(node: fx.Node, subject: Subject) -> Any:
    """A node's result by what torchshard recorded of it; V where that is nothing, inside a replacement."""
    grad, made = node in subject.live, list[Any]()
    for val, layout in itertools.zip_longest(as_list(node.meta["val"]), node.meta.get("layouts", ())):
        kind = V if layout is None else type_of(layout)
        shaped = isinstance(val, Tensor)
        made.append(
            typed(sizes_of(val.shape), val.dtype, kind, grad=grad and _is_differentiable(val), parts=parts_in(layout))
            if shaped
            else hint(val)
        )
    return made if isinstance(node.meta["val"], (list, tuple)) else made[0]


def _is_differentiable(val: Tensor) -> bool:
    return val.is_floating_point() or val.is_complex()


def _compared(node: fx.Node, found: Judgement, subject: Subject) -> Judgement:
    """The judgement beside what torchshard recorded, which the result has from here on."""
    layouts, vals, made = node.meta.get("layouts", ()), as_list(node.meta.get("val")), list[Any]()
    for result, layout, val in itertools.zip_longest(as_list(found.value), layouts, vals):
        if not isinstance(result, Tensor):
            made.append(result)
            continue
        grad = result.requires_grad and node in subject.live
        kind, parts = full_type(result), getattr(result, "parts", None)
        if layout is not None:
            found = _beside(found, result, layout, node, grad=grad)
            kind, parts = type_of(layout), parts_in(layout)
        if isinstance(val, Tensor) and sizes_of(val.shape) != list(result.shape):
            found = _with_fault(found, f"size: {list(result.shape)}, recorded {sizes_of(val.shape)}")
        made.append(typed_like(result, kind, grad=grad, parts=parts))
    return dataclasses.replace(found, value=made if isinstance(found.value, (list, tuple)) else made[0])


def _beside(found: Judgement, result: Tensor, layout: Layout, node: fx.Node, *, grad: bool) -> Judgement:
    """The judgement of one result beside its layout."""
    have, want = full_type(result), type_of(layout)
    if isinstance(want, SHARD) and found.level == BY_TYPE and local_type(result) is V:
        return found
    if isinstance(want, SHARD) and have == want:
        if not is_collective(node.target) and getattr(result, "parts", None) != parts_in(layout):
            return dataclasses.replace(found, level=BY_TYPE, why="its dim has other parts than its operands'")
        return found
    if want is P and local_type(result) is V and found.level == BY_TYPE and node.target in SUMS:
        return dataclasses.replace(found, level=BY_DECLARATION, why=SUMS[node.target])
    if have is V or isinstance(have, SHARD) or isinstance(want, SHARD) or not same(have, want, grad=grad):
        return _with_fault(found, f"type: {have}, recorded {layout}{found.why and f' ({found.why})'}")
    return found


def _with_fault(found: Judgement, fault: str) -> Judgement:
    return dataclasses.replace(found, fault="; ".join(filter(None, (found.fault, fault))))


# --- a graph ---------------------------------------------------------------------------------------------------------


def subject_of(graphs: Sequence[fx.GraphModule], trainable: set[str]) -> Subject:
    """The first rank's graph, of all ranks' graphs, with a number for each dynamic size."""
    _give_numbers(graphs[0], _sizes_by_values(graphs[0]))
    return Subject(graphs[0], own_numbers(graphs), live_values(graphs[0], trainable))


def _sizes_by_values(graph: fx.GraphModule) -> dict[Any, int]:
    """Numbers for sizes that depend on values, as experts' shares of the tokens do, so that a split's add up."""
    found: dict[Any, int] = {}
    for node in graph.graph.nodes:
        if node.target is aten.split_with_sizes.default:
            x, sizes, *dim = node.args
            at = dim[0] if dim else 0
            asked = [size_expr(n.meta["val"] if isinstance(n, fx.Node) else n) for n in sizes]
            exprs = [found.get(e, e) for e in asked]
            counts = Counter(e for e in exprs if not isinstance(e, int))
            rest = hint(x.meta["val"].shape[at]) - sum(e for e in exprs if isinstance(e, int))
            while counts:
                symbol, count = counts.popitem()
                found[symbol] = 1 if counts else rest // count
                rest -= count
            # the results may have symbols of their own: `.item()` has run again since they were recorded
            own = [size_expr(val.shape[at]) for val in node.meta["val"]]
            found.update((e, found.get(a, a)) for e, a in zip(own, asked, strict=True) if not isinstance(e, int))
    return found


def _give_numbers(graph: fx.GraphModule, by_values: Mapping[Any, int]) -> None:
    """Puts numbers in the place of dynamic sizes: those of the example inputs, and those that are given."""

    def number(size: Any) -> int:
        expr = size_expr(size)
        fixed = expr if isinstance(expr, int) else expr.xreplace(by_values)
        return int(fixed) if isinstance(fixed, int) or fixed.is_Integer else hint(size)

    def numbered(value: Any) -> Any:
        if isinstance(value, Tensor):
            with spmd.no_typecheck():
                return torch.empty([number(size) for size in value.shape], dtype=value.dtype)
        return number(value) if isinstance(value, torch.SymInt) else value

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(numbered, node.meta["val"])
        if node.meta.get("global_shapes"):
            shapes = node.meta["global_shapes"]
            node.meta["global_shapes"] = tuple(shape and tuple(map(numbered, shape)) for shape in shapes)


def own_numbers(graphs: Sequence[fx.GraphModule]) -> dict[str, dict[Any, tuple[Any, ...]]]:
    """Node -> the arguments that are other numbers on other ranks, by place or name, rank by rank.

    A rank that holds nothing may run other ops in a node's place: it has no say.
    """
    ranks = [{node.name: node for node in graph.graph.nodes} for graph in graphs]
    found: dict[str, dict[Any, tuple[Any, ...]]] = {}
    for name, node in ranks[0].items():
        nodes = [rank[name] for rank in ranks if name in rank and rank[name].target is node.target]
        arguments = [dict(enumerate(n.args)) | n.kwargs for n in nodes]
        numbers = {
            place: tuple(held.get(place) for held in arguments)
            for place, value in arguments[0].items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        found[name] = {place: held for place, held in numbers.items() if len(set(held)) > 1}
    return found


def live_values(graph: fx.GraphModule, trainable: set[str]) -> set[fx.Node]:
    """The values that autograd reaches from the results: torchshard's own marks are not believed."""
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            values[node] = (
                hint(val) if not isinstance(val, Tensor) else torch.empty(sizes_of(val.shape), dtype=val.dtype)
            )
            if node.meta["path"] in trainable:
                values[node].requires_grad_()
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        try:
            if isinstance(node.target, (Stepwise, WholeCall)):  # on fake tensors it may give shapes alone
                values[node] = _of_any_value(node, tensors_in((args, kwargs)))
            else:
                values[node] = args if node.op == "output" else node.target(*args, **kwargs)
        except UNKNOWABLE:
            values[node] = _of_any_value(node, tensors_in((args, kwargs)))
    results = [t for t in tensors_in(values.popitem()[1]) if t.requires_grad]
    reached, leaves = {t.grad_fn for t in results} - {None}, {id(t) for t in results}
    todo = list(reached)
    while todo:
        step = todo.pop()
        leaves.add(id(getattr(step, "variable", None)))
        new = {after for after, _ in step.next_functions if after is not None} - reached
        reached |= new
        todo.extend(new)

    def is_live(tensor: Tensor) -> bool:
        return tensor.requires_grad and (id(tensor) in leaves or tensor.grad_fn in reached)

    return {node for node, value in values.items() if any(map(is_live, tensors_in(value)))}


def _of_any_value(node: fx.Node, operands: Sequence[Tensor]) -> Any:
    """A result of the recorded shape, with the gradients of all that it might come from."""
    source = sum((t.sum() for t in operands if t.requires_grad), torch.zeros(()))

    def made(val: Tensor) -> Tensor:
        empty = torch.empty(sizes_of(val.shape), dtype=val.dtype)
        return empty + source.to(val.dtype) if _is_differentiable(val) else empty

    return tree_map_only(Tensor, made, node.meta["val"])


def judged(subject: Subject) -> tuple[dict[fx.Node, Any], dict[fx.Node, Judgement]]:
    """The typed values of all nodes, and the judgements of all but placeholders."""
    values, found = dict[fx.Node, Any](), dict[fx.Node, Judgement]()
    for node in subject.graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = recorded(node, subject)
        else:
            found[node] = judge(node, values, subject)
            values[node] = found[node].value
    return values, found


def without(node: fx.Node, subject: Subject, values: dict[fx.Node, Any], before: Mapping[fx.Node, Judgement]) -> str:
    """The fault that is found where a collective gives its operand: "type: ...", "size: ..." or "dim: ..."; or ''.

    Its consumers are judged again, and theirs in turn where nothing is recorded (inside a replacement). It is a fault
    of dims where the global rules refuse what they took before.
    """
    first: Any = node.args[0]
    held, todo = ChainMap({node: values[first]}, values), set(node.users)
    for user in subject.graph.graph.nodes:
        if user not in todo:
            continue
        found = judge(user, held, subject)
        if found.fault or (before[user].level == BY_DIM and found.level != BY_DIM):
            return f"{found.fault or f'dim: {found.why}'}, in {user.name}"
        if "layouts" not in user.meta:
            held[user] = found.value
            todo |= set(user.users)
    return ""


def wrong_duals() -> list[str]:
    """Collectives whose backward is not what the types say: from the target's gradient to the source's."""
    wrong = []
    for name, (_, source, target) in COLLECTIVES.items():
        backward = [end if end is SHARD else end.backward_type() for end in (target, source)]
        if list(COLLECTIVES[TABLE[name].dual][1:]) != backward:
            wrong.append(f"{name}: its backward is {TABLE[name].dual}, not {backward[0]} -> {backward[1]}")
    return wrong
