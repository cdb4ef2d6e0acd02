"""Captures a module, called on example inputs, as one flat graph of ATen ops."""

from torchshard.capture.flat import Captured, capture
from torchshard.capture.models import (
    check_devices,
    check_strided,
    check_weights,
    copy_model,
    model_without_storage,
    refuse_transforms,
    shared_names,
    without_storage,
)
from torchshard.capture.rehearsal import ModelCall, refuse_state_between
from torchshard.capture.signature import Leaves, flatten, flatten_call, memory_order
from torchshard.capture.watch import Watch, global_hooks

__all__ = [
    "Captured", "Leaves", "ModelCall", "Watch", "capture", "check_devices", "check_strided", "check_weights",
    "copy_model", "flatten", "flatten_call", "global_hooks", "memory_order", "model_without_storage",
    "refuse_state_between", "refuse_transforms", "shared_names", "without_storage",
]  # fmt: skip
