"""The properties of a tensor that Python code sees, apart from its values: class and attributes.

A captured forward, a copy of a model and a sharded parameter replace tensors with others. The
replacements keep the user's class and attributes. So `isinstance(self.weight, Codebook)`,
`self.weight.infshape` and `p._no_weight_decay` give the same results as before.
`type(x) is torch.Tensor` and `isinstance(x.shape[0], int)` do too: inside a capture, `type` and
`isinstance` are replaced, because they would see export's `FakeTensor` and `SymInt`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import GenericAlias, UnionType

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from torchshard.capture.visible import Visible
from torchshard.weights.lazy import LazyTensor


def is_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor is a `FakeTensor` or of a class of this package, and so a replacement."""
    return isinstance(tensor, FakeTensor) or type(tensor).__module__.startswith("torchshard.")


def own_class(tensor: Tensor) -> type[Tensor] | None:
    """The class of a tensor, if the user has chosen it; else None."""
    return None if type(tensor) in (Tensor, nn.Parameter) or is_stand_in(tensor) else type(tensor)


def own_attributes(tensor: Tensor) -> dict[str, object]:
    """The attributes that users or libraries have set on a tensor."""
    if not vars(tensor) or (is_stand_in(tensor) and not isinstance(tensor, LazyTensor)):
        return {}
    found = vars(tensor).items()
    return {name: value for name, value in found if name not in _OF_LAZY and not name.startswith("_torchshard")}


_OF_LAZY = frozenset(LazyTensor.__annotations__)


def look_like(tensor: Tensor, replacement: Tensor) -> Tensor:
    """Gives a replacement the tensor's class and attributes, and returns it."""
    cls = own_class(tensor)
    if cls is not None:
        made = type(replacement)
        # The replacement's class comes first, so that its methods win.
        replacement.__class__ = type(cls.__name__, (made, cls), {}) if is_stand_in(replacement) else cls
    copy_attributes(tensor, replacement)
    return replacement


def copy_attributes(tensor: Tensor, replacement: Tensor) -> None:
    """Copies the attributes of a tensor that its replacement lacks."""
    vars(replacement).update({n: v for n, v in own_attributes(tensor).items() if n not in vars(replacement)})


# --- type(x), isinstance(x, ...) -------------------------------------------------------------------------------------


class _AsType(type):
    def __call__(cls, *args: object, **kwargs: object) -> object:
        if cls is not _Type:  # a user's metaclass
            return super().__call__(*args, **kwargs)
        return _class_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, type) if cls is _Type else super().__instancecheck__(value)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, type) if cls is _Type else super().__subclasscheck__(other)


class _Type(type, metaclass=_AsType):
    """`type`, which returns the original's class for a replacement."""

    __class_getitem__ = classmethod(GenericAlias)  # type: ignore[var-annotated]


_Type.__name__, _Type.__qualname__, _Type.__module__ = "type", "type", "builtins"
_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""The classes of dynamic sizes and of numbers computed from them -> Python's classes."""


def _class_of(value: object) -> type:
    cls = type(value)
    if cls is type:
        return _Type
    if not issubclass(cls, FakeTensor):
        return _NUMBERS.get(cls, cls)
    if cls is not FakeTensor:
        return cls.__bases__[-1]  # `look_like` puts the user's class last
    return nn.Parameter if isinstance(value, nn.Parameter) else Tensor


def _isinstance(value: object, classes: type | UnionType | tuple[type | UnionType, ...]) -> bool:
    """`isinstance`, to which a dynamic size is a number."""
    number = _NUMBERS.get(type(value))
    return isinstance(value, classes) or (number is not None and issubclass(number, classes))


_OF_ORIGINALS = {"type": _Type, "isinstance": _isinstance}


@contextlib.contextmanager
def types_of_originals(model: nn.Module, visible: Visible) -> Iterator[None]:
    """Inside the block, `type` and `isinstance` see originals, in the files of a model's code.

    Args:
        visible: the values that forward can read. The names are added to the files of the modules'
            classes and of the user's functions.
    """
    of_functions = [
        space.owner for space in visible.namespaces if not _OF_ORIGINALS.keys().isdisjoint(space.names or ())
    ]
    modules = dict.fromkeys(cls.__module__ for module in model.modules() for cls in type(module).__mro__)
    of_classes = [
        vars(sys.modules[name]) for name in modules if name in sys.modules and not name.startswith(_LIBRARIES)
    ]
    files = {id(values): values for values in (*of_functions, *of_classes) if isinstance(values, dict)}
    added = [(values, name) for values in files.values() for name in _OF_ORIGINALS if name not in values]
    for values, name in added:
        values[name] = _OF_ORIGINALS[name]
    try:
        yield
    finally:
        for values, name in added:
            values.pop(name, None)


_LIBRARIES = ("torch.", "torchshard.", "builtins")
