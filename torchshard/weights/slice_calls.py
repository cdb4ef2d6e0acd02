"""Handles calls with slices among the arguments: marks results that are slices, and warns about others.

`following` infers which results are slices of the function's results for the full tensors. Functions
that return numbers or memory instead of tensors (`tolist`, `numpy`, `data_ptr`, DLPack) bypass PyTorch's
dispatcher and can't be followed. To see whether such a function reads values, it is called on tensors
that differ only in their values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchshard.core.errors import InputError, SliceWarning
from torchshard.core.mesh import Place
from torchshard.core.modules import version_of
from torchshard.core.user_files import warn
from torchshard.custom_ops.fx_types import Args, Kwargs
from torchshard.weights.boxes import pieces
from torchshard.weights.callers import is_users
from torchshard.weights.following import Function, Outcome, SliceType, follow
from torchshard.weights.op_calls import tensors_in
from torchshard.weights.op_layouts import Lost
from torchshard.weights.place import SlicePlace, cuts_at, place_of, place_text

ADVICE = (
    "model.full_state_dict() has whole parameters; ts.clip_grad_norm_ and torch.nn.utils.get_total_norm take norms of "
    "whole gradients; a penalty of weights is right as a part of the model's forward"
)
OVERWRITING = frozenset([
    dist.all_reduce, dist.all_reduce_coalesced, dist.all_to_all, dist.all_to_all_single, dist.broadcast, dist.irecv,
    dist.recv, dist.reduce, dist.reduce_scatter, dist.scatter,
])  # fmt: skip
"""Functions that write other ranks' values into their first argument."""
Mark = Callable[[Tensor, SliceType, bool], Tensor]
"""(tensor, type, whether in place) -> the tensor marked as a slice."""


@dataclass(frozen=True)
class SliceCall:
    """A call of a function with slices among its arguments."""

    func: Function
    args: Sequence[object]
    kwargs: Mapping[str, object]
    tensors: Sequence[Tensor]
    """The tensors among the arguments, in order."""
    versions: Sequence[int]
    """The tensors' versions before the call."""

    @classmethod
    def begun(cls, func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> SliceCall:
        """Records a call that is about to run."""
        leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            return cls(func, args, kwargs, tensors, [version_of(tensor) for tensor in tensors])

    def ended(
        self, result: object, held: Mapping[int, SliceType], place: Place, text: str, mark: Mark, *, module: str
    ) -> object:
        """Returns the result with its slices marked, after the call ran.

        Args:
            held: the number of a slice among the tensors -> its type.
            place: this rank's place.
            text: a description of one slice, for warnings.
            module: the calling module. User code gets a warning if a result is not a slice.

        Raises:
            InputError: safetensors reads the values, and its files can't mark them as a slice.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self._ended(result, held, place, text, mark, module)

    def _ended(
        self, result: object, held: Mapping[int, SliceType], place: Place, text: str, mark: Mark, module: str
    ) -> object:
        written = {i for i, tensor in enumerate(self.tensors) if version_of(tensor) != self.versions[i]}
        if not written and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            if is_users(module) and _reads_values(self.func, self.args, self.kwargs):
                _check_file(module, text)
                warn_of_slice(f"{self._name} reads", text)
            return result
        outcome = follow(self.func, self.args, self.kwargs, held, place, result)
        lost = [of for of in outcome.results if isinstance(of, Lost)]
        for i in written & outcome.written.keys():
            of, tensor = outcome.written[i], self.tensors[i]
            if isinstance(of, Lost) or (isinstance(tensor, nn.Parameter) if i in held else _is_shared(tensor)):
                lost.append(Lost())
            elif i in held or type(tensor) in (Tensor, nn.Parameter):  # in held: unsqueeze_ changes the dims
                mark(tensor, of, True)
        if lost and is_users(module):
            draws = any(of.draws for of in lost)
            but = "draws the same numbers on all ranks, and others than for the whole" if draws else "not of the whole"
            warn_of_slice(f"{self._name} of" if draws else f"{self._name} gives a result of", text, but)
        elif is_users(module) and self._takes_part_of_a_gradient(outcome, result):
            verb = f"{self._name} gives a tensor that is whole on every rank the part of a gradient that belongs to"
            warn_of_slice(verb, text, "not to the whole: add the ranks' parts, as by all_reduce of its grad")
        of_results = iter(outcome.results)

        def marked(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            of = next(of_results)
            is_given = any(leaf is tensor for tensor in self.tensors)
            return mark(leaf, of, False) if isinstance(of, SliceType) and not is_given else leaf

        return pytree.tree_map(marked, result)

    def _takes_part_of_a_gradient(self, outcome: Outcome, result: object) -> bool:
        """Returns whether a gradient of the results, which are slices, reaches a replicated argument."""
        leaves = pytree.tree_leaves(result) if torch.is_grad_enabled() else []  # else the results are arguments
        if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            return False
        return any(tensor.requires_grad and i not in outcome.slices for i, tensor in enumerate(self.tensors))

    @property
    def _name(self) -> str:
        name = self.func.__name__
        return "an index" if name in ("__getitem__", "__setitem__") else f"{name}()"


def warn_of_slice(verb: str, text: str, but: str = "not the whole") -> None:
    """Warns that a function uses a slice, not the full tensor; `verb`: 'sum() gives a result of'."""
    warn(f"{verb} this rank's slice, {text}, {but}. {ADVICE}", SliceWarning)


def _check_file(module: str, text: str) -> None:
    """Raises InputError for code of safetensors: its files can't mark a tensor as a slice."""
    if module.partition(".")[0] == "safetensors":
        raise InputError(
            "safetensors can't save this rank's slice of a parameter",
            where=f"safetensors, {text}",
            why="the file would not say which part of the whole it holds, and be read as the whole",
            attempt="ts.save_pretrained(folder, model) for whole tensors, ts.save or torch.save for slices",
        )


def _is_shared(tensor: Tensor) -> bool:
    """Returns whether other tensors share this one's memory: a mark would not reach them.

    Example: `t.data.copy_(p)` writes into `t`.
    """
    # `_storage_Use_Count`, `_is_view`: no public question for shared memory (PyTorch 2.13.0).
    users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._is_view() or users > 2  # the tensor, and the Python object that this makes of its storage


_VALUES = (bool, int, float, complex, list, tuple, np.ndarray, torch.UntypedStorage, torch.TypedStorage)
_READS: dict[Function, bool] = {}


def _reads_values(func: Function, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Returns whether a function without tensor results reads a tensor's values or memory."""
    if func.__name__ == "__get__":
        return False
    if func not in _READS and getattr(func, "__module__", "") == dist.all_reduce.__module__:
        _READS[func] = False  # a trial call would send messages
    if func not in _READS:
        _READS[func] = _differ(*(_tried(func, args, kwargs, first) for first in (0, 1)))
    return _READS[func]


def _tried(func: Function, args: Sequence[object], kwargs: Mapping[str, object], first: int) -> object:
    """Calls a function on one-element tensors with the same `ndim`, filled with `first`, `2 * first`, ..."""
    count = 0

    def other(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return torch.full((1,) * tensor.ndim, first * count, dtype=tensor.dtype, device=tensor.device)

    tried_args, tried_kwargs = pytree.tree_map_only(Tensor, other, (tuple(args), dict(kwargs)))
    try:
        return func(*tried_args, **tried_kwargs)
    except Exception:  # of any class; the function read no values
        return None


def _differ(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return not (isinstance(b, np.ndarray) and np.array_equal(a, b))
    if type(a).__name__ == "PyCapsule":
        return True
    return isinstance(a, _VALUES) and bool(a != b)


def explain(error: Exception, func: Callable[..., object], arguments: tuple[Args, Kwargs]) -> None:
    """Raises InputError if a function failed on a slice but would have run on the full tensor.

    Args:
        error: the exception that the function raised.
        func: the function.
        arguments: its args and kwargs.
    """
    tensors = tensors_in(arguments)
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


def _runs_on_wholes(func: Callable[..., object], arguments: tuple[Args, Kwargs]) -> bool:
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
