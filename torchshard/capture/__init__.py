"""Module and example inputs in, one flat ATen graph out."""

from torchshard.capture.flat import Captured, capture
from torchshard.capture.models import check_devices, check_weights, copied, hollow, hollow_tensor, shared_names
from torchshard.capture.signature import Leaves, flatten, flatten_call, memory_order

__all__ = [
    "Captured", "Leaves", "capture", "check_devices", "check_weights", "copied", "flatten", "flatten_call", "hollow",
    "hollow_tensor", "memory_order", "shared_names",
]  # fmt: skip
