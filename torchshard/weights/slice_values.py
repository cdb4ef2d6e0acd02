"""Slices of parameters, buffers and gradients in users' code: warns if one would be mistaken for the full tensor.

    p.mul_(0.9), (p - q).square()            elementwise: this rank's slice of the intended result
    p.norm(), (p ** 2).sum(), p.grad.std()   a SliceWarning: of this rank's slice, not of the parameter
    torch.randn_like(p)                      a SliceWarning: each rank draws the same, by the sizes of its slice
    p.normal_(), nn.init.*                   an error: each rank would draw the same numbers into its slice
    torch.nn.utils.get_total_norm            the norm over all ranks' slices

Elementwise results are marked as slices too, so `p.square().sum()` warns like `p.norm()`. PyTorch's and
this library's code gets plain tensors (`callers`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, ParamSpec, Protocol, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.overrides import redispatch_function
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from torchshard.core.errors import DistributedError, InputError
from torchshard.core.hashing import hash_text
from torchshard.core.sharding import UNSHARDED, Sharding
from torchshard.distributed.group import ALONE, Group
from torchshard.distributed.ranks import Ranks, widest
from torchshard.weights.callers import acts_for_caller, called_from, caller, is_users
from torchshard.weights.following import SliceType
from torchshard.weights.slice_calls import OVERWRITING, SliceCall
from torchshard.weights.state_slices import Placed, SlicePlace, explain, place_text, slice_place, types_of

P = ParamSpec("P")
T = TypeVar("T")
_DRAWING = ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_")
_CLIPPING = "torch.nn.utils.clip_grad"
_READS_ALL_GRADIENTS = (_CLIPPING, "torch.amp.grad_scaler")
"""PyTorch's modules that combine all gradients."""
_RUNNING_HOOKS = frozenset([torch.autograd.grad, torch.autograd.backward, Tensor.backward])
"""Functions that run users' code: gradient hooks and custom backwards."""
_OPS = (OpOverload, OpOverloadPacket)
_AS_COPIES = ("all_reduce", "broadcast", "reduce_scatter")
"""Name prefixes of functional collectives that treat the ranks' tensors as copies of one."""
AVERAGING = "torch.distributed.algorithms.model_averaging.utils"

_GRAD = vars(torch._C.TensorBase)["grad"].__get__
Gradients = tuple[Tensor | None, ...]
"""The results of `torch.autograd.grad`, one per input."""
unwatched = torch._C.DisableTorchFunctionSubclass
"""A context in which all functions treat slices as plain tensors."""


def watched(call: Callable[P, T]) -> Callable[P, T]:
    """Wraps a user's function, to be called within `unwatched`, so that it runs as outside of it."""
    if not torch._C._is_torch_function_enabled():
        return call

    def watched_call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C._EnableTorchFunction():
            return call(*args, **kwargs)

    return watched_call


class Slice(Placed):
    """This rank's slice of a distributed tensor."""

    sharding: Sharding = UNSHARDED
    """The sharding over the ranks."""
    ranks: Ranks = Ranks(ALONE)
    path: str = ""
    """The parameter's name in the model."""
    whole: tuple[int, ...] = ()
    """The global shape."""
    owner: Callable[[], object] = staticmethod(lambda: None)
    """Returns the sharded model that it belongs to, or None if the model was freed."""

    @property
    def is_split(self) -> bool:
        """Whether ranks have slices of the tensor; otherwise it is replicated."""
        return self.sharding.is_split

    @property
    def place(self) -> SlicePlace:
        """The place of the slice, as stored in state dicts."""
        return slice_place(self.path, self.sharding, self.ranks.place, self.whole)

    @property
    def _torchshard_place(self) -> SlicePlace | None:
        """The place if the tensor is split; slices in state dicts have an attribute of this name."""
        return self.place if self.is_split else None

    @classmethod
    def sharing(cls, tensor: Tensor, like: Slice, of: SliceType | None = None) -> Self:
        """Returns an alias of `tensor`, with its autograd history, marked as a slice like `like` or of type `of`."""
        with unwatched():
            marked = tensor.as_subclass(cls)
        marked.become(of or SliceType(like.sharding, like.whole), like.ranks, like.path, like.owner)
        return marked

    def become(self, of: SliceType, ranks: Ranks, path: str, owner: Callable[[], object]) -> None:
        """Marks this tensor as a slice of this type."""
        (self.sharding, self.whole), self.ranks, self.path, self.owner = of, ranks, path, owner

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        module = caller(func)
        if (func in OVERWRITING or isinstance(func, _OPS)) and not module.startswith("torchshard."):
            _check_overwriting(func, args, kwargs)
        clips = func in _NORMS and module == _CLIPPING
        order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2)) if clips else 2.0
        call = SliceCall.begun(func, args, kwargs) if is_users(module) else None
        try:
            if func in _RUNNING_HOOKS:
                result = redispatch_function(func, types, args, kwargs)
            else:
                with unwatched():
                    result = func(*((_with_identity(args[0], order), *args[1:]) if clips else args), **kwargs)
        except (RuntimeError, IndexError) as error:
            explain(error, func, (args, kwargs))
            raise
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            _join_overflow(*args[:2])
        if clips:
            return _whole_norms(args[0], cast(Tensor | Sequence[Tensor], result), order)
        if func == _GRAD and isinstance(result, Tensor):
            return gradient_for(module, args[0], result) if args[0].is_split else result
        slices = [t for t in call.tensors if isinstance(t, Slice) and t.is_split] if call is not None else []
        if call is None or not slices:
            return result
        if func is torch.autograd.grad:
            return _marked_gradients(args[1] if len(args) > 1 else kwargs["inputs"], cast(Gradients, result))
        first = slices[0]
        text, own = f"{first.place[1]}, of one such as {first.path!r}", first.ranks.place
        return call.ended(result, types_of(call.tensors, own), own, text, first._mark, module=module)

    def _mark(self, tensor: Tensor, of: SliceType, in_place: bool) -> Tensor:
        """Marks a tensor as a slice of this model.

        Tensors with a `grad_fn` are marked in place too: `p.expand_as(p).grad_fn.next_functions` starts
        with the node that accumulates the parameter's gradient, and a new tensor would have its own node.

        Args:
            in_place: whether other code already references the tensor.
        """
        if not in_place and (tensor.grad_fn is None or type(tensor) is not Tensor):
            return SliceValue.sharing(tensor, self, of)
        return SliceValue.marked(tensor, of, self.ranks, self.path, self.owner)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """Like `Tensor.register_hook`; a user's hook gets the gradient marked as a slice."""
        self.check_hook()
        registered = self.seeing_slices(hook) if is_users(caller(Tensor.register_hook)) else hook
        with unwatched():
            return Tensor.register_hook(self, registered)

    def check_hook(self) -> None:
        """Does nothing; a ShardedParameter raises InputError if it has gradients that are not summed yet."""

    def seeing_slices(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
        """Returns a hook that calls `hook` with the gradient marked as a slice."""

        def marking(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                self.refuse_hook()
            replacement = hook(SliceValue.sharing(gradient, self) if self.is_split else gradient)
            return replacement.as_subclass(Tensor) if isinstance(replacement, Slice) else replacement

        return marking

    def refuse_hook(self) -> NoReturn:
        """Raises InputError for a gradient hook within `no_sync()`: the ranks sum the gradient later."""
        raise InputError(
            "a hook of a gradient can't run within no_sync()",
            where=f"register_hook of parameter {self.path!r}",
            why="the ranks have not summed this gradient: a later call does, with its own",
            attempt="accumulate without no_sync(), which only saves messages; or change p.grad before the step",
        )

    def refuse_shape(self, how: str, shape: tuple[int, ...]) -> NoReturn:
        """Raises InputError for values with a shape different from the slice's."""
        raise InputError(
            f"this rank's slice of {self.path!r} takes no values of shape {shape}",
            where=how,
            why=f"the slice is {tuple(self.shape)}, {place_text(self.place)}",
            attempt="model.load_full_state_dict({**model.full_state_dict(), name: whole}), on every rank",
        )

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        """Like `Tensor.copy_`; raises InputError for values that don't fit, or another rank's slice."""
        # PyTorch's own message would show the slice's shape, which the user has never seen.
        if self.is_split and isinstance(other, Tensor) and other.ndim == self.dim() and other.shape != self.shape:
            if any(n not in (1, own) for n, own in zip(other.shape, self.shape, strict=True)):
                self.refuse_shape("p.copy_(...)", tuple(other.shape))
        if self.is_split and is_users(called_from()):
            types_of([other], self.ranks.place)  # refuses another rank's slice
        copied: Tensor = super().copy_(other, non_blocking)
        return copied

    def refuse_drawing(self, how: str) -> NoReturn:
        """Raises InputError for a function that would draw random numbers into a slice."""
        raise InputError(
            f"a slice of a parameter can't be initialised by {how}",
            where=f"parameter {self.path!r}, split as {self.place[1]}",
            why="each rank would draw the same numbers for its slice, and from the slice's sizes, not the parameter's",
            attempt="initialise the unsharded model, then ts.shard; or model.load_full_state_dict with new weights",
        )

    def detach(self) -> Tensor:
        """Like `Tensor.detach`; `nn.Parameter(p)` gets p's class, because it rejects any other."""
        return self.detached_for(called_from())

    def detached_for(self, module: str) -> Tensor:
        """Returns the result of `detach` for the calling module."""
        with unwatched():
            detached = Tensor.detach(self)
        if module == "torch.nn.parameter":
            return self.sharing(detached, self)
        is_marked = self.is_split and (is_users(module) or acts_for_caller(module))
        return SliceValue.sharing(detached, self) if is_marked else detached

    def ndimension(self) -> int:
        """Like `Tensor.ndimension`; raises InputError if `torch.nn.init` calls it to draw into a slice."""
        if self.is_split and called_from() == "torch.nn.init":
            self.refuse_drawing(f"torch.nn.init.{sys._getframe(1).f_code.co_name}")
        return self.dim()

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        if id(self) not in memo:
            copied = self.plain.detach().clone()
            memo[id(self)] = SliceValue.sharing(copied, self) if self.is_split else copied
        return cast(Tensor, memo[id(self)])

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        text = repr(self.as_subclass(Tensor))
        return f"{self.path!r}, {place_text(self.place)}: {text}" if self.is_split else text


class SliceValue(Slice):
    """A split buffer, or a tensor derived from a slice: its `.data`, its gradient, an elementwise result."""

    @staticmethod
    def marked(tensor: Tensor, of: SliceType, ranks: Ranks, path: str, owner: Callable[[], object]) -> SliceValue:
        """Marks a tensor as a slice in place, for code that already references it."""
        if isinstance(tensor, nn.Parameter):
            tensor._is_param = True  # `nn.Parameter` marks tensors of other classes like this
        tensor.__class__ = SliceValue
        own = cast(SliceValue, tensor)
        own.become(of, ranks, path, owner)
        return own


# --- drawing into slices ---------------------------------------------------------------------------------------------


def _drawing(name: str) -> Callable[..., Tensor]:
    original: Callable[..., Tensor] = getattr(Tensor, name)

    def draw(self: Slice, *args: object, **kwargs: object) -> Tensor:
        if self.is_split:
            self.refuse_drawing(f"{name}()")
        return original(self, *args, **kwargs)

    draw.__name__, draw.__doc__ = name, f"As `Tensor.{name}`; refused for a slice."
    return draw


# As methods, not in `__torch_function__`: drawing raises within an optimizer's step too.
for _name in _DRAWING:
    setattr(Slice, _name, _drawing(_name))


# --- marking results -------------------------------------------------------------------------------------------------


def _marked_gradients(inputs: Tensor | Sequence[Tensor], gradients: Gradients) -> Gradients:
    """Marks the results of `torch.autograd.grad` for inputs that are slices."""
    parameters = [inputs] if isinstance(inputs, Tensor) else inputs
    return tuple(map(_marked_gradient, parameters, gradients))


def _marked_gradient(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or not isinstance(parameter, Slice) or not parameter.is_split:
        return gradient
    return SliceValue.sharing(gradient, parameter)


def gradient_for(module: str, parameter: Slice, gradient: Tensor) -> Tensor:
    """Returns a slice's gradient: marked if the calling module is user code or combines all gradients."""
    needs_mark = is_users(module) or module in _READS_ALL_GRADIENTS
    return SliceValue.sharing(gradient, parameter) if needs_mark else gradient


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
    for number, path in sorted(_key(tensor) for tensor in tensors if isinstance(tensor, Slice)):
        paths.setdefault(number, []).append(path)
    found = (", ".join(names) + (f" of model {number}" if number >= 0 else "") for number, names in paths.items())
    text = "; ".join(found)
    count = sum(map(len, paths.values()))
    return text if len(text) <= MAX_NAMES else f"{text[:MAX_NAMES]}..., {count} in all ({hash_text(text):x})"


def _join_overflow(gradients: Iterable[Tensor], found_inf: Tensor) -> None:
    """Reduces a GradScaler's overflow flag over the ranks, so that all of them skip the step."""
    given = list(gradients)
    what = f"overflows in gradients of {names_of(given)}"
    found_inf.copy_(widest(given).reduced(found_inf, dist.ReduceOp.MAX, eager=what))


_NORMS = frozenset([torch.linalg.vector_norm, torch._foreach_norm])


def _with_identity(operands: Tensor | Sequence[Tensor], order: float) -> Tensor | list[Tensor]:
    """Replaces empty slices by the norm's identity element: PyTorch rejects some norms of empty tensors."""
    if not isinstance(operands, Tensor):
        return [cast(Tensor, _with_identity(tensor, order)) for tensor in operands]
    return operands if operands.numel() else operands.new_full((1,), 0.0 if order >= 0 else math.inf)


def _whole_norms(
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
    split = [(i, t) for i, t in enumerate(tensors) if isinstance(t, Slice) and t.is_split]
    slices = dict(sorted(split, key=lambda item: _key(item[1])))
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


def _check_overwriting(func: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises DistributedError for a PyTorch collective that would treat the ranks' slices as copies."""
    name, group = func.__name__.partition(".")[0], kwargs.get("group")
    if func not in OVERWRITING:
        if not (str(func).startswith("_c10d_functional.") and name.startswith(_AS_COPIES)):
            return
        group = args[-1] if isinstance(args[-1], dist.ProcessGroup) else _resolve_process_group(args[-1])
    for tensor in pytree.tree_leaves(args[0]):
        if isinstance(tensor, Slice) and tensor.is_split:
            check_other_group(group, tensor.ranks.groups_of(tensor.sharding), f"torch.distributed.{name}")


def check_averaging(parameter: Slice, frame: FrameType | None) -> None:
    """Raises DistributedError if PyTorch would average the parameters of one sharded model over its ranks.

    `average_parameters` reads `p.data` and reduces a buffer made of it, so the collective sees no slice.
    """
    while frame is not None and "process_group" not in frame.f_locals:
        frame = frame.f_back
    group = None if frame is None else frame.f_locals["process_group"]
    check_other_group(group, parameter.ranks.groups_of(parameter.sharding), f"{AVERAGING}.average_parameters")


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
