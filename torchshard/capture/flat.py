"""Captures one call of a module as one flat graph of ATen ops, with global shapes.

`torch.export` (non-strict) runs the model on fake tensors, so no parameter is read. In its training IR,
linear, attention, layer_norm, cross_entropy and dropout stay single ops. The result becomes the
graph that all passes work on:

    placeholders    parameters, buffers and constants first, then the call's tensors; meta["kind"], meta["path"]
    call_function   ATen ops; meta["val"] (fake, global shape), meta["module"] (path), meta["source"] (user's line)
    output          the flat list of result tensors

The first two dims of each input tensor (batch, sequence) are dynamic if the model computes the same
for any size. `Captured.assumes` checks the graph's assumptions about its inputs at each call.

Control flow that depends on a tensor's value raises an error, except for values of one-element
buffers (see `conditions`). Custom `autograd.Function`s and gradient hooks are kept
whole: each is one op of the graph. The ops of an activation checkpoint are marked, because backward
computes their values again.

`torch.export` does the tracing. This module is needed because a program in training IR (PyTorch
2.13) has regions for `no_grad` and autocast, no marks of checkpoints, and no op for Python code
with its own backward. It will be unnecessary once such programs are flat, mark checkpoints and keep
that code whole.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchshard.capture.assumptions import Assumption, assumption, divided_sizes, multiples
from torchshard.capture.call_arguments import flatten_call
from torchshard.capture.carried import Changes, finder
from torchshard.capture.conditions import Condition, Number
from torchshard.capture.copied_layers import repeat
from torchshard.capture.copies import without_storage
from torchshard.capture.models import check_devices, check_inputs, shared_names
from torchshard.capture.node_facts import describe_ops, describe_placeholders, order_placeholders, rename_nodes
from torchshard.capture.recording import WHOLE
from torchshard.capture.regions import detach_within_no_grad, inline_regions
from torchshard.capture.shared_memory import refuse_shared_constants
from torchshard.capture.signature import Leaves
from torchshard.capture.trace import trace
from torchshard.capture.user_code import line_in
from torchshard.core.errors import CaptureError
from torchshard.custom_ops.whole import HookCall, WholeCall
from torchshard.ir.editing import duplicate
from torchshard.ir.fake_values import guards
from torchshard.ir.graph import fake_mode

DYNAMIC_DIMS = frozenset({0, 1})
"""The dims of input tensors that may vary between calls: batch and sequence."""
log = logging.getLogger("torchshard.capture.flat")


@dataclass(frozen=True)
class Captured:
    """A graph with all the data needed to call it."""

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    """The names of the call's tensors, in the order of their placeholders."""
    constants: Mapping[str, Tensor]
    """Path -> tensor that forward reads, other than parameters, buffers and arguments."""
    result: Leaves
    """Forward's result and the carried values; its `rebuild` takes the graph's results."""
    changes: Changes
    """Where the arguments store the carried values."""
    assumes: Assumption
    """Checks whether tensors satisfy the graph's assumptions about sizes."""
    guards: int = 0
    """The number of size guards after export. Later ones are passed to `assumes` when it is called."""
    assigned: tuple[tuple[str, ...], ...] = ()
    """The places (see `attributes`) to which forward assigns in each call."""
    left: tuple[tuple[str, ...], ...] = ()
    """The places to which forward assigns tensors that depend on its inputs; the graph does not assign them."""
    conditions: tuple[tuple[Condition, Number], ...] = ()
    """(condition, value): the graph is valid only for calls in which each condition has this value."""

    def finish(self, results: Sequence[object], arguments: object) -> object:
        """Stores the carried values from the graph's results, and returns forward's result."""
        find = finder(arguments)
        value, items = self.result.rebuild(results, find)
        self.changes.store(find, items)
        return value


def capture(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic: bool = True,
    repeating: bool = False,
    left: Mapping[str, int | None] = MappingProxyType({}),
    numbers: Collection[str] = (),
    divided: Mapping[int, int] = MappingProxyType({}),
) -> Captured:
    """Captures one call of the model; reads only shapes, strides and dtypes of its tensors.

    Args:
        dynamic: whether batch and sequence may vary between calls, if the model allows it.
        left: name -> split dim, of each tensor that an earlier call left in the arguments; its
            other dims may vary too.
        numbers: the places of integers in the arguments that vary between calls.
        divided: dim of the call's tensors -> number of ranks. Each graph is for calls in which a
            dynamic size of this dim splits evenly over the ranks, with at least two elements per
            rank, or for calls in which it does not.
        repeating: whether only the first and the last of equal layers are traced. Effects of Python
            code in the layers between are not seen: for graphs that are planned, not run.

    Raises:
        CaptureError: the model can't be captured; the error names the line and an alternative.
        InputError: `forward` does not take these arguments, or a tensor is on a different device
            from the model.
    """
    call = flatten_call(model, args, kwargs or {}, numbers)
    check_inputs(model, call)
    check_devices(model, call)
    shapes = [_dynamic_dims(name, tensor, left) if dynamic else frozenset() for name, tensor in call.named_tensors]
    if repeating:
        try:
            return captured_flat(model, call, shapes, divided, repeating=True)
        except Exception as error:  # the capture of every layer reports the model's errors
            log.info("each layer is traced: %s", error)
    return captured_flat(model, call, shapes, divided, repeating=False)


def _dynamic_dims(name: str, tensor: Tensor, left: Mapping[str, int | None]) -> frozenset[int]:
    """The dims of an input that may vary between calls."""
    return frozenset(range(tensor.ndim)) - {left[name]} if name in left else DYNAMIC_DIMS & set(range(tensor.ndim))


def captured_flat(
    model: nn.Module, call: Leaves, shapes: Sequence[frozenset[int]], divided: Mapping[int, int], *, repeating: bool
) -> Captured:
    """Captures a call whose arguments are flat and checked.

    Args:
        shapes: the dynamic dims of each of the call's tensors.
    """
    traced = trace(model, call, shapes, repeating=repeating)
    exported = traced.exported
    constants = {path: exported.constants[path] for path in exported.graph_signature.lifted_tensor_constants}
    refuse_shared_constants(model, exported, constants, [condition for condition, _ in traced.conditions])
    shared = shared_names(model)
    names = (*call.names, *call.number_names)
    inputs = tuple(f"{name} (argument)" if name in shared else name for name in names)
    memo = {id(t): without_storage(t) for t in (*model.parameters(), *model.buffers())}
    graph = fx.GraphModule(exported.graph_module, copy.deepcopy(exported.graph_module.graph))
    inline_regions(graph)
    describe_placeholders(graph.graph, exported, inputs, shared)
    if traced.repeats is not None:
        repeat(graph.graph, traced.repeats, constants)
    _flatten(graph.graph, [whole_call.with_own_modules(memo) for whole_call in traced.whole])
    describe_ops(graph.graph)
    order_placeholders(graph.graph)
    rename_nodes(graph.graph)
    # Drops the modules and attributes of the exported program, which the graph does not use.
    graph = duplicate(fx.GraphModule(nn.Module(), graph.graph))
    sizes = divided_sizes(graph.graph, divided)
    graph.meta["multiples"] = multiples(sizes)
    return Captured(
        graph=graph,
        inputs=inputs,
        constants=constants,
        result=traced.result,
        changes=traced.changes,
        assumes=assumption(graph.graph, exported, sizes),
        guards=len(guards(fake_mode(graph.graph))),
        assigned=traced.assigned,
        left=traced.left,
        conditions=traced.conditions,
    )


# --- ExportedProgram -> GraphModule ----------------------------------------------------------------------------------


def _flatten(graph: fx.Graph, whole_calls: Sequence[WholeCall]) -> None:
    """Replaces temporary ops with real calls, and flattens the output; regions must already be inlined."""
    detach_within_no_grad(graph)
    for node in graph.nodes:
        _check_node(node)
    _insert_whole_calls(graph, whole_calls)
    output = graph.output_node()
    (results,) = output.args
    assert isinstance(results, Sequence)
    output.args = (tuple(results),)


def _check_node(node: fx.Node) -> None:
    """Refuses a node that can't be planned.

    Raises:
        CaptureError: the node turns a tensor's value into a number, or draws from a generator of
            the model.
    """
    line = line_in(node.meta.get("stack_trace") or "") or node.name
    if node.target in _READS_VALUE and not all(map(_is_only_checked, node.users)):
        raise CaptureError(
            "forward converts a tensor's value to a Python number",
            where=line,
            why="the graph would depend on the values of a tensor: .item(), float(t) and int(t) read one",
            attempt="compute with the tensor itself (`x * t` instead of `x * t.item()`), and call .item() outside",
        )
    if any(_is_generator(a) for a in pytree.tree_leaves((node.args, node.kwargs))):
        raise CaptureError(
            "forward draws random numbers from a generator of its own",
            where=line,
            why="all ranks share the state of PyTorch's default generator; another would be a constant of the graph",
            attempt="call torch.randn(...) and the like without generator=, and torch.manual_seed outside of the model",
        )


def _is_only_checked(user: fx.Node) -> bool:
    """Whether a use of a tensor's value only asserts on it or splits by it, which a graph can express."""
    if isinstance(user.target, torch._ops.OpOverload):
        return user.target in _CHECKS_VALUE
    return user.op == "call_function" and all(map(_is_only_checked, user.users))


_CHECKS_VALUE = {
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.split_with_sizes.default,
}
_READS_VALUE = {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}


def _is_generator(argument: object) -> bool:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    # Export replaces generators with script objects.
    script_object = isinstance(value, torch.ScriptObject) or type(value).__name__ in _SCRIPT_OBJECTS
    return script_object or isinstance(value, torch.Generator) or "Generator" in type(value).__name__


_SCRIPT_OBJECTS = ("CustomObjArgument", "FakeScriptObject")


# --- calls that are kept whole ---------------------------------------------------------------------------------------


def _insert_whole_calls(graph: fx.Graph, whole_calls: Sequence[WholeCall]) -> None:
    """Replaces the temporary ops with the calls that they represent."""
    stand_ins: dict[fx.Node, WholeCall] = {}
    for node in graph.nodes:
        if node.target is WHOLE:
            _, _, number = node.args
            stand_ins[node] = whole_calls[number]
    hooks = {node for node, call in stand_ins.items() if isinstance(call, HookCall)}
    for node, call in stand_ins.items():
        call_node = _replace_stand_in(graph, node, call)
        if node in hooks:
            _insert_hook(call_node, hooks)
        graph.erase_node(node)


def _replace_stand_in(graph: fx.Graph, node: fx.Node, call: WholeCall) -> fx.Node:
    """Inserts the call before its temporary op, or a hook directly after its tensor; moves the op's users to it."""
    tensors, sizes, _ = node.args
    assert isinstance(tensors, Sequence) and isinstance(sizes, Sequence) and isinstance(tensors[0], fx.Node)
    count = call.operands - len(sizes)
    with graph.inserting_after(tensors[0]) if isinstance(call, HookCall) else graph.inserting_before(node):
        # Sizes follow the arguments' tensors; the state of modules among the arguments comes last.
        call_node = graph.call_function(call, (*tensors[:count], *sizes, *tensors[count:]))
    call_node.meta = dict(node.meta)
    if call.single:
        call_node.meta["val"] = node.meta["val"][0]
    for user in list(node.users):
        if call.single:
            user.replace_all_uses_with(call_node)
            graph.erase_node(user)
        else:
            user.args = (call_node, user.args[1])
    return call_node


def _insert_hook(call_node: fx.Node, hooks: set[fx.Node]) -> None:
    """Redirects the users of a hooked tensor to the hook's result.

    Hooks see the gradient in the order of their registration: each later hook is inserted between
    the tensor and the earlier ones, so backward reaches it after them.
    """
    (tensor,) = call_node.args
    assert isinstance(tensor, fx.Node)
    tensor.replace_all_uses_with(call_node, lambda user: user is not call_node and user not in hooks)
