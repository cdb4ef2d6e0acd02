"""The parameters of a sharded model: this rank's slices, which know what they are slices of.

An ordinary `nn.Parameter` to optimizers and to autograd; what would treat a slice as a whole is told or made right
(`slice_values`). `DistributedDataParallel` over the model's ranks is refused: it would give each the first's slices.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchshard.core.layouts import Layout
from torchshard.distributed.group import Group
from torchshard.distributed.ops import PLAIN
from torchshard.weights.slice_values import (
    Slice,
    SliceValue,
    called_from,
    check_other_group,
    gradient_for,
    is_users,
    unwatched,
)
from torchshard.weights.state_slices import StateSlice

_GRAD: Any = torch._C.TensorBase.__dict__["grad"]
_DATA: Any = torch._C.TensorBase.__dict__["data"]


class ShardedParameter(Slice, nn.Parameter):
    """This rank's slice of a parameter, or the whole of it."""

    owner: Callable[[], Any] = staticmethod(lambda: None)
    """Gives the sharded model that it belongs to, if that still exists."""
    touched = False
    """Whether `.data` was taken, through which it may have been written unseen."""

    @classmethod
    def of(cls, tensor: Tensor, sharding: Layout, group: Group, path: str, owner: Any = None) -> ShardedParameter:
        """A parameter with the memory of a tensor; it requires a gradient if that does."""
        made: ShardedParameter = torch.Tensor._make_subclass(cls, tensor.detach(), tensor.requires_grad)
        made.sharding, made.group, made.path = sharding, group, path
        if owner is not None:
            made.owner = weakref.ref(owner)
        return made

    def make_like(self, parameter: nn.Parameter) -> None:
        """Makes a parameter that takes this one's place, with as large a slice, one of the same model: in place."""
        if type(parameter) in (nn.Parameter, SliceValue, StateSlice) and parameter.shape == self.shape:
            parameter.__class__ = ShardedParameter
            made: Any = parameter
            made.sharding, made.group, made.path, made.owner = self.sharding, self.group, self.path, self.owner

    @property
    def data(self) -> Tensor:
        """As `Tensor.data`."""
        self.touched = True
        with unwatched():
            held: Tensor = _DATA.__get__(self)
        return SliceValue.sharing(held, self) if self.is_split else held

    @data.setter
    def data(self, value: Tensor) -> None:
        if self.is_split and is_users(called_from()) and value.shape != self.shape:
            self.refuse_shape("p.data = ...", tuple(value.shape))
        _DATA.__set__(self, value)

    @property
    def grad(self) -> Tensor | None:
        """As `Tensor.grad`: this rank's slice of the gradient."""
        with unwatched():
            held: Tensor | None = super().grad
        return held if held is None or not self.is_split else gradient_for(called_from(), self, held)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def detach(self) -> Tensor:
        """As `Tensor.detach`; refused where other ranks of the model would be given this rank's slice."""
        asked = called_from()
        if self.group.size > 1 and asked == "torch.distributed.utils":
            check_other_group(sys._getframe(1).f_locals.get("process_group"), self.group, "DistributedDataParallel")
        return self.detached_for(asked)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """As `Tensor.register_hook`; the hook is given this rank's slice of the gradient."""
        given = self.seeing_slices(hook) if self.is_split and is_users(called_from()) else hook
        with unwatched():
            return Tensor.register_hook(self, given)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if id(self) not in memo:
            copied = self.detach().clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
            memo[id(self)] = ShardedParameter.of(copied, self.sharding, self.group, self.path)
        made: ShardedParameter = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


PLAIN.add(ShardedParameter)


def support_foreach() -> None:
    """Optimizers and clipping take these parameters many at a time, as PyTorch's own."""
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        supported = getattr(sys.modules.get(module), "_foreach_supported_types", None)
        if supported is not None and ShardedParameter not in supported:
            supported.extend((ShardedParameter, SliceValue))
