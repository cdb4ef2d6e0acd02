"""The passes `direct`, `decompose` and `lower` replace ops and keep the results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import torchshard as ts
from tests import conversion_cases
from tests.golden import check_golden
from tests.helpers import nightly
from tests.op_database import calls, operators
from tests.test_decompose import BODIES, _Body
from torchshard.capture import capture
from torchshard.core.conversions import step_args
from torchshard.distributed.group import lookup
from torchshard.distributed.ops import direct as without_dispatcher
from torchshard.ir.graph import fake_mode
from torchshard.ir.listing import listing
from torchshard.passes import direct, lower, schedule, verify
from torchshard.passes.decompose import DECOMPOSITIONS, decompose
from torchshard.testing import run_ranks

aten = torch.ops.aten
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.uint8, torch.bool)
PARTS = 10
"""Number of tests that share the database."""
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
    """Returns the results of a function's graph, before and after the pass `direct`."""
    graph = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*(t.clone() for t in tensors))
    found = []
    for module in (graph, direct(graph)):
        torch.manual_seed(0)
        found.append(module(*(t.clone() for t in tensors)))
    return found[0], found[1]


def _of_tensors(function: Callable[..., Any], call: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """Returns a call as a function of its tensors, and the tensors."""
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
    """A model with weights of four bits, two per byte."""

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
    """Compares each op of PyTorch's database, in five dtypes."""
    compared, wrong = 0, []
    for op in operators(part, PARTS):
        for sample in itertools.chain(*(calls(op, dtype, 4, 3) for dtype in DTYPES)):
            of_tensors, tensors = _of_tensors(op.op, ((sample.input, *sample.args), sample.kwargs))
            try:
                graph = make_fx(of_tensors, tracing_mode="fake", pre_dispatch=True)(*(t.clone() for t in tensors))
                torch.manual_seed(0)
                expected = graph(*(t.clone() for t in tensors))
            except Exception:  # can't be traced with these arguments
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


# --- decompose --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_labels_behind_the_end_of_a_row_do_not_count(shape: tuple[int, ...], reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    order = torch.rand(shape, generator=generator).argsort(-1)
    labels = torch.where(torch.rand(shape, generator=generator) < 0.3, -1, order)
    expected = F.multilabel_margin_loss(x, labels, reduction=reduction)
    number = ["none", "mean", "sum"].index(reduction)
    found = DECOMPOSITIONS[torch.ops.aten.multilabel_margin_loss.default](x, labels, number)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_listing() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            first, second = torch.tensor_split(x, 2, dim=1)
            return F.kl_div(x, t, reduction="batchmean"), F.glu(first * second)

    graph = capture(Model(), (torch.randn(3, 8), torch.rand(3, 8)), dynamic=False).graph
    before = listing(graph, sources=False)
    assert decompose(graph)
    check_golden("decompose.txt", f"--- before\n{before}\n--- after\n{listing(graph, sources=False)}\n")
    assert not decompose(graph)


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_no_dynamic_size_is_decided(body: Callable[[Tensor], Tensor]) -> None:
    """Decompositions don't specialise on sizes: PyTorch may take a different branch for other sizes."""
    graph = capture(_Body(body), (torch.randn(4, 6),)).graph
    sizes = fake_mode(graph.graph).shape_env
    before = len(sizes.guards), dict(sizes.replacements)
    decompose(graph)
    assert (len(sizes.guards), dict(sizes.replacements)) == before


def test_what_depends_on_a_dynamic_size_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.trace(x)

    def steps(x: Tensor) -> Tensor:
        return x.diagonal().sum() if x.shape[0] < 5 else x.diagonal().cumsum(0)[-1]

    monkeypatch.setitem(DECOMPOSITIONS, torch.ops.aten.trace.default, steps)
    dynamic, static = (capture(Model(), (torch.randn(7, 6),), dynamic=d).graph for d in (True, False))
    assert decompose(static) and not decompose(dynamic)


def test_what_draws_random_numbers_stays() -> None:
    """The decomposed ops would draw random numbers in a different order."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.feature_alpha_dropout(x, 0.5, training=True)

    graph = capture(Model(), (torch.randn(3, 8, 4),)).graph
    assert not decompose(graph)


# --- collectives without PyTorch's dispatcher ------------------------------------------------------------------------


def _direct_conversions(rank: int) -> list[str]:
    ts.distributed.init_process_group()
    ops = torch.ops.torchshard
    wrong, done = conversion_cases.conversions(rank, lambda name: without_dispatcher(getattr(ops, name).default))
    return wrong if done else ["nothing has run"]


@nightly("2", "4")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_functions_of_collectives_compute_what_the_layouts_say(world: int) -> None:
    assert run_ranks(_direct_conversions, world) == [[]] * world


# --- lower ------------------------------------------------------------------------------------------------------------


def _lowered_conversions(rank: int) -> list[str]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    group, wrong = lookup("model"), []
    for name, source, target, shape in conversion_cases.cases():
        x = conversion_cases.spread(source, shape, group.size)[rank]
        op, args = getattr(torch.ops.torchshard, name).default, (*step_args(source, target, shape), group.name)
        module = fx.GraphModule(nn.Module(), fx.Graph())
        expected, mode = op(x, *args), FakeTensorMode()
        operand, result = mode.from_tensor(x), mode.from_tensor(expected)
        taken = module.graph.placeholder("x")
        taken.meta = {"val": operand, "kind": "input", "path": "x"}
        node = module.graph.call_function(op, (taken, *args))
        node.meta = {"val": result}
        module.graph.output((node,))
        schedule(module)
        lower(module)
        verify(module, "lowered", after="lower")
        module.recompile()
        if not torch.equal(module(x)[0], expected):
            wrong.append(f"{name} {source} -> {target} of {shape}")
    return wrong


@nightly("3")
@pytest.mark.parametrize("world", [2, 3])
def test_lowered_collectives_compute_what_their_operators_do(world: int) -> None:
    assert run_ranks(_lowered_conversions, world) == [[]] * world
