"""Predicted calls and bytes of a step on a mesh are those that the first rank's graphs send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import CASES
from torchshard.capture.facts import ModelFacts
from torchshard.checking import lockstep
from torchshard.checking.check import _trial
from torchshard.checking.exchanges import exchanged
from torchshard.compiler.batches import divided_batch
from torchshard.compiler.constraints import read_constraints
from torchshard.compiler.meshes import read_mesh
from torchshard.compiler.program import Program, program
from torchshard.distributed.kernels import Exchange
from torchshard.plans.machine import objective

WAYS = ("replicate", "shard", "shard_grad_op")
MESHES: list[dict[str, str]] = [{"dp": way} for way in WAYS]
MESHES += [{"dp": way, "tp": ""} for way in WAYS] + [{"dp": "replicate", "fs": "shard", "tp": ""}]
NAMES = ["mlp", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("attention", "fused_gqa", "conv_columns"))]


def _program(name: str, axes: Mapping[str, str]) -> tuple[Any, Program, tuple[Tensor, ...]]:
    """A model over two ranks along each axis, on a batch of four times its own."""
    case = CASES[name]
    torch.manual_seed(0)
    model, batch = case.build(), tuple(torch.cat([x.detach()] * 4) for x in case.inputs())
    data = {axis: way for axis, way in axes.items() if way}
    ranks = read_mesh(2 ** len(axes), dict.fromkeys(axes, 2), data if len(axes) > 1 else data["dp"])
    aim = objective("cpu-gloo", data=ranks.data)
    constraints = read_constraints(ModelFacts.of(model), "auto", ranks.axis, aim, ranks.divisions)
    layouts = divided_batch(model, batch, {}, constraints.batch_parts)
    return model, program(model, constraints, batch, batches=layouts), batch


def _sent(parts: Sequence[Exchange]) -> float:
    """The bytes that the first of some ranks sends by a ring."""
    (first, *others), nbytes = parts, parts[0].sent.nbytes
    if first.lengths is not None:
        return float(sum(first.lengths[1][1:]) * first.sent.itemsize)
    times = {"all_reduce": 2 / len(parts), "all_gather_single": 1.0, "reduce_scatter_single": 1 / len(parts)}
    return nbytes * len(others) * times[first.collective]


def _counted(model: Any, made: Program, batch: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bytes of each message of the first rank in a step."""
    graphs, found = lockstep.rank_graphs(made.graph, made.axis, made.batches), list[float]()
    firsts = {str(n.args[-1]) for n in graphs[0].graph.nodes if n.args and str(n.args[-1]).startswith("simulated")}
    run = lockstep._run_collective

    def watched(requests: Any, **how: Any) -> Any:
        def noted(parts: Sequence[Any]) -> list[Tensor]:
            if isinstance(parts[0], Exchange) and requests[0].args[-1] in firsts:
                found.append(_sent(parts))
            return exchanged(parts)

        with monkeypatch.context() as patch:
            patch.setattr(lockstep, "exchanged", noted)
            return run(requests, **how)

    with monkeypatch.context() as patch:
        patch.setattr(lockstep, "_run_collective", watched)
        assert _trial(model, made.captured, batch, {}).by_graphs(graphs, made) is not None
    return found


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_predicts_what_is_sent(name: str, axes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, batch = _program(name, axes)
    first, plans = made.priced(with_memory=False), list[Any]()
    while first is not None:
        plans.append(first)
        first = first.batch  # type: ignore[assignment]
    found = _counted(model, made, batch, monkeypatch)
    assert found
    assert sum(plan.costs.nbytes for plan in plans) == pytest.approx(sum(found))
    assert sum(sum(plan.costs.calls) for plan in plans) == len(found)
