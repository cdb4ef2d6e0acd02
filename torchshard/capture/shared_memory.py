"""Finds tensors of a model that share elements in memory.

A write to one changes the other, but their slices would have memory of their own.

    stats = torch.zeros(2, 8)
    stats, stats[0]                 share eight elements: refused
    stats[0], stats[1]              share a storage and no element
    stats[:, 0], stats[:, 1]        as well, although the bytes of one start within the other

Parameters and buffers are compared with each other before a model is sharded. Other tensors are
compared after a capture has shown which of them forward reads, because libraries keep such tensors
without using them. By then the model has been copied, so a copy notes where the original's
parameters and buffers were.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.export import ExportedProgram
from torch.multiprocessing.reductions import StorageWeakRef

# `is_traceable_wrapper_subclass`: no public question for a tensor of tensors (PyTorch 2.13.0).
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from torchshard.capture.conditions import Condition
from torchshard.capture.namespaces import OF_MEMORIES
from torchshard.capture.user_code import line_in
from torchshard.capture.visible import visible_to
from torchshard.core.errors import CaptureError
from torchshard.weights.lazy import LazyTensor


@dataclass(frozen=True)
class Memory:
    """The elements of a tensor in memory; it does not keep the tensor alive."""

    space: Hashable
    """Starts are comparable within a space: a device, or a storage if the tensor has no values."""
    start: int
    """The position of its first element, in bytes."""
    shape: tuple[int, ...]
    """Without dims of stride 0, such as `expand` makes."""
    strides: tuple[int, ...]
    """In bytes."""
    itemsize: int
    """In bytes."""
    exists: Callable[[], bool]
    """Whether the memory is still in use: later, another tensor may occupy it."""

    @staticmethod
    def of(tensor: Tensor) -> Memory:
        """Finds the memory of a strided tensor."""
        space, first, exists = _space(tensor)
        dims = [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
        shape = tuple(size for size, _ in dims) if tensor.numel() else (0,)
        strides = tuple(step * tensor.itemsize for _, step in dims) if tensor.numel() else (1,)
        return Memory(space, first, shape, strides, tensor.itemsize, exists)

    @property
    def stop(self) -> int:
        """The byte after its last element."""
        if 0 in self.shape:
            return self.start
        steps = zip(self.shape, self.strides, strict=True)
        return self.start + self.itemsize + sum((size - 1) * step for size, step in steps)

    def shares(self, other: Memory) -> bool:
        """Whether any element of one tensor overlaps an element of the other."""
        if not self._meets(other) or not (self.exists() and other.exists()):
            return False
        first, second = sorted((self, other), key=lambda one: one.start)
        if second.start == first.start or first.stop - first.start == first.itemsize * math.prod(first.shape):
            return True  # needs no marks: the second starts in the first, which has no gaps
        marks = _Marks([first, second])
        return marks.mark(first) or marks.mark(second)

    def _meets(self, other: Memory) -> bool:
        """Whether the ranges from start to stop overlap, and neither is empty."""
        if self.space != other.space or 0 in (*self.shape, *other.shape):
            return False
        return self.start < other.stop and other.start < self.stop


class _Marks:
    """Marks the bytes of tensors: only this shows whether interleaved columns share any."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self._start = min(one.start for one in memories)
        self._unit = math.gcd(*(n for one in memories for n in (one.itemsize, one.start - self._start)))
        # Under a fake mode, the marks would have no values.
        with _disable_current_modes():
            size = (max(one.stop for one in memories) - self._start) // self._unit
            self._marks = torch.zeros(size, dtype=torch.bool, device="cpu")

    def mark(self, memory: Memory) -> bool:
        """Marks a tensor's bytes; returns whether some were marked before."""
        shape = (*memory.shape, memory.itemsize // self._unit)
        strides = (*(step // self._unit for step in memory.strides), 1)
        with _disable_current_modes():
            own = self._marks.as_strided(shape, strides, (memory.start - self._start) // self._unit)
            was_marked = bool(own.any())
            own.fill_(True)
        return was_marked


def _space(tensor: Tensor) -> tuple[Hashable, int, Callable[[], bool]]:
    """Finds `space`, `start` and `exists` of a `Memory`."""
    offset = int(tensor.storage_offset()) * tensor.itemsize
    if isinstance(tensor, LazyTensor):
        tape = weakref.ref(tensor.tape)
        return (id(tensor.tape), tensor.tape.memories[tensor.slot]), offset, lambda: tape() is not None
    storage = StorageWeakRef(tensor.untyped_storage())
    if tensor.is_meta or is_fake(tensor) or not tensor.untyped_storage().nbytes():
        return storage.cdata, offset, lambda: not storage.expired()
    return tensor.device, tensor.data_ptr(), lambda: not storage.expired()


Memories = Mapping[str, Memory]
"""The name of a parameter or buffer in errors -> its memory."""


def memories_of(model: nn.Module) -> Memories:
    """The memory of each parameter and buffer; a tensor with several names is listed once."""
    found: dict[int, tuple[str, Memory]] = {}
    for role, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if id(tensor) not in found and _is_plain(tensor):
                found[id(tensor)] = f"{role} {name!r}", Memory.of(tensor)
    return dict(found.values())


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own, in strides."""
    return not tensor.is_nested and tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def note_memories(copied: nn.Module, model: nn.Module, others: Iterable[tuple[str, Tensor]]) -> None:
    """Notes in a copy of a model where the original's parameters and buffers are in memory.

    Args:
        others: (name of a parameter or buffer in errors, the copy's tensor at its place in memory).
            Values of lazy tensors do not share memory as the lazy tensors did.
    """
    noted = [(name, Memory.of(tensor)) for name, tensor in others]
    copied.__dict__[OF_MEMORIES] = (*_noted(model), *memories_of(model).items(), *noted)


def _noted(model: nn.Module) -> tuple[tuple[str, Memory], ...]:
    return cast(tuple[tuple[str, Memory], ...], vars(model).get(OF_MEMORIES, ()))


def sharing_pair(memories: Memories) -> tuple[str, str] | None:
    """The first two names that share memory, in the order of `memories`, or None."""
    for meeting in _meeting(memories):
        marks = _Marks([memories[name] for name in meeting])
        name = next((name for name in meeting if marks.mark(memories[name])), None)
        if name is not None:
            other = next(one for one in meeting if one != name and memories[one].shares(memories[name]))
            first, second = (one for one in memories if one in (name, other))
            return first, second
    return None


def _meeting(memories: Memories) -> list[list[str]]:
    """Groups of names; each but the first of a group starts before the stop of an earlier one."""
    groups, by_space = list[list[str]](), dict[Hashable, list[str]]()
    for name, memory in memories.items():
        by_space.setdefault(memory.space, []).append(name)
    for names in by_space.values():
        stop = -1
        for name in sorted(names, key=lambda one: memories[one].start):
            groups += [] if memories[name].start < stop else [[]]
            groups[-1].append(name)
            stop = max(stop, memories[name].stop)
    return [group for group in groups if len(group) > 1]


class Sharing:
    """Finds the parameter or buffer of a model or its original that shares a tensor's memory."""

    def __init__(self, model: nn.Module) -> None:
        self._memories = [*memories_of(model).items(), *_noted(model)]

    def name_of(self, tensor: Tensor) -> str | None:
        """The name (for errors) of the tensor that shares this tensor's memory, or None."""
        if not _is_plain(tensor):
            return None
        memory = Memory.of(tensor)
        return next((name for name, held in self._memories if memory.shares(held)), None)


def tensors_sharing(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name of a parameter or buffer, another tensor of the model that shares its memory)."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held = {id(value): value for _, value in visible_to(model, code=False).values() if isinstance(value, Tensor)}
    others = [tensor for key, tensor in held.items() if key not in own]
    if not others:
        return []
    sharing = Sharing(model)
    named = [(sharing.name_of(tensor), tensor) for tensor in others]
    return [(name, tensor) for name, tensor in named if name is not None]


def refuse_shared_constants(
    model: nn.Module, exported: ExportedProgram, constants: Mapping[str, Tensor], conditions: Iterable[Condition]
) -> None:
    """Checks that no constant shares memory with a parameter or buffer.

    Args:
        constants: path -> tensor that forward reads, other than parameters, buffers and arguments.
        conditions: numbers that forward takes from tensors.

    Raises:
        CaptureError: a constant shares memory.
    """
    read = [(_reading_line(exported, path), tensor) for path, tensor in constants.items()]
    read += [(one.where, tensor) for one in conditions for tensor in one.graph.buffers()]
    sharing = Sharing(model)
    for line, tensor in read:
        name = sharing.name_of(tensor)
        if name is not None:
            raise CaptureError(
                f"forward reads a tensor that shares memory with {name}",
                where=line,
                why=f"a write to {name}, or an optimizer's step, changes both; a sharded model has slices with memory "
                "of their own, and what is neither parameter nor buffer as a constant",
                attempt=f"to have one value, read {name} in forward and index it there (self.stats[0]); "
                "to have two, a copy: .clone()",
            )


def _reading_line(exported: ExportedProgram, path: str) -> str:
    """The user's line that reads a constant."""
    names = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.target == path}
    users = [user for node in exported.graph.nodes if node.name in names for user in node.users]
    return next(filter(None, (line_in(user.meta.get("stack_trace") or "") for user in users)), path)
