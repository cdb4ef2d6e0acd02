"""The states of a computation's random number generators: on the CPU and on its GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

RngStates = dict[torch.device, Tensor]
"""Device -> the state of its generator."""
_CPU = torch.device("cpu")


def rng_states(tensors: Iterable[object]) -> RngStates:
    """Returns the generator states of the CPU, and of each GPU that has one of these tensors."""
    devices = {value.device for value in tensors if isinstance(value, Tensor) and value.is_cuda}
    return {device: rng_state(device) for device in (_CPU, *devices)}


def rng_state(device: torch.device) -> Tensor:
    """Returns the state of one device's generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_rng_states(states: RngStates) -> None:
    """Sets generators to these states."""
    for device, state in states.items():
        torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


@contextlib.contextmanager
def keeping_rng_states(tensors: Iterable[object]) -> Iterator[None]:
    """Restores, at the end of the block, the generator states that `rng_states` reads at its start."""
    states = rng_states(tensors)
    try:
        yield
    finally:
        set_rng_states(states)
