"""How far an optimizer's step reads: elements can be stepped in slices, matrices and models only in full."""

from __future__ import annotations

import weakref
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.optimizer import Optimizer

from torchshard.core.errors import InputError

Reach = Literal["element", "parameter", "model"]
"""The values that an optimizer's step reads to update an element of a parameter.

element      the element's own: its gradient and its state, as AdamW does. Each rank steps its slices.
parameter    the full parameter's, as Muon does. One rank steps the full parameter.
model        all parameters', as LBFGS does. Every rank steps the full model.
"""
REACHES: tuple[Reach, ...] = get_args(Reach)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


_KNOWN: dict[type, Reach] = {
    **dict.fromkeys(
        (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam,
         torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta,
         torch.optim.ASGD, torch.optim.SparseAdam, ZeroRedundancyOptimizer), "element"),
    **dict.fromkeys((torch.optim.Muon, torch.optim.Adafactor), "parameter"),
    torch.optim.LBFGS: "model",
}  # fmt: skip
"""The class that defines `step` -> its reach."""
_REACH: weakref.WeakKeyDictionary[type, Reach] = weakref.WeakKeyDictionary(_KNOWN)


def register_optimizer(cls: type[Optimizer], reach: Reach) -> type[Optimizer]:
    """Declares how far the step of an optimizer class reads, instead of finding out at its first step.

        ts.register_optimizer(MyMuon, "parameter")

    Args:
        cls: the class, which defines `step` or inherits it.
        reach: "element" (an element's own gradient and state, as in AdamW): each rank steps its slices; "parameter"
            (the full matrix, as in Muon): one rank steps each matrix; "model" (all parameters together, as in LBFGS):
            every rank steps the full model.

    Returns:
        the class: `functools.partial(ts.register_optimizer, reach="parameter")` is a decorator.

    Raises:
        InputError: `cls` is not an optimizer class, or `reach` is none of the three.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise InputError(
            f"{cls!r:.80} is not an optimizer class",
            where="register_optimizer(cls=...)",
            why="a step belongs to a subclass of torch.optim.Optimizer",
            attempt="the class itself, and not an object of it",
        )
    if reach not in REACHES:
        raise InputError(
            f"{reach!r} is not a reach of an optimizer",
            where="register_optimizer(reach=...)",
            why="a step reads elements, parameters, or the model",
            attempt=" or ".join(map(repr, REACHES)),
        )
    _REACH[cls] = reach
    return cls


def known_reach(optimizer: Optimizer) -> Reach | None:
    """Returns the reach of an optimizer's class, or of the one that it inherits `step` from; None if it is unknown."""
    for cls in type(optimizer).__mro__:
        if cls in _REACH or "step" in vars(cls):
            return _REACH.get(cls)
    return None
