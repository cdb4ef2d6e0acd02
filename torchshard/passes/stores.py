"""Stores the final value of each buffer and parameter that a functional graph writes to, for `functionalize`.

    before    add = add(mean, x); y = mul(add, 2)
    after     add = add(mean, x); y = mul(add, 2); copy_ = copy_(mean, add)

An op whose backward may save a written buffer reads a copy of it. The value stored in a parameter
has no gradient, and no earlier op's backward may need the overwritten one.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from torchshard.core.modules import storage_id
from torchshard.custom_ops.store import STORE
from torchshard.custom_ops.with_value import WITH_VALUE
from torchshard.ir.editing import emit
from torchshard.ir.effects import is_inplace, writes
from torchshard.ir.fake_values import faking
from torchshard.ir.graph import fake_mode, is_tensor
from torchshard.passes.aliases import Aliases, refused, storage
from torchshard.passes.nodes import call_target, node_arg, read_by

aten = torch.ops.aten


def store_written(aliases: Aliases) -> None:
    """Stores the final value of each written buffer and parameter; refuses writes to constants."""
    graph = aliases.module.graph
    for root in list(aliases.version):
        if root.op != "placeholder" or root.meta["kind"] == "input":
            continue  # values written to the call's arguments are results of the graph
        if root.meta["kind"] == "constant":
            raise refused(root, f"the model writes to {root.meta['path']}, which is no registered buffer of it")
        value = aliases.current(root)
        if root.meta["kind"] == "parameter":
            value = _without_gradient(aliases, root, value)
        else:
            _keep_what_is_read(aliases, root)
        with graph.inserting_before(graph.output_node()):
            target = STORE if root.meta["kind"] == "parameter" else aten.copy_.default
            emit(aliases.module, target, (root, value), root)


def _without_gradient(aliases: Aliases, root: fx.Node, value: fx.Node) -> fx.Node:
    """The value to store in a parameter, unwrapped from a `with_value`.

    Raises:
        CaptureError: the value has a gradient of its own, or a gradient is computed from the
            overwritten value. Eager PyTorch raises in the second case too; if the write is through
            `.data`, it computes the gradient from the new value.
    """
    if value.target is WITH_VALUE:
        value = node_arg(value, 1)
    if not torch.is_grad_enabled():
        return value
    if aliases.wants_grad(value):
        raise refused(root, f"parameter {root.meta['path']} would hold a value that has a gradient", _UNDER_NO_GRAD)
    old = [node for node in aliases.sharing[storage(root)] if not is_inplace(node)]
    for reader in (user for node in old for user in node.users if _saves_for_gradient(aliases, user, node)):
        why = f"the gradient of {reader.name} is computed of parameter {root.meta['path']}, which is written to later"
        raise refused(reader, why, "the write before the first use of the parameter, or outside of forward")
    return value


_UNDER_NO_GRAD = "the write under torch.no_grad(), of a detached value"


def _saves_for_gradient(aliases: Aliases, reader: fx.Node, value: fx.Node) -> bool:
    """Whether the gradient of an op is wanted, and autograd saves an operand for it."""
    if not aliases.wants_grad(reader) or not _reaches_results(aliases, reader):
        return False
    saved = set[int]()

    def note(tensor: Tensor) -> Tensor:
        saved.add(storage_id(tensor))
        return tensor

    def leaf(node: fx.Node) -> object:
        val = node.meta["val"]
        return val.detach().requires_grad_(aliases.wants_grad(node)) if is_tensor(node) else val

    args, kwargs = fx.map_arg((reader.args, reader.kwargs), leaf)  # type: ignore[arg-type]
    with faking(fake_mode(aliases.module.graph)), torch.enable_grad(), saved_tensors_hooks(note, lambda t: t):
        call_target(reader, args, kwargs)
    return storage(value) in saved


def _reaches_results(aliases: Aliases, node: fx.Node) -> bool:
    """Whether a gradient of the results flows back to a value."""
    pending, seen = [node], {node}
    while pending:
        users = set(pending.pop().users)
        if any(user.op == "output" for user in users):
            return True
        new = [user for user in users - seen if aliases.wants_grad(user)]
        seen.update(new)
        pending += new
    return False


def _keep_what_is_read(aliases: Aliases, root: fx.Node) -> None:
    """Lets an op read a copy of a written buffer if its backward may save the buffer.

    Otherwise autograd would raise for `y = x * self.scale`, because the final `copy_` modifies a
    saved tensor. A view of the buffer counts as the buffer. Norms that read and update their
    statistics in one op are left out.
    """
    readers = [n for n in root.users if not writes(n) and any(map(aliases.wants_grad, read_by(n)))]
    if readers:
        first = min(readers, key=list(aliases.module.graph.nodes).index)
        with aliases.module.graph.inserting_before(first):
            earlier = emit(aliases.module, aten.clone.default, (root,), root)
        for reader in readers:
            reader.replace_input_with(root, earlier)
