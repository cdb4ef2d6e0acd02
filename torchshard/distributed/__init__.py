"""Groups, and the autograd-aware conversions between layouts, for graphs and for people."""

from torchshard.distributed import ops
from torchshard.distributed.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    copy,
    gather,
    narrow,
    reduce,
    reduce_scatter,
    scatter,
)
from torchshard.distributed.groups import (
    destroy_process_group,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_size,
    get_group,
    get_group_size,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)
from torchshard.distributed.kernels import Handle
from torchshard.distributed.launch import launch

__all__ = [
    "Handle", "all_gather", "all_reduce", "all_to_all", "copy", "destroy_process_group", "gather",
    "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_size", "get_group", "get_group_size",
    "get_rank", "get_world_size", "init_process_group", "is_initialized", "launch", "narrow", "ops", "reduce",
    "reduce_scatter", "scatter",
]  # fmt: skip
