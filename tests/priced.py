"""Models, in sizes at which predicted bytes and memory are compared with a real step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.helpers import holding
from tests.models import CASES, GPT, MLP, Attention, DenseMoE, EncoderDecoder
from torchshard.testing import CapturedCall, PlannedCall, capture

WAYS = ("replicate", "shard", "shard_grad_op")
MESHES: list[dict[str, str]] = [{"dp": way} for way in WAYS]
MESHES += [{"dp": way, "tp": ""} for way in WAYS]
MESHES += [{"dp": outer, "fs": inner, "tp": ""} for outer, inner in (("replicate", "shard"), ("shard", "replicate"))]
WIDTH = 96
Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Layer(nn.Module):
    """A decoder layer with cross attention."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Attention(WIDTH, 4), Attention(WIDTH, 4, causal=False)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.own(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), memory)
        return x + self.down(F.gelu(self.up(self.norms[2](x))))


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(_Layer() for _ in range(2)), nn.Linear(WIDTH, 50)

    def forward(self, x: Tensor, memory: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class _Mixed(nn.Module):
    """Experts stacked in one weight; each token gets a weighted sum of all experts."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        hidden = torch.einsum("btc,ech->bteh", h, self.up).relu()
        return x + torch.einsum("bteh,ehc,bte->btc", hidden, self.down, self.router(h).softmax(-1))


class _SoftMixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(_Mixed() for _ in range(2)), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH)) for _ in "abcd"
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.pow(2).mean()


class _Images(nn.Module):
    """Convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 100)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def _ids(*shape: int) -> Tensor:
    return torch.randint(1, 50, shape)


def _hugging_face(name: str, **more: Any) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**sizes, num_hidden_layers=2, **more)
    head = "ForImageClassification" if name == "ViT" else "ForCausalLM"
    return getattr(transformers, f"{name}{head}")(config)  # type: ignore[no-any-return]


PRICED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Call]]] = {
    "llama": (
        lambda: _hugging_face("Llama", num_key_value_heads=2, vocab_size=500, use_cache=False),
        lambda: ((), {"input_ids": _ids(8, 32), "labels": _ids(8, 32)}),
    ),
    "vit": (
        lambda: _hugging_face("ViT", image_size=32, patch_size=4, num_labels=50),
        lambda: ((), {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.arange(8)}),
    ),
    "gpt": (lambda: GPT(width=WIDTH, p=0.0), lambda: ((_ids(8, 16), _ids(8, 16)), {})),
    "encoder_decoder": (lambda: EncoderDecoder(width=180), lambda: ((_ids(8, 16), _ids(8, 12)), {})),
    "dense_moe": (lambda: DenseMoE(WIDTH, 256, 4), lambda: ((torch.randn(8, 32, WIDTH),), {})),
    "soft_mixture": (_SoftMixture, lambda: ((torch.randn(8, 16, WIDTH), torch.arange(8)), {})),
    "decoder": (_Decoder, lambda: ((torch.randn(8, 16, WIDTH), torch.randn(8, 12, WIDTH), _ids(8, 16)), {})),
    "residual": (_Residual, lambda: ((torch.randn(8, 16, WIDTH),), {})),
    "images": (_Images, lambda: ((torch.randn(8, 3, 16, 16), torch.arange(8)), {})),
    "mlp_wide": (lambda: MLP(WIDTH, 512, WIDTH), lambda: ((torch.randn(32, WIDTH),), {})),
}
"""Name -> a model, and a call with the full batch."""


def _built(name: str) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    if name in PRICED:
        build, call = PRICED[name]
        return build(), call()
    case = CASES[name]
    return case.build(), (tuple(torch.cat([x.detach()] * 4) for x in case.inputs()), {})


@cache
def _captured(name: str) -> CapturedCall:
    model, (args, kwargs) = _built(name)
    return capture(model, args, kwargs)


def priced(name: str, axes: Mapping[str, str]) -> PlannedCall:
    """Plans a model for two ranks along each axis; axes with a non-empty value in `axes` split the batch."""
    data = {axis: way for axis, way in axes.items() if way}
    mesh = dict.fromkeys(axes, 2)
    divides: Any = data if len(axes) > 1 else data["dp"]
    return _captured(name).plan("auto", holding(mesh, divides), objective={"machine": "cpu-gloo"})
