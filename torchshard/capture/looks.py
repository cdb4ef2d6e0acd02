"""What Python code sees of a tensor besides its values: a class of the user's own, and attributes.

A captured forward, a copy of a model and a sharded parameter replace tensors by others. They keep both, so that
`isinstance(self.weight, Codebook)`, `self.weight.infshape` and `p._no_weight_decay` give what they gave before, and so
does `type(x) is torch.Tensor`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from torchshard.capture.visible import visible_to
from torchshard.weights.lazy import LazyTensor


def is_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor's class is PyTorch's or ours for tensors that are used in place of ordinary ones."""
    return isinstance(tensor, FakeTensor) or type(tensor).__module__.startswith("torchshard.")


def own_class(tensor: Tensor) -> type[Tensor] | None:
    """The class of a tensor, if the user has chosen it."""
    return None if type(tensor) in (Tensor, nn.Parameter) or is_stand_in(tensor) else type(tensor)


def own_attributes(tensor: Tensor) -> dict[str, object]:
    """The attributes that users or libraries have set on a tensor."""
    if not vars(tensor) or (is_stand_in(tensor) and not isinstance(tensor, LazyTensor)):
        return {}
    found = vars(tensor).items()
    return {name: value for name, value in found if name not in _OF_LAZY and not name.startswith("_torchshard")}


_OF_LAZY = frozenset(LazyTensor.__annotations__)


def look_like(tensor: Tensor, replacement: Tensor) -> Tensor:
    """Gives a replacement the class and the attributes of a tensor, and returns it."""
    cls = own_class(tensor)
    if cls is not None:
        made = type(replacement)
        replacement.__class__ = type(cls.__name__, (made, cls), {}) if is_stand_in(replacement) else cls
    copy_attributes(tensor, replacement)
    return replacement


def copy_attributes(tensor: Tensor, replacement: Tensor) -> None:
    """Gives a replacement the attributes of a tensor that it does not have."""
    vars(replacement).update({n: v for n, v in own_attributes(tensor).items() if n not in vars(replacement)})


# --- type(x) ---------------------------------------------------------------------------------------------------------


class _AsType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _class_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, type)


class _Type(type, metaclass=_AsType):
    """`type`, which tells of a stand-in the class of what it stands for."""


def _class_of(value: object) -> type:
    cls = type(value)
    if not issubclass(cls, FakeTensor):
        return cls
    if cls is not FakeTensor:
        return cls.__bases__[-1]  # as `look_like` makes it
    return nn.Parameter if isinstance(value, nn.Parameter) else Tensor


@contextlib.contextmanager
def types_of_originals(model: nn.Module) -> Iterator[None]:
    """While it is entered, `type(x)` is the class of what a stand-in stands for, in the files of a model's code.

    Those are the files of its modules' classes and of the user's functions that its forward may call.
    """
    spaces = visible_to(model).namespaces
    files = [space.owner for space in spaces if isinstance(space.owner, dict) and "type" in (space.names or ())]
    names = dict.fromkeys(cls.__module__ for module in model.modules() for cls in type(module).__mro__)
    files += [vars(sys.modules[name]) for name in names if name in sys.modules and not name.startswith(_NOT_OF_MODELS)]
    replaced = [values for values in files if values.setdefault("type", _Type) is _Type]
    try:
        yield
    finally:
        for values in replaced:
            values.pop("type", None)


_NOT_OF_MODELS = ("torch.", "torchshard.", "builtins")
