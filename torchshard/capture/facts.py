"""Facts about a model apart from its graph, taken once: modules, parameters and buffers, ties, device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

_KINDS = (nn.Linear, nn.Embedding)
"""Modules whose subclasses count as them: other libraries' plans have words for these two."""


@dataclass(frozen=True)
class TensorFacts:
    """A parameter or buffer."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element."""
    module: str
    """The class of the module that holds it: 'Linear', 'Embedding'."""
    names: tuple[str, ...]
    """All its names, the first one first; several where it is tied."""
    is_parameter: bool
    is_trained: bool
    """Whether it is a parameter that requires a gradient."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class ModelFacts:
    """What planning must know of a model apart from its graph."""

    modules: Mapping[str, type[nn.Module]]
    """Path -> class, of all modules; the model itself has the path ''."""
    grouped: frozenset[str]
    """The paths of modules with several groups, as a grouped convolution has."""
    tensors: Mapping[str, TensorFacts]
    """Parameters and buffers, by their first names."""
    device: str
    """The type of the parameters' device: 'cpu', 'cuda', 'meta'."""

    @staticmethod
    def of(model: nn.Module) -> ModelFacts:
        """Reads a model."""
        modules = dict(model.named_modules())
        names: dict[int, list[str]] = {}
        for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
            names.setdefault(id(t), []).append(name)
        tensors = {
            name: TensorFacts(
                tuple(t.shape),
                t.dtype.itemsize,
                _kind(modules[name.rpartition(".")[0]]),
                tuple(names[id(t)]),
                isinstance(t, nn.Parameter),
                isinstance(t, nn.Parameter) and t.requires_grad,
            )
            for name, t in (*model.named_parameters(), *model.named_buffers())
        }
        grouped = frozenset(path for path, module in modules.items() if getattr(module, "groups", 1) != 1)
        return ModelFacts({path: type(m) for path, m in modules.items()}, grouped, tensors, device_type(model))

    @cached_property
    def first_names(self) -> Mapping[str, str]:
        """Each name of a parameter or buffer -> its first name."""
        return {name: first for first, tensor in self.tensors.items() for name in tensor.names}

    @cached_property
    def signature(self) -> str:
        """Equal for models whose parameters and buffers have the same names and shapes."""
        shapes = sorted((name, tensor.shape) for name, tensor in self.tensors.items())
        return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def device_type(model: nn.Module) -> str:
    """The type of the device that a model's parameters are on: 'cpu', 'cuda', 'meta'; 'cpu' where it has none."""
    return next((p.device.type for p in model.parameters()), "cpu") if isinstance(model, nn.Module) else "cpu"


def _kind(module: nn.Module) -> str:
    return next((kind.__name__ for kind in _KINDS if isinstance(module, kind)), type(module).__name__)
