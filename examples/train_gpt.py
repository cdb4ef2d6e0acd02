"""Trains a small GPT on the Python standard library's sources, whole and split over two ranks, on the same batches.

    python examples/train_gpt.py                            # starts its two ranks itself
    torchrun --nproc-per-node 2 examples/train_gpt.py

Every rank trains the unsharded model too, for comparison. The picture of the sharded graph is examples/out/gpt.svg.
"""

import os
import sysconfig
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts

CONTEXT, BATCH, WIDTH, LAYERS, DROPOUT = 64, 16, 96, 3, 0.05
PICTURE = Path(__file__).parent / "out" / "gpt.svg"

PLAN = {
    "tok": "vocab",
    "blocks.*.attn.[qkv]": "column",
    "blocks.*.attn.o": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "vocab",
}


class Attention(nn.Module):
    def __init__(self, n_head: int = 6, n_kv_head: int = 2) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, kv_width = n_head, n_kv_head, WIDTH // n_head * n_kv_head
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv_width), nn.Linear(WIDTH, kv_width)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q = self.q(x).view(B, T, self.n_head, -1).transpose(1, 2)
        k = self.k(x).view(B, T, self.n_kv_head, -1).transpose(1, 2)
        v = self.v(x).view(B, T, self.n_kv_head, -1).transpose(1, 2)
        p = DROPOUT if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.tok.weight
        for embedding in (self.tok, self.pos):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def plot(whole: list[float], split: list[float], width: int = 72, height: int = 14) -> str:
    top, bottom = max(whole + split), min(whole + split)
    rows = [[" "] * width for _ in range(height)]
    for sign, curve in (("o", whole), ("+", split)):
        for x in range(width):
            y = round((top - curve[x * (len(curve) - 1) // (width - 1)]) / (top - bottom or 1) * (height - 1))
            rows[y][x] = sign if rows[y][x] == " " else "*"
    marks = (f"{top - (top - bottom) * y / (height - 1):5.2f} | " for y in range(height))
    return "\n".join(mark + "".join(row) for mark, row in zip(marks, rows, strict=True)) + "\no whole, + split, * both"


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--steps", type=int, default=250)
    steps = parser.parse_args().steps
    ts.distributed.init_process_group()
    say = print if ts.distributed.get_rank() == 0 else lambda *_: None

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text("utf-8") for path in sources).encode("ascii", "ignore")
    data, generator = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(0)

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=generator)
        piece = data[starts + torch.arange(CONTEXT + 1)].long()
        return piece[:, :-1], piece[:, 1:]

    torch.manual_seed(0)
    whole = GPT()
    split = ts.shard(whole, PLAN, example_inputs=batch())
    say(ts.explain(split, "blocks.0"))
    PICTURE.parent.mkdir(exist_ok=True)
    ts.draw(split, PICTURE)

    runs = [(model, torch.optim.AdamW(model.parameters(), lr=3e-3), []) for model in (whole, split)]
    for step in range(steps):
        ids, targets = batch()
        for model, optimizer, losses in runs:
            torch.manual_seed(step)  # the same dropout for both
            loss = model(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            say(f"step {step:4}   whole {runs[0][2][-1]:.6f}   split {runs[1][2][-1]:.6f}")

    curves = [losses for _, _, losses in runs]
    worst = max(abs(a - b) for a, b in zip(*curves, strict=True))
    say(f"\n{plot(*curves)}\n\nlargest difference of the losses: {worst:.1e}\npicture: {PICTURE}")
    assert worst < 1e-3
    ts.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        ts.distributed.launch(main, 2)
