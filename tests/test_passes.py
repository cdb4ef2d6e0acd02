"""Each pass before and after, as listings; `UPDATE_GOLDEN=1 pytest tests/test_passes.py` writes tests/golden anew."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.golden import check_golden
from torchshard.capture import capture
from torchshard.distributed.groups import simulated_name
from torchshard.distributed.ops import OPS
from torchshard.explain import listing
from torchshard.graph import duplicate, mark_needs_grad
from torchshard.passes import annotate, insert, localized, normalize, simplify, verify
from torchshard.planner.search import pinned_options, problem, search
from torchshard.planner.styles import check_matches, pins_of

WORLD = 2
PLAN = {"tok": "vocab", "q": "column", "k": "column", "o": "row"}


class Model(nn.Module):
    """Three heads on two ranks, an embedding split over its vocabulary, an in-place write, a cast that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.q, self.k, self.o = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids).float()
        q = self.q(x).view(*ids.shape, 3, -1)
        k = self.k(x)[:, :].view(*ids.shape, 3, -1)
        h = F.gelu(q * k).flatten(2)
        h.mul_(2.0)
        return x + self.o(h)


def _stages() -> dict[str, fx.GraphModule]:
    model = Model()
    graph = capture(model, (torch.zeros(2, 5, dtype=torch.long),)).graph
    stages = {"captured": duplicate(graph)}
    assert normalize(graph)
    mark_needs_grad(graph, [name for name, _ in model.named_parameters()])
    stages["normalized"] = duplicate(graph)
    made = problem(graph.graph, WORLD)
    pins = pins_of(graph.graph, check_matches(PLAN, [name for name, _ in model.named_modules()]))
    plan = search(made, pinned_options(made, pins))
    graph.meta["world_size"] = WORLD
    for name, changed, stage in (
        ("annotated", lambda: annotate(graph, plan), "annotated"),
        ("inserted", lambda: insert(graph), "inserted"),
        ("simplified", lambda: simplify(graph), "inserted"),
    ):
        assert changed(), name
        verify(graph, stage, after=name)
        stages[name] = duplicate(graph)
    for rank in range(WORLD):
        stages[f"localized_{rank}"] = localized(graph, rank, WORLD, simulated_name(rank, WORLD))
    return stages


def test_every_pass_has_its_listing() -> None:
    stages = _stages()
    text = "\n".join(f"--- {name}\n{listing(graph, sources=False)}\n" for name, graph in stages.items())
    check_golden("passes.txt", text)


def test_normalize_and_simplify_do_nothing_the_second_time() -> None:
    stages = _stages()
    assert not normalize(stages["normalized"])
    assert not simplify(stages["simplified"])


def test_sibling_copies_are_one() -> None:
    stages = _stages()
    kinds = {
        name: [OPS[n.target].name for n in graph.graph.nodes if n.target in OPS]
        for name, graph in stages.items()
        if name in ("inserted", "simplified")
    }
    assert kinds["inserted"].count("copy") == 2 and kinds["simplified"].count("copy") == 1
    assert kinds["simplified"].count("reduce") == 2


def test_pairs_fuse() -> None:
    from torchshard.layouts import I, P, R, S

    parts = [6, 1]
    ops = torch.ops.torchshard
    cases = [
        ((ops.reduce, ()), (ops.scatter, (1, parts)), (P, I, S(1)), "reduce_scatter"),
        ((ops.reduce, ()), (ops.copy, ()), (P, I, R), "all_reduce"),
        ((ops.gather, (1, parts)), (ops.copy, ()), (S(1), I, R), "all_gather"),
        ((ops.copy, ()), (ops.narrow, (1, parts)), (I, R, S(1)), "scatter"),
        ((ops.scatter, (1, parts)), (ops.gather, (1, parts)), (I, S(1), I), None),
    ]
    for first, second, layouts, expected in cases:
        graph = fx.Graph()
        value = graph.placeholder("x")
        value.meta = {"layouts": layouts[:1], "kind": "input", "path": "x"}
        for (op, args), layout, source in zip((first, second), layouts[1:], layouts, strict=False):
            value = graph.call_function(op.default, (value, *args, "model"))
            value.meta = {"layouts": (layout,), "note": f"{source} -> {layout}, for y"}
        graph.output((value,))
        module = fx.GraphModule(nn.Module(), graph)
        assert simplify(module)
        left = [OPS[n.target].name for n in module.graph.nodes if n.target in OPS]
        assert left == ([expected] if expected else [])
