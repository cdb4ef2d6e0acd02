"""Compares meshes by the time of a step with one batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import command
from tests.test_batches import _batch, _model

MIB = 2**20


@pytest.fixture(scope="module")
def proposals() -> Any:
    return ts.meshes(_model(p=0.0), example_inputs=_batch(4), mesh=4)


@pytest.mark.nightly
def test_the_fastest_comes_first_and_steps_are_what_the_plans_say(proposals: Any) -> None:
    assert [each.seconds for each in proposals] == sorted(each.seconds for each in proposals)
    meshes = {line.split()[0] for line in str(proposals).splitlines()[1:]}
    assert meshes == {"tp=4", "dp=4:replicate", "dp=4:shard", "dp=2:replicate,tp=2", "dp=2:shard,tp=2"}
    assert all(each.fits for each in proposals)
    model, batch = _model(p=0.0), _batch(4)
    for each in proposals[::3]:
        assert each.plan is not None
        parts, _ = each.mesh.get("dp", (1, ""))
        part = tuple(t[: len(t) // parts] for t in batch)
        alone = ts.plan(model, mesh=each.mesh, example_inputs=part)
        assert alone.step_seconds == each.plan.step_seconds
        report = ts.check(model, each.plan, mesh=each.mesh, example_inputs=batch)
        assert report.ok and report.world_size == 4, str(report)


@pytest.mark.nightly
def test_slices_of_weights_take_less_memory(proposals: Any) -> None:
    of_batch = [each for each in proposals if each.plan and "dp" in each.mesh]
    held = {(len(each.mesh), each.mesh["dp"][1]): each.plan.step_memory for each in of_batch}
    for axes in (1, 2):
        assert held[axes, "shard"]["parameters"] < held[axes, "replicate"]["parameters"]


def test_a_plan_for_one_mesh_is_refused() -> None:
    plan = ts.plan(_model(), {}, example_inputs=_batch(1), mesh=2)
    with pytest.raises(ts.InputError, match="a finished plan is for one mesh"):
        ts.meshes(_model(), plan, example_inputs=_batch(4), mesh=4)


@pytest.mark.nightly
def test_what_does_not_fit_comes_last(proposals: Any) -> None:
    peaks = sorted(each.plan.step_memory["peak"] for each in proposals if each.plan)
    limit = (peaks[0] + peaks[-1]) / 2
    found = ts.meshes(_model(p=0.0), example_inputs=_batch(4), mesh=4, objective={"memory": limit})
    fits = [each.fits for each in found]
    assert any(fits) and fits == sorted(fits, reverse=True)
    assert all(each.plan.step_memory["peak"] <= limit for each in found if each.plan and each.fits)
    rows = str(found).splitlines()
    assert ("too much" in rows[len(found)]) is not fits[-1]
    skipped = [each for each in found if "even without the limit" in each.why]
    assert all(each.plan is not None and each.step >= found[0].seconds for each in skipped)
    assert len(rows) == 1 + len(found) + len({each.why for each in found if each.why})


@pytest.mark.nightly
def test_slices_of_weights_are_searched_under_the_limit_too() -> None:
    layers = [nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(4)]
    model, rows = nn.Sequential(*layers), torch.randn(256, 8)
    wide = ts.plan(model, example_inputs=(rows[:128],), mesh={"dp": (2, "shard")}, objective={"memory": "1GiB"})
    limit = 0.8 * wide.step_memory["peak"]
    found = ts.meshes(model, example_inputs=(rows,), mesh=2, objective={"memory": limit})
    slices = next(each for each in found if each.mesh == {"dp": (2, "shard")})
    assert slices.fits and slices.plan is not None and slices.plan.recompute


@pytest.mark.nightly
def test_where_nothing_fits_none_is_the_fastest(proposals: Any) -> None:
    found = type(proposals)([dataclasses.replace(each, limit=1.0) for each in reversed(proposals)])
    assert "none with a plan that fits" in repr(found)
    assert [each.step for each in found] == sorted(each.step for each in found)
    assert str(dict(proposals[0].mesh)) in repr(proposals)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()


def test_a_batch_that_does_not_divide_says_so() -> None:
    found = ts.meshes(Wide(), example_inputs=(torch.randn(4, 8),), mesh=6)
    whys = {str(dict(each.mesh)): each.why for each in found if each.plan is None}
    assert whys == {
        "{'dp': (6, 'replicate')}": "a batch of 4 can't be divided among 6 ranks; try: a batch of 6",
        "{'dp': (6, 'shard')}": "a batch of 4 can't be divided among 6 ranks; try: a batch of 6",
        "{'dp': (3, 'replicate'), 'tp': 2}": "a batch of 4 can't be divided among 3 ranks; try: a batch of 3",
        "{'dp': (3, 'shard'), 'tp': 2}": "a batch of 4 can't be divided among 3 ranks; try: a batch of 3",
    }
    assert found[0].fits
    for two in ("dp=6:replicate and dp=6:shard", "dp=3:replicate,tp=2 and dp=3:shard,tp=2"):  # once below the table
        assert str(found).count(f"\n{two}: a batch of 4") == 1


@pytest.mark.nightly
def test_the_command_line_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("meshes", "tests.test_proposals:made", "--ranks", "2") == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["mesh", "time"] and len(rows) == 3


def test_a_call_is_captured_once_and_each_mesh_is_told_as_it_is_planned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "torchshard.compiler"):
        found = ts.meshes(Wide(), example_inputs=(torch.randn(8, 8),), mesh=4)
    texts = [record.getMessage() for record in caplog.records]
    assert sum(text.startswith("capture:") for text in texts) == 1
    told = [text for text in texts if text.split(":")[0] in ("dp=4", "dp=2", "tp=4")]
    assert sorted(told) == sorted(map(str, found)) and all("products" in text for text in told)


@pytest.mark.parametrize(
    ("ranks", "host", "hosts"), [(16, 4, [(4, 1), (2, 2)]), (4, 4, []), (6, 4, []), (8, 2, [(2, 1)])]
)
def test_several_hosts_may_each_hold_all_weights(ranks: int, host: int, hosts: list[tuple[int, int]]) -> None:
    machine = dataclasses.replace(ts.MACHINES["cpu-gloo"], domain=host)
    found = ts.meshes(Wide(), example_inputs=(torch.randn(32, 8),), mesh=ranks, objective={"machine": machine})
    of_hosts = [each.mesh for each in found if "hosts" in each.mesh]
    expected = [
        {"hosts": (ranks // host, "replicate"), "fsdp": (fsdp, "shard")} | ({"tp": tp} if tp > 1 else {})
        for fsdp, tp in hosts
    ]
    assert sorted(map(str, of_hosts)) == sorted(map(str, expected))


def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Returns a model and its example inputs."""
    return Wide(), (torch.randn(4, 8),)
