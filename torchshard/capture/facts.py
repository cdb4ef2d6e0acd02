"""Reads the facts about a model that planning needs and a graph lacks.

They are read once, so planning, plan files and error messages use the same names of modules, tied
parameters and devices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from torchshard.capture.models import shared_names

_BASE_CLASSES = (nn.Linear, nn.Embedding)
"""A subclass of these counts as the class itself, because other libraries' plans name these two."""


@dataclass(frozen=True)
class TensorFacts:
    """One parameter or buffer."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element."""
    module: str
    """The class of the module that owns it: 'Linear', 'Embedding'."""
    names: tuple[str, ...]
    """All its names, in the model's order; a tied tensor has several."""
    is_parameter: bool
    is_trained: bool
    """Whether it is a parameter that requires a gradient."""

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class ModelFacts:
    """The modules, parameters, buffers and device of a model."""

    modules: Mapping[str, type[nn.Module]]
    """Path -> class of each module; the model itself has the path ''."""
    grouped: frozenset[str]
    """The paths of modules with several groups, such as grouped convolutions."""
    tensors: Mapping[str, TensorFacts]
    """Parameters and buffers, by their first names."""
    device: str
    """The type of the parameters' device: 'cpu', 'cuda', 'meta'."""

    @staticmethod
    def of(model: nn.Module) -> ModelFacts:
        """Reads the facts of a model."""
        modules, names = dict(model.named_modules()), shared_names(model)
        tensors = {
            name: TensorFacts(
                tuple(t.shape),
                t.dtype.itemsize,
                _class_name(modules[name.rpartition(".")[0]]),
                names[name],
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
        """A hash that is equal for models with equal names and shapes of parameters and buffers."""
        shapes = sorted((name, tensor.shape) for name, tensor in self.tensors.items())
        return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def device_type(model: nn.Module) -> str:
    """The device type of a model's parameters: 'cpu', 'cuda', 'meta'; 'cpu' without parameters."""
    return next((p.device.type for p in model.parameters()), "cpu") if isinstance(model, nn.Module) else "cpu"


def _class_name(module: nn.Module) -> str:
    return next((cls.__name__ for cls in _BASE_CLASSES if isinstance(module, cls)), type(module).__name__)
