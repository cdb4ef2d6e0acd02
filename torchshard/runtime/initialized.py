"""Finds parameters and buffers without values: on the meta device, or not written to since `to_empty`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.core.hashing import hash_tensor, spread


class Uninitialized:
    """The tensors of a model that got memory by `to_empty`, and have not been written to since."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[int, int]] = {}
        """Name -> (version, sample of the values) after `to_empty`."""

    def note(self, names: Iterable[str], tensors: Mapping[str, Tensor]) -> None:
        """Notes those of the named tensors, which were on the meta device, that have memory now."""
        for name in names:
            tensor = tensors[name]
            if not tensor.is_meta:
                self._noted[name] = _state(tensor)
                tensor.touched = False  # type: ignore[attr-defined]

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Checks that all parameters and buffers have been written to.

        Raises:
            InputError: some lack memory, or have not been written to since `to_empty`.
        """
        without_memory = [name for name, tensor in tensors.items() if tensor.is_meta]
        self._forget_written(tensors)
        if without_memory:
            raise InputError(
                f"{len(without_memory)} parameters and buffers have no memory",
                where=_first_names(without_memory),
                why="the model is on the meta device",
                attempt="shard a model that has its weights",
            )
        if self._noted:
            names = list(self._noted)
            raise InputError(
                f"{len(names)} parameters and buffers hold uninitialised memory",
                where=_first_names(names),
                why="they were on the meta device, and no state dict that was loaded since to_empty() has them; "
                "buffers that a constructor computes are in none",
                attempt=f"in no_grad() model.get_parameter({names[0]!r}).copy_(...), or get_buffer; or shard a "
                "model that has its weights",
            )

    def _forget_written(self, tensors: Mapping[str, Tensor]) -> None:
        """Removes tensors that were written to since `to_empty`.

        A write through `.data` does not raise the version. So access to `.data`, and new values in
        a sample, count as well.
        """
        for name, noted in list(self._noted.items()):
            tensor = tensors[name]
            if getattr(tensor, "touched", False) or _state(tensor) != noted:
                del self._noted[name]


def _state(tensor: Tensor) -> tuple[int, int]:
    return tensor._version, hash_tensor(spread(tensor, 64))


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
