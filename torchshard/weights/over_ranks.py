"""PyTorch's functions over all slices of a model: norms and overflows over the ranks, and collectives to refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Protocol, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

# Functional collectives name their group; the look-up has no public name (PyTorch 2.13.0).
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils import _pytree as pytree

from torchshard.core.errors import DistributedError
from torchshard.core.hashing import hash_text
from torchshard.custom_ops.fx_types import Args, Kwargs
from torchshard.distributed.group import Group
from torchshard.distributed.ranks import Held, widest
from torchshard.weights.callers import is_users
from torchshard.weights.place import SlicePlace, place_text
from torchshard.weights.slice_calls import OVERWRITING, warn_of_slice

OPS = (OpOverload, OpOverloadPacket)
_AS_COPIES = ("all_reduce", "broadcast", "reduce_scatter")
"""Name prefixes of functional collectives that treat the ranks' tensors as copies of one."""
AVERAGING = "torch.distributed.algorithms.model_averaging.utils"


class Slice(Held, Protocol):
    """The attributes of a slice that are read here."""

    owner: Callable[[], object]
    """Returns the sharded model that it belongs to."""

    @property
    def path(self) -> str:
        """The parameter's name in the model."""

    @property
    def is_stored(self) -> bool:
        """Whether it is in a state dict or a file, so its ranks are unknown."""

    @property
    def place(self) -> SlicePlace:
        """The place in the full tensor."""

    @property
    def plain(self) -> Tensor:
        """A plain tensor that shares its memory."""


def is_of_a_model(tensor: object) -> TypeGuard[Slice]:
    """Returns whether a tensor belongs to a sharded model of this process, split or replicated."""
    return not getattr(tensor, "is_stored", True)


def is_slice(tensor: object) -> TypeGuard[Slice]:
    """Returns whether a tensor is a rank's slice of a distributed tensor."""
    return bool(getattr(tensor, "is_split", False))


# --- PyTorch's functions over all gradients --------------------------------------------------------------------------

MAX_NAMES = 300
"""The maximum length of a text of names, in characters, so that it fits in a message header."""


class NumberedOwner(Protocol):
    """The attributes of a sharded model that its slices read."""

    @property
    def _ts_number(self) -> int:
        """The model's number on its ranks; a copy has the number of its original."""


def _key(tensor: Slice) -> tuple[int, str]:
    """Returns (the number of a slice's model or -1, the parameter's name): equal on all ranks."""
    model = cast(NumberedOwner | None, tensor.owner())
    return -1 if model is None else model._ts_number, tensor.path


def names_of(tensors: Iterable[object]) -> str:
    """Returns the names of the slices among some tensors, for ranks to compare: 'down.weight, up.weight of model 0'."""
    paths: dict[int, list[str]] = {}
    for number, path in sorted(_key(tensor) for tensor in tensors if is_of_a_model(tensor)):
        paths.setdefault(number, []).append(path)
    found = (", ".join(names) + (f" of model {number}" if number >= 0 else "") for number, names in paths.items())
    text = "; ".join(found)
    count = sum(map(len, paths.values()))
    return text if len(text) <= MAX_NAMES else f"{text[:MAX_NAMES]}..., {count} in all ({hash_text(text):x})"


def join_overflow(gradients: Iterable[Tensor], found_inf: Tensor) -> None:
    """Reduces a GradScaler's overflow flag over the ranks, so that all of them skip the step."""
    given = list(gradients)
    what = f"overflows in gradients of {names_of(given)}"
    found_inf.copy_(widest(given).reduced(found_inf, dist.ReduceOp.MAX, eager=what))


# `torch.nn.utils.get_total_norm` calls one of these; `_foreach_norm` has no public name (PyTorch 2.13.0).
NORMS = frozenset([torch.linalg.vector_norm, torch._foreach_norm])


def with_identity(operands: Tensor | Sequence[Tensor], order: float) -> Tensor | list[Tensor]:
    """Replaces empty slices with the norm's identity element: PyTorch rejects some norms of empty tensors."""
    if not isinstance(operands, Tensor):
        return [cast(Tensor, with_identity(tensor, order)) for tensor in operands]
    return operands if operands.numel() else operands.new_full((1,), 0.0 if order >= 0 else math.inf)


def whole_norms(
    operands: Tensor | Sequence[Tensor], norms: Tensor | Sequence[Tensor], order: float
) -> Tensor | list[Tensor]:
    """Returns the norms of the full tensors, from this rank's norms of one tensor or several."""
    if isinstance(operands, Tensor) and isinstance(norms, Tensor):
        return _joined_norms([operands], [norms], order)[0]
    return _joined_norms(cast(Sequence[Tensor], operands), cast(Sequence[Tensor], norms), order)


def _joined_norms(tensors: Sequence[Tensor], norms: Sequence[Tensor], order: float) -> list[Tensor]:
    """Combines the ranks' norms of slices in one all-reduce; norms of replicated tensors stay.

    The message is in the order of names, because the order of a user's set differs between ranks.
    """
    split = [(i, t) for i, t in enumerate(tensors) if is_slice(t)]
    for _, t in split:
        if t.is_stored:
            warn_of_slice("a norm is computed of", place_text(t.place))
    slices = dict(sorted(((i, t) for i, t in split if not t.is_stored), key=lambda item: _key(item[1])))
    joined_norms = list(norms)
    if not slices:
        return joined_norms
    ranks, what = widest(tensors), f"norms of {names_of(slices.values())}"
    stacked = torch.stack([norms[i].double() for i in slices])
    if math.isinf(order):
        joined = ranks.reduced(stacked, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN, eager=what)
    else:
        # one rank per distinct slice contributes
        counts = torch.tensor([ranks.counts(t) for t in slices.values()], device=stacked.device)
        powers = (stacked if order == 0 else stacked**order).where(counts, 0.0)
        joined = ranks.reduced(powers, dist.ReduceOp.SUM, eager=what)
        joined = joined if order == 0 else joined ** (1 / order)  # order 0: the number of elements that are not zero
    for i, norm in zip(slices, joined, strict=True):
        joined_norms[i] = norm.to(norms[i].dtype)
    return joined_norms


# --- collectives over the ranks of one model -------------------------------------------------------------------------


def check_overwriting(func: Callable[..., object], args: Args, kwargs: Kwargs, module: str) -> None:
    """Raises DistributedError for a PyTorch collective that would treat the ranks' slices as copies.

    Slices in state dicts have unknown ranks; a collective that writes them warns.

    Args:
        module: the calling module.
    """
    name, group = func.__name__.partition(".")[0], kwargs.get("group")
    if func not in OVERWRITING:
        # `_c10d_functional` has the operators of functional collectives; it has no public name (PyTorch 2.13.0).
        if not (str(func).startswith("_c10d_functional.") and name.startswith(_AS_COPIES)):
            return
        group = args[-1] if isinstance(args[-1], dist.ProcessGroup) else _resolve_process_group(args[-1])
    for tensor in filter(is_slice, pytree.tree_leaves(args[0])):
        if not tensor.is_stored:
            check_other_group(group, tensor.ranks.groups_of(tensor.sharding), f"torch.distributed.{name}")
        elif is_users(module):
            warn_of_slice(f"{name}() writes other ranks' values into", place_text(tensor.place))


def check_averaging(parameter: Slice, frame: FrameType | None) -> None:
    """Raises DistributedError if PyTorch would average the parameters of one sharded model over its ranks.

    `average_parameters` reads `p.data` and reduces a buffer made of it, so the collective sees no slice.
    """
    while frame is not None and "process_group" not in frame.f_locals:
        frame = frame.f_back
    group = None if frame is None else frame.f_locals["process_group"]
    check_other_group(group, parameter.ranks.groups_of(parameter.sharding), f"{AVERAGING}.average_parameters")


def check_wrapper(caller: FrameType, groups: Iterable[Group]) -> None:
    """Checks the process group of a `DistributedDataParallel`, if it is the caller.

    DDP offers no other hook before it broadcasts rank 0's slices to all ranks. It does not pass itself, so its frame is
    read.
    """
    wrapper = caller.f_locals.get("self")
    if type(wrapper).__name__ == "DistributedDataParallel":
        check_other_group(getattr(wrapper, "process_group", None), groups, "DistributedDataParallel")


def check_other_group(process_group: dist.ProcessGroup | None, groups: Iterable[Group], who: str) -> None:
    """Checks that a process group joins copies of a model: it has at most one rank of each copy.

    Args:
        process_group: None for all ranks.
        groups: the groups over which the model is split.
        who: the function that would average or broadcast over the process group.

    Raises:
        DistributedError: several ranks of the model are in the process group.
    """
    world = dist.group.WORLD if process_group is None else process_group
    for group in groups:
        if group.process_group is not None and dist.is_initialized():
            _check_other_group(world, group, who)


def _check_other_group(world: dist.ProcessGroup | None, group: Group, who: str) -> None:
    own = set(dist.get_process_group_ranks(group.process_group))
    both = sorted(own & set(dist.get_process_group_ranks(world)))
    if len(both) > 1:
        raise DistributedError(
            f"{who} would treat the ranks of one sharded model as copies of it",
            where=f"{who}, ranks {both}",
            why="these ranks hold slices of one model; its group must join the ranks that hold the same slices",
            attempt="process_group=torchshard.distributed.get_data_parallel_group(), after "
            "init_process_group(group_size=...); the gradients of one sharded model need no averaging",
        )
