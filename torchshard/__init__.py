"""TorchShard: tensor parallelism for an ordinary PyTorch model, as a compiler you can read."""

from torchshard import distributed
from torchshard.check import check
from torchshard.layouts import I, P, R, S
from torchshard.planner.plan import Plan
from torchshard.rules import rule

__all__ = ["I", "P", "Plan", "R", "S", "check", "distributed", "rule"]
