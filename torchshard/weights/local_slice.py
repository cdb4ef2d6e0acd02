"""Slices in users' code: warns if one would be mistaken for the full tensor.

    p.mul_(0.9), (p - q).square()            elementwise: this rank's slice of the intended result
    p.norm(), (p ** 2).sum(), p.grad.std()   a SliceWarning: of this rank's slice, not of the parameter
    torch.randn_like(p)                      a SliceWarning: each rank draws the same, by the sizes of its slice
    p.normal_(), nn.init.*                   an error: each rank would draw the same numbers into its slice
    torch.nn.utils.get_total_norm            the norm over all ranks' slices

A `LocalSlice` is a parameter's `.data` or gradient, a buffer, an optimizer's state, an elementwise
result of these, or an entry of a state dict or a file. The last have no model and no ranks, only a
place: without it another rank, or a tool that expects an unsharded model, would load a slice of a
matching shape without an error.

Elementwise results are marked as slices too, so `p.square().sum()` warns like `p.norm()`. PyTorch's and
this library's code gets plain tensors of a model's slices (`callers`), so optimizers stay fast.

PyTorch's `DTensor` (2.13) has no sharding for parts of unequal size, such as a fused QKV weight with
fewer key heads; by default its ops insert collectives. The class could go if DTensor had such
shardings, and a step on it were as fast as on plain tensors (pytorch/pytorch#109477).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import NoReturn, ParamSpec, Self, SupportsIndex, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import redispatch_function
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from torchshard.core.errors import InputError
from torchshard.core.mesh import Place
from torchshard.core.sharding import Sharding
from torchshard.custom_ops.fx_types import Args, Kwargs
from torchshard.distributed.ranks import Ranks
from torchshard.weights.callers import acts_for_caller, called_from, caller, is_users
from torchshard.weights.dcp import Checkpointable
from torchshard.weights.following import SliceType
from torchshard.weights.over_ranks import NORMS, OPS, check_overwriting, join_overflow, whole_norms, with_identity
from torchshard.weights.place import NOWHERE, PLACE, SlicePlace, held_at, place_text, slice_place, types_of
from torchshard.weights.slice_calls import OVERWRITING, SliceCall, explain

P = ParamSpec("P")
T = TypeVar("T")
_DRAWING = ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_")
_CLIPPING = "torch.nn.utils.clip_grad"
_READS_ALL_GRADIENTS = (_CLIPPING, "torch.amp.grad_scaler")
"""PyTorch's modules that combine all gradients."""
_RUNNING_HOOKS = frozenset([torch.autograd.grad, torch.autograd.backward, Tensor.backward])
"""Functions that run users' code: gradient hooks and custom backwards."""
_GRAD = vars(torch._C.TensorBase)["grad"].__get__
Gradients = tuple[Tensor | None, ...]
"""The results of `torch.autograd.grad`, one per input."""
unwatched = torch._C.DisableTorchFunctionSubclass
"""A context in which all functions treat slices as plain tensors."""


def watched(call: Callable[P, T]) -> Callable[P, T]:
    """Wraps a user's function, to be called within `unwatched`, so that it runs as outside of it."""
    # `_is_torch_function_enabled`, `_EnableTorchFunction`: no public names (PyTorch 2.13.0; pytorch/pytorch#82633).
    if not torch._C._is_torch_function_enabled():
        return call

    def watched_call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C._EnableTorchFunction():
            return call(*args, **kwargs)

    return watched_call


class LocalSlice(Checkpointable):
    """This rank's slice of a distributed tensor, or a replicated tensor of a sharded model.

    A stored slice, of a state dict or a file, has only its place, and the attributes derive from that. A place
    from a file is not read before it is needed: it may contain anything.
    """

    ranks: Ranks
    """The ranks of its model; missing for a slice in a state dict or a file."""
    owner: Callable[[], object] = staticmethod(lambda: None)
    """Returns the sharded model that it belongs to, or None if there is none or it was freed."""

    @staticmethod
    def stored(tensor: Tensor, place: SlicePlace) -> LocalSlice:
        """Returns a slice of a state dict with this place that shares the tensor's memory, without autograd history."""
        marked: LocalSlice = torch.Tensor._make_subclass(LocalSlice, tensor.detach(), tensor.requires_grad)
        marked._become_stored(place)
        return marked

    @classmethod
    def sharing(cls, tensor: Tensor, like: LocalSlice, of: SliceType | None = None) -> Self:
        """Returns an alias of `tensor`, with its autograd history, marked as a slice like `like` or of type `of`."""
        with unwatched():
            marked = tensor.as_subclass(cls)
        marked.become_like(like, of)
        return marked

    @classmethod
    def converted(cls, tensor: Tensor) -> Self:
        """Converts a tensor into a slice in place, for code that already references it; its attributes follow."""
        if isinstance(tensor, nn.Parameter):
            tensor._is_param = True  # as `nn.Parameter` does for other classes (PyTorch 2.13.0; pytorch/pytorch#73459)
        tensor.__class__ = cls
        return cast(Self, tensor)

    def become(self, of: SliceType, ranks: Ranks, path: str, owner: object = None) -> None:
        """Sets the attributes of a model's slice; `owner` is the sharded model."""
        vars(self).pop(PLACE, None)
        self.sharding, self.whole = of
        self.ranks, self.at, self.path = ranks, ranks.place, path
        if owner is not None:
            self.owner = weakref.ref(owner)

    def become_like(self, like: LocalSlice, of: SliceType | None = None) -> None:
        """Sets the attributes of a slice with the model of another, and its type unless `of` is given."""
        sharding, whole = of or (like.sharding, like.whole)
        if like.is_stored:
            self._become_stored(slice_place(like.path, sharding, like.at, whole))
        else:
            self.become(SliceType(sharding, whole), like.ranks, like.path)
            self.owner = like.owner

    def _become_stored(self, place: SlicePlace) -> None:
        for name in ("sharding", "at", "whole", "path"):
            vars(self).pop(name, None)  # derived from the former place
        vars(self)[PLACE] = place

    @cached_property
    def sharding(self) -> Sharding:
        """The sharding over the ranks."""
        return held_at(self.place)[0]

    @cached_property
    def at(self) -> Place:
        """The place of its rank on the mesh."""
        return held_at(self.place)[1]

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.place[4])

    @cached_property
    def path(self) -> str:
        """The parameter's name in the model."""
        return self.place[0]

    @property
    def is_split(self) -> bool:
        """Whether ranks have slices of the tensor; otherwise it is replicated."""
        return self.sharding.is_split

    @property
    def is_stored(self) -> bool:
        """Whether it is in a state dict or a file, so its ranks are unknown."""
        return "ranks" not in vars(self)

    @property
    def place(self) -> SlicePlace:
        """The place of the slice, as stored in state dicts."""
        if self.is_stored:
            return cast(SlicePlace, vars(self).get(PLACE, NOWHERE))
        return slice_place(self.path, self.sharding, self.at, self.whole)

    @property
    def _torchshard_place(self) -> SlicePlace | None:
        """The place if the tensor is split; plain tensors from files have an attribute of this name."""
        return self.place if PLACE in vars(self) or self.is_split else None

    @property
    def with_place(self) -> Tensor:
        """A plain tensor with the place as an attribute, so files open without torchshard installed."""
        plain = self.plain
        if isinstance(self, nn.Parameter):
            plain = nn.Parameter(plain.detach(), self.requires_grad)
        if (place := self._torchshard_place) is not None:
            vars(plain)[PLACE] = place
        return plain

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: Collection[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        module = caller(func)
        if (func in OVERWRITING or isinstance(func, OPS)) and not module.startswith("torchshard."):
            check_overwriting(func, args, kwargs, module)
        clips = func in NORMS and module == _CLIPPING
        order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2)) if clips else 2.0
        call = SliceCall.begun(func, args, kwargs) if is_users(module) or _is_stored(args) else None
        try:
            if func in _RUNNING_HOOKS:
                result = redispatch_function(func, types, args, kwargs)
            else:
                with unwatched():
                    result = func(*((with_identity(args[0], order), *args[1:]) if clips else args), **kwargs)
        except (RuntimeError, IndexError) as error:
            explain(error, func, (args, kwargs))
            raise
        # `_amp_foreach...` is the one op by which a GradScaler finds overflows (PyTorch 2.13.0).
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            join_overflow(*args[:2])
        if clips:
            return whole_norms(args[0], cast(Tensor | Sequence[Tensor], result), order)
        if func == _GRAD and isinstance(result, Tensor):
            return gradient_for(module, args[0], result) if args[0].is_split else result
        slices = [t for t in call.tensors if isinstance(t, LocalSlice) and t.is_split] if call is not None else []
        if call is None or not slices:
            return result
        if func is torch.autograd.grad:
            return _marked_gradients(args[1] if len(args) > 1 else kwargs["inputs"], cast(Gradients, result))
        first = slices[0]
        text = f"{first.place[1]}, of one such as {first.path!r}"
        if first.is_stored:
            text = f"{place_text(first.place)}, of {first.path!r}"
        return call.ended(result, types_of(call.tensors, first.at), first.at, text, first._mark, module=module)

    def _mark(self, tensor: Tensor, of: SliceType, in_place: bool) -> Tensor:
        """Marks a tensor as a slice like this one.

        Tensors with a `grad_fn` are marked in place too: `p.expand_as(p).grad_fn.next_functions` starts
        with the node that accumulates the parameter's gradient, and a new tensor would have its own node.

        Args:
            in_place: whether other code already references the tensor.
        """
        if not in_place and (tensor.grad_fn is None or type(tensor) is not Tensor):
            return LocalSlice.sharing(tensor, self, of)
        marked = LocalSlice.converted(tensor)
        marked.become_like(self, of)
        return marked

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
            replacement = hook(LocalSlice.sharing(gradient, self) if self.is_split else gradient)
            return replacement.as_subclass(Tensor) if isinstance(replacement, LocalSlice) else replacement

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
            types_of([other], self.at)  # refuses another rank's slice
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
        is_marked = self.is_split and (self.is_stored or is_users(module) or acts_for_caller(module))
        return LocalSlice.sharing(detached, self) if is_marked else detached

    def ndimension(self) -> int:
        """Like `Tensor.ndimension`; raises InputError if `torch.nn.init` calls it to draw into a slice."""
        if self.is_split and called_from() == "torch.nn.init":
            self.refuse_drawing(f"torch.nn.init.{sys._getframe(1).f_code.co_name}")
        return self.dim()

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        if id(self) not in memo:
            copied: Tensor = self.plain.detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            if self.is_split:
                copied = self._mark(copied, SliceType(self.sharding, self.whole), True)
            memo[id(self)] = copied
        return cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        if self.is_stored and called_from() == "multiprocessing.reduction":  # to a child, such as async_save's
            return LocalSlice.stored, (self.plain, self.place)
        return self.with_place.__reduce_ex__(protocol)

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        text = repr(self.as_subclass(Tensor))
        return f"{self.path!r}, {place_text(self.place)}: {text}" if self.is_split else text


def _is_stored(args: Sequence[object]) -> bool:
    """Returns whether the first slice among arguments is in a state dict; the first of a list stands for all."""
    for arg in args:
        first = arg[0] if isinstance(arg, (list, tuple)) and arg else arg
        if isinstance(first, LocalSlice):
            return first.is_stored
    return any(isinstance(leaf, LocalSlice) and leaf.is_stored for leaf in pytree.tree_leaves(args))


# --- drawing into slices ---------------------------------------------------------------------------------------------


def _drawing(name: str) -> Callable[..., Tensor]:
    original: Callable[..., Tensor] = getattr(Tensor, name)

    def draw(self: LocalSlice, *args: object, **kwargs: object) -> Tensor:
        if self.is_split:
            self.refuse_drawing(f"{name}()")
        return original(self, *args, **kwargs)

    draw.__name__, draw.__doc__ = name, f"As `Tensor.{name}`; refused for a slice."
    return draw


# As methods, not in `__torch_function__`: drawing raises within an optimizer's step too.
for _name in _DRAWING:
    setattr(LocalSlice, _name, _drawing(_name))


# --- marking results -------------------------------------------------------------------------------------------------


def _marked_gradients(inputs: Tensor | Sequence[Tensor], gradients: Gradients) -> Gradients:
    """Marks the results of `torch.autograd.grad` for inputs that are slices."""
    parameters = [inputs] if isinstance(inputs, Tensor) else inputs
    return tuple(map(_marked_gradient, parameters, gradients))


def _marked_gradient(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or not isinstance(parameter, LocalSlice) or not parameter.is_split:
        return gradient
    return LocalSlice.sharing(gradient, parameter)


def gradient_for(module: str, parameter: LocalSlice, gradient: Tensor) -> Tensor:
    """Returns a slice's gradient: marked if the calling module is user code or combines all gradients."""
    needs_mark = is_users(module) or module in _READS_ALL_GRADIENTS
    return LocalSlice.sharing(gradient, parameter) if needs_mark else gradient
