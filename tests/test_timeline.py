"""How long a step takes where weights and gradients are sent while the rank computes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchshard as ts
from tests.helpers import nightly
from torchshard.core.layouts import I, P
from torchshard.planner.timeline import Messages, Work, course
from torchshard.plans.data import Collective, Sent
from torchshard.plans.machine import MACHINES

NONE = Sent("none", 0.0, 0.0)
SOME = Collective("w", "reduce", P, I, ("op",), "", "", "", "f32[8]", "f32[8]", NONE, NONE, NONE)


def _messages(*seconds: float) -> Messages:
    """A message over each axis that takes a while."""
    return {axis: [(SOME, Sent("all_reduce", 1.0, each))] for axis, each in enumerate(seconds) if each}


def _work(forward: float, backward: float, gather: float = 0.0, sums: float = 0.0, again: float = 0.0) -> Work:
    return Work([forward, backward], ([], []), (_messages(gather), _messages(again)), _messages(sums))


def step(ops: list[Work]) -> float:
    return course(ops).seconds


def test_a_gather_is_hidden_behind_what_comes_before() -> None:
    assert step([_work(3, 0), _work(1, 0, gather=2)]) == 4
    assert step([_work(3, 0), _work(1, 0, gather=5)]) == 6  # it begins with the op before
    assert step([_work(3, 0, gather=2), _work(1, 0)]) == 6  # before the first there is nothing
    assert step([_work(1, 0), _work(1, 0, gather=1), _work(1, 0, gather=3)]) == 5


def test_backward_begins_when_forward_has_ended() -> None:
    assert step([_work(1, 2), _work(3, 4, again=5)]) == 4 + 5 + 4 + 2


def test_a_sum_is_hidden_behind_what_comes_later() -> None:
    assert step([_work(0, 3), _work(0, 1, sums=2)]) == 4
    assert step([_work(0, 3, sums=2), _work(0, 1)]) == 6  # that of the first op is the last
    assert step([_work(0, 1, sums=4), _work(0, 1, sums=4)]) == 1 + 4 + 4


def test_what_is_needed_next_is_sent_before_a_sum() -> None:
    ops = [_work(0, 1, again=3), _work(0, 4, sums=2)]
    assert step(ops) == 4 + 1 + 1 and step([_work(0, 1, again=5), *ops[1:]]) == 5 + 2
    assert [(message.start, message.sent.seconds) for message in course(ops).messages] == [(0, 3), (4, 2)]


def test_an_inner_axis_sums_before_an_outer_one() -> None:
    both = Work([0, 1], sums=_messages(2, 3))
    assert step([both]) == 1 + 3 + 2
    assert step([both, both]) == 1 + 3 + 3 + 2  # an axis sums while the other does


SECONDS = st.floats(0, 8, width=16)
OPS = st.lists(st.builds(_work, *[SECONDS] * 5), min_size=1, max_size=6)


@given(OPS)
def test_a_step_takes_as_long_as_each_of_its_parts_and_no_longer_than_all(ops: list[Work]) -> None:
    computes = sum(sum(op.computes) for op in ops)
    messages = itertools.chain.from_iterable(m.values() for op in ops for m in (*op.gathers, op.sums))
    sent = sum(message.seconds for _, message in itertools.chain.from_iterable(messages))
    assert max(computes, sent) - 1e-9 <= step(ops) <= computes + sent + 1e-9


MESHES = [
    ({"dp": 4}, "replicate"),
    ({"dp": 4}, "shard"),
    ({"dp": 2, "tp": 2}, "shard"),
    ({"a": 2, "b": 2, "tp": 2}, {"a": "replicate", "b": "shard"}),
]


@nightly(but=["{'dp': 2, 'tp': 2}-shard"])
@pytest.mark.parametrize(("mesh", "data"), MESHES, ids=str)
def test_of_a_plan(mesh: dict[str, int], data: Any) -> None:
    """With a link that takes no time a step is its computation; else it hides a part of what is sent."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4)])
        part = torch.ones(4096, 2048)
    free = dataclasses.replace(
        MACHINES["h100x8"], launch=0.0, latency=0.0, link_bandwidth=1e30, network_bandwidth=1e30, network_latency=0.0
    )
    for machine in ("h100x8", free):
        plan = ts.plan(model, mesh=mesh, data=data, example_inputs=(part,), machine=machine)
        assert plan.costs.step is not None
        sent = sum(c.seconds for each in plan.over_all if each.data for c in each.costs.collectives)
        assert plan.costs.step == pytest.approx(sum(plan.step_seconds.values()))
        assert -1e-12 <= plan.hidden_seconds <= sent + 1e-12
        if machine is free:
            assert plan.costs.step == pytest.approx(sum(plan.costs.compute.values()), rel=0.01)
        else:
            assert plan.hidden_seconds > sent / 4
        assert ts.Plan.from_json(plan.to_json()).step_seconds == plan.step_seconds
