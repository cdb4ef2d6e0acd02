"""Modes of a capture: train and eval, gradients, default dtypes; and checks of values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.test_capture import X, _exact, _Up


def test_modes_of_single_modules_are_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    model[1].eval()
    sharded = ts.shard(model, {"0": "column"})
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    for part, mode in ((None, None), (2, False), (1, True), (2, True), (1, False)):
        for m in (model, sharded):
            if part is not None:
                m[part].train(mode)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.allclose(sharded(x), expected), (part, mode)
    ts.distributed.destroy_process_group()


def _by_grad_mode(m: _Up, x: Tensor) -> Tensor:
    h = m.up(x)
    h = h * 2 if torch.is_grad_enabled() else h
    h = h + 1 if h.requires_grad else h
    return h * torch.full((8,), 3.0, dtype=None).to(h.dtype) + torch.is_inference_mode_enabled()


def test_each_grad_mode_gets_its_own_graph() -> None:
    torch.manual_seed(0)
    model = _Up(_by_grad_mode)
    sharded = ts.shard(model, {"up": "column"}, example_inputs=(X,))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            expected, got = model(X), sharded(X)
            assert torch.allclose(expected, got) and expected.requires_grad == got.requires_grad, mode
    ts.distributed.destroy_process_group()


def test_each_default_dtype_gets_its_own_graph() -> None:
    model = _Up(lambda m, x: torch.zeros(3) + m.up(x).sum())
    sharded = ts.shard(model, {}, example_inputs=(X,))
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            assert sharded(X).dtype == model(X).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)
    ts.distributed.destroy_process_group()


def _checked_by_pytorch(m: _Up, x: Tensor) -> Tensor:
    h = m.up(x)
    chosen = torch.distributions.Categorical(logits=h).log_prob(torch.zeros(len(x), dtype=torch.long))
    drawn = torch.distributions.Normal(h, nn.functional.softplus(h)).log_prob(h.detach())
    torch._assert((h < 1e9).all(), "too large")
    return nn.functional.gaussian_nll_loss(h, torch.zeros_like(h), nn.functional.softplus(h)) + chosen + drawn.sum(-1)


def _checked_by_the_user(m: _Up, x: Tensor) -> Tensor:
    h = m.up(x)
    with torch.no_grad():
        for limit in (1e8, 1e9):
            if (h < -limit).any() or (h > limit).any():
                raise ValueError(f"beyond {limit}, of {[limit for _ in range(2)]}")
    assert torch.isfinite(h).all(), "not finite"
    return h


@pytest.mark.parametrize("body", [_checked_by_pytorch, _checked_by_the_user])
def test_checks_of_values_that_only_raise_are_left_out(body: Callable[[_Up, Tensor], Tensor]) -> None:
    _exact(_Up(body), X, plan={"up": "column"})
