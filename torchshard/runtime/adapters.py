"""The methods of peft's adapters that merge weights: they run layer by layer, on full weights.

Switching adapters needs no code here: peft only sets attributes and `requires_grad` of the sharded
modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol, cast

from torch import nn

_MERGING = frozenset({"merge", "unmerge"})
_UNLOADING = frozenset({"merge_and_unload", "unload"})
UNLOADING = (
    "ts.save_pretrained(model, folder, merge=True) writes the merged model; model.merge_adapter() merges in place, and "
    "model.unmerge_adapter() takes it back"
)
"""The advice for methods that would remove the adapters' modules."""


class _Owner(Protocol):
    """A sharded model, as the layers that merge adapters use it."""

    def change_whole(self, part: nn.Module, change: Callable[[nn.Module], None], name: str) -> None:
        """Changes a submodule's tensors on full values."""


def is_unloading(source: type, name: str) -> bool:
    """Returns whether a method replaces peft's layers with those that they wrap; `source` is the unsharded class."""
    return name in _UNLOADING and _is_subclass(source, "BaseTuner")


def merging_method(source: type, name: str) -> Callable[..., None] | None:
    """Returns the sharded layer's version of a method of peft's layers that merges adapters, else None."""
    if name not in _MERGING or not _is_subclass(source, "BaseTunerLayer"):
        return None

    def merge(self: nn.Module, *args: object, **kwargs: object) -> None:
        owner = cast(_Owner, next(iter(self.parameters())).owner())  # type: ignore[attr-defined]
        owner.change_whole(self, lambda layer: getattr(layer, name)(*args, **kwargs), name)

    return merge


def _is_subclass(source: type, name: str) -> bool:
    """Returns whether a class is a subclass of one of peft's; peft defines it only if it is imported."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and issubclass(source, getattr(tuners, name))
