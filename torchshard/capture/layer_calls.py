"""Calls of equal layers as data: what they were called with, what they returned, and their marks in the graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchshard.capture.attributes import Attributes
from torchshard.capture.equal_layers import PLAIN, Layer
from torchshard.core.autocast import current_autocast
from torchshard.ir.fake_values import size_expr

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""The (args, kwargs) of a call."""


class DifferentLayers(Exception):
    """Layers that were taken to be equal are not."""


class Outcome(NamedTuple):
    """The result of a layer."""

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]
    """Its leaves; each tensor is replaced with a `MarkedTensor`."""


class MarkedTensor(NamedTuple):
    """A tensor among a layer's results, by the index of its mark after the layer."""

    number: int


Marks = range
"""The numbers of the marks of several tensors."""


class Traced(NamedTuple):
    """A layer that was traced: its call, and the marks around its ops."""

    layer: Layer
    call: Hashable
    attributes: Attributes
    """The values that it could see before its call."""
    outcome: Outcome
    enter: Marks
    leave: Marks


@dataclass
class Run:
    """Equal layers, and the findings of their capture so far."""

    layers: list[Layer]
    first: Traced | None = None
    last: Traced | None = None
    repeated: dict[Marks, Layer] = field(default_factory=dict)
    """Marks -> the layer that they represent."""
    called: set[int] = field(default_factory=set)
    is_off: bool = False
    """Whether every layer is traced."""


class TensorType(NamedTuple):
    """The properties of a tensor except its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorType:
        """Reads the type of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad)

    def key(self) -> Hashable:
        """A key, equal for equal types; comparing sizes as expressions adds no assumption."""
        return (tuple(map(size_expr, self.shape)), tuple(map(size_expr, self.stride)), *self[2:])

    def made(self) -> Tensor:
        """Makes a tensor of this type."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def tensors_by_id(leaves: Sequence[object]) -> dict[int, Tensor]:
    """id -> tensor, for the distinct tensors among some values."""
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}


def _is_fixed(value: object) -> bool:
    """Whether a layer can change a value only by ops; a list or dict is copied for the layer."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (Tensor, torch.SymInt, *PLAIN)) and not isinstance(value, nn.Parameter)


def call_key(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    """A key, equal for calls with the same ops; None if an argument's content may change."""
    if not all(map(_is_fixed, (*args, *kwargs.values()))):
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places: dict[int, int] = {}
    # `_len_torch_*_stack`: no public way to count the active modes (PyTorch 2.13.0).
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    defaults = torch.get_default_dtype(), torch.get_default_device()
    keys: list[Hashable] = [spec, torch.is_grad_enabled(), current_autocast(), modes, defaults]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            keys.append((TensorType.of(leaf).key(), places.setdefault(id(leaf), place)))
        else:
            keys.append(size_expr(leaf) if isinstance(leaf, torch.SymInt) else (type(leaf), leaf))
    return tuple(keys)
