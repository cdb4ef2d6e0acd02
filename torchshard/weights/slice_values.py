"""This rank's slices of parameters and gradients in the hands of users: what would take one for the whole is told.

    p.mul_(0.9), (p - q).square()            by elements: a slice of what is wanted
    p.norm(), (p ** 2).sum(), p.grad.std()   a SliceWarning: of this rank's slice, not of the parameter
    torch.randn_like(p)                      a SliceWarning: each rank draws the same, by the sizes of its slice
    p.normal_(), nn.init.*                   refused: the same where it is surely meant for the whole
    torch.nn.utils.get_total_norm            the norm over all ranks' slices

What is computed by elements stays marked, so that `p.square().sum()` is told as `p.norm()` is. Code of PyTorch's own
and of this library knows what it does, and is given plain tensors.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import DistributedError, InputError, SliceWarning
from torchshard.core.layouts import I, Layout, Shard
from torchshard.distributed.group import ALONE, Group
from torchshard.distributed.kernels import reduced

_DRAWING = ("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_", "bernoulli_")
_DRAWN_LIKE = frozenset(["randn_like", "rand_like", "randint_like", "dropout", "alpha_dropout", "bernoulli", "normal"])
_JOINING = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack", "masked_select"])
"""What gives another number of elements, and is computed by elements still."""
_MIXING = frozenset([
    "softmax", "log_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "flip",
    "roll", "renorm", "normalize", "layer_norm", "group_norm", "batch_norm", "matmul", "mm", "linear", "inverse", "inv",
    "matrix_power", "matrix_exp", "cholesky", "pinverse", "pinv", "norm", "vector_norm", "sum", "mean", "max", "min",
    "any", "all", "_foreach_norm", "svd", "qr", "std", "var", "__setitem__", "tril", "triu", "fill_diagonal",
    "diagonal", "index_fill", "index_add", "index_copy", "index_put", "scatter", "scatter_add", "gather",
    "take", "trace",
])  # fmt: skip
"""What may give as many elements, and is not computed by elements."""
_CLIPPING = "torch.nn.utils.clip_grad"
_LOOKING_AT_GRADIENTS = (_CLIPPING, "torch.amp.grad_scaler")
"""The modules of PyTorch that look at all gradients at once."""
_FOR_USERS = frozenset([
    "torch.overrides", "torch.functional", "torch._tensor", "torch.nn.functional", "torch.autograd",
    "torch._jit_internal", "torch.nn.utils.convert_parameters", "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
])  # fmt: skip
"""The modules of PyTorch whose functions are called on behalf of who calls them."""
_OVERWRITING = frozenset([dist.all_reduce, dist.broadcast, dist.reduce])
"""What makes the ranks' tensors one, as of copies."""


def called_from(depth: int = 2) -> str:
    """The module whose code called."""
    return str(sys._getframe(depth).f_globals.get("__name__", ""))


def caller() -> tuple[str, int]:
    """The module whose code has called a function of a tensor, and how many frames above this function's it runs."""
    frame: FrameType | None = sys._getframe(2)
    depth = 2
    while frame is not None and frame.f_globals.get("__name__") in _FOR_USERS:
        frame, depth = frame.f_back, depth + 1
    return ("" if frame is None else str(frame.f_globals.get("__name__", ""))), depth


def is_users(module: str) -> bool:
    """Whether a module is neither PyTorch's nor of this library."""
    return module.partition(".")[0] not in ("torch", "torchshard")


unwatched: Any = torch._C.DisableTorchFunctionSubclass
"""While it is open, slices are plain tensors."""


class Slice(Tensor):
    """A tensor of which each rank holds a slice."""

    sharding: Layout = I
    """How the parameter lies over the ranks."""
    group: Group = ALONE
    path: str = ""
    """The parameter's name in the model."""

    @property
    def is_split(self) -> bool:
        """Whether this is a part of the parameter."""
        return isinstance(self.sharding, Shard) and self.group.size > 1

    @property
    def place(self) -> tuple[str, str, int, int]:
        """(name, layout, rank, number of ranks), as files say it."""
        return self.path, str(self.sharding), self.group.rank, self.group.size

    @classmethod
    def sharing(cls, tensor: Tensor, like: Slice) -> Self:
        """A tensor that shares memory and gradients with one, marked as a slice like another."""
        with unwatched():
            made = tensor.as_subclass(cls)
        made.sharding, made.group, made.path = like.sharding, like.group, like.path
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OVERWRITING and is_users(caller()[0]):
            _check_copies(func.__name__, args, kwargs)
        with unwatched():
            result: Any = func(*args, **kwargs)
        name = func.__name__
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            group = next(s.group for s in args[0] if isinstance(s, Slice))
            args[1].copy_(reduced(args[1], dist.ReduceOp.MAX, group))
        if not isinstance(result, Tensor | list | tuple) and name != "__setitem__":
            return result
        module, depth = caller()
        slices = [s for s in _tensors(args) if isinstance(s, Slice) and s.is_split]
        if name == "__get__" and module in _LOOKING_AT_GRADIENTS and slices:  # the gradient of a copy
            return SliceValue.sharing(result, slices[0])
        if module == _CLIPPING and func in (torch.linalg.vector_norm, torch._foreach_norm):
            order, many = args[1] if len(args) > 1 else kwargs.get("ord", 2), isinstance(result, list | tuple)
            local: Any = result if many else [result]
            found = _norms(args[0] if many else args[:1], local, order)
            return found if many else found[0]
        if not slices or not is_users(module):
            return result
        if func is torch.autograd.grad:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            return tuple(map(_gradient_of, [inputs] if isinstance(inputs, Tensor) else inputs, result))
        first = slices[0]
        shown = f"{first.sharding}, of a parameter such as {first.path!r}"
        told = tell(name, result, first.numel(), shown, depth)
        if told or result is None or any(result is a for a in _tensors(args)):
            return result
        if isinstance(result, Tensor):
            return SliceValue.sharing(result, first)
        return type(result)([SliceValue.sharing(r, first) if isinstance(r, Tensor) else r for r in result])

    def seeing_slices(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
        """A hook on gradients that is given them marked."""

        def marked(gradient: Tensor) -> Tensor | None:
            made = hook(SliceValue.sharing(gradient, self))
            return made.as_subclass(Tensor) if isinstance(made, Slice) else made

        return marked

    def refuse_shape(self, how: str, given: tuple[int, ...]) -> NoReturn:
        """Raises InputError for values of another shape than the slice's."""
        raise InputError(
            f"this rank's slice of a parameter takes no values of shape {given}",
            where=f"{how}, parameter {self.path!r}",
            why=f"the slice is {tuple(self.shape)}, {self.sharding} on rank {self.group.rank} of {self.group.size}",
            attempt="model.load_full_state_dict({**model.full_state_dict(), name: whole}), on every rank",
        )

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        """As `Tensor.copy_`."""
        if self.is_split and isinstance(other, Tensor) and other.ndim == self.dim() and other.shape != self.shape:
            if any(n not in (1, own) for n, own in zip(other.shape, self.shape, strict=True)):
                self.refuse_shape("p.copy_(...)", tuple(other.shape))
        made: Tensor = super().copy_(other, non_blocking)
        return made

    def _refuse_drawing(self, how: str) -> NoReturn:
        raise InputError(
            f"a slice of a parameter can't be initialised by {how}",
            where=f"parameter {self.path!r}, split as {self.sharding}",
            why="each rank would draw the same numbers for its slice, and from the slice's sizes, not the parameter's",
            attempt="initialise the unsharded model, then ts.shard; or model.load_full_state_dict with new weights",
        )

    def detach(self) -> Tensor:
        """As `Tensor.detach`; where `nn.Parameter(p)` asks, of the same class, for it accepts no other."""
        return self.detached_for(called_from())

    def detached_for(self, module: str) -> Tensor:
        """What `detach` gives a module's code."""
        with unwatched():
            held = Tensor.detach(self)
        if module == "torch.nn.parameter":
            return self.sharing(held, self)
        return SliceValue.sharing(held, self) if self.is_split and is_users(module) else held

    def ndimension(self) -> int:
        """The number of dims; `torch.nn.init` asks for it where it initialises by the sizes."""
        if self.is_split and called_from() == "torch.nn.init":
            self._refuse_drawing(f"torch.nn.init.{sys._getframe(1).f_code.co_name}")
        return self.dim()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made: Tensor = memo.setdefault(id(self), self.as_subclass(Tensor).detach().clone())
        return made

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        held = repr(self.as_subclass(Tensor))
        return f"{self.path!r}, {self.sharding} on rank {self.group.rank}: {held}" if self.is_split else held

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _drawing(name: str) -> Callable[..., Tensor]:
    original = getattr(Tensor, name)

    def draw(self: Slice, *args: Any, **kwargs: Any) -> Tensor:
        if self.is_split:
            self._refuse_drawing(f"{name}()")
        made: Tensor = original(self, *args, **kwargs)
        return made

    draw.__name__, draw.__doc__ = name, f"As `Tensor.{name}`; refused for a slice."
    return draw


for _name in _DRAWING:
    setattr(Slice, _name, _drawing(_name))


class SliceValue(Slice):
    """What is computed of a slice by elements: its `.data`, a square, a gradient."""


def _gradient_of(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or not isinstance(parameter, Slice) or not parameter.is_split:
        return gradient
    return SliceValue.sharing(gradient, parameter)


def gradient_for(module: str, parameter: Slice, gradient: Tensor) -> Tensor:
    """A slice's gradient as a module's code is given it: plain, unless it may take it for the whole."""
    marked = is_users(module) or module in _LOOKING_AT_GRADIENTS
    return SliceValue.sharing(gradient, parameter) if marked else gradient


def _check_copies(name: str, args: Any, kwargs: Any) -> None:
    """Ranks may not take each other's slices for copies of one tensor."""
    tensor = args[0] if args else kwargs["tensor"]
    if isinstance(tensor, Slice) and tensor.is_split:
        check_other_group(kwargs.get("group"), tensor.group, f"torch.distributed.{name}")


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


def _tensors(held: Any) -> Iterator[Tensor]:
    """The tensors of arguments, and of lists among them."""
    for value in held:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in value if isinstance(v, Tensor))


_WATCHING, _PLAIN = Slice.__dict__["__torch_function__"], torch._C._disabled_torch_function_impl


def watch_slices(on: bool) -> None:
    """Whether slices see the functions that they are given to: the optimizers of PyTorch itself go faster without."""
    setattr(Slice, "__torch_function__", _WATCHING if on else _PLAIN)  # noqa: B010


def tell(name: str, result: Any, size: int, shown: str, depth: int) -> bool:
    """Warns of a function's result that is not computed by elements; whether it did.

    Args:
        size: how many elements the slice has that it was given.
        shown: what that is a slice of.
        depth: how many frames above the one that asks the user's code is.
    """
    made = [r for r in (result if isinstance(result, list | tuple) else [result]) if isinstance(r, Tensor)]
    plain, what = (
        name if name.startswith("__") else name.rstrip("_"),
        "an index" if name in ("__getitem__", "__setitem__") else f"{name}()",
    )
    if plain in _DRAWN_LIKE:
        text = (
            f"{what} of this rank's slice, {shown}, draws the same numbers on all ranks, and others than for the whole"
        )
    elif plain in _MIXING or (name not in _JOINING and any(r.numel() != size for r in made)):
        text = f"{what} gives a result of this rank's slice, {shown}, not of the whole"
    else:
        return False
    warnings.warn(f"{text}. {ADVICE}", SliceWarning, stacklevel=depth + 1)
    return True


ADVICE = (
    "model.full_state_dict() has whole parameters; ts.clip_grad_norm_ and torch.nn.utils.get_total_norm take norms of "
    "whole gradients; a penalty of weights is right as a part of the model's forward"
)


def _norms(tensors: Sequence[Tensor], local: Sequence[Tensor], order: float) -> list[Tensor]:
    """Norms of whole gradients from those of slices, in one message; the norms of wholes stay."""
    split = [i for i, t in enumerate(tensors) if isinstance(t, Slice) and t.is_split]
    found = list(local)
    if not split:
        return found
    order = float(order)
    group = tensors[split[0]].group  # type: ignore[attr-defined]
    held = torch.stack([local[i].double() for i in split])
    if math.isinf(order):
        held = reduced(held, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN, group)
    else:
        held = reduced(held**order, dist.ReduceOp.SUM, group) ** (1 / order)
    for i, norm in zip(split, held, strict=True):
        found[i] = norm.to(local[i].dtype)
    return found
