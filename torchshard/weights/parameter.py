"""The parameters of a sharded model: this rank's slices, with their name, sharding and global shape.

Optimizers and autograd use a `ShardedParameter` like an ordinary `nn.Parameter`. Functions that would
mistake a slice for the full parameter warn, raise, or are corrected (`local_slice`).
`DistributedDataParallel` over the ranks of one model raises, because it would overwrite each rank's
slice with rank 0's.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from torchshard.core.errors import InputError
from torchshard.core.sharding import Sharding
from torchshard.distributed.ops import PLAIN
from torchshard.distributed.ranks import Ranks
from torchshard.weights.callers import called_from, is_users, method_of
from torchshard.weights.following import SliceType
from torchshard.weights.local_slice import LocalSlice, gradient_for, unwatched
from torchshard.weights.over_ranks import AVERAGING, check_averaging, check_other_group
from torchshard.weights.restored import mark_copies

T = TypeVar("T")


class _TensorAttribute(Protocol, Generic[T]):
    """A tensor attribute implemented in C++."""

    def __get__(self, tensor: Tensor) -> T:
        """Returns the attribute's value."""

    def __set__(self, tensor: Tensor, value: T) -> None:
        """Sets the attribute."""

    def __delete__(self, tensor: Tensor) -> None:
        """Sets the attribute to None."""


# ShardedParameter's properties of these names wrap them, because Python can't assign to `super().grad`.
_GRAD = cast(_TensorAttribute[Tensor | None], torch._C.TensorBase.__dict__["grad"])
_DATA = cast(_TensorAttribute[Tensor], torch._C.TensorBase.__dict__["data"])
DATA = _DATA.__get__
"""Returns a parameter's data, unmarked, whatever its class is."""
_IS_LEAF = cast(_TensorAttribute[bool], torch._C.TensorBase.__dict__["is_leaf"])


class OptimizerOwner(Protocol):
    """The methods of a sharded model that its parameters call."""

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Records an optimizer that was created with parameters of the model."""


class ShardedParameter(LocalSlice, nn.Parameter):
    """This rank's slice of a parameter, or a replicated parameter."""

    unsummed: Mapping[Any, Tensor] = MappingProxyType({})
    """Partial sums of the gradient that are not reduced yet, keyed by the calls that reduce them."""
    touched = False
    """Whether `.data` was read: a write through it does not increment the tensor's version."""

    @classmethod
    def of(
        cls, tensor: Tensor, sharding: Sharding, ranks: Ranks, path: str, whole: Sequence[int], owner: object = None
    ) -> ShardedParameter:
        """Returns a parameter that shares the tensor's memory and its requires_grad."""
        parameter: ShardedParameter = torch.Tensor._make_subclass(cls, tensor.detach(), tensor.requires_grad)
        parameter.become(SliceType(sharding, tuple(whole)), ranks, path, owner)
        mark_copies()
        return parameter

    def adopt(self, parameter: nn.Parameter) -> None:
        """Converts a parameter that replaces this one, and has its shape, into a slice of the same model.

        Changes its class in place: the user, or an optimizer, may reference the object.
        """
        if type(parameter) in (nn.Parameter, LocalSlice) and parameter.shape == self.shape:
            adopted = ShardedParameter.converted(parameter)
            adopted.become_like(self)
            adopted.unsummed = {}

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]  # read-only in C++ too, whatever the stub says
        """Like `Tensor.is_leaf`; records the optimizer whose constructor reads it.

        State dicts of recorded optimizers contain marked slices.
        """
        if called_from() == "torch.optim.optimizer":
            optimizer, model = sys._getframe(1).f_locals.get("self"), self.owner()
            if isinstance(optimizer, torch.optim.Optimizer) and model is not None:
                cast(OptimizerOwner, model).note_optimizer(optimizer)
        return _IS_LEAF.__get__(self)

    @property
    def data(self) -> Tensor:
        """Like `Tensor.data`, marked as a slice unless AOTAutograd reads it."""
        self.touched = True
        with unwatched():
            data = _DATA.__get__(self)
        # AOTAutograd (`_functorch`) runs compiled code, such as a step, and checks a parameter's class (PyTorch 2.13.0)
        module = called_from()
        if module == AVERAGING:
            check_averaging(self, sys._getframe(1))
        is_aot = module.startswith("torch._functorch")
        return LocalSlice.sharing(data, self) if self.is_split and not is_aot else data

    @data.setter
    def data(self, value: Tensor) -> None:
        if self.is_split and is_users(called_from()) and value.shape != self.shape:
            self.refuse_shape("p.data = ...", tuple(value.shape))
        _DATA.__set__(self, value)

    @property
    def grad(self) -> Tensor | None:
        """Like `Tensor.grad`: this rank's slice of the gradient.

        Raises:
            InputError: the ranks have not summed the gradients of all calls.
        """
        if self.unsummed:
            if sys._getframe(1).f_code.co_name != "zero_grad":
                raise _unsummed(self.path)
            self.unsummed = {}
        with unwatched():
            gradient: Tensor | None = _GRAD.__get__(self)
        if gradient is None or not self.is_split:
            return gradient
        return gradient_for(called_from(), self, gradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.unsummed = {}
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.unsummed = {}
        _GRAD.__delete__(self)

    def detach(self) -> Tensor:
        """Like `Tensor.detach`; raises if other ranks of the model would receive this rank's slice.

        `torch.distributed.utils._sync_module_states` detaches each parameter before it broadcasts it;
        no later step calls Python code of the parameter.
        """
        module = called_from()
        if module == "torch.distributed.utils":
            groups = self.ranks.groups_of(self.sharding) or [self.ranks.group]
            check_other_group(sys._getframe(1).f_locals.get("process_group"), groups, "DistributedDataParallel")
        return self.detached_for(module)

    def numel(self) -> int:
        """Like `Tensor.numel`; a method of the user's model gets the number of the full parameter."""
        return math.prod(self.whole) if self.is_split and method_of(called_from()) else super().numel()

    def check_hook(self) -> None:
        """Raises InputError if gradients of earlier calls are not summed yet: a hook would get these too."""
        if self.unsummed:
            self.refuse_hook()

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedParameter:
        if id(self) not in memo:
            tensor = self.detach().clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
            memo[id(self)] = ShardedParameter.of(tensor, self.sharding, self.ranks, self.path, self.whole)
        return cast(ShardedParameter, memo[id(self)])


PLAIN.add(ShardedParameter)


def _unsummed(path: str) -> InputError:
    return InputError(
        "the ranks have not summed a gradient",
        where=f"grad of parameter {path!r}",
        why="the last backward was of a call within no_sync(), which leaves that to the next call outside of it; or "
        "the backward of that one did not reach all parameters",
        attempt="the last of the accumulated calls, forward and backward, outside of no_sync(), and then what reads "
        "gradients; zero_grad() drops them",
    )


def support_foreach() -> None:
    """Lets optimizers and clipping use their fused `foreach` kernels for sharded parameters.

    PyTorch uses them only for classes in a private list; it processes other tensors one at a time.
    """
    # `_foreach_supported_types`: no public way to add a class (PyTorch 2.13.0; pytorch/pytorch#196305).
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        supported = getattr(sys.modules.get(module), "_foreach_supported_types", None)
        if supported is not None and ShardedParameter not in supported:
            supported.extend((ShardedParameter, LocalSlice))
