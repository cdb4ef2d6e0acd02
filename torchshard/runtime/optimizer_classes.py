"""Which optimizers step slices as they step full tensors: those that treat each element separately."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import Optimizer

from torchshard.core.errors import InputError
from torchshard.core.user_files import warn
from torchshard.weights.parameter import ShardedParameter


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters of an optimizer's groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


BY_ELEMENT = frozenset([
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD", "SparseAdam",
    "Lion", "ZeroRedundancyOptimizer",
])  # fmt: skip
"""Optimizers that treat each element separately, so steps of slices are slices of steps."""
_BY_TENSOR = frozenset([
    "Adafactor", "LBFGS", "Muon", "Lamb", "LAMB", "Lars", "LARS", "Shampoo", "DistributedShampoo", "SOAP", "NovoGrad",
    "AdaFactor", "Adalayer", "KFAC", "Sophia",
])  # fmt: skip
"""Optimizers that compute from a full matrix, or from the full model."""


def class_of_step(optimizer: Optimizer) -> str:
    """Returns the name of the class that defines `step`: a subclass that changes only defaults inherits it."""
    return type(optimizer).step.__qualname__.rpartition(".step")[0].rpartition(".")[2]


def check_class_of_slices(optimizer: Optimizer) -> None:
    """Refuses an optimizer that would step slices differently than full tensors; warns of unknown classes."""
    if not any(isinstance(p, ShardedParameter) and p.is_split for p in parameters_of(optimizer)):
        return
    optimizer = _innermost(optimizer)
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    if any(name in _BY_TENSOR for name in names):
        raise InputError(
            f"{names[0]} can't step slices of parameters",
            where=f"{names[0]}.step()",
            why="it computes from a whole matrix, or from the whole model: of a slice it would make another step",
            attempt="an optimizer that treats each element by itself: SGD, AdamW, ...; or keep those parameters whole "
            "with a plan of 'replicate' and give it these alone",
        )
    if class_of_step(optimizer) not in BY_ELEMENT:
        warn(
            f"{names[0]} is not known here: it steps a sharded model as the unsharded one if it treats each element by "
            "itself, as AdamW does, and not if it looks at whole matrices or norms, as Muon and LAMB do"
        )


def _innermost(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that steps: accelerate and Lightning wrap it."""
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, Optimizer) and inner is not optimizer else optimizer
