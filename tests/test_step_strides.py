"""Gradients in other memory orders, kernels that need contiguous memory, and ops that autograd records differently."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly


class _Turned(nn.Module):
    """PyTorch's fake gradient of this softplus has other strides than the real one, which can't be viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.rand(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.linear(x)).transpose(1, 2) * self.scale


def test_gradients_may_lie_in_memory_otherwise_than_recorded() -> None:
    torch.manual_seed(0)
    ts.check(_Turned(), {}, example_inputs=(torch.randn(3, 5, 6),), mesh=2).raise_on_error()


class _Image(nn.Module):
    """Attention leaves channels last in memory, and a convolution of a later layer keeps that order."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.out = nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 1)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return self.out(self.norm(self.layers[0](h).flatten(2)).transpose(1, 2)).square().mean()


def test_groups_are_normalized_wherever_they_lie() -> None:
    whole = {"mix": "replicate", "layers.*": "replicate"}
    ts.check(_Image(), whole, example_inputs=(torch.randn(2, 8, 4, 4),), mesh=2).raise_on_error()


@torch.library.custom_op("tests::read", mutates_args=(), schema="(Tensor x) -> Tensor")
def _read(x: Tensor) -> Tensor:
    """Reads memory as if it were contiguous, without a check of the strides, as some kernels do."""
    return torch.as_strided(x, x.shape, torch.empty_like(x, memory_format=torch.contiguous_format).stride()).clone()


_read.register_fake(lambda x: x.new_empty(x.shape))
_read.register_autograd(lambda ctx, grad: grad)


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(1, 2)


class _Kernel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.tests.read(x.contiguous())


def test_a_kernel_gets_contiguous_memory() -> None:
    """A layer's recording doesn't know the strides of values from other layers."""
    model = nn.Sequential(_Transposed(), _Kernel(), nn.Linear(4, 8))
    ts.check(model, {"*": "replicate"}, example_inputs=(torch.randn(2, 4, 8),), mesh=2).raise_on_error()


@nightly("bicubic")
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_what_pytorch_records_and_erases_again_hides_no_backward(mode: str) -> None:
    """If a segment ends with an upsampling, PyTorch erases the last nodes that it recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Upsample(scale_factor=2, mode=mode))
    x = torch.randn(2, 3, 6, 6)
    plan = ts.plan(model, {"0": "column"}, example_inputs=(x,), mesh=2)
    assert "\nbackward" in ts.explain(plan, level="step")
    ts.check(model, plan, example_inputs=(x,), mesh=2).raise_on_error()


def test_an_op_that_writes_what_its_gradient_is_of() -> None:
    """`rrelu` stores its noise in an operand, which is saved for the backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Linear(6, 6)).train()
    ts.check(model, {}, example_inputs=(torch.randn(3, 6),), mesh=2).raise_on_error()


class _Narrow(nn.Module):
    """A model that always passes float32 values between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        for layer in self.layers:
            x = x + layer(x.to(layer.weight.dtype)).tanh().float()
        return x


def test_a_graph_of_the_backward_is_widened_too() -> None:
    torch.manual_seed(0)
    ts.check(_Narrow(), {}, example_inputs=(torch.randn(3, 6),), mesh=2).raise_on_error()


class _Gated(nn.Module):
    """A model of layers that each split the result of a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            gate, up = layer(x).chunk(2, dim=-1)
            x = x + up * F.silu(gate)
        return x


def test_what_layers_split_is_kept_for_each() -> None:
    torch.manual_seed(0)
    model, x = _Gated().double(), torch.randn(3, 4, dtype=torch.float64)
    sharded = ts.shard(copy.deepcopy(model), {})
    model(x).square().sum().backward()
    for _ in range(2):  # under autograd, and by step graphs
        sharded.zero_grad()
        sharded(x).square().sum().backward()
        for p, own in zip(model.parameters(), sharded.parameters(), strict=True):
            assert torch.allclose(p.grad, own.grad, rtol=1e-12, atol=1e-14)
