"""Splits a call's batch and sequence across ranks: tensors that enter a rank's graph, and results that leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torchshard.capture import Leaves
from torchshard.compiler.batches import Known, SplitDims, dims_of_parts, whole_batch
from torchshard.compiler.constraints import Constraints
from torchshard.core.layouts import Shard
from torchshard.core.mesh import Mesh
from torchshard.core.sharding import Sharding
from torchshard.custom_ops.fx_types import Argument
from torchshard.distributed.group import Group
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.batches import entering, joined, leaving, own_parts
from torchshard.runtime.call_verification import PreparedCall
from torchshard.runtime.carried import is_of_all


@dataclass(frozen=True)
class BatchSplit:
    """The split of a model's inputs."""

    mesh: Mesh
    ranks: Ranks
    is_whole: bool
    """Whether each rank passes the full inputs, and gets full results."""
    _known: Known = field(default_factory=dict, compare=False)
    """The arguments that earlier calls with more than one element per rank split."""

    @staticmethod
    def of(constraints: Constraints, ranks: Ranks, *, is_whole: bool) -> BatchSplit:
        """Returns the split that a model's constraints require."""
        return BatchSplit(constraints.mesh, ranks, is_whole)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the groups that inputs are split over, outermost first; () if all ranks have the same inputs."""
        return tuple(axis.name for axis in self.mesh.of_inputs)

    @property
    def group(self) -> Group | None:
        """All ranks that inputs are split over; None if all ranks have the same inputs."""
        if not self.axes:
            return None
        return self.ranks.replicas if self.mesh.across else self.ranks.group

    def inputs(self, given: Leaves, inputs: Leaves) -> tuple[Leaves, SplitDims]:
        """Returns a call's inputs in global shapes, and the dims of them that are split.

        Args:
            given: the inputs as the caller passed them.
            inputs: `given`, with a tensor of global shape and without storage for each carried slice.
        """
        if not self.axes:
            return inputs, {}
        if self.is_whole:
            return inputs, dims_of_parts(inputs, self.mesh)
        whole = {name for name, tensor in given.named_tensors if is_of_all(tensor)}
        return whole_batch(inputs, self.mesh, whole, self._known)

    def entering(self, call: PreparedCall) -> Sequence[Tensor]:
        """Returns the tensors that a call passes to this rank's graph."""
        if not self.axes:
            return call.tensors
        shardings = {name: self._sharding(dims) for name, dims in call.batches.items()}
        named = dict(zip(call.inputs.names, call.tensors, strict=True))
        if self.is_whole:
            return own_parts(named, shardings, self.ranks)
        return entering(named, {name: _parts(each) for name, each in shardings.items()})

    def leaving(
        self, returned: Sequence[Argument], shardings: Sequence[Sharding], count: int
    ) -> tuple[Sequence[Argument], Sequence[Argument], Sequence[Argument]]:
        """Returns (a call's results, the results that are equal on all ranks of the batch, the carried tensors).

        Args:
            returned: the values that this rank's graph returns, the results first.
            shardings: the sharding of each of them over the axes that split inputs.
            count: the number of results.
        """
        if not self.axes:
            return returned[:count], returned[:count], returned[count:]
        if self.is_whole:
            results = joined(returned[:count], shardings[:count], self.ranks)
            return results, results, returned[count:]
        returned = leaving(returned, list(map(_parts, shardings)))
        equal = [r for r, of in zip(returned[:count], shardings[:count], strict=True) if not of.is_split]
        return returned[:count], equal, returned[count:]

    def _sharding(self, dims: tuple[int, ...]) -> Sharding:
        return Sharding.of(*((axis, Shard(axis.dim)) for axis in self.mesh.of_inputs if axis.dim in dims))


def _parts(of: Sharding) -> int:
    """The number of parts that a tensor is split into."""
    return math.prod(axis.size for axis, layout in of if isinstance(layout, Shard))
