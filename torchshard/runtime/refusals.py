"""The errors for operations that an unsharded module supports, and a sharded one refuses."""

from __future__ import annotations

from typing import Literal, NoReturn, Protocol

from torch import nn

from torchshard.core.errors import InputError


class NoMethodError(InputError, AttributeError):
    """A method of the unsharded model can't run on the sharded one."""


def no_method(name: str, why: str, attempt: str) -> NoMethodError:
    """Returns the error for a method that can't run with this rank's slices."""
    return NoMethodError(
        f"{name}() can't be called of a sharded model: it would compute with this rank's slices",
        where=name,
        why=why,
        attempt=attempt,
    )


def not_changeable(name: str, where: str, how: Literal["added", "replaced", "removed"]) -> InputError:
    """Returns the error for adding, replacing or removing an entry of a sharded model."""
    return InputError(
        f"{name!r} can't be {how} after sharding",
        where=where,
        why="graphs that were captured before would not follow",
        attempt="change the unsharded model, then shard",
    )


class _HasSource(Protocol):
    """A sharded model, or one of its submodules."""

    @property
    def source(self) -> nn.Module:
        """The unsharded module."""


def refuse_class(module: _HasSource, value: type) -> NoReturn:
    """Refuses wrappers that change a module's class, as `torch.distributed.fsdp.fully_shard` does.

    Raises:
        InputError: always.
    """
    raise InputError(
        f"a sharded model can't become a {value.__name__}",
        where=f"{type(module.source).__name__}.__class__",
        why="its parts have a class of their own, and their parameters are slices",
        attempt='torchshard.shard(..., mesh="shard") in place of fully_shard; or DistributedDataParallel over '
        "torchshard's data-parallel group",
    )
