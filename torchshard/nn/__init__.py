"""Layers for models that are split by hand, without `torchshard.shard`."""

from torchshard.nn import functional
from torchshard.nn.modules import ParallelCrossEntropyLoss, ParallelEmbedding, ParallelLinear
from torchshard.nn.state import full_state_dict, load_full_state_dict

__all__ = [
    "ParallelCrossEntropyLoss", "ParallelEmbedding", "ParallelLinear", "full_state_dict", "functional",
    "load_full_state_dict",
]  # fmt: skip
