"""Streams the full parameters of a sharded model, a bucket at a time, to refit an engine or to write a file.

Consecutive parameters form a bucket. The memory is of two buckets, which take turns: the caller still refers to the
last tensor of one while the next is filled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn

from torchshard.core.errors import InputError
from torchshard.core.units import read_size
from torchshard.distributed.buckets import Sliced, consecutive, gather_into
from torchshard.distributed.consistency import gather_bytes
from torchshard.distributed.memory import aligned
from torchshard.distributed.packing import Type, nbytes, unpacked
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.store import WeightStore
from torchshard.weights.boxes import place_of, whole_box
from torchshard.weights.lazy import LazyTensor
from torchshard.weights.local_slice import unwatched
from torchshard.weights.parameter import DATA, ShardedParameter
from torchshard.weights.parts import Parts, Wanted
from torchshard.weights.recording import file_tensor
from torchshard.weights.reslicing import Request, reslice
from torchshard.weights.stored_tensors import ModelTensor
from torchshard.weights.tape import Tape

Make = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Cuts tensors out of full parameters, which it receives by name."""


class Memory:
    """Memory for one bucket after the other, used again if nothing else refers to it.

    PyTorch's CPU allocator returns large memory to the system, which takes longer to provide it
    again than a copy into it takes.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts without memory."""
        self._device, self._array, self._idle = device, np.empty(0, np.uint8), 0
        self._idle = sys.getrefcount(self._array)

    def take(self, types: Sequence[Type]) -> list[Tensor]:
        """Returns tensors of some types, with any values."""
        places, at = list[int](), 0
        for each in types:
            places.append(at)
            at += aligned(nbytes(each))
        if self._device.type != "cpu":  # its allocator keeps memory
            return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in types]
        if len(self._array) < at or sys.getrefcount(self._array) != self._idle:
            self._array = np.empty(at, np.uint8)
        # each has a storage of its own, so a file has its bytes only, and a write to one changes no other's version
        parts = [torch.from_numpy(self._array[at : at + nbytes(each)]) for at, each in zip(places, types, strict=True)]
        return [unpacked(part, [each])[0] for part, each in zip(parts, types, strict=True)]


def full_parameters(
    model: nn.Module, store: WeightStore, bucket: int | str, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor) of a sharded model's parameters; all ranks iterate together.

    Args:
        bucket: the memory for two buckets, in bytes or with a unit.
        dtype: of the results, if they are floating-point; None for the parameters' own.

    Raises:
        InputError: `bucket` is not a size.
    """
    parameters, ranks = _parameters(model, store), store.ranks

    def read() -> tuple[list[Type], list[range]]:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(
                f"{dtype!r} is not a floating-point dtype",
                where="named_full_parameters",
                attempt="dtype=torch.bfloat16",
            )
        types = [
            (p.whole, dtype if dtype is not None and p.is_floating_point() else p.dtype) for p in parameters.values()
        ]
        return types, _buckets(types, bucket)

    types, numbers = ranks.run_on_all(read, InputError, "the ranks can't stream parameters together")
    what = {"the dtype": str(dtype), "the buckets": str(numbers)}
    ranks.verify(what, "the ranks stream parameters differently")
    names, of, stream = list(parameters), list(parameters.values()), ranks.random_name("a stream of parameters")

    def fill(turn: int, numbers: range, full: Sequence[Tensor]) -> None:
        slices = [Sliced(DATA(of[i]).to(types[i][1]), of[i].sharding, of[i].whole) for i in numbers]
        what = f"full parameters {names[numbers[0]]!r} to {names[numbers[-1]]!r} of stream {stream}"
        gather_into(ranks, slices, full, what)

    return _streamed(names, types, numbers, fill, _device(of))


def parameter_slices(
    model: nn.Module, store: WeightStore, make: Make, bucket: int | str
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) as `make` cuts them out of full parameters; all ranks iterate together.

    Raises:
        InputError: a rank's `make` raises, or computes values; or `bucket` is not a size.
    """
    parameters, ranks = _parameters(model, store, tied=True), store.ranks

    def read() -> tuple[_Made, list[range], list[list[Request]]]:
        made = _Made.by(make, parameters)
        buckets = _buckets(made.types, bucket)
        own = [[request for request, _ in made.requests(numbers, made.places(numbers))] for numbers in buckets]
        return made, buckets, own

    made, buckets, own = ranks.run_on_all(read, InputError, "the ranks can't cut parameters together")
    requests, stream = _of_all(ranks, own), ranks.random_name("a stream of parameters")

    def fill(turn: int, numbers: range, given: Sequence[Tensor]) -> None:
        of_turn = [of_rank[turn] if turn < len(of_rank) else [] for of_rank in requests]
        into = [x for _, x in made.requests(numbers, given)]
        requested = sorted({request.name for of_rank in of_turn for request in of_rank})
        of = {name: parameters[name] for name in requested}
        slices = {name: Sliced(DATA(p), p.sharding, p.whole) for name, p in of.items()}
        reslice(ranks, slices, of_turn, into, f"slices of parameters, bucket {turn} of stream {stream}")

    buckets += [range(0)] * (max(map(len, requests)) - len(buckets))
    return _streamed(made.names, made.types, buckets, fill, _device(list(parameters.values())))


def _parameters(model: nn.Module, store: WeightStore, *, tied: bool = False) -> dict[str, ShardedParameter]:
    """Returns a model's parameters by name.

    Args:
        tied: whether a tied parameter has all of its names, or the first only.
    """
    store.follow()
    return cast(dict[str, ShardedParameter], dict(model.named_parameters(remove_duplicate=not tied)))


def _buckets(types: Sequence[Type], bucket: int | str) -> list[range]:
    limit = read_size(bucket, "bucket")
    assert limit is not None
    return list(consecutive([nbytes(each) for each in types], limit / 2))


def _streamed(
    names: Sequence[str],
    types: Sequence[Type],
    buckets: Sequence[range],
    fill: Callable[[int, range, Sequence[Tensor]], None],
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors, which are filled a bucket at a time.

    Args:
        fill: a collective call with the number of the bucket, the numbers of its tensors, and their memory.
    """
    memory = Memory(device), Memory(device)
    for turn, numbers in enumerate(buckets):
        tensors = memory[turn % 2].take([types[i] for i in numbers])
        with torch.no_grad(), unwatched():
            fill(turn, numbers, tensors)
        for i in numbers:
            yield names[i], tensors.pop(0)


def _device(parameters: Sequence[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def _of_all(ranks: Ranks, own: list[list[Request]]) -> list[list[list[Request]]]:
    """Returns all ranks' requests, by rank and bucket."""
    what = "the requests for slices of parameters"
    of_group = gather_bytes(ranks.group, what, lambda: json.dumps(own).encode())
    of_all = gather_bytes(ranks.replicas, what, lambda: json.dumps([json.loads(each) for each in of_group]).encode())
    decoded = [of_rank for each in of_all for of_rank in json.loads(each)]
    return [
        [
            [Request(name, tuple((start, stop) for start, stop in box)) for name, box in of_bucket]
            for of_bucket in of_rank
        ]
        for of_rank in decoded
    ]


class _Made(NamedTuple):
    """The tensors that a rank requests, as functions of the full parameters."""

    names: list[str]
    tensors: list[LazyTensor]
    parts: Parts

    @classmethod
    def by(cls, make: Make, parameters: Mapping[str, ShardedParameter]) -> _Made:
        """Runs `make` on tensors without memory.

        Raises:
            InputError: it returns something else than tensors cut out of parameters.
        """
        tape = Tape()
        recorded: dict[int, LazyTensor] = {}
        for name, p in parameters.items():
            if id(p) not in recorded:  # tied parameters have several names
                recorded[id(p)] = file_tensor(tape, ModelTensor(name, p.dtype, p.whole, partial(_refuse, name)))
        tensors: dict[str, LazyTensor] = {}
        for name, x in dict(make({name: recorded[id(p)] for name, p in parameters.items()})).items():
            if not (isinstance(x, LazyTensor) and x.tape is tape and x.device.type == "cpu"):
                _refuse(name)
            tensors[name] = x
        return _Made(list(tensors), list(tensors.values()), Parts(tape))

    @property
    def types(self) -> list[Type]:
        """The types of the tensors."""
        return [(tuple(x.shape), x.dtype) for x in self.tensors]

    def places(self, numbers: range) -> list[Tensor]:
        """Returns memory for some of the tensors on the meta device."""
        return [place_of(self.tensors[i].shape) for i in numbers]

    def requests(self, numbers: range, into: Sequence[Tensor]) -> list[tuple[Request, Tensor]]:
        """Returns the requests for some of the tensors, with the memory for each.

        Raises:
            InputError: a tensor has to be computed.
        """
        found = list[tuple[Request, Tensor]]()
        for i, x in zip(numbers, into, strict=True):
            reads = self.parts.reads(Wanted(self.tensors[i].slot, whole_box(x.shape), x))
            if reads is None or any(len(read.dtypes) > 1 for read in reads):
                _refuse(self.names[i])
            found += [(Request(read.tensor.name, read.box), read.into) for read in reads]
        return found


def _refuse(name: str) -> NoReturn:
    raise InputError(
        f"{name!r} is not cut out of full parameters",
        where="named_slices(make)",
        why="ranks send elements of their slices, so make may cut, join, reorder and cast full parameters, once, but "
        "not compute with them or read their values",
        attempt="narrow, chunk, split, cat, stack, permute and to(dtype) in make, and other ops on the tensors that "
        "named_slices yields; or named_full_parameters()",
    )
