"""The door to torch.distributed: a collective under way, and what its failure is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from torchshard.distributed.group import Group
from torchshard.distributed.handshake import collective_failed


def begin(group: Group, call: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Starts a function of torch.distributed that gives a Work.

    Raises:
        DistributedError: it fails at once.
    """
    try:
        return fn(*args, **kwargs)
    except RuntimeError as error:
        raise collective_failed(group, call, error) from error


def finish(group: Group, call: str, work: Any) -> None:
    """Waits for a Work.

    Raises:
        DistributedError: a rank is gone, did not come within the timeout, or sent something else.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise collective_failed(group, call, error) from error


def collective(group: Group, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Runs a collective of torch.distributed on a group's own process group."""
    begin(group, fn.__name__, fn, *args, group=group.process_group, **kwargs)


class Pending(NamedTuple):
    """A collective under way."""

    result: Callable[[], Tensor]
    """What makes the result of what came."""
    work: Any = None
    """torch.distributed's Work, or the like; None where nothing is sent."""
    group: Any = None
    call: str = ""
    """What was started, and in which group."""

    @classmethod
    def of(
        cls, result: Callable[[], Tensor], group: Group, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Pending:
        """Starts a collective of torch.distributed on a group's own process group."""
        name = fn.__name__
        work = begin(group, name, fn, *args, group=group.process_group, async_op=True, **kwargs)
        return cls(result, work, group, name)

    def wait(self) -> Tensor:
        """The result."""
        if self.work is not None:
            finish(self.group, self.call, self.work)
        return self.result()


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
