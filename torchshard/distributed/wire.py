"""The door to torch.distributed: a collective under way, and what its failure is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from torchshard.distributed.checks import failed
from torchshard.distributed.groups import Group


class Work:
    """torch.distributed's Work, whose failure is a DistributedError that says what the other ranks do."""

    __slots__ = ("_call", "_group", "_work")

    def __init__(self, group: Group, call: str, work: Any) -> None:
        self._group, self._call, self._work = group, call, work

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            DistributedError: a rank is gone, did not come within the timeout, or sent something else.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise failed(self._group, self._call, error) from error

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._work.is_completed())


def begin(group: Group, call: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Work:
    """Starts a function of torch.distributed that gives a Work.

    Raises:
        DistributedError: it fails at once.
    """
    try:
        return Work(group, call, fn(*args, **kwargs))
    except RuntimeError as error:
        raise failed(group, call, error) from error


def collective(group: Group, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Work:
    """Starts a collective of torch.distributed on a group's own process group."""
    return begin(group, fn.__name__, fn, *args, **kwargs, group=group.process_group, async_op=True)


class Pending(NamedTuple):
    """A collective under way."""

    work: Any
    """What is waited for, such as a Work; None where nothing is sent."""
    finish: Callable[[], Tensor]
    """What makes the result of what came."""

    def wait(self) -> Tensor:
        """The result."""
        if self.work is not None:
            self.work.wait()
        return self.finish()


class Handle:
    """A collective that goes on while this process computes."""

    def __init__(self, pending: Pending, result: Callable[[], Tensor] | None = None) -> None:
        self._pending, self._result = pending, result or pending.wait
        self._held: Tensor | None = None

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._held is not None or self._pending.work is None or bool(self._pending.work.is_completed())

    def wait(self) -> Tensor:
        """The result, with its gradient; the same tensor each time."""
        if self._held is None:
            self._held = self._result()
        return self._held
