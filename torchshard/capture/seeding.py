"""Refuses a forward that seeds PyTorch's RNG: its graph would be seeded once, when it is captured.

A custom Function that is kept whole may seed, because it runs again in each call of the graph.
While it runs on fake tensors, its seeding is only noted. `generators` finds forwards that seed in
a way other than by `torch.manual_seed` and the like (through `torch.default_generator`).

Export in PyTorch 2.13 runs `torch.manual_seed` (`torch/random.py`) as Python code and records no
node for it. This module is needed as long as a graph can't seed.
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
    """Whether TorchDynamo seeds: it restores the RNG state after branches of `torch.cond`."""
    # skips the frames of `_seed` and of the wrapper that `in_captures` makes
    # Dynamo has no public name for the function that restores the RNG state (PyTorch 2.13.0).
    return str(sys._getframe(3).f_globals.get("__name__")).startswith("torch._dynamo.")


_FUNCTIONS = ("manual_seed", "seed", "set_rng_state")
INTERCEPTED_SEEDING = Patches(
    *(Patch(owner, name, in_captures(_seed)) for owner in (torch, torch.random) for name in _FUNCTIONS)
)
"""Refuses or notes calls of functions that seed, in threads that capture.

These are plain Python functions without tensor arguments, so no mode sees them. Comparing the
generator's states would not show the line that seeds, or distinguish threads.
"""


def seeds_inside_forward(where: str) -> CaptureError:
    """Builds the error for a model that seeds a random number generator."""
    return CaptureError(
        "the model seeds the random numbers",
        where=where,
        why="a graph draws from the RNG state as it finds it: seeded once, when it was captured, and never again",
        attempt="torch.manual_seed before the call, outside the model",
    )
