"""In-place ops become plain ones, so that every value of the graph is written once.

    before    y = slice(x, 1, 0, 1); add_ = add_(y, 1); z = mul(x, 2)
    after     y = slice(x, 1, 0, 1); add = add(y, 1); x_1 = slice_scatter(x, add, 1, 0, 1); z = mul(x_1, 2)

A write to a view is written back to what it views, and other views are taken anew where they are used later. A
written buffer is stored by one `copy_` at the end. A write to an input or a parameter, or through a view that can't
be undone, is refused.

Gradients are eager PyTorch's too: a write through `detach` or under `no_grad` is not recorded, so the gradient goes on
as if there had been none (`with_value`); what is overwritten altogether (`zero_`, `copy_`) keeps a gradient of zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx

from torchshard.core.errors import CaptureError
from torchshard.custom_ops.with_value import WITH_VALUE
from torchshard.ir.graph import bound_args, emit, is_tensor, where

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
    """Which values are views of which, and what each is now."""

    module: fx.GraphModule
    parent: dict[fx.Node, fx.Node] = field(default_factory=dict)
    now: dict[fx.Node, fx.Node] = field(default_factory=dict)
    seen: dict[fx.Node, int] = field(default_factory=dict)
    version: dict[fx.Node, int] = field(default_factory=dict)
    sharing: dict[int, list[fx.Node]] = field(default_factory=dict)
    """Storage -> the nodes seen so far that lie in it."""
    wanting: dict[fx.Node, bool] = field(default_factory=dict)
    """Whether a value may need a gradient, as far as known."""

    def wants_grad(self, node: fx.Node) -> bool:
        """Whether a value comes from a parameter or input that needs a gradient."""
        pending = [node]
        while pending:
            one = pending[-1]
            unknown = [n for n in one.all_input_nodes if n not in self.wanting]
            if one in self.wanting or not unknown:
                self.wanting.setdefault(pending.pop(), _wants_grad(one, self.wanting))
            else:
                pending += unknown
        return self.wanting[node]

    def root(self, node: fx.Node) -> fx.Node:
        while node in self.parent:
            node = self.parent[node]
        return node

    def current(self, node: fx.Node) -> fx.Node:
        """The node that holds this value now; a view of something written since is taken anew."""
        version = self.version.get(self.root(node), 0)
        if self.seen.get(node, 0) == version:
            return self.now.get(node, node)
        if node in self.parent:
            source = self.current(self.parent[node])
            if _is_inplace(node):
                self.now[node] = source
            else:
                args = (source, *node.args[1:])
                self.now[node] = emit(self.module, node.target, args, node, **node.kwargs)
        self.seen[node] = version
        return self.now.get(node, node)

    def write(self, node: fx.Node, value: fx.Node) -> None:
        """`node` now holds `value`, and so does what it is a view of."""
        if node in self.parent:
            base = self.parent[node]
            held = value if _is_inplace(node) else self._undone(node, self.current(base), value)
            self.write(base, held)
        else:
            self.version[node] = self.version.get(node, 0) + 1
        self.now[node] = value
        self.seen[node] = self.version[self.root(node)]

    def _undone(self, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
        if view.target is aten.detach.default and self.wants_grad(base):
            return emit(self.module, WITH_VALUE, (base, value), view)
        return _undo(self.module, view, base, value)


def _wants_grad(node: fx.Node, known: Mapping[fx.Node, bool]) -> bool:
    val = node.meta.get("val")
    if node.op == "placeholder":
        return isinstance(val, torch.Tensor) and (val.requires_grad or "kind" not in node.meta)
    floats = isinstance(val, torch.Tensor) and (val.is_floating_point() or val.is_complex())
    plain = floats or isinstance(val, (list, tuple))
    return plain and node.target is not aten.detach.default and any(known[n] for n in node.all_input_nodes)


def functionalize(module: fx.GraphModule) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    changed = _drop_copies_to_themselves(module)
    writes = [n for n in module.graph.nodes if _is_inplace(n)]
    if not writes:
        return changed
    _cut_pieces(module, {_storage(n.args[0]) for n in writes if is_tensor(n.args[0])})
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
    """`self.scale = self.scale.to(x.device)` stores a buffer in itself where there is nothing to move.

    The copy would change nothing but the buffer's version, and a backward that has kept the buffer would refuse that.
    """
    changed = False
    for node in list(module.graph.nodes):
        if node.target is not aten.copy_.default or node.args[0].op != "placeholder" or not is_tensor(node.args[1]):
            continue
        target, source = node.args[:2]
        while source.target in _SAME_VALUES and _storage(source) == _storage(source.args[0]):
            source = source.args[0]
        if source is target and not target.meta["val"].requires_grad:
            node.replace_all_uses_with(target)
            module.graph.erase_node(node)
            changed = True
    return changed


def _cut_pieces(module: fx.GraphModule, written: set[int]) -> None:
    """Pieces of a split value that is written to become slices of it, each a view of its own."""
    for node in list(module.graph.nodes):
        source: Any = node.args[0] if node.op == "call_function" and node.args else None
        if node.target is not operator.getitem or source.target not in _SPLITS or _storage(node) not in written:
            continue
        args = bound_args(source)
        sizes = [v.shape[args["dim"]] for v in source.meta["val"][: node.args[1] + 1]]
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
    """A constant that each call copies first, in what export says is the same storage."""
    return node.op == "placeholder" and all(user.target is aten.lift_fresh_copy.default for user in node.users)


def _storage(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


def _note_alias(aliases: _Aliases, node: fx.Node) -> None:
    """A value that shares its first operand's storage is a view of it, whatever the op is called."""
    source: Any = node.args[0] if node.args else None
    if not is_tensor(node) or not is_tensor(source) or node.op != "call_function" or _is_copied(source):
        return
    if _storage(source) == _storage(node):
        aliases.parent[node] = source
        aliases.seen[node] = aliases.version.get(aliases.root(source), 0)


def _replace(aliases: _Aliases, node: fx.Node) -> None:
    args = bound_args(node)
    schema: Any = node.target._schema  # type: ignore[union-attr]
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    target: Any = args[written[0]]
    if not is_tensor(target) or len(written) > 1:
        raise _refused(node, f"it writes to {', '.join(written)}: more than one tensor")
    family = aliases.root(target)
    if any(aliases.root(n) is not family for n in aliases.sharing[_storage(target)] if n is not node):
        raise _refused(node, "it writes to a piece of a split value, which shares its memory with the other pieces")
    held = {k: fx.map_arg(v, lambda n: aliases.current(n)) for k, v in args.items()}
    before: Any = held[written[0]]
    value = _functional(aliases.module, node, held, written[0])
    if value.meta["val"].shape != target.meta["val"].shape:
        raise _refused(node, f"it changes the shape of what it writes to, {written[0]}")
    if value.meta["val"].dtype != target.meta["val"].dtype:
        value = emit(aliases.module, aten.to.dtype, (value, target.meta["val"].dtype), node)
    if node.target in _OVERWRITING and aliases.wants_grad(before):
        value = _keeping_gradient(aliases.module, node, before, value)
    aliases.parent[node] = target
    aliases.write(target, value)
    aliases.now[node], aliases.seen[node] = value, aliases.version[aliases.root(target)]


def _functional(module: fx.GraphModule, node: fx.Node, held: dict[str, Any], written: str) -> fx.Node:
    target: Any = node.target
    mine = held[written]
    if target is aten.copy_.default:
        source = held["src"]
        if source.meta["val"].shape != mine.meta["val"].shape:
            source = emit(module, aten.expand_as.default, (source, mine), node)
        return emit(module, aten.clone.default, (source,), node)
    if target is aten.fill_.Scalar:
        return emit(module, aten.full_like.default, (mine, held["value"]), node)
    if target in _NAMED:
        positional = [a for a in _NAMED[target]._schema.arguments if not a.kwarg_only]
        return emit(module, _NAMED[target], tuple(held.values())[: len(positional)], node)
    plain = _returning(target)
    if plain is None:
        raise _refused(node, f"{target} has no form that does not write")
    first = plain._schema.arguments[0].name  # dropout_ calls it `self`, dropout `input`
    held = {first if i == 0 else name: value for i, (name, value) in enumerate(held.items())}
    schema_names = {a.name for a in plain._schema.arguments}
    kwonly = {a.name for a in plain._schema.arguments if a.kwarg_only}
    args = tuple(v for k, v in held.items() if k in schema_names and k not in kwonly)
    return emit(module, plain, args, node, **{k: v for k, v in held.items() if k in kwonly})


_OVERWRITING = {
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default, aten.normal_.default,
    aten.uniform_.default, aten.exponential_.default, aten.random_.default, getattr(aten.random_, "from"),
    aten.random_.to, aten.bernoulli_.float, aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default,
}  # fmt: skip
"""Ops that leave nothing of what they write to."""


def _keeping_gradient(module: fx.GraphModule, node: fx.Node, before: fx.Node, value: fx.Node) -> fx.Node:
    """The value; it needs a gradient as what was there before did, which gets one of zeros."""
    if value.target in _DRAWN:  # PyTorch has no derivative for these
        value.args = (emit(module, aten.detach.default, (before,), node), *value.args[1:])
        value.prepend(cast(fx.Node, value.args[0]))
    like = before.meta["val"]
    true = emit(module, aten.scalar_tensor.default, (True,), node, dtype=torch.bool, device=like.device)
    return emit(module, aten.where.self, (true, value, before), node)


_DRAWN = {
    aten.normal_functional.default, aten.uniform.default, aten.exponential.default, aten.random.default,
    aten.log_normal.default, aten.cauchy.default, aten.geometric.default, aten.bernoulli.p,
}  # fmt: skip


def _returning(target: Any) -> Any:
    """The overload that returns what this one writes: `add.Tensor` for `add_.Tensor`, `div.Tensor` for `div.out`."""
    name, overload = target._schema.name.split("::")[1], target._overloadname
    wanted = [str(a.type) for a in target._schema.arguments if not a.is_out]
    family = getattr(aten, name.rstrip("_"), None) if name.endswith("_") else target._overloadpacket
    overloads = [getattr(family, name) for name in family.overloads()] if family is not None else []
    fitting = [o for o in overloads if [str(a.type) for a in o._schema.arguments] == wanted]
    return next((o for o in fitting if o._overloadname == overload), fitting[0] if fitting else None)


def _undo(module: fx.GraphModule, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    """What `base` is once the view of it holds `value`."""
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
    if target in _RESHAPES and all(isinstance(s, int) for s in shape):
        return emit(module, aten.reshape.default, (value, shape), view)
    if target in _RESHAPES:
        sizes = [
            s if isinstance(s, int) else emit(module, aten.sym_size.int, (base, i), view) for i, s in enumerate(shape)
        ]
        return emit(module, aten.reshape.default, (value, sizes), view)
    raise _refused(view, f"a write through the view {target} can't be traced back")


_SAME_VALUES = {
    aten.alias.default, aten.detach.default, aten.contiguous.default, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.to.other, aten.type_as.default,
}  # fmt: skip
"""Ops that give their operand itself where they have nothing to do; only then are they views."""
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten._unsafe_view.default, aten.view_as.default,
}  # fmt: skip


def _store_written(aliases: _Aliases) -> None:
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
    """Ops whose backward may need a written buffer's earlier value (`y = x * self.scale`) read a copy of it."""
    readers = [n for n in root.users if aliases.wants_grad(n) and "norm" not in str(n.target)]
    if readers:
        first = min(readers, key=list(aliases.module.graph.nodes).index)
        with aliases.module.graph.inserting_before(first):
            held = emit(aliases.module, aten.clone.default, (root,), root)
        for reader in readers:
            reader.replace_input_with(root, held)


def _refused(node: fx.Node, why: str) -> CaptureError:
    return CaptureError(
        "an in-place op of the model can't be made part of a graph without side effects",
        where=where(node),
        why=why,
        attempt="the same op without the trailing underscore, on a new value",
    )
