"""Ordinary models, as users write them, each with a plan and example inputs, for the parity tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, width: int = 12, hidden: int = 20, classes: int = 5) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Attention(nn.Module):
    """Attention with separate q, k and v, and optionally fewer key-value heads than query heads."""

    def __init__(
        self, width: int, heads: int, kv_heads: int | None = None, *, causal: bool = True, p: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, width // heads
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, self.kv_heads * self.size) for _ in "kv")
        self.o = nn.Linear(width, width)
        self.causal, self.p = causal, p

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        (b, t, c), s = x.shape, source.shape[1]
        q = self.q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k = self.k(source).view(b, s, self.kv_heads, -1).transpose(1, 2)
        v = self.v(source).view(b, s, self.kv_heads, -1).transpose(1, 2)
        p = self.p if self.training else 0.0
        grouped = self.kv_heads != self.heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p, enable_gqa=grouped)
        return self.o(out.transpose(1, 2).reshape(b, t, c))


class FusedBySplit(nn.Module):
    """GPT-2's attention: one weight for q, k and v, cut by `split`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(self.width, dim=2))
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).contiguous().view(b, t, c))


class FusedByView(nn.Module):
    """timm's attention: one weight for q, k and v, cut by a view to (3, heads, size)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


class FusedPerHead(nn.Module):
    """GPT-NeoX's attention: one weight, with q, k and v interleaved per head, cut by `chunk`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


class FusedGQA(nn.Module):
    """Phi-3's block: one weight for q, k and v with fewer key-value heads, cut by slices; a fused gate and up."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        qkv, cut = self.qkv(x), self.heads * self.size
        q = qkv[..., :cut].view(b, t, self.heads, self.size).transpose(1, 2)
        k = qkv[..., cut : cut + self.kv_heads * self.size].view(b, t, self.kv_heads, self.size).transpose(1, 2)
        v = qkv[..., cut + self.kv_heads * self.size :].view(b, t, self.kv_heads, self.size).transpose(1, 2)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int | None = None, p: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = RMSNorm(width), Attention(width, heads, kv_heads, p=p), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(p))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A GPT with tied embeddings, dropout, causal attention without a mask, and its own loss."""

    def __init__(self, vocab: int = 97, width: int = 24, heads: int = 4, kv_heads: int = 2, p: float = 0.1) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, p) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=3)}


class ConvNet(nn.Module):
    """Convolutions, batch and group norm, and a classifier of 1,001 classes, which split unevenly on all ranks here."""

    def __init__(self, classes: int = 1001) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10)
        self.conv2, self.norm2 = nn.Conv2d(10, 12, 3, stride=2), nn.GroupNorm(4, 12)
        self.depthwise = nn.Conv2d(12, 12, 3, groups=12)
        self.fc = nn.Linear(12, classes)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(x, 2)
        x = self.depthwise(F.silu(self.norm2(self.conv2(x))))
        logits = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits, F.cross_entropy(logits, labels, label_smoothing=0.1)


@dataclass
class Seq2SeqOutput:
    logits: Tensor
    memory: Tensor
    loss: Tensor | None = None
    notes: dict[str, Any] = field(default_factory=dict)


class EncoderDecoder(nn.Module):
    """Cross attention, one embedding for both sides and the head, a padding mask, a dataclass as output."""

    def __init__(self, vocab: int = 50, width: int = 30, heads: int = 5) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width, padding_idx=0)
        self.encoder, self.norm1 = Attention(width, heads, causal=False), nn.LayerNorm(width)
        self.decoder, self.norm2 = Attention(width, heads), nn.LayerNorm(width)
        self.cross, self.norm3 = Attention(width, heads, causal=False), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 44), nn.Linear(44, width)

    def forward(self, source: Tensor, target: Tensor, *, with_loss: bool = True) -> Seq2SeqOutput:
        memory = self.tok(source)
        memory = memory + self.encoder(self.norm1(memory))
        memory = memory.masked_fill((source == 0)[..., None], 0.0)
        x = self.tok(target)
        x = x + self.decoder(self.norm2(x))
        x = x + self.cross(self.norm3(x), memory)
        x = x + self.down(torch.tanh(self.up(x)))
        logits = x @ self.tok.weight.t()
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.reshape(-1)) if with_loss else None
        return Seq2SeqOutput(logits, memory, loss, {"layers": 1})


class DenseMoE(nn.Module):
    """Every expert runs on every token; a top-2 mask selects the results that are added."""

    def __init__(self, width: int = 12, hidden: int = 14, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(MLP(width, hidden, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        kept = scores >= scores.topk(2, dim=-1).values[..., -1:]
        weights = scores.masked_fill(~kept, float("-inf")).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + weights[..., i, None] * expert(x)
        return out


class Writes(nn.Module):
    """In-place ops on values, on views and on a buffer."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.up(x)
        h[:, 1:] += 1.0
        h.view(-1, 4, 4).mul_(2.0)
        h.add_(h.detach().mean()).relu_()
        y = self.down(h)
        with torch.no_grad():
            self.mean.lerp_(y.mean((0, 1)), 0.1)
        return y + self.mean


@dataclass(frozen=True)
class Case:
    """A model with a plan and inputs."""

    build: Callable[[], nn.Module]
    plan: dict[str, Any]
    inputs: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)


def _x(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(*shape).requires_grad_(),)


def _ids(vocab: int, *shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(torch.randint(0, vocab, shape) for shape in shapes)


_ATTENTION = {"q": "column", "k": "column", "v": "column", "o": "row"}
_GPT = {
    "tok": "vocab",
    "head": "column",
    **{f"blocks.*.attn.{name}": style for name, style in _ATTENTION.items()},
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
}
_FUSED = {"qkv": "column", "o": "row"}


class Recurrent(nn.Module):
    """A recurrent translator: a bidirectional GRU encodes, an LSTM decodes with attention to the encoder's results."""

    def __init__(self, vocab: int = 40, width: int = 7) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(width, 2 * width, num_layers=2, dropout=0.2)
        self.head = nn.Linear(4 * width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.tok(source))
        start = torch.cat([last[0], last[1]], -1).expand(2, -1, -1)
        made, _ = self.decoder(self.tok(target).transpose(0, 1), (start, torch.zeros_like(start)))
        made = made.transpose(0, 1)
        looked = (made @ memory.transpose(1, 2)).softmax(-1) @ memory
        return self.head(torch.cat([made, looked], -1))


class Reversal(torch.autograd.Function):
    """The identity, with a negated gradient. Its calls are kept replicated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


CASES = {
    "mlp": Case(MLP, {"up": "column", "down": "row"}, _x(3, 12)),
    "mlp_uneven": Case(lambda: MLP(7, 9, 5), {"up": 1, "down": 0}, _x(2, 5, 7)),
    "mlp_two_columns": Case(MLP, {"up": "colwise", "down": "colwise_rep"}, _x(3, 12)),
    "attention": Case(lambda: Attention(24, 4), _ATTENTION, _x(2, 5, 24)),
    "attention_7_heads": Case(lambda: Attention(28, 7), _ATTENTION, _x(2, 5, 28)),
    "attention_dropout": Case(lambda: Attention(24, 6, 2, p=0.2), _ATTENTION, _x(2, 5, 24)),
    "gqa_1_kv_head": Case(lambda: Attention(24, 4, 1), _ATTENTION, _x(2, 5, 24)),
    "gqa_2_kv_heads": Case(lambda: Attention(24, 6, 2), _ATTENTION, _x(2, 5, 24)),
    "fused_by_split": Case(lambda: FusedBySplit(24, 4), _FUSED, _x(2, 5, 24)),
    "fused_by_split_7_heads": Case(lambda: FusedBySplit(28, 7), _FUSED, _x(2, 5, 28)),
    "fused_by_view": Case(lambda: FusedByView(24, 4), _FUSED, _x(2, 5, 24)),
    "fused_by_view_5_heads": Case(lambda: FusedByView(30, 5), _FUSED, _x(2, 5, 30)),
    "fused_per_head": Case(lambda: FusedPerHead(24, 3), _FUSED, _x(2, 5, 24)),
    "fused_gqa": Case(lambda: FusedGQA(24, 6, 2, 20), {**_FUSED, "gate_up": "column", "down": "row"}, _x(2, 5, 24)),
    "gpt": Case(GPT, _GPT, _ids(97, (2, 7), (2, 7))),
    "gpt_hidden_30": Case(lambda: GPT(97, 30, 5, 1), _GPT, _ids(97, (2, 7), (2, 7))),
    "gpt_vocab_unsplit": Case(GPT, {k: v for k, v in _GPT.items() if k not in ("tok", "head")}, _ids(97, (1, 6))),
    "conv": Case(
        ConvNet,
        {"conv1": "column", "conv2": "row", "depthwise": "column", "fc": "column"},
        lambda: (torch.randn(4, 3, 16, 16), torch.randint(0, 1001, (4,))),
    ),
    "conv_columns": Case(
        ConvNet, {"conv*": "column"}, lambda: (torch.randn(4, 3, 16, 16), torch.randint(0, 1001, (4,)))
    ),
    "encoder_decoder": Case(
        EncoderDecoder,
        {
            **{f"{m}.{k}": v for m in ("encoder", "decoder", "cross") for k, v in _ATTENTION.items()},
            "up": "column",
            "down": "row",
            "tok": "vocab",
        },
        _ids(50, (2, 6), (2, 4)),
    ),
    "dense_moe": Case(
        DenseMoE, {"experts.*.up": "column", "experts.*.down": "row"}, lambda: (torch.randn(2, 4, 12).requires_grad_(),)
    ),
    "recurrent": Case(Recurrent, {"encoder": "column", "decoder": "column", "tok": "vocab"}, _ids(40, (3, 6), (3, 4))),
    "writes": Case(Writes, {"up": "column", "down": "row"}, _x(2, 3, 12)),
}
