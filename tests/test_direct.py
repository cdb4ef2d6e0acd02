"""The last pass calls other functions than the graph's ops: they compute the same, in the code that runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import torchshard as ts
from tests.op_database import calls, operators
from torchshard.passes import direct
from torchshard.testing import run_ranks

aten = torch.ops.aten
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.uint8, torch.bool)
PARTS = 10
"""The database is compared in as many tests."""
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "shift": (aten.__rshift__.Scalar, (torch.tensor([[200, 7], [9, 255]], dtype=torch.uint8), 4)),
    "and": (aten.__and__.Scalar, (torch.tensor([200, 7]), 15)),
    "in place": (aten.__ilshift__.Scalar, (torch.tensor([1, 2]), 3)),
    "stft": (aten.stft.default, (torch.randn(32, dtype=torch.complex128), 8, None, None, None, True, False, True)),
    "a list": (aten.block_diag.default, ([torch.randn(2, 3), torch.randn(1, 2)],)),
    "tensordot": (aten.tensordot.default, (torch.randn(2, 3), torch.randn(3, 2), [1], [0])),
    "rsub": (aten.rsub.Scalar, (torch.tensor([1, 2]), 5)),
    "promoted": (aten.add.Tensor, (torch.tensor([1, 2]), torch.tensor(0.5))),
    "floor": (aten.div.Tensor_mode, (torch.tensor([-7, 7]), torch.tensor([2, 2]))),
}


def _both(function: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """What a function's graph computes, and the graph after its last pass."""
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*(t.clone() for t in tensors))
    found = []
    for module in (graph, direct(graph)):
        torch.manual_seed(0)
        found.append(module(*(t.clone() for t in tensors)))
    return found[0], found[1]


def _of_tensors(function: Callable[..., Any], call: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """A call as a function of its tensors, and these."""
    leaves, spec = pytree.tree_flatten(call)

    def of_tensors(*tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(left) if isinstance(x, Tensor) else x for x in leaves], spec)
        return [x for x in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]

    return of_tensors, [x for x in leaves if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_a_function_computes_what_its_op_computes(name: str) -> None:
    op, args = CALLS[name]
    kwargs = {"rounding_mode": "floor"} if name == "floor" else {}
    expected, found = _both(*_of_tensors(op, (args, kwargs)))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Packed(nn.Module):
    """Weights of four bits, two in a byte."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(0, 255, (8, 6), dtype=torch.uint8))
        self.up = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return h @ torch.cat([self.q >> 4, self.q & 15], 1).to(x.dtype).T


def _packed(rank: int) -> float:
    torch.manual_seed(0)
    model, x = Packed().double(), torch.randn(3, 4, dtype=torch.float64)
    sharded, expected = ts.shard(model, {"up": "column"}), model(x)
    with torch.no_grad():
        return max(float((sharded(x) - expected).abs().max()) for _ in range(2))


def test_packed_weights_on_real_ranks() -> None:
    assert max(run_ranks(_packed, 2)) < 1e-10


def _has_constants(graph: fx.GraphModule) -> bool:
    return bool(graph.graph.find_nodes(op="get_attr"))


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_pytorchs_operators(part: int) -> None:
    """Each op of PyTorch's database, with numbers of each kind."""
    compared, wrong = 0, []
    for op in operators(part, PARTS):
        for sample in itertools.chain(*(calls(op, dtype, 4, 3) for dtype in DTYPES)):
            of_tensors, tensors = _of_tensors(op.op, ((sample.input, *sample.args), sample.kwargs))
            try:
                graph = make_fx(of_tensors, tracing_mode="fake", pre_dispatch=True)(*(t.clone() for t in tensors))
                torch.manual_seed(0)
                expected = graph(*(t.clone() for t in tensors))
            except Exception:  # not an op that a graph can hold, for these arguments
                continue
            if _has_constants(graph):
                continue
            try:
                torch.manual_seed(0)
                found = direct(graph)(*(t.clone() for t in tensors))
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            except Exception as error:
                wrong.append(f"{op.name} {tensors[:1]}: {type(error).__name__}: {str(error)[:200]}")
            compared += 1
    assert compared > 1500 // PARTS and not wrong, (compared, wrong)
