"""The parameters of a sharded model: this rank's slices, which know what they are slices of.

An ordinary `nn.Parameter` to optimizers and to autograd. What would treat a slice as a whole is refused or made right:

    p.normal_(), p.data.uniform_(), nn.init.*      refused: with one RNG state each rank would draw the same slice
    torch.nn.utils.clip_grad_norm_                 takes the norm over all ranks' slices
    torch.amp.GradScaler                           skips a step on all ranks if a gradient overflows on one
    DistributedDataParallel over the model's ranks refused: it would give each rank the slices of the first
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchshard.distributed.groups import ALONE, Group
from torchshard.distributed.kernels import reduced
from torchshard.distributed.ops import PLAIN
from torchshard.errors import DistributedError, InputError
from torchshard.layouts import I, Layout, Shard

_GRAD: Any = torch._C.TensorBase.__dict__["grad"]
_DATA: Any = torch._C.TensorBase.__dict__["data"]
_LOOKING_AT_GRADIENTS = ("torch.nn.utils.clip_grad", "torch.amp.grad_scaler")
"""The modules of PyTorch that look at all gradients at once."""
_DRAWING = ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_")


def _called_from(depth: int = 2) -> str:
    """The module whose code called."""
    return str(sys._getframe(depth).f_globals.get("__name__", ""))


class _Slice(Tensor):
    """What slices of parameters have in common."""

    sharding: Layout
    """How the parameter lies over the ranks."""
    group: Group
    path: str
    """The parameter's name in the model."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def is_split(self) -> bool:
        """Whether this is a part of the parameter."""
        return isinstance(self.sharding, Shard) and self.group.size > 1

    @property
    def place(self) -> tuple[str, str, int, int]:
        """(name, layout, rank, number of ranks), as files say it."""
        return self.path, str(self.sharding), self.group.rank, self.group.size

    def _refuse_drawing(self, how: str) -> NoReturn:
        raise InputError(
            f"a slice of a parameter can't be initialised by {how}",
            where=f"parameter {self.path!r}, split as {self.sharding}",
            why="each rank would draw the same numbers for its slice, and from the slice's sizes, not the parameter's",
            attempt="initialise the unsharded model, then ts.shard; or model.load_full_state_dict with new weights",
        )

    def detach(self) -> Tensor:
        """As `Tensor.detach`; where `nn.Parameter(p)` asks, of the same class, for it accepts no other."""
        held: Tensor = super().detach()
        return _as(type(self), held, self) if _called_from() == "torch.nn.parameter" else held

    def ndimension(self) -> int:
        """The number of dims; `torch.nn.init` asks for it where it initialises by the sizes."""
        if self.is_split and _called_from() == "torch.nn.init":
            self._refuse_drawing(f"torch.nn.init.{sys._getframe(1).f_code.co_name}")
        return self.dim()


def _drawing(name: str) -> Callable[..., Tensor]:
    original = getattr(Tensor, name)

    def draw(self: _Slice, *args: Any, **kwargs: Any) -> Tensor:
        if self.is_split:
            self._refuse_drawing(f"{name}()")
        made: Tensor = original(self, *args, **kwargs)
        return made

    draw.__name__, draw.__doc__ = name, f"As `Tensor.{name}`; refused for a slice."
    return draw


for _name in _DRAWING:
    setattr(_Slice, _name, _drawing(_name))


class _Data(_Slice):
    """`.data` of a parameter."""


def _as(kind: Any, tensor: Tensor, like: Any) -> Any:
    """A tensor that shares memory with one, of another class."""
    made = torch.Tensor._make_subclass(kind, tensor)
    made.sharding, made.group, made.path = like.sharding, like.group, like.path
    return made


class ShardedParameter(_Slice, nn.Parameter):
    """This rank's slice of a parameter, or the whole of it."""

    sharding: Layout = I
    group = ALONE
    path = ""
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

    @property
    def data(self) -> Tensor:
        """As `Tensor.data`."""
        self.touched = True
        held: Tensor = _DATA.__get__(self)
        return _as(_Data, held, self) if self.is_split else held

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)

    @property
    def grad(self) -> Tensor | None:
        """As `Tensor.grad`: this rank's slice of the gradient."""
        held: Tensor | None = _GRAD.__get__(self)
        if held is not None and self.is_split and _called_from() in _LOOKING_AT_GRADIENTS:
            return _as(SliceOfGradient, held, self)
        return held

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def detach(self) -> Tensor:
        """As `Tensor.detach`; refused where other ranks of the model would be given this rank's slice."""
        if self.group.size > 1 and _called_from() == "torch.distributed.utils":
            check_other_group(sys._getframe(1).f_locals.get("process_group"), self.group, "DistributedDataParallel")
        held: Tensor = Tensor.detach(self)
        return _as(type(self), held, self) if _called_from() == "torch.nn.parameter" else held

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if id(self) not in memo:
            copied = self.detach().clone(memory_format=torch.preserve_format).requires_grad_(self.requires_grad)
            memo[id(self)] = ShardedParameter.of(copied, self.sharding, self.group, self.path)
        made: ShardedParameter = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def check_other_group(process_group: Any, group: Group, who: str) -> None:
    """A group across copies of a model, for its gradients, has only one rank of each copy.

    Raises:
        DistributedError: several ranks of the model are in it.
    """
    world = dist.group.WORLD if process_group is None else process_group
    if group.process_group is None or not dist.is_initialized():
        return
    own = set(dist.get_process_group_ranks(group.process_group))
    both = sorted(own & set(dist.get_process_group_ranks(world)))
    if len(both) > 1:
        raise DistributedError(
            f"{who} would treat the ranks of one sharded model as copies of it",
            where=f"{who}, ranks {both}",
            why="these ranks hold slices of one model; its group must join the ranks that hold the same slices",
            attempt="process_group=torchshard.distributed.get_data_parallel_group(), after "
            "init_process_group(group_size=...); the gradients of one sharded model need no averaging",
        )


class SliceOfGradient(_Slice):
    """A slice of a gradient, whose norm is that of the whole: what PyTorch's clipping and scaling are given."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func is torch.linalg.vector_norm:
                order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
                return _norms([args[0]], [result], order)[0]
            if func is torch._foreach_norm:
                order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
                return _norms(args[0], result, order)
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                group = next(g.group for g in args[0] if isinstance(g, cls))
                args[1].copy_(reduced(args[1], dist.ReduceOp.MAX, group))
        return result


def _norms(tensors: Sequence[Tensor], local: Sequence[Tensor], order: float) -> list[Tensor]:
    """Norms of whole gradients from those of slices, in one message; the norms of wholes stay."""
    split = [i for i, t in enumerate(tensors) if isinstance(t, SliceOfGradient)]
    order = float(order)
    group = tensors[split[0]].group  # type: ignore[attr-defined]
    held = torch.stack([local[i].double() for i in split])
    if math.isinf(order):
        held = reduced(held, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN, group)
    else:
        held = reduced(held**order, dist.ReduceOp.SUM, group) ** (1 / order)
    found = list(local)
    for i, norm in zip(split, held, strict=True):
        found[i] = norm.to(local[i].dtype)
    return found


PLAIN.add(ShardedParameter)


def support_foreach() -> None:
    """Optimizers and clipping take these parameters many at a time, as PyTorch's own."""
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        supported = getattr(sys.modules.get(module), "_foreach_supported_types", None)
        if supported is not None and ShardedParameter not in supported:
            supported.extend((ShardedParameter, SliceOfGradient))
