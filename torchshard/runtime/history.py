"""Compares the ranks' histories since a sharded model's last call, in the message that precedes its next call.

One small all-reduce of a digest precedes each call. The digest covers the call itself, and without
another message:

    which model is called         two models of one class, called in another order on two ranks
    the collectives since then    a backward or clipping that a rank skipped, or ran in another order
    the optimizers' steps         a step that a rank skipped, or ran with another learning rate
    one replicated parameter      in turn: weights that drift apart, whatever wrote them
    one split parameter           in turn: slices that were overwritten with another rank's
    gradients of the results      losses that differ: other labels, another head; up to rounding
    tensors on other devices      digests that are computed there and compared a call later, without a wait
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.core.hashing import hash_text
from torchshard.core.layouts import Layout, Shard
from torchshard.distributed.facts import Near
from torchshard.distributed.group import Group
from torchshard.runtime import digests

MODEL = "the model that is called"
GRADIENTS = "the gradients of the results"
SENT = "the collectives since the last call"
STEPS = "the optimizers' steps"
PARAMETER = "the values of parameter or buffer"
EARLIER = "the values, a call ago, of"
_NO_GRADIENTS = Near(name=GRADIENTS)


def gradient_sum(gradient: Tensor, number: int) -> Near:
    """Returns a number for the gradient of the result with this number, equal on all ranks up to rounding.

    If it overflows, or the gradient has NaNs, its scale is so large that any two ranks count as
    equal: such gradients are left to the user's loss scaling.
    """
    value, scale = digests.weighted_sum(gradient, number)
    return Near(value, scale, GRADIENTS) if math.isfinite(scale) else Near(0.0, sys.float_info.max, GRADIENTS)


@dataclass(frozen=True)
class HistorySnapshot:
    """The part of a rank's digest that covers the time before the call."""

    facts: Mapping[str, str]
    """Name -> a fact that must match on all ranks."""
    slice_name: str
    """The split parameter to compare at this call; '' without one."""
    slice_digest: int
    """The digest of this rank's slice; it is an error if all ranks have the same."""
    gradients: Near
    """The sum of the results' gradients since the last call."""


class History:
    """One rank's history with one model."""

    def __init__(self, group: Group, class_name: str) -> None:
        self._group, self._class_name = group, class_name
        self.number = group.handshake.sharded_models
        """The number of the model among the group's models."""
        group.handshake.sharded_models += 1
        self._calls, self._turn, self._failures = 0, 0, group.handshake.failures
        self._steps, self._steps_digest, self._settings = 0, 0, "none"
        self._pending_digests: dict[str, Tensor] = {}
        self._digests_done: torch.cuda.Event | None = None
        self._gradients = _NO_GRADIENTS
        self._whole: list[str] = []
        self._split: list[str] = []

    @property
    def next_call(self) -> str:
        """The name of the next call."""
        return f"call {self._calls + 1} of model {self.number}"

    @property
    def latest_text(self) -> str:
        """The name of the latest call's backward."""
        return f"backward of call {self._calls} of model {self.number}"

    @property
    def latest_call(self) -> tuple[int, int]:
        """(the model's number, the latest call's number)."""
        return self.number, self._calls

    def count_call(self) -> None:
        """Counts a call that all ranks make."""
        self._calls += 1

    def note_step(self, settings: str) -> None:
        """Counts a step of this model's parameters, which an optimizer with these settings is about to make."""
        self._steps, self._settings = self._steps + 1, settings
        self._steps_digest = hash_text(f"{self._steps_digest} {settings}")

    def watch_results(self, results: Iterable[object]) -> None:
        """Adds hooks to results, which collect the gradients that reach them."""
        for number, result in enumerate(results):
            if isinstance(result, Tensor) and result.grad_fn is not None and digests.is_here(result):
                result.register_hook(_GradientHook(self, number))

    def note_gradient(self, gradient: Tensor, number: int) -> None:
        """Adds the gradient that a backward computed for the result with this number."""
        added = gradient_sum(gradient, number)
        # A sum over several backwards, because their order may differ between the ranks.
        value, scale = self._gradients.value + added.value, self._gradients.scale + added.scale
        self._gradients = Near(value, scale, GRADIENTS)

    def watch(self, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], distinct: Mapping[str, bool]) -> None:
        """Sets the parameters and buffers to compare: at each call one replicated and one split one, in turn.

        Args:
            distinct: whether the ranks' slices of a split parameter are known to differ.
        """
        compared = [name for name, t in tensors.items() if _is_compared(t) and t.is_floating_point()]
        self._whole = [name for name in compared if not isinstance(layouts.get(name), Shard)]
        # a rank with an empty slice takes the same turns as the others
        self._split = [name for name in tensors if isinstance(layouts.get(name), Shard) and distinct.get(name)]

    def snapshot(self, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> HistorySnapshot:
        """Returns the facts to compare at this call; the next call compares the next parameters.

        Args:
            tensors: the model's parameters and buffers, by name.
            inputs: the call's tensors on devices other than the CPU, by name.
        """
        if self._failures != self._group.handshake.failures:  # other calls of the group may have failed since
            self.reset()
        facts = self._facts() | self._collect_digests()
        pending = dict(inputs)
        whole = self._in_turn(self._whole) if tensors else ""
        if whole and digests.is_here(tensors[whole]):
            facts[f"{PARAMETER} {whole}"] = f"{digests.values_digest(tensors[whole], digests.SAMPLED):x}"
        elif whole:
            pending[f"parameter {whole}"] = tensors[whole]
        self._start_digests(pending)
        sliced = self._in_turn(self._split) if tensors else ""
        self._turn += 1
        gradients, self._gradients = self._gradients, _NO_GRADIENTS
        slice_digest = self._slice_digest(tensors[sliced]) if sliced else self._group.rank
        return HistorySnapshot(facts, sliced, slice_digest, gradients)

    def _facts(self) -> dict[str, str]:
        handshake = self._group.handshake
        recent = "; ".join(handshake.recent_unverified) or "nothing"
        return {
            MODEL: f"number {self.number}, a {self._class_name}",
            SENT: f"{recent} ({handshake.unverified_hash:x})",
            STEPS: f"{self._steps}, the last by {self._settings} ({self._steps_digest:x})",
        }

    def all_facts(self, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> tuple[dict[str, str], Near]:
        """Returns the facts to compare before a user's collective: steps, backwards, all replicated parameters."""
        snapshot = self.snapshot(tensors, {})
        facts = dict(snapshot.facts)
        for name, tensor in tensors.items():
            if _is_compared(tensor) and digests.is_here(tensor) and not isinstance(layouts.get(name), Shard):
                facts[f"{PARAMETER} {name}"] = f"{digests.values_digest(tensor, digests.SAMPLED):x}"
        return facts, snapshot.gradients

    def reset(self) -> None:
        """Starts over after an error that all ranks raise: their turns may have diverged before it."""
        self._turn, self._pending_digests, self._digests_done, self._gradients = 0, {}, None, _NO_GRADIENTS
        self._failures = self._group.handshake.failures

    def _in_turn(self, names: Sequence[str]) -> str:
        return names[self._turn % len(names)] if names else ""

    def _slice_digest(self, tensor: Tensor) -> int:
        """Returns a digest of this rank's slice, or the rank if equal slices would prove no copy.

        Constant slices don't: each rank may have its own zeros, as in a new bias.
        """
        if not digests.is_here(tensor) or not _is_compared(tensor) or not tensor.is_floating_point():
            return self._group.rank
        sample = tensor.detach().reshape(-1)[: digests.SAMPLED // 8]
        is_constant = bool((sample == sample[0]).all())
        return self._group.rank if is_constant else digests.values_digest(tensor, digests.SAMPLED)

    def _start_digests(self, tensors: Mapping[str, Tensor]) -> None:
        """Starts to compute digests on the tensors' devices; the next call reads them."""
        self._digests_done = None
        self._pending_digests = {
            name: digests.device_digest(tensor).to("cpu", non_blocking=True) for name, tensor in tensors.items()
        }
        if any(tensor.is_cuda for tensor in tensors.values()):
            # A non-blocking copy gets its values when the device reaches it; the event marks that.
            self._digests_done = torch.cuda.Event()
            self._digests_done.record()

    def _collect_digests(self) -> dict[str, str]:
        """Returns the digests that the last call started."""
        if self._digests_done is not None:
            self._digests_done.synchronize()
        return {f"{EARLIER} {name}": f"{int(value):x}" for name, value in self._pending_digests.items()}


def _is_compared(tensor: Tensor) -> bool:
    return digests.has_values(tensor) and tensor.layout == torch.strided


class _GradientHook:
    """A hook on a result that passes its gradient to the model's history."""

    __torch_unserializable__ = True  # without it torch.save warns that it leaves this hook out

    def __init__(self, history: History, number: int) -> None:
        # Weak: a result that the user keeps must not keep the model.
        self._history, self.number = weakref.ref(history), number

    def __call__(self, gradient: Tensor | None) -> None:
        history = self._history()
        if (
            history is None
            or gradient is None  # undefined: `gradcheck` tries that, and a custom Function may return it
            or torch.compiler.is_compiling()
            # `is_functorch_wrapped_tensor`: no public question for a tensor of a transform (PyTorch 2.13.0).
            or torch._C._functorch.is_functorch_wrapped_tensor(gradient)
        ):
            return
        # `is_legacy_batchedtensor`: the same for the older vmap, by which `is_grads_batched` works (PyTorch 2.13.0).
        if torch._C._functorch.is_legacy_batchedtensor(gradient):
            raise InputError(
                "a sharded model takes no batch of gradients at once",
                where=history.latest_text,
                why="is_grads_batched=True, or vectorize=True of torch.autograd.functional, maps its backward, and the "
                "collectives in it can't be mapped",
                attempt="one torch.autograd.grad for each gradient; vectorize=False",
            )
        if gradient.layout == torch.strided and gradient.is_floating_point() and gradient.numel():
            history.note_gradient(gradient, self.number)
