"""Autocast and `no_grad`, around the call, inside the model and nested, compared with eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from tests.models import CASES
from torchshard.testing import capture, largest, run_ranks

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def _autocast(enabled: bool = True, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


class _Layers(nn.Module):
    """Some layers, called by the function `body`."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(16)
        self.attention, self.conv = nn.MultiheadAttention(16, 2), nn.Conv1d(16, 16, 3, padding=1)
        self.lstm, self.gru, self.cell, self.batch = (
            nn.LSTM(16, 16),
            nn.GRU(16, 16),
            nn.LSTMCell(16, 16),
            nn.BatchNorm1d(16),
        )
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _within(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    with _autocast():
        return m.down(F.gelu(m.norm(h)))


def _off(m: Any, x: Tensor) -> Tensor:
    """Switches autocast off, like the rotary positions of Hugging Face's models."""
    h = m.up(x)
    with _autocast(enabled=False):
        return m.down(h.float())


def _no_grad_inside(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        h = m.up(x)
        with torch.no_grad():
            h = h + 2 * m.up(x)
        return m.down(h.relu())


def _no_grad_inside_off(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    with _autocast(enabled=False):
        with torch.no_grad():
            h = h + m.up(x)
            with torch.enable_grad():
                h = h + m.up(x)
    return m.down(h.float())


def _off_inside_no_grad(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    with torch.no_grad(), _autocast(enabled=False):
        table = m.up(x).float()
    return m.down(h * table.to(h.dtype))


def _products(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        h = torch.einsum("bi,oi->bo", x, m.up.weight)
        h = torch.addmm(h, h, m.attention.out_proj.weight).add_(1).mul_(0.5)
        return F.softmax(h @ m.down.weight.T, -1) * 2


def _attention(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        h = m.up(x)[None]
        return m.down(m.attention(h, h, h, need_weights=False)[0][0])


def _biased_attention(m: Any, x: Tensor) -> Tensor:
    """A bias that needs a gradient, as in T5: PyTorch casts to float32 by itself and computes in it."""
    with _autocast():
        h = m.up(x).view(1, 4, 2, 8).transpose(1, 2)
        bias = m.up.weight[:4, :4].expand(1, 2, 4, 4)
        return m.down(F.scaled_dot_product_attention(h, h, h, attn_mask=bias).transpose(1, 2).reshape(4, 16))


def _convolution(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        return m.down(m.batch(m.conv(m.up(x).T[None])[0].T))


def _lstm(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        return m.down(m.lstm(m.up(x)[None])[0][0])


def _gru(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        return m.down(m.gru(m.up(x)[None])[0][0])


def _cell(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        return m.down(m.cell(m.up(x))[0])


def _losses(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        h = m.down(m.up(x))
        entropy = F.cross_entropy(h, torch.arange(4)) + F.binary_cross_entropy_with_logits(h, x.sigmoid())
        return entropy + F.mse_loss(h, x) + F.smooth_l1_loss(h, x)


def _widest(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        return torch.cat([m.down(m.up(x)), x], -1)


def _again(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        for _ in range(3):
            x = m.down(m.up(x))
        return x


class _Triple(torch.autograd.Function):
    """A Function that shows by its result's dtype and its gradient whether it was called in autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 3 if torch.is_autocast_enabled("cpu") else 5
        return (x @ torch.ones(16, 16, dtype=x.dtype)).float() if ctx.factor == 3 else x * 5

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.factor


def _function(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        return m.down(_Triple.apply(m.up(x)))


def _dropout(m: Any, x: Tensor) -> Tensor:
    with _autocast():
        h = F.dropout(m.up(x), 0.3)
        return F.cosine_similarity(h, h.roll(1, 0), dim=-1) + torch.cdist(h, h).sum(-1) + m.down(h).sum(-1)


BODIES = [
    _within, _off, _no_grad_inside, _no_grad_inside_off, _off_inside_no_grad, _products, _attention, _biased_attention,
    _convolution, _lstm, _gru, _cell, _losses, _widest, _again, _function, _dropout,
]  # fmt: skip


@nightly(but=["_off-*"])
@pytest.mark.parametrize("around", [False, True], ids=["", "around"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_blocks_in_a_model(body: Callable[[Any, Tensor], Tensor], around: bool) -> None:
    """Compares in bfloat16 with eager PyTorch, and widened with the captured graph."""
    model = _Layers(body)
    with _autocast(enabled=around):
        report = ts.check(model, "auto", example_inputs=(X,), mesh=2, dtype=None).raise_on_error()
        expected = model(X).dtype
        captured = capture(model, (X,)).graph
    (result,) = captured.graph.output_node().args[0]
    assert result.meta["val"].dtype == expected
    assert report.widened is not None or torch.bfloat16 not in {n.meta["val"].dtype for n in captured.graph.nodes}


@pytest.mark.parametrize("around", [False, True], ids=["", "around"])
def test_listing(around: bool) -> None:
    """Casts are nodes: one per op for activations, one in all for a parameter, however many ops use it."""
    with _autocast(enabled=around):
        graph = capture(_Layers(_again), (X,)).graph.graph
    casts = [n.args[0].name for n in graph.nodes if n.target is torch.ops.aten.to.dtype]
    assert casts == ["x", "up_weight", "up_bias", "down_weight", "down_bias"]
    assert {str(n.target) for n in graph.nodes if n.op == "call_function"} == {
        "aten.to.dtype", "aten.linear.default", "aten.add.Tensor"
    }  # fmt: skip
    assert not any("autocast" in n.meta for n in graph.nodes)


def test_a_block_that_is_off_computes_in_float32_within_a_call_in_autocast() -> None:
    model = _Layers(_off)
    sharded = ts.shard(model, "auto", example_inputs=(X,))
    with _autocast():
        expected, got = model(X), sharded(X)
    assert got.dtype == expected.dtype == torch.float32 and torch.allclose(got, expected, atol=0.05)
    for result in (expected, got):
        assert not torch.equal(result, result.bfloat16().float())
    ts.distributed.destroy_process_group()


@pytest.mark.parametrize("style, dims", [("column", (0, 0)), ("row", (1, None)), ("replicate", (None, None))])
def test_pins_reach_through_casts(style: str, dims: tuple[int | None, ...]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    with _autocast():
        plan = ts.plan(model, {"0": style}, example_inputs=(X,), mesh=2)
    found = tuple(getattr(plan.parameters[name], "dim", None) for name in ("0.weight", "0.bias"))
    assert found == dims


def _training(rank: int) -> list[float]:
    """The relative differences of sharded from unsharded losses in a few steps, with autocast around the forward."""
    case, differences = CASES["gpt"], []
    torch.manual_seed(0)
    model = case.build()
    sharded = ts.shard(model, "auto", example_inputs=case.inputs())
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, sharded)]
    for _ in range(3):
        losses = []
        for m, optimizer in zip((model, sharded), steps, strict=True):
            torch.manual_seed(1)
            with _autocast():
                loss = sum(v.float().square().mean() for v in m(*case.inputs()).values() if v.is_floating_point())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        differences.append(abs(losses[0] - losses[1]) / abs(losses[0]))
    return differences


@pytest.mark.nightly
def test_training_in_autocast() -> None:
    for differences in run_ranks(_training, 2):
        assert largest(*differences) < 5e-2, differences


@pytest.mark.nightly
def test_a_call_under_autocast_gets_its_own_graph() -> None:
    torch.manual_seed(0)
    case = CASES["gpt"]
    model, inputs = case.build().eval(), case.inputs()
    sharded = ts.shard(model, case.plan, example_inputs=inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = model(*inputs), sharded(*inputs)
    assert expected["logits"].dtype == got["logits"].dtype
    rounding = 8 * torch.finfo(torch.bfloat16).eps * expected["logits"].abs().max()
    assert (expected["logits"] - got["logits"]).abs().max() < rounding
    assert not torch.equal(got["logits"].float(), sharded(*inputs)["logits"])
    ts.distributed.destroy_process_group()


@pytest.mark.parametrize("plan", [{}, {"0": "column", "2": "row"}], ids=str)
def test_autocast_gives_the_same_dtype(plan: dict[str, str]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)), torch.randn(3, 6)
    sharded = ts.shard(model, plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = model(x), sharded(x)
    assert got.dtype == expected.dtype == torch.bfloat16 and torch.allclose(got, expected, atol=0.05)
    ts.distributed.destroy_process_group()
