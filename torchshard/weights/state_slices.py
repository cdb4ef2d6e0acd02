"""Slices in state dicts and files, marked with their place in the full tensor.

A state dict of a sharded model contains slices under the names of full tensors. Without a mark, another
rank, or a tool that expects an unsharded model, would load a slice of a matching shape without an error.

PyTorch's distributed checkpointing (DCP) saves and loads slices as chunks of full tensors, through the
three methods of `torch.distributed._checkpointable._Checkpointable`. Unlike a DTensor, a slice may
consist of several chunks, for example in a fused QKV weight.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchshard.core.errors import InputError
from torchshard.core.layouts import I
from torchshard.core.mesh import Mesh, MeshAxis, Place
from torchshard.core.sharding import Cut, Cuts, Sharding, axis_names, split_text
from torchshard.weights.boxes import Piece, pieces, sizes
from torchshard.weights.callers import called_from, caller, is_users
from torchshard.weights.following import SliceType
from torchshard.weights.slice_calls import OVERWRITING, SliceCall, warn_of_slice

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

SlicePlace = tuple[str, str, int | tuple[int, ...], int | tuple[int, ...], tuple[int, ...]]
"""The place of a slice: (name, sharding, rank, number of ranks, global shape).

For a sharding with several placements, rank and number are tuples with one entry each.
"""
PLACE = "_torchshard_place"
"""The tensor attribute for the SlicePlace. It is part of the file format: saved tensors have it too."""


def slice_place(name: str, of: Sharding, place: Place, whole: Sequence[int]) -> SlicePlace:
    """Returns the place of a rank's slice; `place` is the rank's place in the mesh."""
    text, held = of.short_text, of.cuts(place) or (Cut(I, 0, 1),)
    if len(held) == 1:
        return name, text, held[0].rank, held[0].size, tuple(whole)
    return name, text, tuple(cut.rank for cut in held), tuple(cut.size for cut in held), tuple(whole)


def cuts_at(place: SlicePlace) -> Cuts:
    """Returns the cuts that take a slice with this place out of the full tensor."""
    sharding, where = held_at(place)
    return sharding.cuts(where)


def held_at(place: SlicePlace) -> tuple[Sharding, Place]:
    """Returns the sharding of a slice, and its rank's place in the mesh."""
    _, text, rank, size, _ = place
    ranks, sizes_ = (n if isinstance(n, tuple) else (n,) for n in (rank, size))
    names = axis_names(text)
    mesh = Mesh(tuple(MeshAxis(size, name) for name, size in zip(names, sizes_, strict=True)))
    return Sharding.parse(text, mesh), dict(zip(names, ranks, strict=True))


def is_same_slice(a: SlicePlace, b: SlicePlace) -> bool:
    """Returns whether two places are the same slice of the same shape, whatever the names of tensors and axes."""
    try:
        return cuts_at(a) == cuts_at(b) and tuple(a[4]) == tuple(b[4])
    except (ValueError, TypeError, AttributeError, IndexError):  # a file may contain anything
        return False


def place_of(value: object) -> SlicePlace | None:
    """Returns the place of a tensor from a state dict; None for a tensor that is not a slice."""
    return cast(SlicePlace | None, getattr(value, PLACE, None))


def types_of(tensors: Sequence[object], own: Place) -> dict[int, SliceType]:
    """Returns a dict: number of a slice among the tensors -> its type.

    Args:
        own: this rank's place.

    Raises:
        InputError: a slice belongs to another rank.
    """
    found = dict[int, SliceType]()
    for i, place in enumerate(map(place_of, tensors)):
        if place is not None:
            of, where = held_at(place)
            if any(own.get(axis, rank) != rank for axis, rank in where.items()):
                raise InputError(
                    "slices of different ranks are computed with each other",
                    where=f"the slice {place_text(place)} of {place[0]!r}",
                    why=f"this rank's other slices are those at {dict(own)}: the result would be a slice of nothing",
                    attempt="whole tensors: model.full_state_dict(), or a checkpoint by ts.save and ts.load",
                )
            found[i] = SliceType(of, tuple(place[4]))
    return found


class _PlaceOfTensors:
    """A descriptor on `torch.Tensor` for the place of a slice; setting it turns the tensor into a slice.

    `copy.copy`, pickles and files create plain tensors first; PyTorch then sets their attributes.
    """

    def __get__(self, tensor: Tensor | None, owner: object = None) -> object:
        if tensor is None:
            return self  # `torch.overrides` reads all attributes of the class
        if PLACE not in vars(tensor):
            raise AttributeError(PLACE)
        return vars(tensor)[PLACE]

    def __set__(self, tensor: Tensor, place: SlicePlace) -> None:
        _become_slice(tensor, place)


def _become_slice(tensor: Tensor, place: SlicePlace) -> Tensor:
    """Turns a plain tensor into a slice in place, for code that already references it."""
    vars(tensor)[PLACE] = place
    if type(tensor) in (Tensor, nn.Parameter):
        tensor.__class__ = StateParameter if isinstance(tensor, nn.Parameter) else StateSlice
    return tensor


def mark_copies() -> None:
    """Installs the descriptor that marks copies of slices, and slices from files, as slices.

    Only a process with a sharded model installs it; a tool that joins slices from files must not.
    """
    if PLACE not in vars(Tensor):
        setattr(Tensor, PLACE, _PlaceOfTensors())


class Placed(Tensor):
    """A tensor that may be a slice, with its place."""

    @property
    def place(self) -> SlicePlace:
        """The place of the slice."""
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

    @property
    def with_place(self) -> Tensor:
        """A plain tensor with the place as an attribute, so files open without torchshard installed."""
        plain = self.plain
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain.detach(), self.requires_grad)
        if (place := place_of(self)) is not None:
            vars(plain)[PLACE] = place
        return plain

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return self.with_place.__reduce_ex__(protocol)

    def size(self, dim: int | None = None) -> Any:
        """Like `Tensor.size`; DCP gets the global shape, to compare it with the checkpoint's."""
        module = called_from()
        if module == "torch._functorch.vmap" and place_of(self) is not None:
            # it calls `size` before it passes tensors of its own class to the function
            warn_of_slice("torch.vmap gives a result of", place_text(self.place))
        if module == "torch.distributed.checkpoint.default_planner":
            return torch.Size(self.place[4])
        if module == "torch.distributed._state_dict_utils":  # it allocates plain tensors of this size
            _refuse("the older AsyncStager", "async_save without it, which keeps slices; or ts.save(..., wait=False)")
        return super().size() if dim is None else super().size(dim)

    # --- the protocol of DCP -----------------------------------------------------------------------------------------

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


class StateSlice(Placed):
    """A slice in a state dict."""

    @staticmethod
    def of(tensor: Tensor, place: SlicePlace) -> StateSlice:
        """Returns a slice with this place that shares the tensor's memory."""
        marked: StateSlice = torch.Tensor._make_subclass(StateSlice, tensor.detach(), tensor.requires_grad)
        vars(marked)[PLACE] = place
        return marked

    @property
    def place(self) -> SlicePlace:
        """The place of the slice."""
        return cast(SlicePlace, vars(self)[PLACE])

    @property
    def sharding(self) -> Sharding:
        """The sharding of the full tensor."""
        return held_at(self.place)[0]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        call = SliceCall.begun(func, args, kwargs)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            explain(error, func, (args, kwargs))
            raise
        module = caller(func)
        operand = next((t for t in call.tensors if isinstance(t, StateSlice)), None)
        if operand is None:
            return result
        if func in OVERWRITING and is_users(module):
            warn_of_slice(f"{func.__name__}() writes other ranks' values into", place_text(operand.place))
        (name, *_), (_, where) = operand.place, held_at(operand.place)

        def mark(tensor: Tensor, of: SliceType, in_place: bool) -> Tensor:
            place = slice_place(name, of.sharding, where, of.whole)
            if not in_place and tensor.grad_fn is None:
                return cls.of(tensor, place)
            return _become_slice(tensor, place)

        text = f"{place_text(operand.place)}, of {name!r}"
        return call.ended(result, types_of(call.tensors, where), where, text, mark, module=module)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        if called_from() == "multiprocessing.reduction":  # to a child process, such as async_save's
            return StateSlice.of, (self.plain, self.place)
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, object]) -> StateSlice:
        return cast(StateSlice, memo.setdefault(id(self), self.clone()))


class StateParameter(StateSlice, nn.Parameter):
    """A copy of a parameter, by `copy.copy` or from a file."""

    def __deepcopy__(self, memo: dict[int, object]) -> StateSlice:
        copied = nn.Parameter(self.plain.detach().clone(), self.requires_grad)
        return cast(StateSlice, memo.setdefault(id(self), _become_slice(copied, self.place)))


def _offsets(piece: Piece) -> torch.Size:
    return torch.Size(start for start, _ in piece.box)


def place_text(place: SlicePlace) -> str:
    """Returns a place as text: '[8@tp,4] on rank 1 of 2'."""
    _, text, rank, world, shape = place
    try:
        text = split_text(shape, held_at(place)[0])
    except (ValueError, IndexError):  # a file may contain anything
        pass
    return f"{text} on rank {rank} of {world}"


def explain(error: Exception, func: Callable[..., object], arguments: tuple[Any, Mapping[str, Any]]) -> None:
    """Raises InputError if a function failed on a slice but would have run on the full tensor.

    Args:
        error: the exception that the function raised.
        func: the function.
        arguments: its args and kwargs.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    slices = [(tuple(t.shape), place) for t in tensors if (place := place_of(t)) is not None]
    others = [tuple(t.shape) for t in tensors if place_of(t) is None]
    for (own, place), shape in itertools.product(slices, others):
        if _dims_in(place[4], shape) and not _dims_in(own, shape):
            raise InputError(
                f"a tensor of shape {shape} meets this rank's slice of {place[0]!r}",
                where=f"{func.__name__}(...)",
                why=f"the slice is {own}, {place_text(place)}",
                attempt=f"this rank's part of the tensor: {_part_text(place, shape)}",
            )
    if slices and (isinstance(error, IndexError) or _runs_on_wholes(func, arguments)):
        own, place = slices[0]
        what = "an index lies outside of" if isinstance(error, IndexError) else f"{func.__name__} fits the whole, not"
        raise InputError(
            f"{what} this rank's slice of {place[0]!r}",
            where=f"{func.__name__}(...)",
            why=f"the slice is {own}, {place_text(place)}",
            attempt="model.full_state_dict() for the whole, or let the model's forward compute it",
        )


def _runs_on_wholes(func: Callable[..., object], arguments: tuple[Any, Mapping[str, Any]]) -> bool:
    """Returns whether a function runs on meta tensors of the global shapes."""

    def whole(tensor: Tensor) -> Tensor:
        place = place_of(tensor)
        shape = tuple(tensor.shape) if place is None else place[4]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    args, kwargs = pytree.tree_map_only(Tensor, whole, arguments)
    try:
        func(*args, **kwargs)
    except Exception:
        return False
    return True


def _dims_in(whole: tuple[int, ...], shape: tuple[int, ...]) -> slice | None:
    """Returns the dims of a tensor that match another's shape: the last if it broadcasts, the first for a mask."""
    last = slice(max(0, len(whole) - len(shape)), len(whole))
    if len(shape) <= len(whole) and all(own in (1, size) for own, size in zip(shape, whole[last], strict=True)):
        return last
    return slice(len(shape)) if whole[: len(shape)] == shape else None


def _part_text(place: SlicePlace, shape: tuple[int, ...]) -> str:
    """Returns an index expression for this rank's part of a tensor: 't[4:8, :]', or several joined by 'and'."""
    whole = tuple(place[4])
    dims = _dims_in(whole, shape) or slice(0)
    boxes = [piece.box[dims] for piece in pieces(whole, cuts_at(place))]
    texts = [", ".join(f"{a}:{b}" if n > 1 else ":" for (a, b), n in zip(box, shape, strict=True)) for box in boxes]
    return " and ".join(f"t[{text}]" for text in dict.fromkeys(texts))


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
