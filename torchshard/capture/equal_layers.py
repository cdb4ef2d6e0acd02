"""Finds equal layers of a model, so that one can be traced for others (see `repeated`).

Two layers are equal if their modules have the same classes, attributes, hooks and kinds of
parameters. An attribute may be the layer's own index, if all layers store it in the same place.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from torchshard.capture.namespaces import kind_of, stored_values

FEWEST = 4
"""The fewest equal layers that are repeated; repeating fewer saves no time."""
RECURRING = 6
"""With at least this many modules per kind, PyTorch's cache of fake results speeds up a capture.
Transformers with 2 to 12 layers, all of them traced, break even at 4 to 6."""
PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.Size)
"""Types that are compared by value."""


@dataclass(eq=False)
class Layer:
    """One of several equal layers."""

    module: nn.Module
    path: str
    looks: Looks
    places: list[tuple[str, str]]
    """Where it stores its own index: (path within it, attribute)."""
    parts: list[int] = field(init=False)
    """The ids of its modules."""

    def __post_init__(self) -> None:
        self.parts = [*map(id, self.module.modules())]

    @property
    def numbers(self) -> list[tuple[nn.Module, str]]:
        """The attributes that store its own index."""
        return [(self.module.get_submodule(path), name) for path, name in self.places]

    def is_as_before(self) -> bool:
        """Whether its attributes are unchanged since it was compared with the others."""
        now = _looks(self.module)
        # export replaces parameters and buffers with tensors of its own
        same = all(now.get(place) == look for place, look in self.looks.items() if place[1] not in _TENSORS)
        return same and now.keys() == self.looks.keys() and self.parts == [*map(id, self.module.modules())]


Looks = dict[tuple[str, str], Hashable]
"""(path within a layer, attribute) -> a key, equal for equal values."""
_TENSORS = ("_parameters", "_buffers")


def equal_layers(model: nn.Module) -> list[list[Layer]]:
    """The sets of equal children of one container; at least `FEWEST` in each."""
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        # `_looks` does not compare hooks on all modules.
        return []
    containers = [(p, m) for p, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    found = [run for path, m in containers if len(m) >= FEWEST for run in _equal_children(path, m)]
    return [run for run in found if len(run) >= FEWEST]


def calls_recur(model: nn.Module, layers: list[list[Layer]]) -> bool:
    """Whether most ops of a capture repeat earlier ones, with only the ends of `layers` traced."""
    skipped = {part for run in layers for layer in run[1:-1] for part in layer.parts}
    traced = [m for m in model.modules() if id(m) not in skipped]
    kinds = [(type(m), shapes) for m in traced if (shapes := tuple(p.shape for p in m.parameters(recurse=False)))]
    return bool(kinds) and len(kinds) >= RECURRING * len(set(kinds))


# `_global_*_hooks`: no public way to list the hooks of all modules (PyTorch 2.13.0).
_GLOBAL_HOOKS = [name for name in vars(torch_module) if name.startswith("_global_") and name.endswith("_hooks")]


def _equal_children(path: str, container: nn.Module) -> list[list[Layer]]:
    firsts: list[tuple[Looks, int, list[Layer]]] = []
    for number, (name, child) in enumerate(container.named_children()):
        looks = _looks(child)
        layer = Layer(child, f"{path}.{name}".lstrip("."), looks, [])
        for first, first_number, run in firsts:
            own = _own_numbers(first, first_number, looks, number)
            # the layers of a run store their index in the same places, or else they differ
            if own is not None and (len(run) == 1 or own == run[-1].places) and _may_be_hidden(child, own):
                layer.places = run[0].places = own
                run.append(layer)
                break
        else:
            if looks:
                firsts.append((looks, number, [layer]))
    return [run for _, _, run in firsts]


def _own_numbers(first: Looks, first_number: int, looks: Looks, number: int) -> list[tuple[str, str]] | None:
    """The places where two layers store their own index; None if they differ elsewhere."""
    if first.keys() != looks.keys():
        return None
    differing = [place for place in looks if first[place] != looks[place]]
    own = all((first[place], looks[place]) == ((int, first_number), (int, number)) for place in differing)
    return differing if own else None


def _may_be_hidden(layer: nn.Module, places: Sequence[tuple[str, str]]) -> bool:
    """Whether reads of these attributes reach `nn.Module.__getattr__` if no `__dict__` has them."""
    classes = [(type(layer.get_submodule(path)), name) for path, name in places]
    return all(
        cls.__getattr__ is nn.Module.__getattr__ and inspect.getattr_static(cls, name, None) is None
        for cls, name in classes
    )


def _looks(layer: nn.Module) -> Looks:
    """A layer's properties, equal for equal layers; {} without submodules, or with `__slots__`."""
    paths = {id(module): path for path, module in layer.named_modules()}
    tensors: dict[int, tuple[str, str]] = {}
    looks: Looks = {}
    for path, module in layer.named_modules():
        looks[path, "__class__"] = id(type(module))
        # Values in slots are not listed by `vars`.
        if any(cls.__dict__.get("__slots__") for cls in type(module).__mro__):
            return {}
        for name, value in vars(module).items():
            if name == "register_buffer":  # set by `entry_points` during a capture
                continue
            if name == "_modules":
                looks[path, name] = tuple((key, paths.get(id(child))) for key, child in value.items())
            elif name in _TENSORS:
                held = ((key, _tensor_looks(tensor, tensors.setdefault(id(tensor), (path, key))))
                        for key, tensor in value.items())  # fmt: skip
                looks[path, name] = tuple(held)
            else:
                looks[path, name] = _value_looks(value, paths)
    return looks if len(paths) > 1 else {}


def _tensor_looks(tensor: Tensor | None, first: tuple[str, str]) -> Hashable:
    """A key of a parameter or buffer, with the first place where the layer stores it."""
    if tensor is None:
        return None
    return (id(type(tensor)), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, first)


def _value_looks(value: object, paths: dict[int, str]) -> Hashable:
    if isinstance(value, PLAIN):
        return (type(value), value)
    if id(value) in paths:
        return ("module", paths[id(value)])
    if isinstance(value, frozenset):
        return (type(value), tuple(_value_looks(one, paths) for one in value))
    if isinstance(value, dict):
        items = kind_of(value).read(value).items()
        return (type(value), tuple((_value_looks(k, paths), _value_looks(v, paths)) for k, v in items))
    if isinstance(value, (list, tuple, set)):
        return (type(value), tuple(_value_looks(one, paths) for one in stored_values(value)))
    if isinstance(value, MethodType) and id(value.__self__) in paths:
        return ("method", id(value.__func__), paths[id(value.__self__)])
    return ("object", id(value))
