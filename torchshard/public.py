"""What `import torchshard as ts` gives: everything that users call, in one place."""

from torchshard import distributed, nn
from torchshard.api import from_pretrained, meshes, plan, shard
from torchshard.checking.check import check
from torchshard.checking.report import Report
from torchshard.checkpoints.engines import engine_slices
from torchshard.checkpoints.exporting import save_pretrained
from torchshard.checkpoints.loading import load
from torchshard.checkpoints.saving import Saving, save
from torchshard.compiler.decode_example import DecodeStep
from torchshard.compiler.what_if import what_if
from torchshard.core.errors import (
    CaptureError,
    DistributedError,
    InputError,
    InternalError,
    PlanError,
    RuleError,
    ShardError,
    SliceWarning,
)
from torchshard.core.layouts import I, P, R, S
from torchshard.plans.exchange import diff
from torchshard.plans.machine import Machine
from torchshard.plans.machines import MACHINES
from torchshard.plans.objective import Objective
from torchshard.plans.plan import Plan
from torchshard.report.drawing import draw
from torchshard.report.explain import explain
from torchshard.report.network import network_of
from torchshard.rules import rule
from torchshard.runtime.measure import measure_machine
from torchshard.runtime.module import ShardedModule
from torchshard.runtime.optimizer_classes import register_optimizer
from torchshard.runtime.training import GradScaler, clip_grad_norm_
from torchshard.weights.recording import lazy

__all__ = [
    "CaptureError", "DecodeStep", "DistributedError", "GradScaler", "I", "InputError", "InternalError", "MACHINES",
    "Machine", "Objective", "P", "Plan", "PlanError", "R", "Report", "RuleError", "S", "Saving", "ShardError",
    "ShardedModule", "SliceWarning", "check", "clip_grad_norm_", "diff", "distributed", "draw", "engine_slices",
    "explain", "from_pretrained", "lazy", "load", "measure_machine", "meshes", "network_of", "nn", "plan",
    "register_optimizer", "rule", "save", "save_pretrained", "shard", "what_if",
]  # fmt: skip
