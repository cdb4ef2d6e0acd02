"""Models without memory, and parts of a model that are added or removed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

import torchshard as ts
from tests.test_state import X, _pair

# --- models without memory -------------------------------------------------------------------------------------------


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 8)
        self.register_buffer("frequency", torch.arange(8) / 8, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x) * self.frequency
        return y


def _meta() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = _Rotary()
    with torch.device("meta"):
        empty = _Rotary()
    return model, ts.shard(empty, {"up": "column"})


def test_a_model_on_the_meta_device_does_not_compute() -> None:
    _, sharded = _meta()
    with pytest.raises(ts.InputError, match=r"3 parameters and buffers have no memory[\s\S]*up.weight, up.bias"):
        sharded(X)
    assert sharded(X.to("meta")).is_meta
    ts.distributed.destroy_process_group()


def test_memory_that_nobody_has_written_does_not_compute() -> None:
    model, sharded = _meta()
    sharded.to_empty(device="cpu")
    with pytest.raises(ts.InputError, match="3 parameters and buffers hold uninitialised memory"):
        sharded(X)
    sharded.load_full_state_dict(model.state_dict())
    with pytest.raises(ts.InputError, match=r"1 parameters and buffers hold uninit[\s\S]*frequency[\s\S]*copy_"):
        sharded(X)
    with torch.no_grad():
        sharded.frequency.copy_(torch.arange(8) / 8)
    assert torch.allclose(sharded(X), model(X))
    ts.distributed.destroy_process_group()


def test_memory_may_be_written_in_any_way() -> None:
    model, sharded = _meta()
    sharded.to_empty(device="cpu")
    sharded.up.weight.data = model.up.weight.data.clone()
    sharded.up.bias.data.copy_(model.up.bias)
    sharded.frequency = model.frequency.clone()
    assert torch.allclose(sharded(X), model(X))
    ts.distributed.destroy_process_group()


# --- parts that are added or removed ----------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], Any]] = {
    "del m.up": lambda m: delattr(m, "up"),
    "del m.up.weight": lambda m: delattr(m.up, "weight"),
    "_modules[]": lambda m: m._modules.__setitem__("up", nn.Linear(12, 20)),
    "_modules.pop": lambda m: m._modules.pop("up"),
    "_parameters[]": lambda m: m._parameters.__setitem__("new", nn.Parameter(torch.ones(2))),
    "add_module": lambda m: m.add_module("new", nn.Linear(2, 2)),
    "a new submodule": lambda m: setattr(m, "new", nn.Linear(2, 2)),
    "a new parameter": lambda m: setattr(m.up, "new", nn.Parameter(torch.ones(2))),
    "register_parameter": lambda m: m.register_parameter("new", nn.Parameter(torch.ones(2))),
    "register_buffer": lambda m: m.up.register_buffer("new", torch.ones(2)),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m.up),
    "prune": lambda m: nn.utils.prune.l1_unstructured(m.up, "weight", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_submodules_cannot_be_added_or_removed(change: str) -> None:
    model, sharded = _pair()
    with warnings.catch_warnings(), pytest.raises(ts.InputError, match="after sharding"):
        warnings.simplefilter("ignore")
        CHANGES[change](sharded)
    assert torch.allclose(sharded(X), model(X)) and set(sharded.state_dict()) == set(model.state_dict())
    ts.distributed.destroy_process_group()
