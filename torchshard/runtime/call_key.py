"""The key of a call: calls of a sharded model with equal keys may run the same captured graph.

A graph keeps the values that Python code saw during its capture: flags and numbers among the
arguments, dtypes, the grad mode, train or eval of each module, and attributes and globals that
forward reads. The key contains all of them. It contains no sizes, because one graph runs many
sizes: `Captured.assumes` checks the sizes of each call.

Dynamo's guards cover these facts for `torch.compile`, but non-strict export makes guards for sizes
only (PyTorch 2.13). The key could shrink to the arguments if export returned guards for the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchshard.capture import Leaves, Numbers, global_hooks, look_key, memory_order
from torchshard.core.autocast import Autocast, current_autocast
from torchshard.core.hashing import hash_text


class CallKey(NamedTuple):
    """The facts, except sizes, that decide which graph computes a call."""

    structure: Hashable
    """The non-tensor arguments, and the positions of the tensors among them."""
    visible_state: int
    """The number that `Watch` assigns to the current values of attributes, closures and globals."""
    inputs_need_grad: tuple[bool, ...]
    inputs: tuple[tuple[torch.dtype, str, Hashable, Hashable], ...]
    """(dtype, device type, memory order, `look_key`) of each input."""
    entry: str
    """The path of the called submodule; '' for the full model."""
    layouts: tuple[tuple[str, str], ...]
    """(name, layout) of each input that is split."""
    training: tuple[bool, ...]
    """Whether each module is in training mode."""
    autocast: Autocast
    process_wide: tuple[bool, bool, torch.dtype, str, tuple[Hashable, ...]]
    """Grad mode, inference mode, default dtype, default device, hooks on all modules."""
    state_needs_grad: tuple[bool, ...]
    """Whether each parameter and buffer needs a gradient."""
    numbers: Numbers = ()
    """The numbers that forward reads from its buffers; see `Condition`."""

    @property
    def digest(self) -> int:
        """A hash that equal keys share in all processes; Python's `hash` differs between processes."""
        return hash_text(repr(self))

    @property
    def grad_enabled(self) -> bool:
        """Whether gradients are enabled."""
        return self.process_wide[0]

    @property
    def facts(self) -> dict[str, str]:
        """{fact: text} of all fields except the arguments and the visible state, for errors."""
        grad, inference, dtype, device, hooks = self.process_wide
        return {
            "the part of the model that is called": self.entry or "all of it",
            "the inputs' dtypes, devices, order in memory and classes": str(self.inputs),
            "inputs that are split": str(self.layouts),
            "inputs that need a gradient": _true_flags(self.inputs_need_grad),
            "parameters and buffers that need a gradient": _true_flags(self.state_needs_grad),
            "modules in training mode": _true_flags(self.training),
            "gradients are enabled": str(grad),
            "inference mode": str(inference),
            "autocast": str(self.autocast),
            "default dtype and device": f"{dtype}, {device}",
            "hooks on all modules": str(hooks),
            "numbers that forward takes from its buffers": str(self.numbers),
        }


def _true_flags(flags: Sequence[bool]) -> str:
    """Returns which flags are true: 'all 12', 'none', '3, 4 of 12 (counted from 0)'."""
    if len({*flags}) < 2:
        return f"all {len(flags)}" if any(flags) else "none"
    return f"{', '.join(str(i) for i, flag in enumerate(flags) if flag)} of {len(flags)} (counted from 0)"


def call_key(
    call: Leaves,
    visible_state: int,
    modules: Iterable[nn.Module],
    state: Iterable[Tensor],
    layouts: Mapping[str, object],
    entry: str = "",
) -> CallKey:
    """Returns the key of a call made now, in this thread's modes.

    Args:
        layouts: the layouts of the split inputs, by name.
        entry: the path of the called submodule.
        visible_state: the number of the current values of attributes and globals.
        modules: all modules of the model, in a fixed order.
        state: all parameters and buffers, in a fixed order.
    """
    return CallKey(
        call.structure,
        visible_state,
        tuple(t.requires_grad for t in call.tensors),
        tuple((t.dtype, t.device.type, memory_order(t), look_key(t)) for t in call.tensors),
        entry,
        tuple((name, str(layout)) for name, layout in layouts.items()),
        tuple(m.training for m in modules),
        current_autocast(),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
         torch.get_default_device().type, global_hooks()),
        tuple(t.requires_grad for t in state),
    )  # fmt: skip
