"""Predicted calls and bytes of a step on a mesh are those that the first rank's graphs send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from tests.helpers import nightly
from tests.priced import MESHES, PRICED, Call, priced
from torchshard.checking import lockstep
from torchshard.checking.check import _trial
from torchshard.checking.exchanges import exchanged
from torchshard.compiler.program import Program
from torchshard.custom_ops.stepwise import Stepwise
from torchshard.distributed.kernels import Exchange

NAMES = ["mlp", *(pytest.param(name, marks=pytest.mark.nightly) for name in (*PRICED, "fused_gqa", "conv_columns"))]


def _sent(parts: Sequence[Exchange]) -> float:
    """The bytes that the first of some ranks sends by a ring."""
    (first, *others), nbytes = parts, parts[0].sent.nbytes
    if first.lengths is not None:
        return float(sum(first.lengths[1][1:]) * first.sent.itemsize)
    times = {"all_reduce": 2 / len(parts), "all_gather_single": 1.0, "reduce_scatter_single": 1 / len(parts)}
    return nbytes * len(others) * times[first.collective]


def _counted(model: Any, made: Program, call: Call, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bytes of each message of the first rank in a step."""
    graphs, found = lockstep.rank_graphs(made.graph, made.axis, made.batches), list[float]()
    nodes = graphs[0].graph.nodes
    firsts = {str(n.args[-1]) for n in nodes if n.args and str(n.args[-1]).startswith("simulated")}
    firsts |= {n.target.group for n in nodes if isinstance(n.target, Stepwise)}
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
        assert _trial(model, made.captured, *call).by_graphs(graphs, made) is not None
    return found


@nightly("mlp-{'dp': 'replicate', 'fs': 'shard', 'tp': ''}")
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_predicts_what_is_sent(name: str, axes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, made, call = priced(name, axes)
    first, plans = made.priced(with_memory=False), list[Any]()
    while first is not None:
        plans.append(first)
        first = first.batch  # type: ignore[assignment]
    found = _counted(model, made, call, monkeypatch)
    assert found
    assert sum(plan.costs.nbytes for plan in plans) == pytest.approx(sum(found))
    assert sum(sum(plan.costs.calls) for plan in plans) == len(found)
