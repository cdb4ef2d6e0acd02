"""Refuses a forward that seeds PyTorch's RNG: its graph would be seeded once, when it is captured, and never again.

A custom Function that is kept whole may seed, because it runs again in each call of the graph; while it runs on fake
tensors its seeding is only noted. Forwards that seed without calling `torch.manual_seed` and the like (through
`torch.default_generator`) are found by `generators`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import cast

import torch

from torchshard.capture.recording import current_recording
from torchshard.capture.user_code import calling_line
from torchshard.core.errors import CaptureError
from torchshard.core.patches import Patch, Patches


def _replace(original: object) -> object:
    function = cast(Callable[..., object], original)

    @functools.wraps(function)
    def seed(*args: object, **kwargs: object) -> object:
        recording = current_recording()
        if recording is None or _is_called_by_dynamo():
            return function(*args, **kwargs)
        if not recording.inside_call:
            raise seeds_inside_forward(calling_line() or f"torch.{function.__name__}")
        recording.asked_for_seed = recording.asked_for_seed or function.__name__ == "seed"
        return 0

    return seed


def _is_called_by_dynamo() -> bool:
    """Whether TorchDynamo calls the function that asks: it puts the RNG state back after branches of `torch.cond`."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch._dynamo.")


_FUNCTIONS = ("manual_seed", "seed", "set_rng_state")
INTERCEPTED_SEEDING = Patches(
    *(Patch(torch, name, _replace) for name in _FUNCTIONS),
    *(Patch(torch.random, name, _replace) for name in _FUNCTIONS),
)
"""While it is entered, functions that seed are refused or noted in threads that capture.

These are plain Python functions without tensor arguments, so no mode sees them. To compare the generator's states
instead would not show the line that seeds, or tell this thread's seeding from another's.
"""


def seeds_inside_forward(where: str) -> CaptureError:
    """The error for a model that seeds a random number generator."""
    return CaptureError(
        "the model seeds the random numbers",
        where=where,
        why="a graph draws from the RNG state as it finds it: seeded once, when it was captured, and never again",
        attempt="torch.manual_seed before the call, outside the model",
    )
