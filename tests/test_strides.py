"""If strides decide a result, the unsharded model's strides count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import gradient_error, largest, run_ranks

aten = torch.ops.aten


class _Strided(torch.autograd.Function):
    """A function that depends on a stride of its operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.stride = x.stride(0)
        return x.clone() * x.stride(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.stride


@torch.library.custom_op("tests_strides::flat", mutates_args=())
def _flat(x: Tensor) -> Tensor:
    return x.clone() * x.stride(0)


@_flat.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_flat.register_autograd(
    lambda ctx, gradient: gradient * ctx.stride,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "stride", inputs[0].stride(0)),
)


def _heads(q: Tensor) -> Tensor:
    """Returns transposed heads: for one sample a view, with a first dim that isn't outermost in memory."""
    return q.view(1, q.shape[1], 4, 2).transpose(1, 2).reshape(4, -1, 2)


def _chunks(q: Tensor) -> Tensor:
    """Returns overlapping chunks, as in Longformer's sliding window."""
    h = _heads(q)
    return h.as_strided([4, 5, 4, 2], [h.stride(0), h.stride(1) * 2, h.stride(1), h.stride(2)])


HABITS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "chunks": lambda q, layer: _chunks(q),
    "strides typed in": lambda q, layer: _heads(q).as_strided([4, 5, 4, 2], [2, 16, 8, 1]),
    "an offset": lambda q, layer: torch.as_strided(q.transpose(1, 2), [3, 4], [2, 1], 3),
    "a part": lambda q, layer: q[:, 2:5].as_strided([3, 4], [8, 1]),
    "a copy": lambda q, layer: aten.as_strided_copy(q.transpose(1, 2), [3, 4], [2, 1]),
    "a weight": lambda q, layer: torch.as_strided(layer.weight.t(), [3, 3], [1, 2], 4) * q.sum(),
    "unfold": lambda q, layer: _heads(q).unfold(1, 4, 2),
    "is_contiguous": lambda q, layer: q * (2.0 if _heads(q).is_contiguous() else 3.0),
    "stride": lambda q, layer: q * float(_heads(q).stride(0)),
    "storage_offset": lambda q, layer: q * float(q[:, 1:].storage_offset()),
    "bits": lambda q, layer: q.transpose(1, 2).contiguous().view(torch.int64).to(q.dtype) * q.sum() * 1e-19,
    "complex": lambda q, layer: torch.view_as_real(torch.view_as_complex(q.view(1, -1, 4, 2))) * q.sum(),
    "a Function": lambda q, layer: _Strided.apply(_heads(q)),
    "transposed": lambda q, layer: _Strided.apply(q.transpose(1, 2)),
    "an op of a library": lambda q, layer: torch.ops.tests_strides.flat(_heads(q)),
}


class Model(nn.Module):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.q, self.o, self.habit = nn.Linear(8, 8), nn.Linear(8, 8), HABITS[habit]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q(x)
        return self.habit(q, self.q), self.o(q).sum()


def _model(habit: str) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(habit).double(), torch.randn(1, 12, 8).double()


def _errors(rank: int) -> dict[str, float]:
    """Returns each habit's largest error of a result or a gradient in two calls."""
    found = {}
    for habit in HABITS:
        model, x = _model(habit)
        sharded, errors = ts.shard(copy.deepcopy(model), {"q": "column"}, (x,)), [0.0]
        for _ in range(2):
            inputs, results = [], []
            for m in (model, sharded):
                m.zero_grad()
                inputs.append(x.clone().requires_grad_())
                results.append(m(inputs[-1]))
                sum(result.square().sum() for result in results[-1]).backward()
            errors += [(a - b).abs().max().item() for a, b in zip(*results, strict=True)]
            errors += [(inputs[0].grad - inputs[1].grad).abs().max().item(), gradient_error(sharded, model)]
        found[habit] = largest(*errors)
    return found


@pytest.mark.nightly
def test_what_strides_decide_is_decided_by_the_unsharded_strides() -> None:
    for found in run_ranks(_errors, 2):
        assert len(found) == len(HABITS) and largest(*found.values()) < 1e-10, found


@nightly("a weight-{'dp': (2, 'shard'), 'tp': 2}-4")
@pytest.mark.parametrize(
    ("habit", "mesh", "batch"),
    [("chunks", {"tp": 3}, 1), *((habit, {"dp": (2, "shard"), "tp": 2}, 4) for habit in ("a weight", "transposed"))],
    ids=str,
)
def test_the_check_agrees(habit: str, mesh: dict[str, Any], batch: int) -> None:
    model, x = _model(habit)
    ts.check(model, {"q": "column"}, (x.repeat(batch, 1, 1),), mesh=mesh).raise_on_error()


def test_memory_between_elements_is_refused() -> None:
    model, x = _model("a part")
    with pytest.raises(ts.CaptureError, match=r"between the elements of a tensor[\s\S]*x\.contiguous\(\)"):
        ts.plan(model, {}, example_inputs=(x.repeat(2, 1, 1),), mesh=2)
