"""Replaces in-place ops by functional ones, so that every value of the graph is written once.

    before    y = slice(x, 1, 0, 1); add_ = add_(y, 1); z = mul(x, 2)
    after     y = slice(x, 1, 0, 1); add = add(y, 1); x_1 = slice_scatter(x, add, 1, 0, 1); z = mul(x_1, 2)

A write to a view is propagated to the base of the view; other views of that base are recomputed before their next use.
One `copy_` at the end stores a written buffer. The pass refuses a write to an input or a parameter, and a write through
a view that it can't invert.

Gradients are those of eager PyTorch. Autograd does not record a write through `detach` or under `no_grad`, so the
gradient passes as if there had been no write (`with_value`). A value that `zero_` or `copy_` overwrites completely
keeps a gradient of zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from torchshard.core.errors import CaptureError
from torchshard.custom_ops.with_value import WITH_VALUE
from torchshard.ir.graph import bound_args, emit, is_tensor, where
from torchshard.passes.nodes import int_arg, node_arg, op_of

aten = torch.ops.aten

_NAMED = {
    aten.detach_.default: aten.detach.default,
    aten.zero_.default: aten.zeros_like.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.__iand__.Tensor: aten.bitwise_and.Tensor,
    aten.__ior__.Tensor: aten.bitwise_or.Tensor,
    aten.__ixor__.Tensor: aten.bitwise_xor.Tensor,
    aten.__iand__.Scalar: aten.bitwise_and.Scalar,
    aten.__ior__.Scalar: aten.bitwise_or.Scalar,
}


@dataclass
class _Aliases:
    """The views of each value, and the node that holds each value after the writes so far."""

    module: fx.GraphModule
    base_of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """View -> the value that it is a view of. An in-place op is a view of the tensor that it writes to."""
    latest: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node of the original graph -> the node that holds its value now; no entry: the node itself."""
    version: dict[fx.Node, int] = field(default_factory=dict)
    """Root -> the number of writes to it and its views."""
    seen_version: dict[fx.Node, int] = field(default_factory=dict)
    """Node -> the version of its root for which `latest` is right."""
    sharing: dict[int, list[fx.Node]] = field(default_factory=dict)
    """Storage -> the nodes so far that use it."""
    may_need_grad: dict[fx.Node, bool] = field(default_factory=dict)
    """The results of `wants_grad` so far."""

    def wants_grad(self, node: fx.Node) -> bool:
        """Whether a value comes from a parameter or input that needs a gradient."""
        pending = [node]  # no recursion: a graph may be deeper than Python's stack
        while pending:
            last = pending[-1]
            unknown = [n for n in last.all_input_nodes if n not in self.may_need_grad]
            if last in self.may_need_grad or not unknown:
                self.may_need_grad.setdefault(pending.pop(), _wants_grad(last, self.may_need_grad))
            else:
                pending += unknown
        return self.may_need_grad[node]

    def root(self, node: fx.Node) -> fx.Node:
        """The value at the end of a chain of views."""
        while node in self.base_of:
            node = self.base_of[node]
        return node

    def current(self, node: fx.Node) -> fx.Node:
        """The node that holds this value now; recomputes a view if its base has been written to since."""
        version = self.version.get(self.root(node), 0)
        if self.seen_version.get(node, 0) == version:
            return self.latest.get(node, node)
        if node in self.base_of:
            base = self.current(self.base_of[node])
            if _is_inplace(node):
                self.latest[node] = base
            else:
                self.latest[node] = emit(self.module, node.target, (base, *node.args[1:]), node, **node.kwargs)
        self.seen_version[node] = version
        return self.latest.get(node, node)

    def write(self, node: fx.Node, value: fx.Node) -> None:
        """Records that `node` now holds `value`, and propagates the write to the base of the view."""
        if node in self.base_of:
            base = self.base_of[node]
            base_value = value if _is_inplace(node) else self._base_value(node, self.current(base), value)
            self.write(base, base_value)
        else:
            self.version[node] = self.version.get(node, 0) + 1
        self.latest[node] = value
        self.seen_version[node] = self.version[self.root(node)]

    def _base_value(self, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
        if view.target is aten.detach.default and self.wants_grad(base):
            return emit(self.module, WITH_VALUE, (base, value), view)
        return _invert_view(self.module, view, base, value)


def _wants_grad(node: fx.Node, inputs_want: Mapping[fx.Node, bool]) -> bool:
    val = node.meta.get("val")
    if node.op == "placeholder":
        # a placeholder without a kind belongs to a traced op, any of whose operands may need a gradient
        return isinstance(val, torch.Tensor) and (val.requires_grad or "kind" not in node.meta)
    floats = isinstance(val, torch.Tensor) and (val.is_floating_point() or val.is_complex())
    differentiable = (floats or isinstance(val, (list, tuple))) and node.target is not aten.detach.default
    return differentiable and any(inputs_want[n] for n in node.all_input_nodes)


def functionalize(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    changed = _drop_copies_to_themselves(module)
    writes = [n for n in module.graph.nodes if _is_inplace(n)]
    if not writes:
        return changed
    _cut_pieces(module, {_storage(node_arg(n)) for n in writes if is_tensor(n.args[0])})
    aliases = _Aliases(module)
    for node in list(module.graph.nodes):
        if is_tensor(node) and not _is_copied(node):
            aliases.sharing.setdefault(_storage(node), []).append(node)
        if node.op not in ("call_function", "output"):
            continue
        with module.graph.inserting_before(node):
            if _is_inplace(node):
                _replace(aliases, node)
                continue
            _note_alias(aliases, node)
            node.args = fx.map_arg(node.args, lambda n: aliases.current(n))
            node.kwargs = fx.map_arg(node.kwargs, lambda n: aliases.current(n))
    _store_written(aliases)
    for node in reversed(writes):
        module.graph.erase_node(node)
    return True


def _drop_copies_to_themselves(module: fx.GraphModule) -> bool:
    """Drops copies of a buffer into itself: `self.scale = self.scale.to(x.device)` makes one if the device is the same.

    Such a copy changes nothing but the buffer's version counter, and the backward of an op that saved the buffer would
    raise because of that.
    """
    changed = False
    for node in list(module.graph.nodes):
        if node.target is not aten.copy_.default or node.args[0].op != "placeholder" or not is_tensor(node.args[1]):
            continue
        target, source = node_arg(node), node_arg(node, 1)
        while source.target in _SAME_VALUES and _storage(source) == _storage(node_arg(source)):
            source = node_arg(source)
        if source is target and not target.meta["val"].requires_grad:
            node.replace_all_uses_with(target)
            module.graph.erase_node(node)
            changed = True
    return changed


def _cut_pieces(module: fx.GraphModule, written: set[int]) -> None:
    """Replaces the pieces of a split value by slices if it is written to: a slice can be inverted, a split can't."""
    for node in list(module.graph.nodes):
        if node.target is not operator.getitem:
            continue
        source = node_arg(node)
        if source.target not in _SPLITS or _storage(node) not in written:
            continue
        args = bound_args(source)
        sizes = [v.shape[args["dim"]] for v in source.meta["val"][: int_arg(node, 1) + 1]]
        start, x = sum(sizes[:-1]), args["self"]
        with module.graph.inserting_before(node):
            piece = emit(module, aten.slice.Tensor, (x, args["dim"], start, start + sizes[-1]), node)
        node.replace_all_uses_with(piece)
        module.graph.erase_node(node)


_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes}


def _is_inplace(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _is_copied(node: fx.Node) -> bool:
    """A constant that each call copies first; export's fake values claim that the copy shares its storage."""
    return node.op == "placeholder" and all(user.target is aten.lift_fresh_copy.default for user in node.users)


def _storage(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def _note_alias(aliases: _Aliases, node: fx.Node) -> None:
    """Records a view: a result that shares the storage of the first operand, as that of `to` or `reshape` may."""
    source = node.args[0] if node.args else None
    if node.op != "call_function" or not is_tensor(node) or not isinstance(source, fx.Node):
        return
    if is_tensor(source) and not _is_copied(source) and _storage(source) == _storage(node):
        aliases.base_of[node] = source
        aliases.seen_version[node] = aliases.version.get(aliases.root(source), 0)


def _replace(aliases: _Aliases, node: fx.Node) -> None:
    """Computes the value that an in-place op writes, by a functional op, and records the write."""
    name = _written_argument(node)
    target = bound_args(node)[name]
    if not isinstance(target, fx.Node) or not is_tensor(target):
        raise _refused(node, f"it writes to {name}: more than one tensor")
    family = aliases.root(target)
    if any(aliases.root(n) is not family for n in aliases.sharing[_storage(target)] if n is not node):
        raise _refused(node, "it writes to a piece of a split value, which shares its memory with the other pieces")
    args = {k: fx.map_arg(v, lambda n: aliases.current(n)) for k, v in bound_args(node).items()}
    before = args[name]
    value = _functional(aliases.module, node, args, before)
    if value.meta["val"].shape != target.meta["val"].shape:
        raise _refused(node, f"it changes the shape of what it writes to, {name}")
    if value.meta["val"].dtype != target.meta["val"].dtype:
        value = emit(aliases.module, aten.to.dtype, (value, target.meta["val"].dtype), node)
    if node.target in _OVERWRITING and aliases.wants_grad(before):
        value = _with_zero_gradient(aliases.module, node, before, value)
    aliases.base_of[node] = target
    aliases.write(target, value)
    aliases.latest[node], aliases.seen_version[node] = value, aliases.version[aliases.root(target)]


def _written_argument(node: fx.Node) -> str:
    """The name of the argument that an in-place op writes to."""
    written = [a.name for a in op_of(node)._schema.arguments if a.alias_info and a.alias_info.is_write]
    if len(written) > 1:
        raise _refused(node, f"it writes to {', '.join(written)}: more than one tensor")
    return written[0]


def _functional(module: fx.GraphModule, node: fx.Node, args: Mapping[str, Argument], before: fx.Node) -> fx.Node:
    """The value that an in-place op writes.

    Args:
        args: the op's arguments by name, as they are now.
        before: the argument that it writes to.
    """
    target = op_of(node)
    if target is aten.copy_.default:
        source = cast(fx.Node, args["src"])
        if source.meta["val"].shape != before.meta["val"].shape:
            source = emit(module, aten.expand_as.default, (source, before), node)
        return emit(module, aten.clone.default, (source,), node)
    if target is aten.fill_.Scalar:
        return emit(module, aten.full_like.default, (before, args["value"]), node)
    if target in _NAMED:
        positional = [a for a in _NAMED[target]._schema.arguments if not a.kwarg_only]
        return emit(module, _NAMED[target], tuple(args.values())[: len(positional)], node)
    functional = _functional_overload(target)
    if functional is None:
        raise _refused(node, f"{target} has no form that does not write")
    schema = functional._schema.arguments
    # the first argument has another name in some pairs: dropout_ calls it `self`, dropout calls it `input`
    by_name = dict(zip((schema[0].name, *list(args)[1:]), args.values(), strict=True))
    kwargs = {a.name: by_name[a.name] for a in schema if a.kwarg_only and a.name in by_name}
    operands = tuple(by_name[a.name] for a in schema if not a.kwarg_only and a.name in by_name)
    return emit(module, functional, operands, node, **kwargs)


_OVERWRITING = {
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default, aten.normal_.default,
    aten.uniform_.default, aten.exponential_.default, aten.random_.default, getattr(aten.random_, "from"),
    aten.random_.to, aten.bernoulli_.float, aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default,
}  # fmt: skip
"""Ops whose result does not depend on the value that they overwrite."""


def _with_zero_gradient(module: fx.GraphModule, node: fx.Node, before: fx.Node, value: fx.Node) -> fx.Node:
    """The value, tied to the overwritten one by a `where` that never picks that, so that its gradient is zero."""
    if value.target in _DRAWN:  # PyTorch has no derivative for these
        detached = emit(module, aten.detach.default, (before,), node)
        value.args = (detached, *value.args[1:])
        value.prepend(detached)
    like = before.meta["val"]
    true = emit(module, aten.scalar_tensor.default, (True,), node, dtype=torch.bool, device=like.device)
    return emit(module, aten.where.self, (true, value, before), node)


_DRAWN = {
    aten.normal_functional.default, aten.uniform.default, aten.exponential.default, aten.random.default,
    aten.log_normal.default, aten.cauchy.default, aten.geometric.default, aten.bernoulli.p,
}  # fmt: skip


def _functional_overload(target: OpOverload[..., object]) -> OpOverload[..., object] | None:
    """The overload that returns what this one writes: `add.Tensor` for `add_.Tensor`, `div.Tensor` for `div.out`."""
    name, overload = target._schema.name.split("::")[1], target._overloadname
    types = [str(a.type) for a in target._schema.arguments if not a.is_out]
    family = getattr(aten, name.rstrip("_"), None) if name.endswith("_") else target._overloadpacket
    overloads = [getattr(family, name) for name in family.overloads()] if family is not None else []
    fitting = [o for o in overloads if [str(a.type) for a in o._schema.arguments] == types]
    return next((o for o in fitting if o._overloadname == overload), fitting[0] if fitting else None)


def _invert_view(module: fx.GraphModule, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    """The value of `base` after `value` is written to the view of it."""
    target, args = view.target, bound_args(view)
    shape = list(base.meta["val"].shape)
    if target in (aten.slice.Tensor, aten.select.int):
        scatter = aten.slice_scatter.default if target is aten.slice.Tensor else aten.select_scatter.default
        return emit(module, scatter, (base, value, *list(args.values())[1:]), view)
    if target in (aten.transpose.int, aten.swapaxes.default):
        return emit(module, target, (value, *list(args.values())[1:]), view)
    if target in (aten.t.default, aten.mT.default):
        return emit(module, target, (value,), view)
    if target in (aten.movedim.int, aten.movedim.intlist):
        return emit(module, target, (value, args["destination"], args["source"]), view)
    if target is aten.diagonal.default:
        return emit(module, aten.diagonal_scatter.default, (base, value, *list(args.values())[1:]), view)
    if target is aten.permute.default:
        ndim = len(shape)
        order = [d % ndim for d in args["dims"]]
        return emit(module, target, (value, [order.index(d) for d in range(ndim)]), view)
    if target in _SAME_VALUES:
        return value
    if target in _RESHAPES:
        for i, size in enumerate(shape):
            if not isinstance(size, int):
                shape[i] = emit(module, aten.sym_size.int, (base, i), view)
        return emit(module, aten.reshape.default, (value, shape), view)
    raise _refused(view, f"a write through the view {target} can't be traced back")


_SAME_VALUES = {
    aten.alias.default, aten.detach.default, aten.contiguous.default, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.to.other, aten.type_as.default,
}  # fmt: skip
"""Ops that return their operand itself if they have nothing to do; only then are they views."""
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten._unsafe_view.default, aten.view_as.default,
}  # fmt: skip


def _store_written(aliases: _Aliases) -> None:
    """Stores the final value of each written buffer, and refuses writes to anything else that outlives the call."""
    graph = aliases.module.graph
    for root in list(aliases.version):
        if root.op != "placeholder":
            continue
        if root.meta["kind"] == "constant":
            raise _refused(root, f"the model writes to {root.meta['path']}, which is no registered buffer of it")
        if root.meta["kind"] != "buffer":
            raise _refused(root, f"the model writes to its {root.meta['kind']} {root.meta['path']}")
        _keep_what_is_read(aliases, root)
        with graph.inserting_before(graph.output_node()):
            emit(aliases.module, aten.copy_.default, (root, aliases.current(root)), root)


def _keep_what_is_read(aliases: _Aliases, root: fx.Node) -> None:
    """Lets ops whose backward may save a written buffer, as in `y = x * self.scale`, read a copy of it.

    Otherwise autograd would raise, because the final `copy_` modifies a saved tensor. Norms are left out: they read and
    update their statistics in one op.
    """
    readers = [n for n in root.users if aliases.wants_grad(n) and "norm" not in str(n.target)]
    if readers:
        first = min(readers, key=list(aliases.module.graph.nodes).index)
        with aliases.module.graph.inserting_before(first):
            earlier = emit(aliases.module, aten.clone.default, (root,), root)
        for reader in readers:
            reader.replace_input_with(root, earlier)


def _refused(node: fx.Node, why: str) -> CaptureError:
    return CaptureError(
        "an in-place op of the model can't be made part of a graph without side effects",
        where=where(node),
        why=why,
        attempt="the same op without the trailing underscore, on a new value",
    )
