"""The ranks that work on one model together, of several mesh axes: what fails on one of them fails on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import DistributedError, InputError, ShardError
from torchshard.core.layouts import Layout, Shard
from torchshard.core.mesh import DATA, MODEL, Mesh, MeshAxis, Place
from torchshard.core.sharding import Cuts, Sharding, local_shape
from torchshard.distributed.consistency import SAME_CALL, Facts, gather_bytes, run_on_all_ranks, verify_equal
from torchshard.distributed.group import ALONE, Group, is_initialized, lookup, own_group
from torchshard.distributed.kernels import gathered, reduced
from torchshard.distributed.memory import ReduceKind
from torchshard.distributed.process_groups import init_process_group

T = TypeVar("T")


class Held(Protocol):
    """A slice that knows which ranks hold the others, and how."""

    sharding: Sharding
    ranks: Ranks


def widest(tensors: Iterable[object]) -> Ranks:
    """The most ranks that any of these sharded tensors is held by: a number about all of them concerns all of these."""
    found = [ranks for ranks in (getattr(tensor, "ranks", None) for tensor in tensors) if isinstance(ranks, Ranks)]
    return max(found, key=lambda ranks: ranks.count) if found else Ranks(own_group())


@dataclass(frozen=True)
class Ranks:
    """A rank among all that work on one model: those that divide its weights, and those that divide the batch."""

    group: Group
    """The ranks of the model's axis, which divide the weights."""
    replicas: Group = ALONE
    """The ranks of the data axes: they hold the same slices as this one, or divide those once more."""
    data: tuple[Group, ...] = ()
    """The ranks along each data axis, outermost first; without them there is one such axis."""
    axes: tuple[MeshAxis, ...] = ()
    """The axis of each of `groups`, with the user's name for it and what its ranks hold; () for the names alone."""

    @classmethod
    def own(cls) -> Ranks:
        """This process among all; it is alone where torch.distributed is not initialised."""
        if dist.is_initialized() and not is_initialized():
            init_process_group()
        return cls(lookup(MODEL), lookup(DATA)) if is_initialized() else cls(ALONE, ALONE)

    @classmethod
    def of(cls, tensors: Iterable[object]) -> Ranks:
        """This process among all that work on the sharded ones of these tensors, and their replicas.

        Raises:
            InputError: they are sharded over meshes that divide the batch over different axes.
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
        """This rank's number among all; number 0 leads."""
        return self.replicas.rank * self.group.size + self.group.rank

    @property
    def count(self) -> int:
        """How many they are."""
        return self.replicas.size * self.group.size

    @property
    def groups(self) -> dict[str, Group]:
        """The group along each mesh axis, outermost first."""
        return {**({each.name: each for each in self.data} or {DATA: self.replicas}), MODEL: self.group}

    @property
    def mesh(self) -> Mesh:
        """The mesh of all of them."""
        return Mesh(self.axes or tuple(MeshAxis(group.size, name) for name, group in self.groups.items()))

    @property
    def place(self) -> Place:
        """Where this rank is on the mesh."""
        return {axis: group.rank for axis, group in self.groups.items()}

    def sharding(self, layouts: Mapping[str, Layout]) -> Sharding:
        """The sharding of what has these layouts over axes by name, first to last."""
        return Sharding.of(*((self.mesh.axis(name), layout) for name, layout in layouts.items()))

    def cuts(self, of: Sharding) -> Cuts:
        """How this rank holds a tensor."""
        return of.cuts(self.place)

    def gathered(self, x: Tensor, of: Sharding, shape: Sequence[int]) -> Tensor:
        """The whole tensor of global `shape`, from all ranks' slices: a collective call."""
        held = self.cuts(of)
        for i, (axis, layout) in reversed([*enumerate(of)]):
            if isinstance(layout, Shard):
                x = gathered(x, layout, local_shape(shape, held[:i]), self.groups[axis.name])
        return x

    def reduced(self, x: Tensor, op: ReduceKind, *, eager: str = "") -> Tensor:
        """As `reduced`, over all of them."""
        for group in (self.replicas, self.group):
            x = reduced(x, op, group, eager=eager) if group.size > 1 else x
        return x

    def groups_of(self, of: Sharding) -> list[Group]:
        """The groups over which a tensor is split."""
        return [self.groups[axis.name] for axis, layout in of if isinstance(layout, Shard)]

    def holders(self, of: Sharding) -> tuple[int, int]:
        """(this rank's number among those that hold the same slice, how many they are)."""
        split = self.groups_of(of)
        others = [group for group in self.groups.values() if group not in split]
        number = 0
        for group in others:
            number = number * group.size + group.rank
        return number, math.prod(group.size for group in others)

    def counts(self, part: Held) -> bool:
        """Whether, of those of these ranks that hold the same slice, this one comes first.

        Args:
            part: held by all of these, if on another mesh, or by those of one replica.
        """
        ranks = part.ranks if part.ranks.count == self.count else self
        return ranks.holders(part.sharding)[0] == 0

    def run_on_all(self, make: Callable[[], T], error: Callable[..., ShardError], what: str) -> T:
        """As `run_on_all_ranks`, for all of them."""
        return self.on_replicas(lambda: run_on_all_ranks(self.group, make, error, what), error, what)

    def verify(self, facts: Facts, what: str, attempt: str = SAME_CALL) -> None:
        """Raises DistributedError on all of them if the facts differ on any."""

        def along(group: Group) -> bool:
            return verify_equal(group, facts, DistributedError, what, attempt=attempt)

        self.on_replicas(lambda: along(self.group), DistributedError, what)
        along(self.replicas)

    def verify_along(self, axis: str, facts: Facts, what: str) -> None:
        """Raises DistributedError on all of them if the facts of ranks along a mesh axis differ."""
        group = self.groups[axis]
        self.run_on_all(lambda: verify_equal(group, facts, DistributedError, what), DistributedError, what)

    def leaders(self, data: bytes) -> bytes:
        """What the rank that leads has given."""
        of_group = gather_bytes(self.group, "ts.save", lambda: data)[0]
        return gather_bytes(self.replicas, "ts.save", lambda: of_group)[0]

    def of_replicas(self, data: bytes) -> list[bytes]:
        """What the ranks that hold the same slices have given, one for each replica."""
        return gather_bytes(self.replicas, "ts.save", lambda: data)

    def on_replicas(self, on_group: Callable[[], T], error: Callable[..., ShardError], what: str) -> T:
        """Makes a call that fails on all ranks of a model or on none; where it fails, the other replicas raise too."""
        return run_on_all_ranks(self.replicas, on_group, error, what)
