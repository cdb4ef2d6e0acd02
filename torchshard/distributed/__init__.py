"""The public names: groups, eager collectives with gradients, messages, objects, and local ranks.

Read the modules bottom-up: `memory` (communication within a machine), `group` (a rank's place and
verification state), `call_site`, `handshake` (headers between ranks), `wire` (starts and waits),
`consistency` (which calls are verified, and how), `facts` (what must be equal on all ranks),
`kernels` (the data that a rank sends), `convert` (sends it), `ops` (the operators of graphs). The
user-facing modules build on these: `eager` (argument checks), `collectives`, `primitives`,
`messages` and `objects`. `world` is how processes find each other, `grouping` divides them into
groups, `process_groups` creates and destroys these, `launch` starts ranks.
"""

from torch.distributed import ReduceOp

from torchshard.distributed import ops
from torchshard.distributed.collectives import (
    all_gather,
    all_to_all,
    copy,
    gather,
    narrow,
    reduce,
    reduce_scatter,
    scatter,
)
from torchshard.distributed.consistency import debug
from torchshard.distributed.group import (
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_size,
    get_group,
    get_group_size,
    get_rank,
    get_world_size,
    is_initialized,
)
from torchshard.distributed.launch import hide_launcher, launch
from torchshard.distributed.messages import irecv, isend, recv, send
from torchshard.distributed.objects import all_gather_object, all_gather_uneven, broadcast_object, gather_object
from torchshard.distributed.primitives import all_reduce, barrier, broadcast, gather_to, reduce_to, scatter_from
from torchshard.distributed.process_groups import destroy_process_group, init_process_group
from torchshard.distributed.wire import Handle

__all__ = [
    "Handle", "ReduceOp", "all_gather", "all_gather_object", "all_gather_uneven", "all_reduce", "all_to_all",
    "barrier", "broadcast", "broadcast_object", "copy", "debug", "destroy_process_group", "gather", "gather_object",
    "gather_to", "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_size", "get_group",
    "get_group_size", "get_rank", "get_world_size", "hide_launcher", "init_process_group", "irecv",
    "is_initialized", "isend", "launch", "narrow", "ops", "recv", "reduce", "reduce_scatter", "reduce_to",
    "scatter", "scatter_from", "send",
]  # fmt: skip
