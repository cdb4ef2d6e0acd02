"""Replaces in-place ops with functional ones, so that every value of the graph is written once.

    before    y = slice(x, 1, 0, 1); add_ = add_(y, 1); z = mul(x, 2)
    after     y = slice(x, 1, 0, 1); add = add(y, 1); x_1 = slice_scatter(x, add, 1, 0, 1); z = mul(x_1, 2)

A write to a view is propagated to the base of the view; other views of that base are recomputed
before their next use. One `copy_` at the end stores a written buffer, one `store` a written
parameter. The pass refuses a write to a constant, and a write through a view that it can't invert.

Gradients equal eager PyTorch's. Autograd does not record a write via `detach` or under `no_grad`,
so the gradient passes as if there had been no write (`with_value`). A value that `zero_` or `copy_`
overwrites completely keeps a gradient of zeros.

The pass replaces PyTorch's own functionalization. Export's training IR keeps in-place ops, and
PyTorch lacks a functional op for a write that autograd does not record, which `with_value` is. The
pass could go if export returned a functional training graph with these gradients, with one write
per buffer or parameter at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import fx
from torch.fx.node import Argument

from torchshard.core.overloads import functional_overload
from torchshard.custom_ops.without_writes import WithoutWrites
from torchshard.ir.editing import emit
from torchshard.ir.effects import is_inplace
from torchshard.ir.graph import bound_args, is_tensor
from torchshard.passes.aliases import SAME_VALUES, Aliases, is_copied_constant, refused, storage
from torchshard.passes.nodes import int_arg, node_arg, operator_of
from torchshard.passes.stores import store_written

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


def functionalize(module: fx.GraphModule, *, keep_stores: bool = False) -> bool:
    """Rewrites the graph; returns whether anything changed.

    Args:
        keep_stores: whether writes to placeholders stay, as in a graph that stores its buffers
            already.
    """
    changed = not keep_stores and _drop_copies_to_themselves(module)
    changed |= _drop_detached_constants(module)
    changed |= _views_for_new_shapes(module)
    writes = [n for n in module.graph.nodes if is_inplace(n) and not (keep_stores and _is_store(n))]
    if not writes:
        return changed
    _cut_pieces(module, {storage(node_arg(n)) for n in writes if is_tensor(n.args[0])})
    aliases, replaced = Aliases(module), set(writes)
    for node in list(module.graph.nodes):
        if is_tensor(node) and not is_copied_constant(node):
            aliases.sharing.setdefault(storage(node), []).append(node)
        if node.op not in ("call_function", "output"):
            continue
        with module.graph.inserting_before(node):
            if node in replaced:
                _replace(aliases, node)
                continue
            aliases.note_view(node)
            node.args = fx.map_arg(node.args, lambda n: aliases.current(n))
            node.kwargs = fx.map_arg(node.kwargs, lambda n: aliases.current(n))
    store_written(aliases)
    for node in reversed(writes):
        for result in [*node.users, node]:
            module.graph.erase_node(result)
    return True


def _drop_detached_constants(module: fx.GraphModule) -> bool:
    """Drops the `detach_` of constants that `torch.tensor(...)` leaves: they need no gradient."""
    found = [
        node
        for node in module.graph.find_nodes(op="call_function", target=aten.detach_.default)
        if node_arg(node).meta.get("kind") == "constant"
    ]
    for node in found:
        node.replace_all_uses_with(node_arg(node))
        module.graph.erase_node(node)
    return bool(found)


def _views_for_new_shapes(module: fx.GraphModule) -> bool:
    """Replaces in-place ops that only change a value's shape (`squeeze_`, `t_`) by views."""
    changed = False
    for node in module.graph.nodes:
        if not is_inplace(node) or torch.Tag.inplace_view not in operator_of(node).tags:
            continue
        view = functional_overload(operator_of(node))
        if view is not None and view._schema.returns[0].alias_info and node_arg(node).op != "placeholder":
            node.target, changed = view, True
    return changed


def _drop_copies_to_themselves(module: fx.GraphModule) -> bool:
    """Drops copies of a buffer into itself, as `self.scale = self.scale.to(x.device)` may make one.

    Such a copy changes only the buffer's version counter, which would make the backward of an op
    that saved the buffer raise.
    """
    changed = False
    for node in list(module.graph.nodes):
        if node.target is not aten.copy_.default or node.args[0].op != "placeholder" or not is_tensor(node.args[1]):
            continue
        target, source = node_arg(node), node_arg(node, 1)
        while source.target in SAME_VALUES and storage(source) == storage(node_arg(source)):
            source = node_arg(source)
        if source is target and not target.meta["val"].requires_grad:
            node.replace_all_uses_with(target)
            module.graph.erase_node(node)
            changed = True
    return changed


def _cut_pieces(module: fx.GraphModule, written: set[int]) -> None:
    """Replaces pieces of a written split value with slices: slices can be inverted, a split can't."""
    for node in list(module.graph.nodes):
        if node.target is not operator.getitem:
            continue
        source = node_arg(node)
        if source.target not in _SPLITS or storage(node) not in written:
            continue
        args = bound_args(source)
        sizes = [v.shape[args["dim"]] for v in source.meta["val"][: int_arg(node, 1) + 1]]
        start, x = sum(sizes[:-1]), args["self"]
        with module.graph.inserting_before(node):
            piece = emit(module, aten.slice.Tensor, (x, args["dim"], start, start + sizes[-1]), node)
        node.replace_all_uses_with(piece)
        module.graph.erase_node(node)


_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.split.sizes}


def _replace(aliases: Aliases, node: fx.Node) -> None:
    """Replaces an in-place op with a functional one, and records its writes."""
    names, before = [a.name for a in _written(node)], bound_args(node)
    targets = {name: before[name] for name in names}
    for name, target in targets.items():
        _check_target(aliases, node, name, target)
    args = {k: fx.map_arg(v, lambda n: aliases.current(n)) for k, v in before.items()}
    functional = _functional(aliases.module, node, args, names)
    made = [functional] if is_tensor(functional) else _elements(aliases.module, functional)
    returned, others = _results(node), iter(made)
    for name, value in zip(names, made[len(made) - len(names) :], strict=True):
        written = _write(aliases, node, name, targets[name], args[name], value)
        for result in returned.pop(name, ()):
            written.meta |= result.meta | {"val": written.meta["val"]}
            aliases.note_written(result, targets[name])
    for results, other in zip(returned.values(), others, strict=False):
        for result in results:
            other.meta = dict(result.meta)
            result.replace_all_uses_with(other)


def _results(node: fx.Node) -> dict[str, list[fx.Node]]:
    """The result nodes of an op, by the name of the written argument that each is, or by number."""
    returns = operator_of(node)._schema.returns
    arguments = {"".join(a.alias_info.before_set): a.name for a in _written(node) if a.alias_info}
    names = [arguments["".join(r.alias_info.before_set)] if r.alias_info else str(i) for i, r in enumerate(returns)]
    if len(returns) == 1:
        return {names[0]: [node]}
    return {name: [user for user in node.users if int_arg(user, 1) == i] for i, name in enumerate(names)}


def _check_target(aliases: Aliases, node: fx.Node, name: str, target: object) -> None:
    if not isinstance(target, fx.Node) or not is_tensor(target):
        raise refused(node, f"it writes to {name}, a list of tensors")
    family = aliases.root(target)
    if any(aliases.root(n) is not family for n in aliases.sharing[storage(target)] if n is not node):
        raise refused(node, "it writes to a piece of a split value, which shares its memory with the other pieces")


def _elements(module: fx.GraphModule, node: fx.Node) -> list[fx.Node]:
    """The results of an op that has several."""
    return [emit(module, operator.getitem, (node, i), node) for i in range(len(node.meta["val"]))]


def _write(aliases: Aliases, node: fx.Node, name: str, target: fx.Node, before: fx.Node, value: fx.Node) -> fx.Node:
    """Records that an op wrote `value` to its argument `name`; returns the written value's node.

    Args:
        before: the node of the argument's value before the write.
    """
    if value.meta["val"].shape != target.meta["val"].shape:
        raise refused(node, f"it changes the shape of what it writes to, {name}")
    if value.meta["val"].dtype != target.meta["val"].dtype:
        value = emit(aliases.module, aten.to.dtype, (value, target.meta["val"].dtype), node)
    if node.target in _OVERWRITING and aliases.wants_grad(before):
        value = _with_zero_gradient(aliases.module, node, before, value)
    aliases.write(target, value)
    return value


def _written(node: fx.Node) -> list[torch.Argument]:
    """The arguments that an op writes to."""
    return [a for a in operator_of(node)._schema.arguments if a.alias_info and a.alias_info.is_write]


def _is_store(node: fx.Node) -> bool:
    """Whether an op writes only to placeholders."""
    args = bound_args(node)
    written = [args[argument.name] for argument in _written(node)]
    return all(isinstance(value, fx.Node) and value.op == "placeholder" for value in written)


def _functional(module: fx.GraphModule, node: fx.Node, args: Mapping[str, Argument], written: Sequence[str]) -> fx.Node:
    """The value that an in-place op writes.

    For an op with several written arguments, the node returns these values after its other results.

    Args:
        args: the op's arguments by name, with their current values.
        written: the names of the arguments that it writes to.
    """
    target, before = operator_of(node), cast(fx.Node, args[written[0]])
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
    functional = functional_overload(target)
    if functional is None:
        return emit(module, WithoutWrites(target), tuple(args.values()), node)
    schema = functional._schema.arguments
    # the first argument has a different name in some pairs: `self` in dropout_, `input` in dropout
    by_name = dict(zip((schema[0].name, *list(args)[1:]), args.values(), strict=True))
    kwargs = {a.name: by_name[a.name] for a in schema if a.kwarg_only and a.name in by_name}
    operands = tuple(by_name[a.name] for a in schema if not a.kwarg_only and a.name in by_name)
    return emit(module, functional, operands, node, **kwargs)


_OVERWRITING = {
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default, aten.normal_.default,
    aten.uniform_.default, aten.exponential_.default, aten.random_.default, getattr(aten.random_, "from"),
    aten.random_.to, aten.bernoulli_.float, aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default,
}  # fmt: skip
"""Ops with a result that does not depend on the overwritten value."""


def _with_zero_gradient(module: fx.GraphModule, node: fx.Node, before: fx.Node, value: fx.Node) -> fx.Node:
    """Ties the value to the overwritten one by a `where` that never picks it: its gradient is zero."""
    if value.target in _DRAWN:  # PyTorch can't differentiate these
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
