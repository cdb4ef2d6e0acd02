"""Finds, during a capture, the numbers that forward asks for and that are known before the call.

Each is a `Condition`. All other numbers depend on the call's inputs, or on parameters, of which a
rank may have only a slice. Those are left to export, which refuses them.

`KNOWN_NUMBERS` replaces `Tensor.item` and the conversions to numbers. Export in PyTorch 2.13 knows
no values, not even of buffers: a branch on such a number raises `GuardOnDataDependentSymNode`. The
patches are needed as long as it refuses branches on buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from torchshard.capture.conditions import Condition, Number
from torchshard.capture.recording import WHOLE, Recording, current_recording, in_captures, use_recording
from torchshard.capture.user_code import calling_line
from torchshard.core.errors import CaptureError
from torchshard.core.modules import storage_id
from torchshard.core.patches import Patch, Patches
from torchshard.core.rng_states import keeping_rng_states, set_rng_states
from torchshard.ir.effects import uses_rng
from torchshard.weights.lazy import LazyTensor, values_of


def note_placeholders(recording: Recording, stand_ins: Mapping[str, Tensor]) -> None:
    """Notes the nodes of the model's parameters and buffers, at the start of a forward.

    Args:
        stand_ins: the fake tensors by which export has replaced them.
    """
    nodes = {name: _node_of(tensor) for name, tensor in stand_ins.items()}
    recording.placeholders = {node: name for name, node in nodes.items() if node is not None}
    recording.conditions.clear()  # a model may be exported twice


def known_number(tensor: Tensor, read: Callable[[Tensor], Number]) -> Number | None:
    """The number that forward asks of a tensor, if it is known before the call; else None.

    Raises:
        CaptureError: the number depends on a buffer with several elements, or without a value.
    """
    recording = current_recording()
    if recording is None or not is_fake(tensor):
        return None
    if recording.rehearsed is not None:
        return next(recording.rehearsed, None)
    node = None if recording.inside_call else _node_of(tensor)
    condition = None if node is None else _condition(recording, node, read)
    if condition is None:
        return None
    number = _number_now(condition, recording)
    recording.conditions.append((condition, number))
    return number


def _read(original: Callable[[Tensor], Number], tensor: Tensor) -> Number:
    number = known_number(tensor, original)
    return original(tensor) if number is None else number


_READS = ("item", "__int__", "__float__", "__index__")
KNOWN_NUMBERS = Patches(*(Patch(Tensor, name, in_captures(_read)) for name in _READS))
"""Supplies known numbers to forward, in threads that capture. `value_checks` replaces `bool`."""


def _condition(recording: Recording, node: fx.Node, read: Callable[[Tensor], Number]) -> Condition | None:
    """The condition that computes a node's value; None if the value depends on the call."""
    needed = _needed_for(recording, node)
    names = {n: recording.placeholders.get(n, "") for n in needed if n.op == "placeholder"}
    if any(n.target is WHOLE for n in needed) or any(_is_of_call(recording.state, name) for name in names.values()):
        return None
    if read is not bool and any(_writes(n) for n in needed):
        return None  # a count of calls: each of its values would need a graph
    for name in names.values():
        _check(name, recording.state[name])
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for each in needed:
        copies[each] = graph.node_copy(each, copies.__getitem__)
    graph.output(copies[node])
    module = fx.GraphModule(_with_constants(needed), graph)
    return Condition(module, tuple(names.values()), any(map(uses_rng, needed)), read, calling_line() or node.name)


def _is_of_call(state: Mapping[str, Tensor], name: str) -> bool:
    return name not in state or isinstance(state[name], nn.Parameter)


def _check(name: str, buffer: Tensor) -> None:
    """Checks that all ranks know the value of a buffer before each call.

    Raises:
        CaptureError: the buffer has more than one element, or no value.
    """
    why = attempt = ""
    if buffer.numel() != 1:
        why = f"of {name} with {buffer.numel()} elements a rank may have a slice; of a buffer of one it has the value"
        attempt = f"a buffer of one element for what is asked of {name}, or torch.where"
    elif not isinstance(buffer, LazyTensor) and (buffer.is_meta or not buffer.untyped_storage().nbytes()):
        why = f"the graph depends on the value of {name}, which has none: it is on the meta device, or freed"
        attempt = "the model with the values of its buffers"
    if why:
        what = "forward converts a buffer's value to a Python number"
        raise CaptureError(what, where=calling_line() or name, why=why, attempt=attempt)


def _number_now(condition: Condition, recording: Recording) -> Number:
    held = {name: recording.state[name] for name in condition.buffers}
    values = values_of([t for t in held.values() if isinstance(t, LazyTensor)])
    # The condition runs on real values; export's modes would record its ops.
    # `DisableTorchFunction` also disables modes, unlike `DisableTorchFunctionSubclass` (PyTorch 2.13.0).
    with use_recording(None), _disable_current_modes(), torch._C.DisableTorchFunction():
        with keeping_rng_states(held.values()):
            # Forward's first draw starts from the state before the capture.
            set_rng_states(recording.rng_states)
            return condition.number({name: values.get(id(t), t) for name, t in held.items()})


# --- export's graph --------------------------------------------------------------------------------------------------


def _needed_for(recording: Recording, node: fx.Node) -> list[fx.Node]:
    """The nodes that must run to compute a node's value, in order.

    These are its ancestors, earlier writes to their memory, and all earlier draws if one of them
    draws.
    """
    earlier = list(itertools.takewhile(lambda n: n is not node, node.graph.nodes))
    writes = [n for n in earlier if _writes(n)]
    draws = [n for n in earlier if _draws(recording, n)]
    needed, memory, waiting = set[fx.Node](), set[int](), [node]
    while waiting:
        each = waiting.pop()
        if each not in needed:
            needed.add(each)
            memory |= _memory_of(each)
            waiting += [*each.all_input_nodes, *(n for n in writes if _memory_of(n) & memory)]
            waiting += draws if _draws(recording, each) else []
    return [n for n in (*earlier, node) if n in needed]


def _memory_of(node: fx.Node) -> set[int]:
    """The memory of a node's results; an op that writes returns the tensor that it wrote to."""
    values = node.meta.get("val")
    return {storage_id(v) for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, Tensor)}


def _writes(node: fx.Node) -> bool:
    """Whether an op writes to the memory of another value; `detach_` of a constant does not."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and target is not _DETACH


_DETACH = torch.ops.aten.detach_.default


def _draws(recording: Recording, node: fx.Node) -> bool:
    return recording.calls[cast(int, node.args[2])].uses_rng if node.target is WHOLE else uses_rng(node)


def _with_constants(nodes: Sequence[fx.Node]) -> nn.Module:
    """A module that contains the constants that some nodes read, as buffers."""
    mode: Any = get_proxy_mode()
    holder = nn.Module()
    for target in sorted({cast(str, n.target) for n in nodes if n.op == "get_attr"}):
        holder.register_buffer(target, getattr(mode.tracer.root, target))
    return holder


def _node_of(tensor: Tensor) -> fx.Node | None:
    """The node that export has recorded for a fake tensor."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None
    return None if slot is None else slot.proxy.node
