"""The key of a call: calls of a sharded model with equal keys may run the same captured graph.

A graph keeps the values that Python code saw during its capture: flags and numbers among the arguments, dtypes, the
grad mode, train or eval of each module, and attributes and globals that forward reads. The key holds all of them. Sizes
are not part of it, for one graph runs many sizes: `Captured.assumes` checks those of each call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchshard.capture import Leaves, Numbers, global_hooks, look_key, memory_order
from torchshard.core.autocast import Autocast, current_autocast
from torchshard.core.hashing import hash_text
from torchshard.core.layouts import Layout


class CallKey(NamedTuple):
    """Everything but sizes that decides which graph computes a call."""

    structure: Hashable
    """The arguments that are not tensors, and where the tensors stand among them."""
    visible_state: int
    """The number of the state that attributes, closures and globals are in: see `Watch`."""
    inputs_need_grad: tuple[bool, ...]
    inputs: tuple[tuple[torch.dtype, str, Hashable, Hashable], ...]
    """(dtype, device type, order in memory, class and attributes of the user's) of each input."""
    entry: str
    """The path of the part of the model that is called; '' for the model itself."""
    layouts: tuple[tuple[str, str], ...]
    """(name, layout) of each input that is split."""
    training: tuple[bool, ...]
    """Train or eval, of each module."""
    autocast: Autocast
    process_wide: tuple[bool, bool, torch.dtype, torch.device, tuple[Hashable, ...]]
    """Grad mode, inference mode, default dtype, default device, hooks on all modules."""
    state_needs_grad: tuple[bool, ...]
    """Which parameters and buffers need a gradient."""
    numbers: Numbers = ()
    """The numbers that forward takes from its buffers: see `Condition`."""

    @property
    def digest(self) -> int:
        """A hash that is the same on every rank; Python's own differs between processes."""
        return hash_text(repr(self))

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are enabled."""
        return self.process_wide[0]

    @property
    def facts(self) -> dict[str, str]:
        """What it holds beside the arguments and the visible state, in words: what the calls of ranks may differ in."""
        grad, inference, dtype, device, hooks = self.process_wide
        return {
            "the part of the model that is called": self.entry or "all of it",
            "the inputs' dtypes, devices, order in memory and classes": str(self.inputs),
            "inputs that are split": str(self.layouts),
            "inputs that need a gradient": _true(self.inputs_need_grad),
            "parameters and buffers that need a gradient": _true(self.state_needs_grad),
            "modules in training mode": _true(self.training),
            "gradients are enabled": str(grad),
            "inference mode": str(inference),
            "autocast": str(self.autocast),
            "default dtype and device": f"{dtype}, {device}",
            "hooks on all modules": str(hooks),
            "numbers that forward takes from its buffers": str(self.numbers),
        }


def _true(flags: Sequence[bool]) -> str:
    """Which of them are true: 'all 12', 'none', 'of 12 those with the numbers 3, 4'."""
    if len({*flags}) < 2:
        return f"all {len(flags)}" if any(flags) else "none"
    return f"of {len(flags)} those with the numbers {', '.join(str(i) for i, flag in enumerate(flags) if flag)}"


def call_key(
    call: Leaves,
    visible_state: int,
    modules: Iterable[nn.Module],
    state: Iterable[Tensor],
    layouts: Mapping[str, Layout],
    entry: str = "",
) -> CallKey:
    """The key of a call that is made now, in this thread's modes.

    Args:
        layouts: those of the inputs that are split.
        entry: the path of the part that is called.
        visible_state: the number of the state of attributes and globals.
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
         torch.get_default_device(), global_hooks()),
        tuple(t.requires_grad for t in state),
    )  # fmt: skip
