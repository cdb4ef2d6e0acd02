"""Finds the regions of files that make up a region of a recorded tensor.

    a = file "q", b = file "k"       wanted: rows 2 to 6 of w
    w = cat([a, b]).to(bfloat16)     read: rows 2 to 4 of "q" into rows 0 to 2, rows 0 to 2 of "k" into the others

Each reader maps a requested region of an op's result to regions of its operands, back to the files.
If an op has no reader, or memory was changed in place by anything but a full `copy_`, the tensor has to
be computed in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from torchshard.custom_ops.fx_types import Argument
from torchshard.weights.boxes import Box, with_range
from torchshard.weights.stored_tensors import StoredTensor
from torchshard.weights.tape import Entry, Slot, Tape

aten = torch.ops.aten


@dataclass(frozen=True)
class Wanted:
    """A requested region of a recorded tensor."""

    slot: int
    box: Box
    into: Tensor
    """The destination, with the box's shape."""
    dtypes: tuple[torch.dtype, ...] = ()
    """The dtypes to which the values are cast, in order."""
    before: int | None = None
    """The values requested are those before this entry; None for the end of the tape."""


@dataclass(frozen=True)
class Read:
    """A read of one region of a tensor in files."""

    tensor: StoredTensor
    box: Box
    into: Tensor
    dtypes: tuple[torch.dtype, ...]

    @property
    def bytes_(self) -> int:
        """The size of the region in the file, in bytes."""
        return self.into.numel() * self.tensor.dtype.itemsize

    @property
    def buffer_bytes(self) -> int:
        """The bytes allocated in addition to `into` during the read."""
        return self.tensor.buffer_bytes(self.into, self.dtypes)

    def prefetch(self) -> None:
        """Hints to the kernel that the region will be read."""
        self.tensor.prefetch(self.box)

    def run(self, spare: int = 0) -> int:
        """Reads the region; returns the bytes read from the file, at most `spare` more than its size."""
        return self.tensor.read(self.box, self.into, self.dtypes, spare)


class Parts:
    """Finds the file reads for regions of a tape's tensors."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._makers = {slot: i for i, entry in enumerate(tape.entries) for slot in entry.results if slot is not None}
        self._writers: dict[int, list[int]] = {}
        for i, entry in enumerate(tape.entries):
            for memory in entry.written:
                self._writers.setdefault(memory, []).append(i)

    def reads(self, wanted: Wanted) -> list[Read] | None:
        """Returns the reads that fill a region; None if the tensor has to be computed in full."""
        before = len(self._tape.entries) if wanted.before is None else wanted.before
        memory = self._tape.memories[wanted.slot]
        number = self._makers[wanted.slot]
        if memory == wanted.slot:  # not a view: the last write determines its values
            writers = [i for i in self._writers.get(memory, ()) if i < before]
            if writers:
                parts = self._copied(writers[-1], wanted)
                return self._all(parts)
            before = number
        entry = self._tape.entries[number]
        if isinstance(entry.op, StoredTensor):
            return [Read(entry.op, wanted.box, wanted.into, wanted.dtypes)]
        reader = READERS.get(entry.op)
        parts = None if reader is None else reader(self._tape, entry, wanted)
        return self._all(None if parts is None else [replace(part, before=before) for part in parts])

    def _all(self, parts: list[Wanted] | None) -> list[Read] | None:
        found: list[Read] = []
        for part in () if parts is None else parts:
            reads = self.reads(part)
            if reads is None:
                return None
            found += reads
        return None if parts is None else found

    def _copied(self, number: int, wanted: Wanted) -> list[Wanted] | None:
        """Returns the region of `source` if the last write was `x.copy_(source)` on the full memory."""
        entry, examples = self._tape.entries[number], self._tape.examples
        source = entry.args[1] if entry.op is aten.copy_.default else None
        if not isinstance(source, Slot):
            return None
        whole, into, given = examples[wanted.slot], examples[entry.args[0].number], examples[source.number]
        if not (whole.shape == into.shape == given.shape and whole.stride() == into.stride()):
            return None
        return [replace(wanted, slot=source.number, dtypes=(whole.dtype, *wanted.dtypes), before=number)]


Reader = Callable[[Tape, Entry, Wanted], list[Wanted] | None]


def _arguments(entry: Entry) -> dict[str, Argument]:
    """Returns the arguments of a call by name, with defaults."""
    assert isinstance(entry.op, OpOverload)
    schema = entry.op._schema.arguments
    given = {a.name: value for a, value in zip(schema, entry.args, strict=False)} | dict(entry.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _same(tape: Tape, entry: Entry, wanted: Wanted) -> list[Wanted] | None:
    """Reader of ops that keep shape and values, such as `clone`, or change only the dtype."""
    (slot, *_), before = entry.operands, wanted
    if tape.examples[slot].shape != tape.examples[wanted.slot].shape:
        return None
    dtype = tape.examples[wanted.slot].dtype
    if dtype == tape.examples[slot].dtype:
        return [replace(before, slot=slot)]
    return [replace(before, slot=slot, dtypes=(dtype, *wanted.dtypes))]


def _shifted(wanted: Wanted, slot: int, dim: int, by: int) -> Wanted:
    """Returns the request for a tensor in which the region starts `by` later along `dim`."""
    start, stop = wanted.box[dim]
    return replace(wanted, slot=slot, box=with_range(wanted.box, dim, start + by, stop + by))


def _slice(tape: Tape, entry: Entry, wanted: Wanted) -> list[Wanted] | None:
    arguments, (slot,) = _arguments(entry), entry.operands
    if arguments["step"] != 1:
        return None
    shape = tape.examples[slot].shape
    dim = arguments["dim"] % len(shape)
    start, _, _ = slice(arguments["start"], None).indices(shape[dim])
    return [_shifted(wanted, slot, dim, start)]


def _split(tape: Tape, entry: Entry, wanted: Wanted) -> list[Wanted] | None:
    dim = _arguments(entry)["dim"] % len(wanted.box)
    place = entry.results.index(wanted.slot)
    before = [tape.examples[slot].shape[dim] for slot in entry.results[:place] if slot is not None]
    return [_shifted(wanted, entry.operands[0], dim, sum(before))]


def _without_dim(tape: Tape, entry: Entry, wanted: Wanted) -> list[Wanted] | None:
    """Reader of `select` and `unbind`."""
    arguments, (slot,) = _arguments(entry), entry.operands
    shape = tape.examples[slot].shape
    dim = arguments["dim"] % len(shape)
    index = arguments["index"] % shape[dim] if "index" in arguments else entry.results.index(wanted.slot)
    box = (*wanted.box[:dim], (index, index + 1), *wanted.box[dim:])
    return [replace(wanted, slot=slot, box=box, into=wanted.into.unsqueeze(dim))]


def _unsqueeze(tape: Tape, entry: Entry, wanted: Wanted) -> list[Wanted] | None:
    dim = _arguments(entry)["dim"] % len(wanted.box)
    if wanted.box[dim] != (0, 1):
        return []
    box = (*wanted.box[:dim], *wanted.box[dim + 1 :])
    return [replace(wanted, slot=entry.operands[0], box=box, into=wanted.into.squeeze(dim))]


def _squeeze(tape: Tape, entry: Entry, wanted: Wanted) -> list[Wanted] | None:
    shape = tape.examples[entry.operands[0]].shape
    dim = _arguments(entry)["dim"] % max(len(shape), 1)
    if not shape or shape[dim] != 1:
        return [replace(wanted, slot=entry.operands[0])]
    box = (*wanted.box[:dim], (0, 1), *wanted.box[dim:])
    return [replace(wanted, slot=entry.operands[0], box=box, into=wanted.into.unsqueeze(dim))]


def _permute(tape: Tape, entry: Entry, wanted: Wanted) -> list[Wanted] | None:
    """Reader of `permute`, `transpose` and `t`."""
    arguments, rank = _arguments(entry), len(wanted.box)
    order = list(range(rank))
    if "dims" in arguments:
        order = [dim % rank for dim in arguments["dims"]]
    elif rank > 1:
        a, b = arguments.get("dim0", 0) % rank, arguments.get("dim1", 1) % rank
        order[a], order[b] = order[b], order[a]
    back = [order.index(dim) for dim in range(rank)]
    box = tuple(wanted.box[dim] for dim in back)
    return [replace(wanted, slot=entry.operands[0], box=box, into=wanted.into.permute(back))]


def _are_recorded(entry: Entry) -> bool:
    """Returns whether all tensors of a list are on the tape; others are constants."""
    return all(isinstance(x, Slot) for x in cast(Sequence[object], _arguments(entry)["tensors"]))


def _cat(tape: Tape, entry: Entry, wanted: Wanted) -> list[Wanted] | None:
    dim = _arguments(entry)["dim"] % len(wanted.box)
    (start, stop), at, found = wanted.box[dim], 0, list[Wanted]()
    dtype = tape.examples[wanted.slot].dtype
    if not _are_recorded(entry):
        return None
    for slot in entry.operands:
        example = tape.examples[slot]
        if example.ndim != len(wanted.box) or example.dtype != dtype:
            return None
        first, last = max(start, at), min(stop, at + example.shape[dim])
        if first < last:
            box = with_range(wanted.box, dim, first - at, last - at)
            found.append(replace(wanted, slot=slot, box=box, into=wanted.into.narrow(dim, first - start, last - first)))
        at += example.shape[dim]
    return found


def _stack(tape: Tape, entry: Entry, wanted: Wanted) -> list[Wanted] | None:
    dim = _arguments(entry)["dim"] % len(wanted.box)
    dtypes = {tape.examples[slot].dtype for slot in (*entry.operands, wanted.slot)}
    if len(dtypes) > 1 or not _are_recorded(entry):
        return None
    start, stop = wanted.box[dim]
    box = (*wanted.box[:dim], *wanted.box[dim + 1 :])
    return [
        replace(wanted, slot=entry.operands[i], box=box, into=wanted.into.select(dim, i - start))
        for i in range(start, stop)
    ]


READERS: Mapping[OpOverload, Reader] = {
    **dict.fromkeys(
        (
            aten.alias.default,
            aten.detach.default,
            aten.clone.default,
            aten.lift_fresh.default,
            aten._to_copy.default,
            aten.view.default,
            aten._unsafe_view.default,
        ),
        _same,
    ),
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.select.int: _without_dim,
    aten.unbind.int: _without_dim,
    aten.squeeze.dim: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}
"""Op -> a function that maps a region of its result to regions of its operands."""
