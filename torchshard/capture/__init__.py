"""Module and example inputs in, one flat ATen graph out."""

from torchshard.capture.flat import Captured, capture
from torchshard.capture.models import (
    check_devices,
    check_kinds,
    check_weights,
    copied,
    hollow,
    hollow_tensor,
    refuse_transforms,
    shared_names,
)
from torchshard.capture.rehearsal import Visit, refuse_between
from torchshard.capture.signature import Leaves, flatten, flatten_call, memory_order
from torchshard.capture.visible import Watch, global_hooks

__all__ = [
    "Captured", "Leaves", "Visit", "Watch", "capture", "check_devices", "check_kinds", "check_weights", "copied",
    "flatten", "flatten_call", "global_hooks", "hollow", "hollow_tensor", "memory_order", "refuse_between",
    "refuse_transforms", "shared_names",
]  # fmt: skip
