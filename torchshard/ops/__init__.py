"""The operators of collectives in graphs, `torch.ops.torchshard.*`: declared here, run by `distributed`.

Each row of `conversions.TABLE` is one operator. Its schema, and the computation of its result's shape,
are known without a process group, so capture, planning and passes need only this room. `distributed.ops`
registers the kernels and the gradients, and `ops.kernels` names the functions that passes take from
there.

    copy(x, group)      gather(x, dim, parts, group)      all_to_all(x, dim, parts, to_dim, to_parts, group)
    dispatch(x, sent, received, rows, group)              combine(x, sent, received, rows, group)

An operator takes the name of a group, because a graph with a process group could not be printed, saved
or exported.
"""

from torchshard.ops.begin import Begin, wait
from torchshard.ops.declared import (
    COMBINE,
    DISPATCH,
    OPS,
    SENDING,
    Op,
    OpArgs,
    communicates,
    experts_of_ranks,
    hashable,
    is_collective,
    layouts_of,
)
from torchshard.ops.kernels import Kernels, kernels, register_kernels

__all__ = [
    "COMBINE", "DISPATCH", "OPS", "SENDING", "Begin", "Kernels", "Op", "OpArgs", "communicates",
    "experts_of_ranks", "hashable", "is_collective", "is_or_begins_collective", "kernels", "register_kernels",
    "layouts_of", "wait",
]  # fmt: skip


def is_or_begins_collective(target: object) -> bool:
    """Returns whether a node's target is a collective, or begins one."""
    return is_collective(target) or isinstance(target, Begin)
