"""Models whose forward reads values other than its arguments, and objects that hold such values."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
SCALE = 1.0
LOGGER = logging.getLogger("a logger that forward reads")


class Config:
    """A configuration with a number and a dict."""

    def __init__(self) -> None:
        self.scale, self.flags = 1.0, {"doubled": False}


class _Slope:
    """An activation object."""

    def __init__(self) -> None:
        self.slope = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.slope


def scaled_by_global(x: Tensor) -> Tensor:
    """Multiplies by a global of this module."""
    LOGGER.debug("scaled by %s", SCALE)
    return x * SCALE


def _closure() -> tuple[list[float], Callable[[Tensor], Tensor], Callable[[float], None]]:
    held, factor = [1.0], 1.0

    def scaled(x: Tensor) -> Tensor:
        return x * held[0] * factor

    def assign(value: float) -> None:
        nonlocal factor
        factor = value

    return held, scaled, assign


class Sees(nn.Module):
    """A linear layer, scaled by every kind of value that a forward can read."""

    factor = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up, self.config, self.act = nn.Linear(6, 8), config, _Slope()
        self.by_name, self.by_index, self.chosen = {"scale": 1.0}, [1.0, (1.0, {"deep": 1.0})], {1}
        self.plain, self.array = torch.ones(8), np.ones(8, dtype=np.float32)
        self.held, self.scaled, self.assign = _closure()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(scaled_by_global(self.scaled(self.up(x)))) * self.config.scale * self.by_name["scale"]
        y = y * self.by_index[0] * self.by_index[1][1]["deep"] * self.plain * self.factor * sum(self.chosen)
        return y * torch.as_tensor(self.array) * (2 if self.config.flags["doubled"] else 1)


@dataclasses.dataclass(slots=True)
class Slots:
    """An object without a dict."""

    value: Any = 1.0


class Doubles:
    """An object without attributes, which doubles."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


class Triples:
    """An object without attributes, which triples."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * 3


def times(factor: float) -> Callable[[Tensor], Tensor]:
    """Returns a new function that multiplies by a factor."""
    return lambda x: x * factor


class Reads:
    """Methods that read values under names that their callers don't mention."""

    of_class = 2.0

    def __init__(self) -> None:
        self.hidden = 2.0

    def by_getattr(self, x: Tensor) -> Tensor:
        return x * getattr(self, "hid" + "den")

    @classmethod
    def by_class(cls, x: Tensor) -> Tensor:
        return x * cls.of_class

    def global_value(self, x: Tensor) -> Tensor:
        return x * SCALE


HOLDER = SimpleNamespace(value=None)


def set_to(owner: Any, name: str, value: object) -> Callable[[], object]:
    """Returns a function that sets an attribute."""
    return lambda: setattr(owner, name, value)


class Applies(nn.Module):
    """Two linear layers with a function in between, from the constructor or from the call."""

    def __init__(self, body: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(6, 8), nn.Linear(8, 6), body

    def forward(self, x: Tensor, body: Any = None) -> Tensor:
        return self.down((body or self.body)(self.up(x)))


class Scales(nn.Module):
    """A module without weights, which multiplies by a global and by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE * self.factor


class ReadsGlobal:
    """A callable that only reads values of its class, and a global."""

    factor = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * SCALE * self.factor
