"""What `ts.check` says of the tests' models, and of small ones of single ops, in each floating dtype: all are exact.

`benchmarks/mutants.py --check` runs it in a library that has been made wrong: a fault that float64 sees must be seen in
every dtype.

    python benchmarks/checked.py
    python benchmarks/checked.py --models gpt conv --ranks 2
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from torchshard.capture import flatten
from torchshard.checking.check import in_dtype

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.models import CASES, Case

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COLUMN, MEGATRON = {"up": "column"}, {"up": "column", "down": "row"}
Body = Callable[[Any, Tensor], Any]


class _Model(nn.Module):
    """Two linears, whatever else a body wants, and the body."""

    def __init__(self, body: Body, hidden: int, **parts: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(12, hidden), nn.Linear(hidden, 12), body
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def _in_autocast(m: Any, x: Tensor) -> Tensor:
    """Computes in bfloat16 whatever the model's dtype is."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x.float(), m.up.weight.float())


def _in_no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.up(x).std()
    return m.up(x) * scale


def _unused_norm(m: Any, x: Tensor) -> Tensor:
    m.norm(m.up(x))
    return m.down(m.up(x))


def _older_view(m: Any, x: Tensor) -> Tensor:
    h = m.up(x)
    older = h[:, 1:]
    h.mul_(2.0)
    y: Tensor = older + h[:, :-1]
    return y


def _masked(m: Any, x: Tensor) -> Tensor:
    """A mask that is computed: each position sees itself and what comes behind."""
    q, i = m.up(x).unflatten(-1, (4, 5)).transpose(1, 2), torch.arange(x.shape[1])
    return F.scaled_dot_product_attention(q, q, q, (i >= i[:, None]).expand(len(x), 1, -1, -1))


def _model(
    body: Body,
    *shape: int,
    plan: Any = COLUMN,
    hidden: int = 20,
    **parts: Callable[[], nn.Module],
) -> Case:
    def build() -> nn.Module:
        return _Model(body, hidden, **{name: part() for name, part in parts.items()})

    return Case(build, plan, lambda: (torch.randn(*shape or (6, 12)).requires_grad_(),))


MODELS: dict[str, Case] = CASES | {
    "gathered_parts": Case(CASES["fused_by_split"].build, {"qkv": "column"}, CASES["fused_by_split"].inputs),
    "mean": _model(lambda m, x: m.up(x).mean(-1), 2048, 12, hidden=500),
    "mean_of_the_batch": _model(lambda m, x: m.up(x).square().mean(), 2048, 12, hidden=500),
    "norm": _model(lambda m, x: m.up(x).norm(dim=-1)),
    "variance": _model(lambda m, x: m.up(x).var(-1)),
    "largest": _model(lambda m, x: (m.up(x) * 0 + x.sum(-1, keepdim=True)).amax(-1), 2048, 12, hidden=500),
    "softmax": _model(lambda m, x: m.down(m.up(x * 20).softmax(-1)), 2048, 12, hidden=500, plan=MEGATRON),
    "layer_norm": _model(lambda m, x: m.down(F.layer_norm(m.up(x), (500,))), 2048, 12, hidden=500, plan=MEGATRON),
    "triangle": _model(lambda m, x: m.up(x).tril()),
    "reshaped": _model(lambda m, x: x.new_ones(3, 16) @ m.up.weight.reshape(16, 15), plan="auto"),
    "residual": _model(
        lambda m, x: x + F.linear(m.up(x), m.down.weight) + F.linear(m.up(-x), m.down.weight), plan=MEGATRON
    ),
    "product": _model(
        lambda m, x: F.linear(m.up(x), m.down.weight).T @ F.linear(m.up(-x), m.down.weight), 512, 12, plan=MEGATRON
    ),
    "truncated": _model(lambda m, x: m.up(x * 20).int().to(x.dtype) * m.up(x)),
    "bias_apart": _model(lambda m, x: F.linear(m.up(x), m.down.weight) + m.down.bias),
    "dropout": _model(lambda m, x: F.dropout(m.up(x))),
    "dropout_of_channels": _model(lambda m, x: F.dropout2d(m.up(x).view(1, 6, 5, 4).transpose(1, 2), 0.5)),
    "dropout_channels_last": _model(
        lambda m, x: F.dropout(m.conv(x).to(memory_format=torch.channels_last)),
        *(2, 3, 6, 6),
        plan={"conv": "column"},
        conv=lambda: nn.Conv2d(3, 8, 3),
    ),
    "queries": _model(
        lambda m, x: m.down.weight @ F.scaled_dot_product_attention(m.up.weight, x, x, is_causal=True),
        *(500, 12),
        plan="auto",
        hidden=500,
    ),
    "masked": _model(_masked, 2, 5, 12),
    "multihead": _model(
        lambda m, x: m.attention(x, x, x)[0], 5, 2, 12, attention=lambda: nn.MultiheadAttention(12, 4, 0.3), plan="auto"
    ),
    "ignored_rows": _model(
        lambda m, x: F.cross_entropy(m.up.weight, x.detach().long() % 12, ignore_index=0), 20, plan="auto"
    ),
    "autocast": _model(_in_autocast),
    "no_grad": _model(_in_no_grad),
    "unused_norm": _model(_unused_norm, norm=lambda: nn.BatchNorm1d(20)),
    "two_layouts": _model(
        lambda m, x: m.up(x).sum() + m.side(x).sum(), plan=COLUMN | {"side": "row"}, side=lambda: nn.Linear(12, 7)
    ),
    "two_steps": _model(lambda m, x: (lambda h: (h, m.up(h)))(F.linear(m.up(x), m.down.weight)), plan=MEGATRON),
    "padding": _model(
        lambda m, x: m.tok(torch.arange(12)), plan={"tok": "vocab"}, tok=lambda: nn.Embedding(12, 8, padding_idx=1)
    ),
    "ignored_labels": _model(
        lambda m, x: F.cross_entropy(m.up(x), x[:, 0].detach().long().clamp(-1, 1), ignore_index=-1),
        2048,
        12,
        hidden=500,
    ),
    "an_older_view": _model(_older_view),
    "frozen": _model(lambda m, x: m.frozen(m.up(x)), frozen=lambda: nn.Linear(20, 3).requires_grad_(False)),
}
"""The tests' models, and models of the ops that these have not."""


def verdict(case: Any, dtype: torch.dtype, world_size: int) -> str:
    """'exact', 'wrong' or 'raised'."""
    torch.manual_seed(0)
    model, args, kwargs = in_dtype(case.build(), flatten(case.inputs()).tensors, case.kwargs, dtype)
    try:
        report = ts.check(model, case.plan, example_inputs=args, example_kwargs=kwargs, mesh=world_size, dtype=None)
    except Exception as error:
        return f"raised {type(error).__name__}"
    return "exact" if report.ok else f"wrong {report.worst.kind} {report.worst.name} {report.worst.error:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    given = parser.parse_args()
    torch.set_num_threads(1)
    seen = Counter[str]()
    for name in given.models:
        for world_size in given.ranks:
            found = {str(dtype).removeprefix("torch."): verdict(MODELS[name], dtype, world_size) for dtype in DTYPES}
            seen.update(dtype for dtype, text in found.items() if text != "exact")
            print(f"{name:24} {world_size} ranks  " + "  ".join(f"{d} {text}" for d, text in found.items()), flush=True)
    print(f"not exact: {dict(seen)}")
    sys.exit(bool(seen))


if __name__ == "__main__":
    main()
