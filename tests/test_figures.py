"""Pages and figures of a step: sums equal the plan's, and slices add up to the full tensors."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.captured import planned_case
from tests.helpers import nightly
from tests.models import MLP
from torchshard.core.units import size_text, time_text
from torchshard.ir.graph import op_name
from torchshard.ir.listing import is_within
from torchshard.ir.sizes import value_text
from torchshard.plans.plan import Plan
from torchshard.report.drawing.lanes import ICON
from torchshard.report.drawing.outline import Box, Frame, outline
from torchshard.report.drawing.stations import MOST_STATIONS, busiest_layer, is_join, stations
from torchshard.report.drawing.tree import Side, Texts
from torchshard.report.explain import graph_of
from torchshard.report.memory import memory_of_ranks
from torchshard.report.times import COMPUTES, SENDS, bounds, layer_timeline, shares
from torchshard.report.why import MAX_ALTERNATIVES, kinds_of
from torchshard.testing import capture

SVG = "{http://www.w3.org/2000/svg}"


def _mesh_plan(data: Any = "shard", **objective: Any) -> Plan:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
    mesh = {"dp": (2, data), "tp": 3}
    return ts.plan(nn.Sequential(*blocks), "auto", (torch.randn(8, 16),), mesh=mesh, objective=objective)


# --- seconds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "mlp", "gqa_1_kv_head", "dense_moe", "conv"])
def test_the_parts_of_a_step_are_the_step(name: str) -> None:
    plan = planned_case(name).program.plan
    parts = shares(plan)
    assert sum(part.seconds for part in parts) == pytest.approx(sum(plan.step_seconds.values()))
    assert sum(part.computes for part in parts) == pytest.approx(sum(plan.costs.compute.values()))
    assert sum(span.seconds for span in layer_timeline(plan, "")) == pytest.approx(plan.costs.seconds)
    assert sum(bound.seconds for bound in bounds(plan)) <= plan.costs.seconds * (1 + 1e-9)


def test_a_layer_computes_one_thing_at_a_time_and_collectives_run_behind() -> None:
    hidden = 0.0
    for span in layer_timeline(planned_case("gpt").program.plan, "blocks.1"):
        assert {event.lane for event in span.events} == {COMPUTES, SENDS}
        lanes = [[(e.start, e.end) for e in span.events if e.lane == lane] for lane in (COMPUTES, SENDS)]
        for own in lanes:
            assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(own))
        work, sent = lanes
        hidden += sum(max(0.0, min(b, d) - max(a, c)) for a, b in work for c, d in sent)
    of_block = next(part for part in shares(planned_case("gpt").program.plan) if part.name == "blocks.*")
    assert hidden == pytest.approx(of_block.hidden / len(of_block.modules)) and hidden > 0


@pytest.mark.nightly
def test_the_parts_of_a_mesh_are_its_step() -> None:
    plan = _mesh_plan(machine="h100x8")
    assert sum(part.seconds for part in shares(plan)) == pytest.approx(sum(plan.step_seconds.values()))
    assert [part.name for part in shares(plan)][-1] == "over the batch's axes"


@pytest.mark.parametrize("data", ["shard", "replicate"])
def test_a_layer_of_a_mesh_waits_for_its_weights_alone(data: Any) -> None:
    """Over the batch's axis, a layer waits for its slices to be gathered, but not for sums of gradients."""
    slow = dataclasses.replace(ts.MACHINES["h100x8"], transfers=(), launch=1e-3)  # layer 0 does not hide a message
    plan = _mesh_plan(data, machine=slow if data == "shard" else "h100x8")
    kinds = [{"all-gather"}, {"all-gather", "reduce-scatter"}] if data == "shard" else [set(), {"all-reduce"}]
    for span, names in zip(layer_timeline(plan, "1"), kinds, strict=True):
        assert names <= {event.name for event in span.events if event.lane == "over dp"}
        waits = span.seconds - sum(e.seconds - e.hidden for e in span.events if e.lane in (COMPUTES, SENDS))
        assert waits > 1e-9 if data == "shard" else waits == pytest.approx(0.0, abs=1e-12)


def test_a_plan_that_was_loaded_tells_what_it_knows() -> None:
    live = planned_case("gpt").program.plan
    loaded = Plan.from_json(live.to_json(question=False))
    assert shares(loaded) == shares(live) and layer_timeline(loaded, "blocks.1") == ()
    assert loaded.title == live.title == "GPT, batch 2, length 7"
    names = [bound.name for bound in bounds(loaded)]
    assert names and all("-" in name for name in names)  # only messages


# --- bytes -----------------------------------------------------------------------------------------------------------


@nightly(but=["mlp-3"])
@pytest.mark.parametrize(("name", "world"), [("gpt", 2), ("gpt", 3), ("gqa_1_kv_head", 4), ("mlp", 3)])
def test_each_rank_holds_what_its_graph_has(name: str, world: int) -> None:
    made = planned_case(name, world).program
    groups = memory_of_ranks(made.plan)
    assert sorted(rank for group in groups for rank in group.ranks) == [*range(world)]
    held = memory_of_ranks(Plan.from_json(made.plan.to_json(question=False)))
    for group, of_loaded in zip(groups, held, strict=True):
        for rank in group.ranks:
            assert made.memory_of(rank) == {**group.nbytes, "peak": group.total}
        assert of_loaded.nbytes["parameters"] == group.nbytes["parameters"]
    assert groups[0].nbytes["parameters"] == made.plan.parameter_bytes()[1]


def test_ranks_of_a_mesh_hold_slices_of_slices() -> None:
    plan = _mesh_plan()
    whole = sum(stored.nbytes() for stored in plan.stored.values())
    groups = memory_of_ranks(plan)
    assert sorted(rank for group in groups for rank in group.ranks) == [*range(6)]
    assert len(groups) > 1 and whole / 6 < groups[0].nbytes["parameters"] < whole / 2
    assert {group.name for group in groups} == {"ranks 0-1, 3-4", "ranks 2, 5"}  # two of three slices have equal sizes


def test_a_tied_weight_is_held_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.tokens(ids))

    plan = ts.plan(Tied(), example_inputs=(torch.zeros(2, 5, dtype=torch.long),), mesh=2)
    (group,) = memory_of_ranks(plan)
    assert group.nbytes["parameters"] == group.nbytes["gradients"] == plan.parameter_bytes()[1]


# --- figures ---------------------------------------------------------------------------------------------------------


def _figure(model: Any, folder: Path, layer: str = "blocks.0") -> ElementTree.Element:
    ts.draw(model, folder / "layer.svg", layer=layer)
    return ElementTree.parse(folder / "layer.svg").getroot()


def _of(root: ElementTree.Element, look: str) -> list[ElementTree.Element]:
    return [e for e in root.iter() if look in e.attrib.get("class", "").split()]


@nightly("2", "4")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_layer_has_a_lane_for_each_rank_and_a_join_for_each_collective(world: int, tmp_path: Path) -> None:
    made = planned_case("gpt", world).program
    root = _figure(made, tmp_path)
    assert [e.text for e in _of(root, "l-name")][1:] == [f"rank {rank}" for rank in range(world)]
    inside = [op_name(n) for n in made.graph.graph.nodes if is_within(n, "blocks.0") and is_join(n)]
    assert len(_of(root, "l-join") + _of(root, "l-quiet")) == len(inside)
    letters = [e.text for e in _of(root, "l-letter")]
    assert letters.count("f") == inside.count("copy") > 0 and letters.count("g") == inside.count("reduce") > 0


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_slices_of_all_lanes_are_the_weights(world: int, tmp_path: Path) -> None:
    made = planned_case("gpt", world).program
    filled = 0.0
    for path in _of(_figure(made, tmp_path), "l-weight"):
        found = re.search(r"h([\d.]+)v([\d.]+)", path.attrib["d"])
        assert found is not None
        filled += float(found[1]) * float(found[2])
    shown = [one.weights[0] for one in stations(made.graph.graph, "blocks.0") if one.weights]
    wanted = 0.0
    for weight in shown:
        high = ICON if weight.meta["val"].ndim > 1 else 8
        is_split = str(weight.meta["layouts"][0]).startswith("S")
        wanted += ICON * high * (1 if is_split else world)
    assert filled == pytest.approx(wanted, rel=5e-3)


def test_stations_lead_from_left_to_right_and_collectives_stand_alone() -> None:
    for name in ("gpt", "gqa_1_kv_head", "encoder_decoder", "dense_moe"):
        shown = stations(planned_case(name).program.graph.graph, "")
        assert all(source.level < one.level for one in shown for source in one.sources)
        for one in shown:
            others = [other for other in shown if other.level == one.level and other is not one]
            assert not (one.is_join and others) and all(other.row != one.row for other in others)


class Net(nn.Module):
    """Named parts that run one after another, instead of numbered layers."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def test_of_a_model_without_layers_the_largest_part_that_a_figure_can_show_is_drawn(tmp_path: Path) -> None:
    def part(width: int) -> Net:
        return Net(**{f"{way}_{i}": nn.Linear(*sizes) for i in range(8) for way, sizes in
                      (("up", (16, width)), ("down", (width, 16)))})  # fmt: skip

    model = Net(stem=nn.Linear(16, 16), body=Net(first=part(32), second=part(64), third=part(32)))
    plan = ts.plan(model, example_inputs=(torch.randn(4, 16),), mesh=2)
    assert plan.graph is not None and len(stations(plan.graph.graph, "body")) > MOST_STATIONS
    assert busiest_layer(plan) == "body.second"
    assert _of(_figure(plan, tmp_path, "auto"), "l-name")[0].text == "body.second on 2 ranks"


def test_the_layer_of_auto_is_the_one_that_pages_show(tmp_path: Path) -> None:
    plan = planned_case("gpt").program.plan
    assert busiest_layer(plan) == "blocks.1"
    assert _of(_figure(plan, tmp_path, "auto"), "l-name")[0].text == "blocks.1 on 2 ranks"
    ts.draw(plan, tmp_path / "page.html")
    assert "blocks.1 on 2 ranks" in (tmp_path / "page.html").read_text()


OF_WEIGHTS: list[dict[str, Any]] = [
    {"mesh": {"dp": (4, "shard")}},
    {"mesh": {"hosts": (2, "replicate"), "fsdp": (3, "shard"), "tp": 2}},
    {"mesh": 2, "objective": {"split": "sequence"}},
]


@nightly("options1")
@pytest.mark.parametrize("options", OF_WEIGHTS)
def test_collectives_of_weights_and_of_other_axes_are_shown(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
    plan = ts.plan(nn.Sequential(*blocks), example_inputs=(torch.randn(4, 6, 16),), **options)
    graph = plan.graph.graph
    assert sum(one.is_join for one in stations(graph, "")) == sum(map(is_join, graph.nodes)) > 0
    root = _figure(plan, tmp_path, "0")
    assert _of(root, "l-weight") and ("of 2 × 3 × 2 ranks" in str(_of(root, "l-name")[0].text)) == (len(plan.axes) == 3)
    ts.draw(plan, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    kinds = sum(len(kinds_of(each)) for each in plan.axes)
    links = re.findall(r'data-row="([^"]+)"', text)
    assert len(links) == min(kinds, MAX_ALTERNATIVES) and all(f'id="{link}"' in text for link in links)
    side = Side(plan, graph_of(plan).graph, "a", Texts({"": 0}), Frame())
    told = {id(side.record(node)) for node in side.ids} | {id(c) for cs in side.inside.values() for c in cs}
    assert all(id(c) in told for each in plan.axes for c in each.costs.collectives if c.nbytes)


@pytest.mark.nightly
def test_many_small_modules_are_one_row(tmp_path: Path) -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i in range(250):
                self.add_module(f"l{i}", nn.Identity() if i else nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.children():
                x = layer(x) * 2
            return x

    plan = ts.plan(Many(), example_inputs=(torch.randn(4, 4),), mesh=2)
    ts.draw({2: plan, 3: plan}, tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert "2 and 3</h1>" in text and "Where the time of a step goes" in text


# --- texts and boxes --------------------------------------------------------------------------------------------------


def test_repeated_layers_are_one_box() -> None:
    root = outline(planned_case("gpt").graph.graph)
    (blocks,) = [i for i in root.items if isinstance(i, Box) and i.count > 1]
    assert blocks.title == "2 × blocks.*" and all(len(row.nodes) == 2 for row in blocks.rows())
    shown = Counter(n for row in root.rows() for n in row.nodes)
    assert set(shown.values()) == {1}


def test_layers_that_differ_are_not_folded() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 4)) for n in (8, 8, 8, 6)))
    made = capture(model, (torch.randn(2, 4),)).plan({"*.0": "column", "*.2": "row"}, 2)
    titles = [i.title for i in outline(made.graph.graph).items if isinstance(i, Box)]
    assert titles == ["0", "2 × *", "3"]  # the first lacks a copy, since its input needs no gradient


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (5 * 2**40, "5120.0 GiB")]
)
def test_sizes(count: float, text: str) -> None:
    assert size_text(count) == text


def test_values() -> None:
    assert value_text(torch.empty(2, 3, dtype=torch.bfloat16)) == "bf16[2,3]"
    assert value_text(torch.tensor(True)) == "b8[]"
    assert value_text(None) == ""


def test_diff_counts_all_axes_of_the_ranks() -> None:
    """Counts the bytes of all axes, mostly of the batch's; memory that was not requested is not shown as 0."""
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.zeros(8, 64)
    pins = [{"0": "column", "2": "row"}, {"0": "replicate", "2": "replicate"}]
    split, whole = (ts.plan(model, pin, example_inputs=(x,), mesh={"dp": (2, "shard"), "tp": 2}) for pin in pins)
    alone = ts.plan(model, pins[0], example_inputs=(x,), mesh=2)
    sent = [sum(each.costs.nbytes for each in plan.axes) for plan in (alone, split, whole)]
    assert sent[0] < sent[1] < sent[2]
    texts = [size_text(nbytes) for nbytes in sent]
    assert f"  sent by a rank per step: {texts[1]} -> {texts[2]}" in ts.diff(split, whole).splitlines()
    lines = ts.diff(alone, split).splitlines()
    assert f"  sent by a rank per step: {texts[0]} -> {texts[1]}" in lines
    assert "  ranks: 2 ranks -> 2 × 2 ranks (dp × tp)" in lines
    assert "  0.weight: [256@tp,64] -> [256@tp@dp,64]" in lines
    assert any(line.startswith("  memory of a step: not estimated -> ") for line in lines)
    other = ts.plan(MLP(), {}, example_inputs=(torch.zeros(3, 12),), mesh=2)
    assert "  0.weight: [256@tp,64] -> –" in ts.diff(alone, other).splitlines()
    for wrong in (lambda: ts.diff("a.json", alone), lambda: ts.diff(alone, model)):  # type: ignore[arg-type]
        with pytest.raises(ts.InputError, match="is no plan"):
            wrong()


def test_a_plan_says_one_time_of_a_step_and_how_much_better_another_may_be() -> None:
    made = ts.plan(MLP(), {}, example_inputs=(torch.randn(4, 12),), mesh={"dp": (2, "replicate")})
    assert str(made).count(time_text(sum(made.step_seconds.values()))) == 1
    costs = dataclasses.replace(made.costs, gap=1.0)
    text = " ".join(str(made.with_last(costs=costs)).split())
    assert f"another plan may be better, by {time_text(1.0)} at most" in text and "budget" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.58, "2.58 s"), (1234.5, "1,234 s"), (0.9996, "1.00 s"), (0.0258, "25.8 ms"), (3.1e-4, "310 us"),
     (4e-9, "4.00 ns"), (1e-10, "<1 ns"), (-4.2e-6, "-4.20 us")],
)  # fmt: skip
def test_times_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
    assert time_text(seconds, "+").lstrip("+") == text
