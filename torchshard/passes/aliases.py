"""Tracks views: the current node of each value, and how a write through a view reaches its base.

`functionalize` replaces one write after the other, and asks here for the current node of each value
in between: a view is recomputed after a write to its base, and the inverse of a view propagates a
write to the base.

    y = slice(x, 1, 0, 1); add_(y, 1)       ->      x_1 = slice_scatter(x, add, 1, 0, 1)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.node import Target

from torchshard.core.errors import CaptureError
from torchshard.core.modules import storage_id
from torchshard.custom_ops.with_value import WITH_VALUE
from torchshard.ir.editing import emit
from torchshard.ir.effects import is_inplace
from torchshard.ir.graph import bound_args, is_float, is_tensor, where
from torchshard.passes.nodes import read_sizes

aten = torch.ops.aten

SAME_VALUES = {
    aten.alias.default, aten.detach.default, aten.contiguous.default, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.to.other, aten.type_as.default,
}  # fmt: skip
"""Ops that return their operand itself when they would change nothing; only then are they views."""
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten._unsafe_view.default, aten.view_as.default,
}  # fmt: skip
_OWN_INVERSES = {
    aten._conj.default, aten._neg_view.default, aten.t.default, aten.mT.default, aten.transpose.int,
    aten.swapaxes.default,
}  # fmt: skip


@dataclass
class Aliases:
    """The views of each value, and its current node after the writes so far."""

    module: fx.GraphModule
    base_of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """View -> the value that it is a view of. An in-place op is a view of the tensor that it writes to."""
    latest: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node of the original graph -> the current node of its value, by default the node itself."""
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
        """Returns the current node of a value; recomputes a view if its base was written since."""
        version = self.version.get(self.root(node), 0)
        if self.seen_version.get(node, 0) == version:
            return self.latest.get(node, node)
        if node in self.base_of:
            base = self.current(self.base_of[node])
            if _is_written(node):
                self.latest[node] = base
            else:
                self.latest[node] = emit(self.module, node.target, (base, *node.args[1:]), node, **node.kwargs)
        self.seen_version[node] = version
        return self.latest.get(node, node)

    def note_view(self, node: fx.Node) -> None:
        """Records a view: a result that shares the storage of the first operand, as `to` may."""
        source = node.args[0] if node.args else None
        if node.op != "call_function" or not is_tensor(node) or not isinstance(source, fx.Node):
            return
        if is_tensor(source) and not is_copied_constant(source) and storage(source) == storage(node):
            self.base_of[node] = source
            self.seen_version[node] = self.version.get(self.root(source), 0)

    def note_written(self, node: fx.Node, target: fx.Node) -> None:
        """Records the result of an in-place op as an alias of the tensor that the op wrote."""
        self.base_of[node] = target
        self.latest[node], self.seen_version[node] = self.current(target), self.version[self.root(target)]

    def write(self, node: fx.Node, value: fx.Node) -> None:
        """Makes `value` the current value of `node`; propagates the write to the base of a view."""
        if node in self.base_of:
            base = self.base_of[node]
            base_value = value if _is_written(node) else self._base_value(node, self.current(base), value)
            self.write(base, base_value)
        else:
            self.version[node] = self.version.get(node, 0) + 1
            if node.meta.get("kind") == "parameter":
                value.meta["holds"] = node.meta["names"]
        self.latest[node] = value
        self.seen_version[node] = self.version[self.root(node)]

    def _base_value(self, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
        if view.target is aten.detach.default and self.wants_grad(base):
            return emit(self.module, WITH_VALUE, (base, value), view)
        return _invert_view(self.module, view, base, value)


def _is_written(node: fx.Node) -> bool:
    """Whether a node is a result of an in-place op."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and is_inplace(source)


def _wants_grad(node: fx.Node, inputs_want: Mapping[fx.Node, bool]) -> bool:
    val = node.meta.get("val")
    if node.op == "placeholder":
        # a placeholder without a kind belongs to a traced op, any of whose operands may need a gradient
        return isinstance(val, torch.Tensor) and (val.requires_grad or "kind" not in node.meta)
    differentiable = (is_float(val) or isinstance(val, (list, tuple))) and node.target is not aten.detach.default
    return differentiable and any(inputs_want[n] for n in node.all_input_nodes)


def is_copied_constant(node: fx.Node) -> bool:
    """Whether a node is a constant that each call copies first.

    Export's fake values claim that the copy shares the constant's storage.
    """
    return node.op == "placeholder" and all(user.target is aten.lift_fresh_copy.default for user in node.users)


def storage(node: fx.Node) -> int:
    """An id of a value's memory; export's fake tensors share storage exactly as the real ones do."""
    value = node.meta["val"]
    if value.layout == torch.sparse_coo:
        # `_values`: `values()` refuses a sparse tensor that is not coalesced (PyTorch 2.13.0).
        value = value._values()
    elif value.layout != torch.strided:
        value = value.values()
    return storage_id(value)


def _invert_view(module: fx.GraphModule, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    """The value of `base` after `value` is written to its view."""
    target, args = view.target, bound_args(view)
    if target in _SCATTERS:
        return _scattered(module, view, base, value)
    if target is aten.view_as_real.default:
        dense = emit(module, aten.contiguous.default, (value,), view)
        return emit(module, aten.view_as_complex.default, (dense,), view)
    if target is aten.view_as_complex.default:
        return _as_real(module, value, view)
    if target in _OWN_INVERSES:
        return emit(module, target, (value, *list(args.values())[1:]), view)
    if target in (aten.movedim.int, aten.movedim.intlist):
        return emit(module, target, (value, args["destination"], args["source"]), view)
    if target is aten.permute.default:
        ndim = base.meta["val"].ndim
        order = [d % ndim for d in args["dims"]]
        return emit(module, target, (value, [order.index(d) for d in range(ndim)]), view)
    if target in SAME_VALUES:
        return value
    if target in _RESHAPES:
        return emit(module, aten.reshape.default, (value, read_sizes(module, base, view)), view)
    raise refused(view, f"a write through the view {target} can't be traced back")


_SCATTERS: Mapping[Target, Target] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
"""View -> the op that scatters a value into the viewed part."""


def _scattered(module: fx.GraphModule, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    """The base with `value` in the viewed part; complex tensors are scattered as real numbers.

    PyTorch 2.13 can't differentiate `slice_scatter` and `select_scatter` of complex numbers.
    """
    scatter, places = _SCATTERS[view.target], list(bound_args(view).values())[1:]
    if not base.meta["val"].is_complex() or scatter is aten.diagonal_scatter.default:
        return emit(module, scatter, (base, value, *places), view)
    dim = places[0] % base.meta["val"].ndim  # real numbers have one dim more, the last one
    parts = [_as_real(module, one, view) for one in (base, value)]
    written = emit(module, scatter, (*parts, dim, *places[1:]), view)
    return emit(module, aten.view_as_complex.default, (written,), view)


def _as_real(module: fx.GraphModule, value: fx.Node, view: fx.Node) -> fx.Node:
    if value.meta["val"].is_conj():
        value = emit(module, aten.resolve_conj.default, (value,), view)
    return emit(module, aten.view_as_real.default, (value,), view)


def refused(
    node: fx.Node,
    why: str,
    attempt: str = "the same op without the trailing underscore, on a new value; torch.where in place of x[i] = y",
) -> CaptureError:
    """The error for an in-place op without a functional form here."""
    return CaptureError(
        "an in-place op of the model can't be made part of a graph without side effects",
        where=where(node),
        why=why,
        attempt=attempt,
    )
