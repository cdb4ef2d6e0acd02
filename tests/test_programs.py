"""Random models under random plans, on simulated and on real ranks.

`TORCHSHARD_PROGRAMS=2000 pytest tests/test_programs.py` runs 2000 new ones.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, example, find, given, settings
from hypothesis import strategies as st
from torch import nn

import torchshard as ts
from tests.helpers import nightly
from tests.program_text import Text
from tests.programs import can_be_trained, checked, drawn, texts, written
from torchshard.testing import Call, Row, capture, changed_rule, largest, rule_of, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*(degrees of freedom|Using a target size)")

aten = torch.ops.aten
COUNT = int(os.environ.get("TORCHSHARD_PROGRAMS", "0"))
EXAMPLES = COUNT or 30
_BOUND_NORMALISED = written((1,), [(0,) * 4, (0,) * 4, (0,) * 4, (1, 0, 3, 5), (5, 0, 0, 0)], 1)
"""A norm of one element, used as a bound of clamp: its gradient is only the rounding noise of that number."""
_CAT_OF_EMPTY_SLICES = written((1,), [(0,) * 4, (10_000, 0, 0, 0)], 1)
"""`cat` of vectors, which skips a rank's empty slices: the backward there never reaches their slicing."""
_VIEW_OF_INPUT = written((1,), [(492, 0, 0, 0)], 1)
"""A result that is a view of an input: created without gradients, it requires them but has no graph."""


REFUSED = [0]
"""Number of refused programs, at most a quarter of all."""


@settings(
    max_examples=EXAMPLES,
    derandomize=not COUNT,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
@given(texts(), st.integers(1, 4), st.integers(0, 99))
@example(_BOUND_NORMALISED, 1, 0)
@example(_CAT_OF_EMPTY_SLICES, 2, 0)
@example(_VIEW_OF_INPUT, 1, 0)
def test_any_program_under_any_plan(text: Text, world: int, seed: int) -> None:
    try:
        report = checked(text, world, seed)
    except ts.CaptureError as error:
        assert "can't be traced back" in str(error), f"{error}\n{text}"
        event("refused: a write through a view that can't be undone")
        REFUSED[0] += 1
        assert REFUSED[0] <= EXAMPLES // 4
        return
    assert report.ok, f"{report}\n{text}"


@pytest.mark.nightly
def test_a_wrong_rule_is_found_and_shrunk() -> None:
    """A wrong rule: it marks a rank's partial sum as the full sum."""
    right = rule_of(aten.linear.default)

    def wrong(call: Call) -> Row:
        return right(call) if call["bias"] is not None else call.row("... k, n k -> ... n", reduced={"k"})

    # While it shrinks, Hypothesis tries many lists of words for the same program.
    @functools.cache
    def fails(text: Text) -> bool:
        return not checked(text, 2, 0).ok

    with changed_rule(aten.linear.default, wrong):
        smallest = find(
            texts(longest=6),
            lambda text: "linear" in text.source and fails(text),
            settings=settings(max_examples=300, derandomize=True, deadline=None, database=None),
        )
    assert len(smallest.lines) <= 2, str(smallest)


def _sgd(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    """Returns the results before and after a step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    found = []
    for turn in range(2):
        torch.manual_seed(turn)
        made = model(*inputs)
        outputs = made if isinstance(made, tuple) else (made,)
        found += [o.detach().clone() for o in outputs]
        loss = sum((o.tanh().sum() for o in outputs), torch.zeros(()))
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
    return found


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max()) / max(1.0, float(a.abs().max()))


def _steps(rank: int, world: int, seeds: list[int]) -> dict[int, tuple[float, float]]:
    ts.distributed.init_process_group()
    found = {}
    for seed in seeds:
        text = drawn(seed)
        model, inputs = text.model(), text.inputs()
        plan = capture(model, inputs, dynamic=False).plan_at_random(world, seed).plan
        sharded = ts.shard(copy.deepcopy(model), plan, example_inputs=inputs)
        expected, got = _sgd(model, inputs), _sgd(sharded, inputs)
        whole = sharded.full_state_dict()
        found[seed] = (
            largest(*(_difference(a, b) for a, b in zip(expected, got, strict=True))),
            largest(*(_difference(t, whole[name]) for name, t in model.state_dict().items())),
        )
    return found


@nightly("3", "4")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_programs_on_real_ranks(world: int) -> None:
    """Runs forward, backward and a step of SGD, and forward again."""
    held = {seed: drawn(seed) for seed in range(100 * world, 100 * world + 8)}
    seeds = [seed for seed, text in held.items() if text.parameters and can_be_trained(text)]
    assert len(seeds) >= 4
    for ranks in run_ranks(_steps, world, world, seeds):
        assert ranks.keys() == set(seeds)
        wrong = {seed: errors for seed, errors in ranks.items() if not largest(*errors) <= 1e-9}
        assert not wrong, "\n".join(f"{seed}: {errors}\n{drawn(seed)}" for seed, errors in wrong.items())
