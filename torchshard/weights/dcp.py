"""PyTorch's distributed checkpointing (DCP): slices are saved and loaded as chunks of full tensors.

Slices follow the protocol of `torch.distributed._checkpointable._Checkpointable`. Unlike a DTensor, a
slice may consist of several chunks, for example in a fused QKV weight.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.weights.boxes import Piece, pieces, sizes
from torchshard.weights.callers import called_from
from torchshard.weights.place import SlicePlace, cuts_at, place_of, place_text
from torchshard.weights.slice_calls import warn_of_slice

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class Checkpointable(Tensor):
    """A tensor that DCP saves and loads as the chunks of its place."""

    @property
    def place(self) -> SlicePlace:
        """The place of the slice, as stored in state dicts."""
        raise NotImplementedError

    @property
    def pieces(self) -> list[Piece]:
        """The boxes of the full tensor that make up this slice."""
        return pieces(self.place[4], cuts_at(self.place))

    @property
    def plain(self) -> Tensor:
        """A plain tensor that shares this one's memory."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        """Like `Tensor.size`; DCP gets the global shape, to compare it with the checkpoint's."""
        module = called_from()
        # `vmap` and `_state_dict_utils` are the modules of `torch.vmap` and of DCP's older stager (PyTorch 2.13.0).
        if module == "torch._functorch.vmap" and place_of(self) is not None:
            # it calls `size` before it passes tensors of its own class to the function
            warn_of_slice("torch.vmap gives a result of", place_text(self.place))
        if module == "torch.distributed.checkpoint.default_planner":
            return torch.Size(self.place[4])
        if module == "torch.distributed._state_dict_utils":  # it allocates plain tensors of this size
            _refuse("the older AsyncStager", "async_save without it, which keeps slices; or ts.save(..., wait=False)")
        return super().size() if dim is None else super().size(dim)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        chunks = self.__create_chunk_list__()
        if len(chunks) > 1:
            _check_writer(sys._getframe(1), name)
        properties, whole = TensorProperties.create_from_tensor(self.plain), torch.Size(self.place[4])
        return [
            WriteItem(MetadataIndex(name, c.offsets), WriteItemType.SHARD, None, TensorWriteData(c, properties, whole))
            for c in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(_offsets(piece), torch.Size(sizes(piece.box)))
            for piece in self.pieces
            if 0 not in sizes(piece.box)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(piece.of(self.plain) for piece in self.pieces if _offsets(piece) == index.offset)


def _offsets(piece: Piece) -> torch.Size:
    return torch.Size(start for start, _ in piece.box)


_TRAINER = "transformers.trainer"
_BETWEEN = ("torch", "torchshard", "accelerate")
"""Packages that forward a call of a Trainer."""


def wants_whole() -> bool:
    """Returns whether the caller needs an unsharded state dict.

    DCP's `get_state_dict` with `StateDictOptions(full_state_dict=True)` does, and Hugging Face's Trainer,
    which writes safetensors. Both call `state_dict()` like users do, so this inspects the frames.
    """
    frame, is_passed_on = cast(FrameType | None, sys._getframe(1)), True
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "torch.distributed.checkpoint.state_dict":
            options = frame.f_locals.get("info")
            return bool(getattr(options, "full_state_dict", False))
        if module == _TRAINER and is_passed_on:
            return True
        is_passed_on &= module.partition(".")[0] in _BETWEEN
        frame = frame.f_back
    return False


def _check_writer(frame: FrameType | None, name: str) -> None:
    """Raises InputError for a slice of several pieces if DCP's writer keeps only the last piece per name.

    DCP does not pass the writer to the tensor, so this finds it in the calling frames.
    """
    while frame is not None:
        writer = frame.f_locals.get("storage_writer")
        if type(writer).__name__ == "HuggingFaceStorageWriter":
            _refuse("HuggingFaceStorageWriter", f"ts.save_pretrained; {name!r} has several pieces on a rank")
        frame = frame.f_back


def _refuse(what: str, attempt: str) -> NoReturn:
    raise InputError(
        f"{what} can't save the slices of a sharded model",
        where="torch.distributed.checkpoint",
        why="it would take each rank's slice, or one piece of it, for the whole tensor",
        attempt=attempt,
    )
