"""The submodules of a sharded model: this rank's slices under the names of an unsharded module's parameters.

A submodule can't be called, because it would compute with slices. `submodule_classes` makes its class.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Self, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchshard.capture import transform_error
from torchshard.core.errors import InputError
from torchshard.core.modules import named_tensors
from torchshard.runtime.fixed_names import FixedNames
from torchshard.runtime.refusals import not_changeable, refuse_class
from torchshard.runtime.submodule_classes import AS_FORWARD, EqualToItsSource, class_for, own_attribute
from torchshard.weights.local_slice import LocalSlice

OWN = "_ts_"
"""The prefix of this library's attributes: a user's model may have attributes of any other name."""
_MISSING = object()


@dataclass
class Unsharded:
    """The unsharded module of a sharded one, and what is known of its attributes.

    Not a module itself: `modules()` of the sharded model must not find the unsharded one.
    """

    module: nn.Module
    """The unsharded module, without memory."""
    assigned: set[str]
    """The attributes that users have assigned since the last call, in any module of the model."""
    left: set[str]
    """The attributes in which forward leaves tensors: graphs don't store them there, so reading one raises."""


class ShardedSubmodule(nn.Module, metaclass=EqualToItsSource):
    """The sharded counterpart of one module of the unsharded model."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Creates an instance of the class for the source's class; for the model itself, of its own subclass."""
        if cls is not ShardedSubmodule:
            return object.__new__(cls)
        return object.__new__(class_for(cls, type(cast(nn.Module, args[0]))))

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Hides the classes made here from user classes that register their subclasses."""

    def __init__(self, source: nn.Module, assigned: set[str] | None = None) -> None:
        """Makes the submodules, with the unsharded tensors, and fixes all names.

        Args:
            assigned: collects the model's assigned attributes.
        """
        nn.Module.__init__(self)  # never `super()` here: next in line is the class of the unsharded module
        own = self._ts_unsharded = Unsharded(source, set() if assigned is None else assigned, set())
        parts = {
            name: None if part is None else ShardedSubmodule(part, own.assigned)
            for name, part in source.__dict__["_modules"].items()
        }
        where = type(source).__name__
        for entries in ("_parameters", "_buffers"):
            self.__dict__[entries] = FixedNames(source.__dict__[entries], where, replaceable=True)
        self.__dict__["_modules"] = FixedNames(parts, where, replaceable=False)

    _ts_unsharded: Unsharded
    """The unsharded module: forward's attributes are read from it, and its methods run with this module as `self`."""

    @property
    def source(self) -> nn.Module:
        """The unsharded module, without memory."""
        return self._ts_unsharded.module

    @property
    def __class__(self) -> type:
        """The class, as of any object; a property, in order to refuse assignments."""
        return type(self)

    @__class__.setter
    def __class__(self, value: type) -> None:
        refuse_class(self, value)

    @property
    def training(self) -> bool:
        """Whether the source, which captures run, is in training mode."""
        return self.source.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_ts_unsharded" in self.__dict__:
            self.source.training = mode

    def train(self, mode: bool = True) -> Self:
        """Sets the training mode of this module, its submodules and the source."""
        nn.Module.train(self, mode)
        # Last, because the source may override `train`, for example to keep a frozen submodule in eval.
        self.source.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict of a submodule; if called directly, its slices know their places in full tensors."""
        state = nn.Module.state_dict(self, *args, **kwargs)
        if args or "destination" in kwargs or kwargs.get("keep_vars"):
            return state
        prefix = kwargs.get("prefix", "")
        for name, tensor in named_tensors(self).items():
            if isinstance(tensor, LocalSlice) and tensor.is_split and prefix + name in state:
                state[prefix + name] = LocalSlice.stored(state[prefix + name], tensor.place)
        return state

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("_ts_unsharded")
        if own is None:
            return nn.Module.__getattr__(self, name)
        if name in own.left:
            raise InputError(
                f"attribute {name!r} does not hold what the last call computed",
                where=type(self.source).__name__,
                why="forward leaves a tensor there, and a call of a sharded model gives nothing but its results",
                attempt="return it from forward",
            )
        if name in own.module.__dict__:
            return own.module.__dict__[name]
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            # The sharded model does not subclass its source's class: attributes of that class are looked up here.
            attribute = inspect.getattr_static(type(self.source), name, _MISSING)
            if name.startswith("__"):
                raise
            if attribute is _MISSING:
                return self._delegated(name)
            found = own_attribute(type(self.source), name, attribute)
            return found.__get__(self, type(self)) if hasattr(found, "__get__") else found

    def _delegated(self, name: str) -> object:
        """Returns the value that the source's `__getattr__` finds: peft's look in the model that they wrap."""
        value = getattr(self.source, name)
        for path, module in self.source.named_modules():
            if value is module:
                return self.get_submodule(path)
            if getattr(value, "__self__", None) is module:
                return getattr(self.get_submodule(path), name)
        if isinstance(value, Tensor):
            raise AttributeError(f"a sharded {type(self.source).__name__} has no attribute {name!r}")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(OWN):
            self.__dict__[name] = value
            return
        if name in self.__dict__.get("_modules", ()):
            raise not_changeable(name, type(self.source).__name__, "replaced")
        attribute = inspect.getattr_static(type(self.source), name, None)
        if isinstance(attribute, property) and attribute.fset is not None and name not in vars(ShardedSubmodule):
            attribute.fset(self, value)
        elif name == "forward" or (name not in _EVERY_MODULE_HAS and self._is_of_source(name)):
            self._set_source(name, value)
        else:
            nn.Module.__setattr__(self, name, value)

    def _is_of_source(self, name: str) -> bool:
        """Returns whether an attribute is the source's, which forward reads; parameters and submodules are not."""
        return name in self.source.__dict__ or (hasattr(type(self.source), name) and not hasattr(nn.Module, name))

    def _set_source(self, name: str, value: object) -> None:
        """Sets an attribute that forward may read; the next call is captured with it."""
        if name == "forward" or isinstance(value, (Tensor, nn.Module)):
            raise InputError(
                f"attribute {name!r} can't be changed after sharding",
                where=type(self.source).__name__,
                why="graphs that were captured before would not follow",
                attempt="set it on the unsharded model, then shard",
            )
        setattr(self.source, name, value)
        if hasattr(type(self), name):  # a default of the class would hide it
            self.__dict__[name] = value
        self._ts_unsharded.assigned.add(name)

    def __delattr__(self, name: str) -> None:
        if any(name in names for names in (self._parameters, self._buffers, self._modules, self.source.__dict__)):
            raise not_changeable(name, type(self.source).__name__, "removed")
        nn.Module.__delattr__(self, name)

    def _refuse_hooks(self, *args: object, **kwargs: object) -> NoReturn:
        raise InputError(
            "a part of a sharded model can't have forward hooks of its own",
            where=type(self.source).__name__,
            why="it is not called: its ops are nodes of the whole model's graph",
            attempt="register the hook on the unsharded model, then shard: it is captured with it",
        )

    register_forward_hook: Callable[..., RemovableHandle] = _refuse_hooks
    register_forward_pre_hook: Callable[..., RemovableHandle] = _refuse_hooks
    register_full_backward_hook: Callable[..., RemovableHandle] = _refuse_hooks
    register_full_backward_pre_hook: Callable[..., RemovableHandle] = _refuse_hooks

    def forward(self, *args: object, **kwargs: object) -> object:
        """Refuses the call of a submodule.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"a {type(self.source).__name__} within a sharded model can't be called by itself",
            where="a submodule of a ShardedModule",
            why="it holds this rank's slices, and graphs are captured for the whole model",
            attempt=f"{AS_FORWARD}; or torchshard.shard(unsharded.part, plan), of that part alone",
        )

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses `torch.jit.script`, which calls this first and would compile the code of `forward`."""
        raise transform_error(self.source, "torch.jit.script", "script the unsharded model")

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Copies a submodule with its model, which has added stand-ins for the source's tensors to `memo`."""
        if any(id(tensor) not in memo for tensor in (*self.source.parameters(), *self.source.buffers())):
            raise InputError(
                f"a {type(self.source).__name__} within a sharded model can't be copied by itself",
                where="copy.deepcopy of a submodule of a ShardedModule",
                why="it is computed by the graphs of the whole model",
                attempt="copy.deepcopy(model); or of its slices, copy.deepcopy(module.state_dict())",
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        """Returns the unsharded module's extra representation."""
        return self.source.extra_repr()


_EVERY_MODULE_HAS = frozenset(nn.Module().__dict__) | {"training"}
"""The attributes of every module, such as its hooks; they may be changed."""
