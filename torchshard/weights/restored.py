"""Restores slices from files, pickles and `copy.copy`, for which PyTorch makes plain tensors and sets attributes."""

from __future__ import annotations

from torch import Tensor, nn

from torchshard.weights.local_slice import LocalSlice
from torchshard.weights.place import PLACE, SlicePlace


class _PlaceOfTensors:
    """A descriptor on `torch.Tensor` for the place of a slice; setting it turns the tensor into a slice."""

    def __get__(self, tensor: Tensor | None, owner: object = None) -> object:
        if tensor is None:
            return self  # `torch.overrides` reads all attributes of the class
        if PLACE not in vars(tensor):
            raise AttributeError(PLACE)
        return vars(tensor)[PLACE]

    def __set__(self, tensor: Tensor, place: SlicePlace) -> None:
        if type(tensor) in (Tensor, nn.Parameter):
            LocalSlice.converted(tensor)
        vars(tensor)[PLACE] = place


def mark_copies() -> None:
    """Installs the descriptor that marks copies of slices, and slices from files, as slices.

    Only a process with a sharded model installs it; a tool that joins slices from files must not.
    """
    if PLACE not in vars(Tensor):
        setattr(Tensor, PLACE, _PlaceOfTensors())
