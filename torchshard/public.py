"""What `import torchshard as ts` gives: everything that users call, in one place."""

from torchshard import distributed, nn
from torchshard.api import plan, shard
from torchshard.checking import Report, check
from torchshard.drawing import draw
from torchshard.errors import (
    CaptureError,
    DistributedError,
    InputError,
    InternalError,
    PlanError,
    RuleError,
    ShardError,
    SliceWarning,
)
from torchshard.explaining import explain
from torchshard.layouts import I, P, R, S
from torchshard.measure import measure_machine
from torchshard.module import ShardedModule
from torchshard.planner.exchange import diff
from torchshard.planner.machine import MACHINES, Machine
from torchshard.planner.plan import Plan
from torchshard.rules import rule
from torchshard.training import GradScaler, clip_grad_norm_

__all__ = [
    "CaptureError", "DistributedError", "GradScaler", "I", "InputError", "InternalError", "MACHINES", "Machine", "P",
    "Plan", "PlanError", "R", "Report", "RuleError", "S", "ShardError", "ShardedModule", "SliceWarning", "check",
    "clip_grad_norm_", "diff", "distributed", "draw", "explain", "measure_machine", "nn", "plan", "rule", "shard",
]  # fmt: skip
