"""TorchShard: tensor parallelism for an ordinary PyTorch model, as a compiler you can read."""

from torchshard import distributed, nn
from torchshard.api import plan, shard
from torchshard.check import Report, check
from torchshard.draw import draw
from torchshard.errors import (
    CaptureError,
    DistributedError,
    InputError,
    InternalError,
    PlanError,
    RuleError,
    ShardError,
)
from torchshard.explain import explain
from torchshard.layouts import I, P, R, S
from torchshard.module import ShardedModule
from torchshard.planner.exchange import diff
from torchshard.planner.machine import MACHINES, Machine
from torchshard.planner.plan import Plan
from torchshard.rules import rule
from torchshard.training import GradScaler, clip_grad_norm_

__all__ = [
    "CaptureError", "DistributedError", "GradScaler", "I", "InputError", "InternalError", "MACHINES", "Machine", "P",
    "Plan", "PlanError", "R", "Report", "RuleError", "S", "ShardError", "ShardedModule", "check", "clip_grad_norm_",
    "diff", "distributed", "draw", "explain", "nn", "plan", "rule", "shard",
]  # fmt: skip
