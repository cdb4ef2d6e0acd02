"""Slices in state dicts: each knows what it is a slice of, in files too.

A state dict of a sharded model holds slices under the names of whole tensors. On another rank, or in a tool that reads
it as a whole model's, a slice of a fitting shape would be loaded without an error.

PyTorch's distributed checkpointing (DCP) saves and loads them as parts of whole tensors: it asks any tensor that has
the three methods of `torch.distributed._checkpointable._Checkpointable`. Unlike a DTensor, a slice may have several
pieces, as that of a fused QKV weight has.
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
"""(name, layout, rank, number of ranks, shape of the whole) of a slice; over more mesh axes than the model's, its word,
and as many ranks and numbers as that has letters."""
PLACE = "_torchshard_place"
"""The attribute of a tensor that holds its SlicePlace. It is part of the file format: saved tensors have it too."""


def slice_place(name: str, of: Sharding, place: Place, whole: Sequence[int]) -> SlicePlace:
    """The place of a slice that the rank at a place of a mesh has."""
    text, held = of.short_text, of.cuts(place) or (Cut(I, 0, 1),)
    if len(held) == 1:
        return name, text, held[0].rank, held[0].size, tuple(whole)
    return name, text, tuple(cut.rank for cut in held), tuple(cut.size for cut in held), tuple(whole)


def cuts_at(place: SlicePlace) -> Cuts:
    """How a slice with this place is cut out."""
    sharding, where = held_at(place)
    return sharding.cuts(where)


def held_at(place: SlicePlace) -> tuple[Sharding, Place]:
    """The word of what a slice is of, and where the rank that holds it is."""
    _, text, rank, size, _ = place
    ranks, sizes_ = (n if isinstance(n, tuple) else (n,) for n in (rank, size))
    names = axis_names(text)
    mesh = Mesh(tuple(MeshAxis(size, name) for name, size in zip(names, sizes_, strict=True)))
    return Sharding.parse(text, mesh), dict(zip(names, ranks, strict=True))


def is_same_slice(a: SlicePlace, b: SlicePlace) -> bool:
    """Whether two places are one slice of one shape, by whatever names of tensors and axes."""
    try:
        return cuts_at(a) == cuts_at(b) and tuple(a[4]) == tuple(b[4])
    except (ValueError, TypeError, AttributeError, IndexError):  # a file may hold anything
        return False


def place_of(value: object) -> SlicePlace | None:
    """The place of a tensor from a state dict; None for a tensor that is not a slice."""
    return cast(SlicePlace | None, getattr(value, PLACE, None))


def types_of(tensors: Sequence[object], own: Place) -> dict[int, SliceType]:
    """The number of each slice among tensors -> what it is a slice of.

    Args:
        own: the place of the rank whose slices they are.

    Raises:
        InputError: one is another rank's.
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
    """The attribute of PyTorch's tensors that says what one is a slice of: one that is given it becomes a slice.

    Copies by `copy.copy` and tensors from pickles and files are plain tensors, whose attributes PyTorch sets then.
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
    """Makes a plain tensor itself, which others hold, a slice."""
    vars(tensor)[PLACE] = place
    if type(tensor) in (Tensor, nn.Parameter):
        tensor.__class__ = StateParameter if isinstance(tensor, nn.Parameter) else StateSlice
    return tensor


def mark_copies() -> None:
    """Lets copies of slices, and slices from files, know from now on that they are slices.

    Not in a process that has no sharded model, such as a tool that joins the slices of several files.
    """
    if PLACE not in vars(Tensor):
        setattr(Tensor, PLACE, _PlaceOfTensors())


class Placed(Tensor):
    """A tensor that may be a slice, and then knows of what."""

    @property
    def place(self) -> SlicePlace:
        """What this is a slice of."""
        raise NotImplementedError

    @property
    def pieces(self) -> list[Piece]:
        """The parts of the whole tensor that this slice is made of."""
        return pieces(self.place[4], cuts_at(self.place))

    @property
    def plain(self) -> Tensor:
        """The same memory, without its place."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @property
    def with_place(self) -> Tensor:
        """As `plain`, with the place as an attribute: files must open where torchshard is not installed."""
        plain = self.plain
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain.detach(), self.requires_grad)
        if (place := place_of(self)) is not None:
            vars(plain)[PLACE] = place
        return plain

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return self.with_place.__reduce_ex__(protocol)

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`; of the whole tensor to DCP, which compares it with the size in a checkpoint."""
        module = called_from()
        if module == "torch._functorch.vmap" and place_of(self) is not None:
            # it asks before it gives its function tensors of another kind
            warn_of_slice("torch.vmap gives a result of", place_text(self.place))
        if module == "torch.distributed.checkpoint.default_planner":
            return torch.Size(self.place[4])
        if module == "torch.distributed._state_dict_utils":  # it allocates plain tensors of this size
            _refuse("the older AsyncStager", "async_save without it, which keeps slices; or ts.save(..., wait=False)")
        return super().size() if dim is None else super().size(dim)

    # --- what DCP asks -----------------------------------------------------------------------------------------------

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
        """The same memory, with its place."""
        marked: StateSlice = torch.Tensor._make_subclass(StateSlice, tensor.detach(), tensor.requires_grad)
        vars(marked)[PLACE] = place
        return marked

    @property
    def place(self) -> SlicePlace:
        """What this is a slice of."""
        return cast(SlicePlace, vars(self)[PLACE])

    @property
    def sharding(self) -> Sharding:
        """How the whole tensor is distributed over the ranks."""
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
        if called_from() == "multiprocessing.reduction":  # to a process of this program, as async_save may start one
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
    """'[8@tp,4] on rank 1 of 2'."""
    _, text, rank, world, shape = place
    try:
        text = split_text(shape, held_at(place)[0])
    except (ValueError, IndexError):  # a file may hold anything
        pass
    return f"{text} on rank {rank} of {world}"


def explain(error: Exception, func: Callable[..., object], arguments: tuple[Any, Mapping[str, Any]]) -> None:
    """Raises InputError where a function failed on a slice and would have run on the whole.

    Args:
        error: what the function raised.
        func: it, and the arguments that it had.
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
    """Whether a function runs, by its shapes, where each slice is a whole tensor."""

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
    """The dims of a tensor that those of another meet: the last ones if it is expanded, the first if it is a mask."""
    last = slice(max(0, len(whole) - len(shape)), len(whole))
    if len(shape) <= len(whole) and all(own in (1, size) for own, size in zip(shape, whole[last], strict=True)):
        return last
    return slice(len(shape)) if whole[: len(shape)] == shape else None


def _part_text(place: SlicePlace, shape: tuple[int, ...]) -> str:
    """'t[4:8, :]', or how its parts are joined."""
    whole = tuple(place[4])
    dims = _dims_in(whole, shape) or slice(0)
    boxes = [piece.box[dims] for piece in pieces(whole, cuts_at(place))]
    texts = [", ".join(f"{a}:{b}" if n > 1 else ":" for (a, b), n in zip(box, shape, strict=True)) for box in boxes]
    return " and ".join(f"t[{text}]" for text in dict.fromkeys(texts))


_TRAINER = "transformers.trainer"
_BETWEEN = ("torch", "torchshard", "accelerate")
"""The packages that pass on the call of a Trainer."""


def wants_whole() -> bool:
    """Whether the caller saves or loads the state dict of a whole model.

    DCP's `get_state_dict` with `StateDictOptions(full_state_dict=True)` does so, and Hugging Face's Trainer, which
    writes safetensors. They call `state_dict()` as users do, so the frames are all that tells.
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
    """Refuses a slice of several pieces in a file format of DCP's that keeps one piece for a name, the last.

    DCP tells a tensor nothing about where it goes, so the writer is looked up in the frames that ask.
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
