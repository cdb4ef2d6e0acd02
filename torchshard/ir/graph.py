"""Reading and editing the one graph type, `fx.GraphModule`. Facts about a node live in these `node.meta` keys:

val          fake tensor (or tuple, or SymInt) with the global shape; after `localize` the rank's own
kind, path   of a placeholder: 'parameter', 'buffer', 'constant' or 'input', and its dotted name
module       of an op: the path of the module that called it; 'source': the user's file and line
autocast     of an op: the autocast that it was called in, until its casts are explicit
layouts      tuple of Layouts, one per result
choice, row  of an op: the planned notation.Choice, and the Row that allows it
needs_grad   whether a gradient flows back through the value
note         of a collective: the conversion and whom it is for
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher

from torchshard.core.autocast import autocasting
from torchshard.core.layouts import I, Layout
from torchshard.core.notation import Choice, Row
from torchshard.custom_ops.whole import WholeCall
from torchshard.distributed.ops import is_collective
from torchshard.rules import Call, TensorType, is_random, row_of, writes_statistics


def op_name(node: fx.Node) -> str:
    """The short name of a node's op: 'linear', 'view'."""
    target: Any = node.target
    name = getattr(target, "_schema", None)
    return str(name.name.split("::")[1] if name is not None else getattr(target, "__name__", target))


def size_expr(size: Any) -> Any:
    """A size as an int, or as a sympy expression where it is dynamic."""
    if isinstance(size, int):
        return size
    expr = size.node.expr if isinstance(size, torch.SymInt) else size
    return int(expr) if isinstance(expr, sympy.Integer) else expr


def tensor_type(value: Any) -> TensorType:
    """The rule's view of a fake tensor."""
    return TensorType(tuple(size_expr(s) for s in value.shape), value.dtype)


def is_tensor(node: Any) -> bool:
    """Whether a node gives one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


_SIZES = {operator.getitem, torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default}
"""Not ops of their own: parts of a result, and sizes (a dynamic size is never split, so any layout tells it)."""


def is_tensor_op(node: fx.Node) -> bool:
    """Whether a node is an op with tensors among its operands or results, and no collective of ours."""
    if node.op != "call_function" or node.target in _SIZES or is_collective(node.target):
        return False
    return any(isinstance(v, Tensor) for v in values(node)) or any(is_tensor(n) for n in node.all_input_nodes)


def is_weight(node: fx.Node) -> bool:
    """Whether a node is a parameter of two dims or more."""
    return node.op == "placeholder" and node.meta["kind"] == "parameter" and node.meta["val"].ndim > 1


def values(node: fx.Node) -> list[Any]:
    """A node's results, as a list; of an op that gives nothing, none."""
    val = node.meta.get("val")
    if val is None:
        return []
    return list(val) if isinstance(val, (list, tuple)) else [val]


def bound_args(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names of the op's schema, defaults filled in; by position where there is no schema."""
    if isinstance(node.target, WholeCall):
        return node.target.bound(node.args)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of an op in the order of its arguments, as rules count them."""
    return [n for value in bound_args(node).values() for n in _nodes_in(value) if is_tensor(n)]


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)


def _as_rule_sees(value: Any) -> Any:
    if isinstance(value, fx.Node):
        held = value.meta.get("val")
        return tensor_type(held) if isinstance(held, Tensor) else size_expr(held)
    if isinstance(value, (list, tuple)):
        return [_as_rule_sees(v) for v in value]
    return value


def consumers(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that take tensors: ops, and the output."""
    return [node for node in graph.nodes if node.op == "output" or is_tensor_op(node)]


def demands(node: fx.Node, choice: Choice | None) -> list[tuple[fx.Node, Layout]]:
    """(value, the layout that it is wanted in) for each operand of an op; the output wants all whole."""
    if choice is None:
        return [(n, I) for n in _nodes_in(node.args) if is_tensor(n)]
    return list(zip(operands(node), choice.operands, strict=True))


def call_of(node: fx.Node) -> Call:
    """An op node as rules see it."""
    args = {name: _as_rule_sees(value) for name, value in bound_args(node).items()}
    return Call(node.target, args, tuple(tensor_type(v) for v in values(node) if isinstance(v, Tensor)))


def node_row(node: fx.Node) -> Row | None:
    """The row of an op node, or None; read once, for its operands' global shapes stay."""
    if "row" not in node.meta:
        node.meta["row"] = row_of(call_of(node))
    return node.meta["row"]


def whole_choice(node: fx.Node) -> Choice:
    """Every rank does the same work: legal for any op."""
    return Choice("I", (I,) * len(operands(node)), (I,) * len(values(node)))


def layout_of(node: fx.Node) -> Layout:
    """The layout of a one-tensor node."""
    return node.meta.get("layouts", (I,))[0]


def global_shape(node: fx.Node) -> tuple[Any, ...]:
    """The global shape, static sizes as ints; stays true after `localize`."""
    return node.meta.get("global_shape") or plain_shape(node.meta["val"])


def plain_shape(value: Any) -> tuple[Any, ...]:
    """A fake tensor's shape: static sizes as ints, dynamic ones as SymInts."""
    exprs = [size_expr(s) for s in value.shape]
    return tuple(e if isinstance(e, int) else s for e, s in zip(exprs, value.shape, strict=True))


def hint(size: Any) -> int:
    """A size as a number: dynamic ones as the example inputs had them, 1 for one that depends on values."""
    return size if isinstance(size, int) else int(1 if size.node.hint is None else size.node.hint)


def nbytes(value: Tensor) -> int:
    """Bytes of a whole value, at the sizes of the example inputs."""
    total = value.dtype.itemsize
    for size in value.shape:
        total *= hint(size)
    return total


def draws_random(node: fx.Node) -> bool:
    """Whether an op draws from the random stream, with these arguments."""
    return is_tensor_op(node) and is_random(node.target) and bound_args(node).get("dropout_p", 1.0) > 0


def drop_dead_code(module: fx.GraphModule) -> bool:
    """Drops ops whose results nobody uses; returns whether there were any.

    Kept are placeholders (the graph's signature), ops that write, and collectives: this rank may not need the result of
    one, but other ranks would wait for it.
    """
    return bool(module.graph.eliminate_dead_code(_is_kept))


def _is_kept(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "placeholder" or bool(node.is_impure())
    return is_collective(node.target) or node.is_impure() or writes_statistics(node.target, bound_args(node))


def mark_needs_grad(module: fx.GraphModule, trainable: Sequence[str]) -> None:
    """Sets meta['needs_grad']: which values a gradient flows back through, from a result to a parameter or input."""
    names, reached = set(trainable), dict[fx.Node, bool]()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            reached[node] = node.meta["path"] in names
        elif node.op == "call_function":
            cut = node.target in (torch.ops.aten.detach.default,)
            floats = any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values(node))
            reached[node] = any(reached[n] for n in node.all_input_nodes) and floats and not cut
    for node in reversed(module.graph.nodes):
        if node.op != "output":
            node.meta["needs_grad"] = reached[node] and any(
                user.op == "output" or user.meta["needs_grad"] for user in node.users
            )


def fake_mode(module: fx.GraphModule) -> Any:
    """The fake mode that the graph's values belong to."""
    for node in module.graph.nodes:
        for value in values(node):
            if isinstance(value, Tensor) and hasattr(value, "fake_mode"):
                return value.fake_mode
    return nullcontext()


@contextmanager
def faking(mode: Any) -> Iterator[None]:
    """Ops run on fake values, of symbolic sizes too, as `torch.export` runs them; out of autocast, as graphs run."""
    with mode, enable_python_dispatcher(), torch.no_grad(), autocasting(()):
        yield


def fake_value(mode: Any, target: Any, args: Any, kwargs: Any) -> Any:
    """What an op gives on the fake values of its arguments."""

    def fake(node: fx.Node) -> Any:
        return node.meta["val"]

    with faking(mode):
        return target(*fx.map_arg(args, fake), **fx.map_arg(kwargs, fake))


def emit(module: fx.GraphModule, target: Any, args: tuple[Any, ...], like: fx.Node, **kwargs: Any) -> fx.Node:
    """A new op node before the insertion point, with its value, and the origin of the node that it serves."""
    node = module.graph.call_function(target, args, kwargs)
    node.meta = {k: like.meta[k] for k in ("module", "source", "needs_grad") if k in like.meta}
    node.meta["val"] = fake_value(fake_mode(module), target, args, kwargs)
    return node


def where(node: fx.Node) -> str:
    """A node as errors and listings name it, with its module and the user's line."""
    parts = [f"node {node.name}", node.meta.get("module") and f"module {node.meta['module']}", node.meta.get("source")]
    return ", ".join(p for p in parts if p)


def duplicate(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own with the same nodes; fake values are shared."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = copy.copy(node.meta)
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


def name_after(node: fx.Node, wanted: str) -> None:
    """Names a new node, with a number behind where the name is taken."""
    node._rename(wanted)
