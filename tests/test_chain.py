"""Concatenations that begin with the same pieces become a chain, with equal values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import capture

CAT = torch.ops.aten.cat.default


class Dense(nn.Module):
    """A dense block: each layer reads the results of all layers before it."""

    def __init__(self, layers: int, width: int = 6, growth: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width + i * growth, growth) for i in range(layers))
        self.head = nn.Linear(width + layers * growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, -1)).relu())
        return self.head(torch.cat(found, 1))


def _cats(model: nn.Module, *inputs: Tensor) -> list[list[str]]:
    graph = capture(model, inputs).graph.graph
    return [[n.name for n in node.args[0]] for node in graph.nodes if node.target is CAT]


def test_listing() -> None:
    assert _cats(Dense(3), torch.randn(4, 6)) == [["x"], ["x", "relu"], ["cat_1", "relu_1"], ["cat_2", "relu_2"]]


def test_others_stay() -> None:
    """Concatenations stay if they differ in dim or beginning, share only one piece, or repeat all pieces."""

    class Others(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return (
                torch.cat([x, y]),
                torch.cat([x, y, y], 1),
                torch.cat([y, x, y]),
                torch.cat([x, x]),
                torch.cat([x, y]),
            )

    x = torch.randn(4, 4)
    assert _cats(Others(), x, x) == [["x", "y"], ["x", "y", "y"], ["y", "x", "y"], ["x", "x"], ["x", "y"]]


@nightly("2", "4")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_dense_block_is_exact(world_size: int) -> None:
    ts.check(Dense(4), "auto", example_inputs=(torch.randn(4, 6),), mesh=world_size).raise_on_error()


@pytest.mark.nightly
def test_a_long_dense_block_is_planned_exactly() -> None:
    """If all later layers read each piece, the tables would be too large and the plan would report a gap."""
    with torch.device("meta"):
        model, x = Dense(24, 16, 8), torch.randn(4, 16)
    plan = ts.plan(model, example_inputs=(x,), mesh=2, objective={"memory": "1GiB", "machine": "cpu-gloo"})
    assert plan.costs.gap <= 1e-9
