"""What the ranks have done since a sharded model's last call, where it must be the same: compared with its next call.

One small all-reduce precedes each call. Beside the call itself its digest covers, at no further message:

    which model is called         two like models, called in another order on two ranks
    the collectives of backwards  a backward that a rank skipped, or made in another order
    the optimizers' steps         a step that a rank skipped, or made with another learning rate
    one whole parameter           in turn: weights that drift apart, however they are written
    one split parameter           in turn: slices that were overwritten with another rank's
    gradients of the results      losses that differ: other labels, another head; up to rounding
    tensors on other devices      digests are made there, and compared a call later: nobody waits for them
"""

from __future__ import annotations

import functools
import math
import sys
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchshard.core.hashing import as_bytes, hash_text
from torchshard.core.layouts import Layout, Shard, split
from torchshard.distributed.consistency import Near
from torchshard.distributed.group import Group

WHOLE_BYTES = 1 << 22
"""Of larger tensors a sample is compared."""
SAMPLED = 1 << 14
"""How many elements a sample has, at least."""
MODEL = "the model that is called"
GRADIENTS = "the gradients that backwards have given the results"
SENT = "what backwards have sent since the last call"
STEPS = "the optimizers' steps"
PARAMETER = "the values of parameter or buffer"
EARLIER = "the values, a call ago, of"
_NO_GRADIENTS = Near(name=GRADIENTS)


def values_digest(tensor: Tensor, most_bytes: int = WHOLE_BYTES) -> int:
    """A checksum of a tensor's values in their order; of a large tensor, of elements at even distances."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() * flat.itemsize > most_bytes:
        flat = flat[:: max(1, flat.numel() // SAMPLED)]
    held: Any = as_bytes(flat).numpy()
    return zlib.crc32(held)


def device_digest(tensor: Tensor) -> Tensor:
    """The like of it as a tensor (int64) on the tensor's device, without waiting for it."""
    flat = tensor.detach().reshape(-1)
    flat = as_bytes(flat[:: max(1, flat.numel() // SAMPLED)]).long()
    places = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B1
    return ((flat + 1) * (places ^ (places >> 15))).sum()


def gradient_sum(gradient: Tensor, number: int) -> Near:
    """A sum of a gradient's elements with weights by their places and the result's number."""
    held = gradient.detach().reshape(-1, gradient.shape[-1] if gradient.ndim else 1)
    rows = (held @ _weights(held.shape[1], held.dtype)).double()
    terms = rows * _weights(len(rows), rows.dtype) * (1 + 0.37 * number)
    value, scale = float(terms.sum()), float(terms.abs().sum())
    return Near(value, scale, GRADIENTS) if math.isfinite(scale) else Near(0.0, sys.float_info.max, GRADIENTS)


@functools.lru_cache(maxsize=64)
def _weights(size: int, dtype: torch.dtype) -> Tensor:
    places = torch.arange(1, size + 1, dtype=torch.float64)
    return ((places * 0.6180339887498949) % 1 + 0.5).to(dtype)


def is_here(tensor: Tensor) -> bool:
    """Whether a tensor has values that can be read without waiting for a device."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def _is_compared(tensor: Tensor) -> bool:
    return not (tensor.is_meta or is_fake(tensor)) and tensor.layout == torch.strided and bool(tensor.numel())


@dataclass(frozen=True)
class Snapshot:
    """What a rank's digest covers at one call."""

    facts: Mapping[str, str]
    """What must be equal, by what it is called."""
    slice_name: str
    """The split parameter whose turn it is; '' where there is none."""
    slice_digest: int
    """Of this rank's slice: all ranks' may not be the same."""
    gradients: Near
    """Of what backwards have given the results since the last call."""


class History:
    """What one rank has done with one model."""

    def __init__(self, group: Group, kind: str) -> None:
        self._group, self._kind, self._number = group, kind, group.handshake.sharded_models
        group.handshake.sharded_models += 1
        self._calls, self._turn, self._steps, self._steps_digest, self._settings = 0, 0, 0, 0, "none"
        self._later: dict[str, Tensor] = {}
        self._event: Any = None
        self._gradients = _NO_GRADIENTS
        self._whole: list[str] = []
        self._split: list[str] = []

    def begin_call(self) -> str:
        """Counts a call, and names it."""
        self._calls += 1
        return f"call {self._calls} of model {self._number}"

    def note_step(self, settings: str) -> None:
        """An optimizer with these settings is about to step this model's parameters."""
        self._steps, self._settings = self._steps + 1, settings
        self._steps_digest = hash_text(f"{self._steps_digest} {settings}")

    def watch_results(self, results: Iterable[Any]) -> None:
        """From now on gradients that reach these results count."""
        for number, result in enumerate(results):
            if isinstance(result, Tensor) and result.grad_fn is not None and is_here(result):
                result.register_hook(_Noting(self, number))

    def note_gradient(self, gradient: Tensor, number: int) -> None:
        """A backward has given this to the result of that number."""
        made = gradient_sum(gradient, number)
        value, scale = self._gradients.value + made.value, self._gradients.scale + made.scale
        self._gradients = Near(value, scale, GRADIENTS)

    def watch(self, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], distinct: Mapping[str, bool]) -> None:
        """From now on these parameters and buffers are compared, one of each kind at a call.

        Args:
            distinct: of a split one, whether the ranks' slices are known to differ.
        """
        held = {name: layouts.get(name) for name, t in tensors.items() if _is_compared(t) and t.is_floating_point()}
        self._whole = [name for name, layout in held.items() if not isinstance(layout, Shard)]
        self._split = [name for name, layout in held.items() if isinstance(layout, Shard) and distinct.get(name)]

    def snapshot(self, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Snapshot:
        """What is compared now.

        Args:
            tensors: the model's, by name.
            inputs: the call's tensors that are on another device than the CPU.
        """
        handshake = self._group.handshake
        facts = {MODEL: f"number {self._number}, a {self._kind}"}
        facts[SENT] = f"{'; '.join(handshake.recent_unverified) or 'nothing'} ({handshake.unverified_hash:x})"
        facts[STEPS] = f"{self._steps}, the last by {self._settings} ({self._steps_digest:x})"
        facts |= self._earlier()
        whole = self._in_turn(self._whole) if tensors else ""
        if whole and is_here(tensors[whole]):
            facts[f"{PARAMETER} {whole}"] = f"{values_digest(tensors[whole], SAMPLED):x}"
        here = not whole or is_here(tensors[whole])
        self._ask({**inputs, **({} if here else {f"parameter {whole}": tensors[whole]})})
        part = self._in_turn(self._split) if tensors else ""
        self._turn += 1
        gradients, self._gradients = self._gradients, _NO_GRADIENTS
        own = self._slice_digest(tensors[part]) if part else self._group.rank
        return Snapshot(facts, part, own, gradients)

    def all_facts(self, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> tuple[dict[str, str], Near]:
        """What must be equal where all ranks stop at one place: steps, backwards, and what they hold whole."""
        snapshot = self.snapshot(tensors, {})
        facts = dict(snapshot.facts)
        for name, tensor in tensors.items():
            if _is_compared(tensor) and is_here(tensor) and not isinstance(layouts.get(name), Shard):
                facts[f"{PARAMETER} {name}"] = f"{values_digest(tensor, SAMPLED):x}"
        return facts, snapshot.gradients

    def reset(self) -> None:
        """After an error that all ranks raise, they begin to compare from the start."""
        self._turn, self._later, self._event, self._gradients = 0, {}, None, _NO_GRADIENTS

    def _in_turn(self, names: Sequence[str]) -> str:
        return names[self._turn % len(names)] if names else ""

    def _slice_digest(self, tensor: Tensor) -> int:
        """A number that no two ranks' slices share; one of the rank's own where that proves nothing."""
        if not is_here(tensor):
            return self._group.rank
        sample = tensor.detach().reshape(-1)[: SAMPLED // 8]
        return self._group.rank if bool((sample == sample[0]).all()) else values_digest(tensor, SAMPLED)

    def _ask(self, tensors: Mapping[str, Tensor]) -> None:
        """Begins to compute digests where the tensors are; they are read at the next call."""
        self._later, self._event = {}, None
        for name, tensor in tensors.items():
            made = device_digest(tensor)
            self._later[name] = made.to("cpu", non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._event = torch.cuda.Event()
            self._event.record()

    def _earlier(self) -> dict[str, str]:
        if self._event is not None:
            self._event.synchronize()
        return {f"{EARLIER} {name}": f"{int(value):x}" for name, value in self._later.items()}


class _Noting:
    """A hook of a result."""

    __torch_unserializable__ = True

    def __init__(self, history: History, number: int) -> None:
        self._history, self._number = weakref.ref(history), number

    def __call__(self, gradient: Tensor) -> None:
        history = self._history()
        if (
            history is None
            or torch.compiler.is_compiling()
            or torch._C._functorch.is_functorch_wrapped_tensor(gradient)
        ):
            return
        if gradient.layout == torch.strided and gradient.is_floating_point() and gradient.numel():
            history.note_gradient(gradient, self._number)


def are_distinct(whole: Tensor, layout: Layout, world: int) -> bool:
    """Whether the first ranks' slices differ, so that equal ones later on were overwritten."""
    if not isinstance(layout, Shard) or world < 2 or not _is_compared(whole):
        return False
    first, second = (split(whole.detach(), layout, rank, world) for rank in range(2))
    return first.shape == second.shape and not torch.equal(first, second)
