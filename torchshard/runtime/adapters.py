"""The methods of peft's adapters that compute with weights: they merge them layer by layer, on whole weights.

Switching adapters needs nothing here: those methods set attributes and `requires_grad` of the sharded modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol, cast

from torch import nn

_MERGING = frozenset({"merge", "unmerge"})
_UNLOADING = frozenset({"merge_and_unload", "unload"})
UNLOADING = (
    "ts.save_pretrained(model, folder, merge=True) writes the merged model; model.merge_adapter() merges in place, and "
    "model.unmerge_adapter() takes it back"
)
"""What to do in place of a method that removes the adapters' modules."""


class _Owner(Protocol):
    """A sharded model, as its layers merge adapters."""

    def change_whole(self, part: nn.Module, change: Callable[[Any], None], name: str) -> None:
        """Changes the tensors of a part on whole values."""


def is_unloading(source: type, name: str) -> bool:
    """Whether a method of an unsharded module's class replaces peft's layers by those that they wrap."""
    return name in _UNLOADING and _is_subclass(source, "BaseTuner")


def merging_method(source: type, name: str) -> Callable[..., None] | None:
    """For a method of peft's layers that merges adapters, one that does it for the sharded layer."""
    if name not in _MERGING or not _is_subclass(source, "BaseTunerLayer"):
        return None

    def merge(self: nn.Module, *args: object, **kwargs: object) -> None:
        owner = cast(_Owner, next(iter(self.parameters())).owner())  # type: ignore[attr-defined]
        owner.change_whole(self, lambda layer: getattr(layer, name)(*args, **kwargs), name)

    return merge


def _is_subclass(source: type, name: str) -> bool:
    """Whether a class is a subclass of one of peft's, which is imported if there is any."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and issubclass(source, getattr(tuners, name))
