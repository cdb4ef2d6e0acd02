"""What modules hold, and where."""

from __future__ import annotations

from torch import Tensor, nn


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by all their names: tied ones have several."""
    return dict((
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ))  # fmt: skip


def storage_id(tensor: Tensor) -> int:
    """Identifies the memory of a strided tensor: only its views have the same id while one of them lives."""
    return int(tensor.untyped_storage()._cdata)
