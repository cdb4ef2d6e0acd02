"""Slices in state dicts: each knows what it is a slice of, in files too.

A state dict of a sharded model holds slices under the names of whole tensors. On another rank, or in a tool that reads
it as a whole model's, a slice of a fitting shape would be loaded without an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import NoReturn, SupportsIndex, cast

import torch
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.weights.callers import caller, is_users
from torchshard.weights.slice_warnings import warn_of_slice

SlicePlace = tuple[str, str, int, int]
"""(name, layout, rank, number of ranks) of a slice."""
_PLACE = "_torchshard_place"
"""The attribute of a tensor that holds its SlicePlace. It is part of the file format: saved tensors have it too."""


def place_of(value: object) -> SlicePlace | None:
    """The place of a tensor from a state dict; None for a tensor that is not a slice."""
    return cast(SlicePlace | None, getattr(value, _PLACE, None))


class StateSlice(Tensor):
    """A slice in a state dict. PyTorch's distributed checkpointing would take it for the whole, and is refused."""

    @staticmethod
    def of(tensor: Tensor, place: SlicePlace) -> StateSlice:
        """The same memory, with its place."""
        marked: StateSlice = torch.Tensor._make_subclass(StateSlice, tensor.detach(), tensor.requires_grad)
        setattr(marked, _PLACE, place)
        return marked

    @property
    def place(self) -> SlicePlace:
        """What this is a slice of."""
        return cast(SlicePlace, getattr(self, _PLACE))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        operand = args[0] if args else None
        if not isinstance(operand, cls):
            return result
        if name in _SAME_SLICE:
            return cls.of(cast(Tensor, result), operand.place)
        module, depth = caller()
        if is_users(module) and isinstance(result, Tensor):
            warn_of_slice(name, result, operand.numel(), place_text(operand.place), depth)
        return result

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        # A plain tensor with an attribute: files must open where torchshard is not installed.
        plain = self.as_subclass(Tensor)
        setattr(plain, _PLACE, self.place)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, object]) -> StateSlice:
        return cast(StateSlice, memo.setdefault(id(self), self.clone()))

    # Distributed checkpointing calls these three methods of any tensor that has them, in place of its own treatment.

    def __create_write_items__(self, *args: object) -> NoReturn:
        refuse_slices()

    def __create_chunk_list__(self) -> NoReturn:
        refuse_slices()

    def __get_tensor_shard__(self, index: object) -> NoReturn:
        refuse_slices()


_SAME_SLICE = frozenset([
    "detach", "clone", "to", "cpu", "cuda", "contiguous", "pin_memory", "float", "double", "half", "bfloat16",
    "requires_grad_",
])  # fmt: skip
"""Functions whose result is the same slice, copied, moved or cast."""


def place_text(place: SlicePlace) -> str:
    """'S(0) on rank 1 of 2'."""
    _, layout, rank, world = place
    return f"{layout} on rank {rank} of {world}"


def refuse_slices() -> NoReturn:
    """Refuses a checkpoint that would hold one rank's slices as whole tensors.

    Raises:
        InputError: always.
    """
    raise InputError(
        "PyTorch's distributed checkpointing can't save or load the slices of a sharded model",
        where="model.state_dict()",
        why="it would take each rank's slice for the whole tensor, and keep one of them",
        attempt="dcp.save(model.full_state_dict(), ...), and model.load_full_state_dict after dcp.load; or "
        "torch.save(model.state_dict(), ...) on each rank",
    )


def refuse_checkpointing() -> None:
    """Refuses `torch.distributed.checkpoint.state_dict.get_model_state_dict` and the functions beside it.

    They call `model.state_dict()` as users do, so the caller's module is all that tells them apart.

    Raises:
        InputError: the caller of this function's caller is one of them.
    """
    if sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
        refuse_slices()
