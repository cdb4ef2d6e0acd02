"""The listing, as people read it. `UPDATE_GOLDEN=1 pytest tests/test_explain.py` writes tests/golden anew."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torchshard as ts
from tests.golden import check_golden
from torchshard.explain import listing, value_text
from torchshard.program import Program, program


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _mlp() -> Program:
    return program(MLP(), {"up": "column", "down": "row"}, 2, (torch.randn(2, 8, 16),))


def test_listing_of_an_mlp() -> None:
    made = _mlp()
    check_golden("mlp_listing.txt", f"{made.plan}\n\n{listing(made.graph, sources=False)}\n")


def test_explain_is_the_plan_and_the_listing_with_sources() -> None:
    made = _mlp()
    told = ts.explain(made)
    assert told.startswith(f"{made.plan}\n\n") and told.endswith(listing(made.graph))
    collectives = [line for line in told.splitlines() if line.startswith("* ")]
    assert len(collectives) == 2 and all("test_explain.py:" in line for line in collectives)


def test_values() -> None:
    assert value_text(torch.empty(2, 3, dtype=torch.bfloat16)) == "bf16[2,3]"
    assert value_text(torch.tensor(True)) == "b8[]"
    assert value_text(None) == ""


def test_the_listing_of_one_module() -> None:
    lines = ts.explain(_mlp(), "up").splitlines()
    assert [line.split()[0].lstrip("*") or line.split()[1] for line in lines] == ["norm_copy", "up"]
