"""The ranks that work on one model together, of several mesh axes: what fails on one of them fails on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from torchshard.core.errors import DistributedError, ShardError
from torchshard.core.mesh import DATA, MODEL
from torchshard.distributed.consistency import Facts, gather_bytes, run_on_all_ranks, verify_equal
from torchshard.distributed.group import ALONE, Group, is_initialized, lookup
from torchshard.distributed.process_groups import init_process_group

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """A rank among all that work on one model: those that hold slices of it, and the replicas of those slices."""

    group: Group
    """The ranks that hold the slices."""
    replicas: Group = ALONE
    """The ranks that hold the same slices as this one."""

    @classmethod
    def own(cls) -> Ranks:
        """This process among all; it is alone where torch.distributed is not initialised."""
        if dist.is_initialized() and not is_initialized():
            init_process_group()
        return cls(lookup(MODEL), lookup(DATA)) if is_initialized() else cls(ALONE, ALONE)

    @property
    def number(self) -> int:
        """This rank's number among all; number 0 leads."""
        return self.replicas.rank * self.group.size + self.group.rank

    @property
    def count(self) -> int:
        """How many they are."""
        return self.replicas.size * self.group.size

    def run_on_all(self, make: Callable[[], T], error: Callable[..., ShardError], what: str) -> T:
        """As `run_on_all_ranks`, for all of them."""
        return self.on_replicas(lambda: run_on_all_ranks(self.group, make, error, what), error, what)

    def verify(self, facts: Facts, what: str) -> None:
        """Raises DistributedError on all of them if the facts differ on any."""
        self.verify_group(facts, what)
        verify_equal(self.replicas, facts, DistributedError, what)

    def verify_group(self, facts: Facts, what: str) -> None:
        """Raises DistributedError on all of them if the facts differ between the ranks of one model."""
        self.on_replicas(lambda: verify_equal(self.group, facts, DistributedError, what), DistributedError, what)

    def verify_replicas(self, facts: Facts, what: str) -> None:
        """Raises DistributedError on all of them if the facts of ranks that hold the same slices differ."""
        self.run_on_all(lambda: verify_equal(self.replicas, facts, DistributedError, what), DistributedError, what)

    def leaders(self, data: bytes) -> bytes:
        """What the rank that leads has given."""
        of_group = gather_bytes(self.group, "ts.save", lambda: data)[0]
        return gather_bytes(self.replicas, "ts.save", lambda: of_group)[0]

    def of_replicas(self, data: bytes) -> list[bytes]:
        """What the ranks that hold the same slices have given, one for each replica."""
        return gather_bytes(self.replicas, "ts.save", lambda: data)

    def on_replicas(self, on_group: Callable[[], T], error: Callable[..., ShardError], what: str) -> T:
        """Makes a call that fails on all ranks of a model or on none; where it fails, the other replicas raise too."""
        failure: Exception | None = None
        result: Any = None
        try:
            result = on_group()
        except Exception as caught:
            failure = caught

        def passed() -> T:
            if failure is not None:
                raise failure
            made: T = result
            return made

        return run_on_all_ranks(self.replicas, passed, error, what)
