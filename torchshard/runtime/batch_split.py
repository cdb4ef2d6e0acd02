"""Splits a model's batch across ranks: the tensors that enter a rank's graph, and the results that leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torchshard.capture import Leaves
from torchshard.compiler.batches import layouts_of_parts, whole_batch
from torchshard.compiler.constraints import Constraints
from torchshard.core.layouts import Layout, Shard
from torchshard.custom_ops.fx_types import Argument
from torchshard.distributed.group import Group
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.batches import entering, joined, leaving, own_parts
from torchshard.runtime.call_verification import PreparedCall
from torchshard.runtime.carried import is_of_all


@dataclass(frozen=True)
class BatchSplit:
    """The split of a model's batch; without a group all ranks compute the same batch."""

    group: Group | None
    """The group that the batch is split over, or None."""
    axes: tuple[str, ...]
    """The names of the groups that the batch is split over."""
    is_whole: bool
    """Whether each rank passes the full batch, and gets full results."""
    _known: dict[str, bool] = field(default_factory=dict, compare=False)
    """Argument name -> whether earlier calls with more than one element per rank split it."""

    @staticmethod
    def of(constraints: Constraints, ranks: Ranks, *, is_whole: bool) -> BatchSplit:
        """Returns the split that a model's constraints require."""
        if constraints.mesh.across:
            return BatchSplit(ranks.replicas, tuple(each.axis.name for each in constraints.of_batch), is_whole)
        if constraints.data:
            return BatchSplit(ranks.group, (ranks.group.name,), is_whole)
        return BatchSplit(None, (), is_whole)

    def inputs(self, given: Leaves, inputs: Leaves) -> tuple[Leaves, dict[str, Layout]]:
        """Returns a call's inputs in global shapes, and the layouts of those that are split along the batch.

        Args:
            given: the inputs as the caller passed them.
            inputs: `given`, with a tensor of global shape and without storage for each carried slice.
        """
        if self.group is None:
            return inputs, {}
        if self.is_whole:
            return inputs, layouts_of_parts(inputs, self.group.size)
        whole = {name for name, tensor in given.named_tensors if is_of_all(tensor)}
        return whole_batch(inputs, self.group.size, whole, self._known)

    def entering(self, call: PreparedCall) -> Sequence[Tensor]:
        """Returns the tensors that a call passes to this rank's graph."""
        if self.group is None:
            return call.tensors
        named = dict(zip(call.inputs.names, call.tensors, strict=True))
        return (own_parts if self.is_whole else entering)(named, call.batches, self.group)

    def leaving(
        self, returned: Sequence[Argument], layouts: Sequence[Layout], count: int
    ) -> tuple[Sequence[Argument], Sequence[Argument], Sequence[Argument]]:
        """Returns (a call's results, the results that are equal on all ranks of the batch, the carried tensors).

        Args:
            returned: the values that this rank's graph returns, the results first.
            layouts: the layout of each of them.
            count: the number of results.
        """
        if self.group is None:
            return returned[:count], returned[:count], returned[count:]
        if self.is_whole:
            results = joined(returned[:count], layouts[:count], self.group)
            return results, results, returned[count:]
        returned = leaving(returned, layouts, self.group)
        equal = [
            r for r, layout in zip(returned[:count], layouts[:count], strict=True) if not isinstance(layout, Shard)
        ]
        return returned[:count], equal, returned[count:]
