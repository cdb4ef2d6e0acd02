"""The ranks that share one model, over several mesh axes; a failure on one raises on all."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import DistributedError, InputError, ShardError
from torchshard.core.layouts import Layout, Shard
from torchshard.core.mesh import DATA, MODEL, Mesh, MeshAxis, Place
from torchshard.core.sharding import Cuts, Sharding, local_shape
from torchshard.distributed.consistency import SAME_CALL, gather_bytes
from torchshard.distributed.convert import gathered
from torchshard.distributed.facts import Facts, run_on_all_ranks, verify_equal
from torchshard.distributed.group import ALONE, Group, is_initialized, lookup, own_group
from torchshard.distributed.kernels import reduced
from torchshard.distributed.memory import ReduceKind
from torchshard.distributed.process_groups import init_process_group

T = TypeVar("T")


class Held(Protocol):
    """A slice with its sharding and its ranks."""

    @property
    def sharding(self) -> Sharding:
        """The sharding over the ranks."""

    @property
    def ranks(self) -> Ranks:
        """The ranks of its model."""


def widest(tensors: Iterable[object]) -> Ranks:
    """Returns the ranks of the most widely sharded tensor, which a number about all concerns."""
    found = [ranks for ranks in (getattr(tensor, "ranks", None) for tensor in tensors) if isinstance(ranks, Ranks)]
    return max(found, key=lambda ranks: ranks.count) if found else Ranks(own_group())


@dataclass(frozen=True)
class Ranks:
    """A rank of a model, with the ranks that split its weights and those that split the batch."""

    group: Group
    """The ranks of the model axis, which split the weights."""
    replicas: Group = ALONE
    """The ranks of the data axes: they store the same slices, or split them again."""
    data: tuple[Group, ...] = ()
    """The ranks along each data axis, outermost first; empty for a single data axis."""
    axes: tuple[MeshAxis, ...] = ()
    """The mesh axis of each of `groups`, with the user's name and its use; () for default names."""

    @classmethod
    def own(cls) -> Ranks:
        """Returns this process among all ranks; alone if torch.distributed is not initialised.

        Creates the groups if the user has only initialised torch.distributed.
        """
        if dist.is_initialized() and not is_initialized():
            init_process_group()
        return cls(lookup(MODEL), lookup(DATA)) if is_initialized() else cls(ALONE, ALONE)

    @classmethod
    def of(cls, tensors: Iterable[object]) -> Ranks:
        """Returns this process among all ranks of these sharded tensors and their replicas.

        Raises:
            InputError: the tensors' meshes have different data axes.
        """
        found = list(tensors)
        ranks = widest(found)
        if ranks.count == ranks.group.size:
            return cls.own()
        for other in (getattr(tensor, "ranks", ranks) for tensor in found):
            if other.count > other.group.size and other.groups.keys() != ranks.groups.keys():
                raise InputError(
                    "models on different meshes can't be saved or loaded together",
                    where=f"axes {', '.join(map(str, ranks.mesh.axes))}, and {', '.join(map(str, other.mesh.axes))}",
                    why="a checkpoint says of each tensor how the ranks of one mesh hold it",
                    attempt="one mesh for all models, or a checkpoint for each",
                )
        return ranks

    @property
    def number(self) -> int:
        """This rank's number among all ranks; number 0 is the leader."""
        return self.replicas.rank * self.group.size + self.group.rank

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self.replicas.size * self.group.size

    @property
    def groups(self) -> dict[str, Group]:
        """The group along each mesh axis, outermost first."""
        return {**({each.name: each for each in self.data} or {DATA: self.replicas}), MODEL: self.group}

    @property
    def mesh(self) -> Mesh:
        """The mesh of all ranks."""
        return Mesh(self.axes or tuple(MeshAxis(group.size, name) for name, group in self.groups.items()))

    @property
    def place(self) -> Place:
        """The place of this rank on the mesh."""
        return {axis: group.rank for axis, group in self.groups.items()}

    def sharding(self, layouts: Mapping[str, Layout]) -> Sharding:
        """Returns the sharding for layouts by axis name, in this order."""
        return Sharding.of(*((self.mesh.axis(name), layout) for name, layout in layouts.items()))

    def cuts(self, of: Sharding) -> Cuts:
        """Returns this rank's cuts of a tensor with a sharding."""
        return of.cuts(self.place)

    def gathered(self, x: Tensor, of: Sharding, shape: Sequence[int]) -> Tensor:
        """Gathers the full tensor of global `shape` from slices; all ranks must call it."""
        held = self.cuts(of)
        # the last axis has split the tensor last, so it is gathered first
        for i, (axis, layout) in reversed([*enumerate(of)]):
            if isinstance(layout, Shard):
                x = gathered(x, layout, local_shape(shape, held[:i]), self.groups[axis.name])
        return x

    def reduced(self, x: Tensor, op: ReduceKind, *, eager: str = "") -> Tensor:
        """All-reduces a copy over all ranks; see `kernels.reduced`."""
        for group in (self.replicas, self.group):
            x = reduced(x, op, group, eager=eager) if group.size > 1 else x
        return x

    def groups_of(self, of: Sharding) -> list[Group]:
        """Returns the groups that a tensor is split over."""
        return [self.groups[axis.name] for axis, layout in of if isinstance(layout, Shard)]

    def holders(self, of: Sharding) -> tuple[int, int]:
        """Returns (this rank's number among holders of the same slice, their number)."""
        split = self.groups_of(of)
        others = [group for group in self.groups.values() if group not in split]
        number = 0
        for group in others:
            number = number * group.size + group.rank
        return number, math.prod(group.size for group in others)

    def counts(self, part: Held) -> bool:
        """Returns whether this rank owns the slice among its holders, so that a sum counts it once.

        Args:
            part: a slice; either all of these ranks have one, on this mesh or another, or one replica does.
        """
        ranks = part.ranks if part.ranks.count == self.count else self
        return ranks.holders(part.sharding)[0] == 0

    def run_on_all(self, make: Callable[[], T], error: Callable[..., ShardError], what: str) -> T:
        """Returns `make()` if it succeeds on all ranks; see `run_on_all_ranks`."""
        return self.on_replicas(lambda: run_on_all_ranks(self.group, make, error, what), error, what)

    def verify(self, facts: Facts, what: str, attempt: str = SAME_CALL) -> None:
        """Raises DistributedError on all ranks if the facts differ on any."""

        def along(group: Group) -> bool:
            return verify_equal(group, facts, DistributedError, what, attempt=attempt)

        self.on_replicas(lambda: along(self.group), DistributedError, what)
        along(self.replicas)

    def verify_along(self, axis: str, facts: Facts, what: str) -> None:
        """Raises DistributedError on all ranks if the facts differ along a mesh axis."""
        group = self.groups[axis]
        self.run_on_all(lambda: verify_equal(group, facts, DistributedError, what), DistributedError, what)

    def random_name(self, call: str) -> str:
        """Returns a random text, equal on all ranks; `call` describes the user's call."""
        drawn = secrets.token_hex(8).encode()
        of_group = gather_bytes(self.group, call, lambda: drawn)[0]
        return gather_bytes(self.replicas, call, lambda: of_group)[0].decode()

    def of_replicas(self, data: bytes) -> list[bytes]:
        """Returns the data of the holders of the same slices, one per replica."""
        return gather_bytes(self.replicas, "ts.save", lambda: data)

    def on_replicas(self, on_group: Callable[[], T], error: Callable[..., ShardError], what: str) -> T:
        """Makes a call that fails on all of a replica's ranks or none; then all replicas raise."""
        return run_on_all_ranks(self.replicas, on_group, error, what)
