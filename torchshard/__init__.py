"""TorchShard: tensor parallelism for an ordinary PyTorch model, as a compiler you can read."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchshard.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Submodules, and the names of `torchshard.public`, when they are asked for: `torchshard --help` needs no torch."""
    if importlib.util.find_spec(f"torchshard.{name}") is not None:
        return importlib.import_module(f"torchshard.{name}")
    public = importlib.import_module("torchshard.public")
    if name not in public.__all__:
        raise AttributeError(f"module 'torchshard' has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    return list(importlib.import_module("torchshard.public").__all__)
