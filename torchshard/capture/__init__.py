"""Module and example inputs in, one flat ATen graph out."""

from torchshard.capture.flat import Captured, capture
from torchshard.capture.models import check_devices, copied, hollow, hollow_tensor, shared_names
from torchshard.capture.signature import Leaves, flatten, flatten_call

__all__ = [
    "Captured", "Leaves", "capture", "check_devices", "copied", "flatten", "flatten_call", "hollow", "hollow_tensor",
    "shared_names",
]  # fmt: skip
