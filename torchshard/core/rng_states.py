"""The states of the random number generators that a computation draws from: the CPU's, and those of its GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

RngStates = dict[torch.device, Tensor]
"""Device -> the state of its generator."""
_CPU = torch.device("cpu")


def rng_states(tensors: Iterable[object]) -> RngStates:
    """The states of the CPU's generator, and of those of the GPUs that hold some of these values."""
    devices = {value.device for value in tensors if isinstance(value, Tensor) and value.is_cuda}
    return {device: rng_state(device) for device in (_CPU, *devices)}


def rng_state(device: torch.device) -> Tensor:
    """The state of one device's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_states(states: RngStates) -> None:
    """Puts generators into these states."""
    for device, state in states.items():
        torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


@contextlib.contextmanager
def keeping_rng_states(tensors: Iterable[object]) -> Iterator[None]:
    """Leaves the generators that `rng_states` of these values reads as they were."""
    states = rng_states(tensors)
    try:
        yield
    finally:
        set_rng_states(states)
