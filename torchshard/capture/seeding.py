"""Refuses a forward that seeds PyTorch's RNG: its graph would be seeded once, when it is captured, and never again.

A custom Function that is kept whole may seed, because it runs again in each call of the graph; while it runs on fake
tensors its seeding is only noted. Forwards that seed without calling `torch.manual_seed` and the like (through
`torch.default_generator`) are found by `generators`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from torchshard.capture.recording import current_recording, in_captures
from torchshard.capture.user_code import calling_line
from torchshard.core.errors import CaptureError
from torchshard.core.patches import Patch, Patches


def _seed(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    recording = current_recording()
    if recording is None or _is_called_by_dynamo():
        return original(*args, **kwargs)
    if not recording.inside_call:
        raise seeds_inside_forward(calling_line() or f"torch.{original.__name__}")
    recording.asked_for_seed = recording.asked_for_seed or original.__name__ == "seed"
    return 0


def _is_called_by_dynamo() -> bool:
    """Whether TorchDynamo calls the function that seeds: it puts the RNG state back after branches of `torch.cond`."""
    # the frames between are those of `_seed` and of what `in_captures` makes of it
    return str(sys._getframe(3).f_globals.get("__name__")).startswith("torch._dynamo.")


_FUNCTIONS = ("manual_seed", "seed", "set_rng_state")
INTERCEPTED_SEEDING = Patches(
    *(Patch(owner, name, in_captures(_seed)) for owner in (torch, torch.random) for name in _FUNCTIONS)
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
