"""Slices in state dicts: each knows what it is a slice of, in files too.

A state dict of a sharded model holds slices under the names of whole tensors. Loaded on another rank, or by a tool that
takes it for a model's state dict, a slice of the right shape would pass for something else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.weights.slice_values import caller, is_users, tell

Place = tuple[str, str, int, int]
"""(name, layout, rank, number of ranks) of a slice."""
PLACE = "_torchshard_place"
"""The attribute of a tensor that says it; a file has it too."""


class StateSlice(Tensor):
    """A slice in a state dict. PyTorch's distributed checkpointing would take it for the whole, and is refused."""

    @staticmethod
    def of(tensor: Tensor, place: Place) -> StateSlice:
        """The same memory, with its place."""
        made: StateSlice = torch.Tensor._make_subclass(StateSlice, tensor.detach(), tensor.requires_grad)
        setattr(made, PLACE, place)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _SAME_SLICE and isinstance(args[0], cls):
            return cls.of(result, getattr(args[0], PLACE))
        module, depth = caller()
        if is_users(module) and isinstance(result, Tensor) and args and isinstance(args[0], cls):
            tell(name, result, args[0].numel(), shown_place(getattr(args[0], PLACE)), depth)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)  # files are read where torchshard is not: a plain tensor with an attribute
        setattr(plain, PLACE, getattr(self, PLACE))
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateSlice:
        return memo.setdefault(id(self), self.clone())

    def __create_write_items__(self, *args: Any) -> NoReturn:
        refuse_slices()

    def __create_chunk_list__(self) -> NoReturn:
        refuse_slices()

    def __get_tensor_shard__(self, index: Any) -> NoReturn:
        refuse_slices()


_SAME_SLICE = frozenset([
    "detach", "clone", "to", "cpu", "cuda", "contiguous", "pin_memory", "float", "double", "half", "bfloat16",
    "requires_grad_",
])  # fmt: skip
"""What gives the same slice again, copied, moved or cast."""


def shown_place(place: Sequence[Any]) -> str:
    """'S(0) on rank 1 of 2'."""
    _, layout, rank, world = place
    return f"{layout} on rank {rank} of {world}"


def refuse_slices() -> NoReturn:
    """The error for a checkpoint that would hold one rank's slices as whole tensors.

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
    """Refuses `torch.distributed.checkpoint.state_dict.get_model_state_dict` and its like, by who asks.

    Raises:
        InputError: they do.
    """
    if sys._getframe(2).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
        refuse_slices()
