"""Optimizers' state per parameter and memory traffic per step, for estimates of memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OptimizerName = Literal["adamw", "adamw-plain", "adamw-8bit", "muon", "sgd-momentum", "sgd"]
"""A name of `OPTIMIZERS`."""


@dataclass(frozen=True)
class Optimizer:
    """The state that an optimizer keeps per parameter."""

    text: str
    states: int
    """The number of tensors of the parameter's shape."""
    itemsize: int | None = None
    """Bytes of an element of a state; None: as the parameter's."""
    has_copy: bool = False
    """Whether it also keeps a parameter of less than 4 bytes an element as float32 ("master weights")."""
    iterations: int = 0
    """Newton-Schulz iterations of a step, on the full matrix, which one rank then has."""

    def held(self, itemsize: int) -> int:
        """Returns the bytes of state per element of a parameter with elements of `itemsize` bytes."""
        state = itemsize if self.itemsize is None else self.itemsize
        return self.states * state + 4 * self._copies(itemsize)

    def moved(self, itemsize: int) -> int:
        """Returns the bytes of memory traffic of a step per element.

        It reads the gradient, writes the parameter, and reads and writes its state; without a copy it reads the
        parameter too.
        """
        return 2 * itemsize + 2 * self.held(itemsize) + itemsize * (not self._copies(itemsize))

    def flops(self, rows: int, columns: int) -> float:
        """Returns the FLOPs of a step's products for a matrix X: X X', its square, and their sum times X, repeated."""
        few, many = sorted((rows, columns))
        return self.iterations * (4.0 * few**2 * many + 2.0 * few**3)

    def sent(self, itemsize: int) -> int:
        """Returns the bytes per element that reach an owner (parameter, gradient, states) and back (no gradient)."""
        return 3 * itemsize + 2 * self.held(itemsize)

    def _copies(self, itemsize: int) -> bool:
        return self.has_copy and itemsize < 4


OPTIMIZERS: Mapping[OptimizerName, Optimizer] = {
    "adamw": Optimizer("AdamW in float32", 2, 4, has_copy=True),
    "adamw-plain": Optimizer("AdamW in the weights' dtype", 2),
    "adamw-8bit": Optimizer("AdamW of 8 bits", 2, 1),
    "muon": Optimizer("Muon", 1, iterations=5),
    "sgd-momentum": Optimizer("SGD with momentum", 1),
    "sgd": Optimizer("SGD", 0),
}
"""Optimizers by name.

    "adamw"         AdamW with two moments and, of weights of 16 bits, a copy in float32: mixed precision as Megatron's
                    and DeepSpeed's (P. Micikevicius et al., Mixed Precision Training, 2018)
    "adamw-plain"   torch.optim.AdamW on the parameters themselves: two moments in their dtype
    "adamw-8bit"    two moments of 8 bits (T. Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022)
    "muon"          torch.optim.Muon of all weights: one momentum in their dtype (K. Jordan et al., Muon, 2024)
    "sgd-momentum"  torch.optim.SGD with one momentum in the parameters' dtype
    "sgd"           torch.optim.SGD without
"""
