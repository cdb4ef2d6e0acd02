"""TorchShard: tensor parallelism for an ordinary PyTorch model, as a compiler you can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchshard.public import *  # noqa: F403
else:
    # `torchshard --help` needs no torch, so the public names are imported when one is asked for. Type checkers read the
    # line above: a module `__getattr__` that they saw would take a typo for a name.
    import importlib

    def __getattr__(name):
        public = importlib.import_module("torchshard.public")
        if name not in public.__all__:
            raise AttributeError(f"module 'torchshard' has no attribute {name!r}")
        return getattr(public, name)

    def __dir__():
        return list(importlib.import_module("torchshard.public").__all__)
