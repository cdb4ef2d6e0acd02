"""The submodules of a sharded model: each holds this rank's slices under the names of an unsharded module's parameters.

Each is an instance of a class made for it, a subclass of `ShardedSubmodule` and of the unsharded module's class (as
`torch.distributed.fsdp.fully_shard` makes `FSDPLinear`): loops over `modules()` that look for a kind of layer by
`isinstance` go on working. It can't be called, nor can its methods, for a part alone would compute on slices.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NoReturn, Self, cast

from torch import nn

from torchshard.core.errors import InputError
from torchshard.weights.parameter import ShardedParameter

OWN = "_ts_"
"""How the names of attributes of ours begin, so that a user's model may have any."""


class _EqualToItsSource(type):
    """The classes of submodules: equal to the class that each was made for, for loops with `type(m) == nn.Linear`."""

    made_for: type | None = None

    def __eq__(cls, other: object) -> bool:
        return cls is other or (cls.made_for is not None and cls.made_for is other)

    def __hash__(cls) -> int:
        return type.__hash__(cls if cls.made_for is None else cls.made_for)


class ShardedSubmodule(nn.Module, metaclass=_EqualToItsSource):
    """Stands for one module of the unsharded model."""

    def __new__(cls, *args: Any) -> Self:
        """Of a class of its own, if it is not the whole model."""
        made: Any = object.__new__(_class_for(type(args[0])) if cls is ShardedSubmodule else cls)
        return made

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A user's class that registers its subclasses does not hear of ours."""

    def __init__(self, source: nn.Module) -> None:
        nn.Module.__init__(self)  # never `super()` here: next in line is the class of the unsharded module
        self.__dict__["_ts_source"] = [source]  # in a list, so that it is no submodule
        for kind in ("_parameters", "_buffers", "_modules"):  # a bias that is None is one that can be asked for
            self.__dict__[kind].update({name: None for name, held in source.__dict__[kind].items() if held is None})

    @property
    def source(self) -> nn.Module:
        """The unsharded module, without memory."""
        held: nn.Module = self.__dict__["_ts_source"][0]
        return held

    @property
    def __class__(self) -> type:
        """As Python has it; a property so that an assignment is refused."""
        return type(self)

    @__class__.setter
    def __class__(self, value: type) -> None:
        refuse_class(self, value)

    @property
    def training(self) -> bool:
        """The mode of the module that this stands for: captures follow it."""
        return self.source.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_ts_source" in self.__dict__:
            self.source.training = mode

    def train(self, mode: bool = True) -> Self:
        """Train or eval, of this module and all in it, as the module's own `train` has it."""
        nn.Module.train(self, mode)
        self.source.train(mode)
        return self

    # --- as the containers of torch.nn: Sequential, ModuleList, ModuleDict, ParameterList, ParameterDict --------------

    def _items(self) -> dict[str, Any]:
        return self._modules or self._parameters

    def _is_dict(self) -> bool:
        return isinstance(self.source, (nn.ModuleDict, nn.ParameterDict))

    def __len__(self) -> int:
        return len(self._items())

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items() if self._is_dict() else self._items().values())

    def __contains__(self, item: Any) -> bool:
        return item in self._items() if self._is_dict() else any(item is held for held in self._items().values())

    def __getitem__(self, index: int | str | slice) -> Any:
        if isinstance(index, str):
            return self._items()[index]
        return list(self._items().values())[index]

    def keys(self) -> Any:
        """The names of a dict's items."""
        return self._items().keys()

    def values(self) -> Any:
        """The items themselves."""
        return self._items().values()

    def items(self) -> Any:
        """Names and items."""
        return self._items().items()

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_ts_source", [None])[0].__dict__:
            return self.source.__dict__[name]
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            # the whole model is no subclass of its source's class, whose properties and methods are found here
            found = inspect.getattr_static(type(self.source), name, None)
            if isinstance(found, property) and found.fget is not None:
                return found.fget(self)
            if not name.startswith("__") and callable(getattr(type(self.source), name, None)):
                return functools.partial(_refuse_method, f"{type(self.source).__name__}.{name}")
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith(OWN):
            self.__dict__[name] = value
            return
        if (name in self.source.__dict__ and name not in _EVERY) or name == "forward":
            raise InputError(
                f"attribute {name!r} can't be changed after sharding",
                where=type(self.source).__name__,
                why="graphs that were captured before would not follow",
                attempt="set it on the unsharded model, then shard",
            )
        if name in self.__dict__.get("_modules", ()):
            raise not_changeable(name, type(self.source).__name__, "replaced")
        nn.Module.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if any(name in held for held in (self._parameters, self._buffers, self._modules, self.source.__dict__)):
            raise not_changeable(name, type(self.source).__name__, "removed")
        nn.Module.__delattr__(self, name)

    def fix_names(self) -> None:
        """From now on parameters and buffers keep their names, and submodules stay."""
        place = type(self.source).__name__
        for kind, replaceable in (("_parameters", True), ("_buffers", True), ("_modules", False)):
            self.__dict__[kind] = _FixedNames(self.__dict__[kind], place, replaceable=replaceable)

    def _refuse_hooks(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputError(
            "a part of a sharded model can't have forward hooks of its own",
            where=type(self.source).__name__,
            why="it is not called: its ops are nodes of the whole model's graph",
            attempt="register the hook on the unsharded model, then shard: it is captured with it",
        )

    register_forward_hook: Any = _refuse_hooks
    register_forward_pre_hook: Any = _refuse_hooks
    register_full_backward_hook: Any = _refuse_hooks
    register_full_backward_pre_hook: Any = _refuse_hooks

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """A part of a sharded model is not called by itself.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"a {type(self.source).__name__} within a sharded model can't be called by itself",
            where="a submodule of a ShardedModule",
            why="it holds this rank's slices, and graphs are captured for the whole model",
            attempt="call the whole model, or shard the part: torchshard.shard(model.part, plan)",
        )

    def extra_repr(self) -> str:
        """The unsharded module's."""
        return self.source.extra_repr()


def refuse_class(module: Any, value: type) -> NoReturn:
    """What wraps modules by giving them another class, as `torch.distributed.fsdp.fully_shard` does, is refused.

    Raises:
        InputError: always.
    """
    raise InputError(
        f"a sharded model can't become a {value.__name__}",
        where=f"{type(module.source).__name__}.__class__",
        why="its parts have a class of their own, and their parameters are slices",
        attempt="wrap the unsharded model, or DistributedDataParallel over torchshard's data-parallel group",
    )


_classes: Any = weakref.WeakValueDictionary()
"""The class of an unsharded module -> that of the submodules that stand for it, while there are any."""


def _class_for(source: type[nn.Module]) -> type[ShardedSubmodule]:
    """A subclass of `ShardedSubmodule` and of a module's class, none of whose methods is the latter's own."""
    made = _classes.get(source)
    if made is None:
        metaclass: Any = _EqualToItsSource
        if type(source) is not type:  # a class has one metaclass, a subclass of those of all its bases
            metaclass = type("_EqualToItsSource", (_EqualToItsSource, type(source)), {})
        namespace = {"made_for": source, "__module__": __name__, **_without_methods(source)}
        made = metaclass(f"Sharded{source.__name__}", (ShardedSubmodule, source), namespace)
        _classes[source] = made
    return cast(type[ShardedSubmodule], made)


def _without_methods(source: type) -> dict[str, Any]:
    """What hides the methods of a module's class: those of `nn.Module` where it overrides them, else a refusal."""
    hidden: dict[str, Any] = {}
    for kind in source.__mro__[: source.__mro__.index(nn.Module)]:
        for name, value in vars(kind).items():
            if name in hidden or name in _OF_CLASSES or name in vars(ShardedSubmodule):
                continue
            if hasattr(nn.Module, name):
                hidden[name] = inspect.getattr_static(nn.Module, name)
            elif isinstance(value, (FunctionType, classmethod, staticmethod)):
                hidden[name] = functools.partialmethod(_refuse_called, f"{source.__name__}.{name}")
    return hidden


_OF_CLASSES = frozenset([
    *vars(type("", (), {})), "__annotations__", "__class_getitem__", "__parameters__", "__slots__",
])  # fmt: skip
"""The names that every class has of its own."""


def _refuse_called(module: Any, name: str, *args: Any, **kwargs: Any) -> NoReturn:
    _refuse_method(name)


class NoMethodError(InputError, AttributeError):
    """A method of the unsharded model was called of the sharded one."""


def _refuse_method(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    """What stands for a method of the unsharded module's class.

    Raises:
        NoMethodError: always.
    """
    raise NoMethodError(
        f"{name}() can't be called of a sharded model: it would compute with this rank's slices",
        where=name,
        why="a sharded model has the forward of the unsharded one, split over the ranks, and no other method of it",
        attempt="call it on the unsharded model, then ts.shard; or make it a part of what the model's forward computes",
    )


def not_changeable(name: Any, where: str, how: str) -> InputError:
    """The error for a part of a sharded model that somebody would add, replace or remove."""
    return InputError(
        f"{name!r} can't be {how} after sharding",
        where=where,
        why="graphs that were captured before would not follow",
        attempt="change the unsharded model, then shard",
    )


class _FixedNames(dict[str, Any]):
    """The parameters, buffers or submodules of a module: none comes or goes; values may be replaced, if so said."""

    def __init__(self, held: dict[str, Any], where: str, *, replaceable: bool) -> None:
        super().__init__(held)
        self._where, self._replaceable = where, replaceable

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            raise not_changeable(name, self._where, "added")
        held = self[name]
        if held is None and value is not None:
            raise not_changeable(name, self._where, "added")
        if not self._replaceable and value is not held:
            raise not_changeable(name, self._where, "replaced")
        if isinstance(held, ShardedParameter) and isinstance(value, nn.Parameter):
            held.make_like(value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        raise not_changeable(name, self._where, "removed")

    def pop(self, name: str, *default: Any) -> Any:
        """Refused, where there is such a name."""
        if name in self:
            raise not_changeable(name, self._where, "removed")
        return super().pop(name, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """One by one."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def clear(self) -> None:
        """Refused."""
        raise not_changeable("everything", self._where, "removed")

    def popitem(self) -> Any:
        """Refused."""
        self.clear()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Refused, where there is no such name."""
        if name not in self:
            self[name] = default
        return self[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> _FixedNames:
        return _FixedNames(copy.deepcopy(dict(self), memo), self._where, replaceable=self._replaceable)


_EVERY = frozenset(nn.Module().__dict__) | {"training"}
"""What every module has."""
