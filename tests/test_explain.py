"""The texts of `ts.explain`. `UPDATE_GOLDEN=1 pytest tests/test_explain.py` rewrites tests/golden."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import torchshard as ts
from tests.golden import check_golden
from tests.helpers import holding, nightly
from tests.models import GPT
from torchshard.testing import PlannedCall, capture, listing


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _mlp(*, needs_grad: bool = True) -> PlannedCall:
    x = torch.randn(2, 8, 16, requires_grad=needs_grad)
    return capture(MLP(), (x,)).plan({"up": "column", "down": "row"}, 2)


def test_listing_of_an_mlp() -> None:
    made = _mlp()
    check_golden("mlp_listing.txt", f"{made.plan}\n\n{made.listing()}\n")


def test_explain_is_the_table_and_each_collective_with_the_next_best() -> None:
    """Each collective is shown with its reason, its cost, and the next best plan without it."""
    made = _mlp()
    told = ts.explain(made.program)
    assert told.startswith(f"{made.plan}\n") and told == ts.explain(made.plan)
    check_golden("mlp_explained.txt", re.sub(r"test_explain.py:\d+", "test_explain.py:N", told) + "\n")


def test_every_collective_is_explained_with_the_users_line() -> None:
    lines = ts.explain(_mlp().plan).splitlines()
    heads = [head for head, line in itertools.pairwise(lines) if "test_explain.py:" in line]
    assert sorted(line.split()[0] for line in heads) == ["copy", "reduce"]
    assert all(f"{count} " in ts.explain(_mlp().plan) for count in ("why:", "costs:", "without it:"))


@functools.cache
def _of_gpt() -> ts.Plan:
    return ts.plan(GPT(), "auto", example_inputs=(torch.zeros(2, 8, dtype=torch.long),) * 2, mesh=2)


@nightly("*-table", "80-step")
@pytest.mark.parametrize("level", ["table", "node", "step"])
@pytest.mark.parametrize("columns", [80, 100])
def test_explain_fits_the_terminal(level: Any, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words stay the same; only line breaks differ."""
    monkeypatch.setenv("COLUMNS", "1000")
    whole = ts.explain(_of_gpt(), level=level)
    monkeypatch.setenv("COLUMNS", str(columns))
    told = ts.explain(_of_gpt(), level=level)
    assert max(map(len, told.splitlines())) <= columns < max(map(len, whole.splitlines()))
    assert sorted(re.sub(r"\s", "", told)) == sorted(re.sub(r"\s", "", whole))


def test_the_table_is_a_tree_of_modules() -> None:
    """Each module has a line, with its submodules below it in the model's order."""
    plan = _of_gpt()
    names = [line.split("  ")[0] if line[:1] != " " else line[: len(line) - len(line.lstrip())] + line.split()[0]
             for line in str(plan).splitlines()]  # fmt: skip
    block = names[names.index("blocks.* ×2") :]
    assert block[1:6] == ["  attn", "    q", "    k", "    v", "    o"] and block.index("head") > block.index("  mlp.0")


def test_layers_that_differ_have_a_line_each() -> None:
    """Layers of two kinds have separate lines, even if these have the same name."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    pins = {"[13]": "row", "[45]": "replicate"}
    plan = ts.plan(model, pins, example_inputs=(torch.randn(4, 8),), mesh=2)
    rows = [line.split("  ")[:2] for line in re.sub(" {2,}", "  ", str(plan)).splitlines() if line.startswith("*")]
    assert rows == [["* ×2", "weight[8,8@tp], bias[8]"], ["* ×2", "weight[8,8], bias[8]"]]


def test_sizes_have_names() -> None:
    """The call's first two dims, and the length of carried values, are shown by name."""
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    decode = ts.explain(
        ts.plan(model, example_inputs=ts.DecodeStep(batch=2, length=5), mesh=2, objective={"mode": "infer"}),
        level="node",
    )
    assert "f32[batch,1,32]" in decode and "f32[batch,2@tp,past + 1,16]" in decode
    batch = torch.randn(4, 8, 16)
    plan = ts.plan(MLP(), mesh={"dp": 2, "tp": 2}, example_inputs=(batch,))
    step = ts.explain(plan, level="step")
    assert "f32[batch/2,length,16]" in step and "f32[batch@dp,length,64@tp]" in ts.explain(plan, level="node")
    assert not re.search(r"\bs\d+\b", step + decode)


def test_a_plan_and_a_report_are_short_to_look_at() -> None:
    made, report = _mlp(), ts.check(MLP(), "auto", example_inputs=(torch.randn(2, 8, 16),), mesh=2)
    assert repr(made.plan) == f"<{str(made.plan).splitlines()[0]}>" and repr(report).startswith("<exact: 2 ranks")
    shown = made.plan._repr_html_()
    assert shown.startswith("<pre>plan for 2 ranks") and "I -&gt; R" not in shown and str(made.plan)[:40] in shown


def test_a_pin_that_makes_the_plan_expensive_is_named() -> None:
    made = capture(MLP(), (torch.randn(2, 8, 16),)).plan({"down": "column"}, 2).plan
    assert "the plan's key 'down' makes a step slower; without it: a step takes" in ts.explain(made)
    assert "makes a step slower" not in ts.explain(_mlp().plan)


def test_the_listing_and_models_without_one() -> None:
    made = _mlp()
    assert ts.explain(made.program, level="node") == ts.explain(made.plan, level="node") == listing(made.graph)
    loaded = ts.Plan.from_json(made.plan.to_json(question=False))
    assert "without it" not in ts.explain(loaded) and "costs: all-reduce backward" in ts.explain(loaded)
    for model, level, text in (
        (loaded, "node", "the plan has no graph"),
        (made.plan, "nodes", "invalid level 'nodes'"),
        (MLP(), "table", "a MLP has no plan"),
    ):
        with pytest.raises(ts.InputError, match=text):
            ts.explain(model, level=level)


def test_a_changed_plan_is_explained_as_it_is() -> None:
    made = _mlp().plan
    changed = made.with_last(costs=dataclasses.replace(made.costs, gap=1.0))
    assert ts.explain(changed).startswith(str(changed)) and str(changed) != str(made)


def test_the_step_of_a_rank_as_it_runs() -> None:
    """The all-reduce of the backward begins before the weights' gradients, and is awaited after them."""
    told = ts.explain(_mlp().plan, level="step")
    check_golden("mlp_step.txt", re.sub(r" *test_explain.py:\d+", "", told) + "\n")
    assert ts.explain(_mlp().plan, "up", level="step").count("\n") < told.count("\n")


@pytest.mark.nightly
def test_all_axes_of_a_mesh_are_shown() -> None:
    """Shows a value's sharding, each collective's axis, and the step of any rank, also with uneven slices."""
    x = torch.randn(4, 8, 16, requires_grad=True)
    mesh, pins = {"dp": 2, "tp": 3}, {"up": "column", "down": "row"}
    plan = ts.plan(MLP(), pins, example_inputs=(x,), mesh=holding(mesh, "shard"), objective={"machine": "cpu-gloo"})
    parts = [ts.explain(plan).partition("\n\nover dp, ")[2], ts.explain(plan, level="node")]
    parts += [ts.explain(plan, level="step", rank=5)]
    check_golden("mesh_explained.txt", re.sub(r" *test_explain.py:\d+", "", "\n\n".join(parts)) + "\n")
    assert "forward of rank 5 of 2 × 3 ranks (dp × tp): " in parts[2] and "f32[20,16]" in parts[2]
    with pytest.raises(ts.InputError, match="there is no rank 6 of 6"):
        ts.explain(plan, level="node", rank=6)


def test_gradients_of_a_layer_go_in_one_message() -> None:
    """For a model's first norm: summing gradients of weight and bias sends less than summing its result's gradient."""
    told = ts.explain(_mlp(needs_grad=False).plan, level="step")
    check_golden("bucket_step.txt", re.sub(r" *test_explain.py:\d+", "", told) + "\n")


def test_gradients_of_casts_are_summed_in_the_parameters_dtype() -> None:
    example = torch.randn(2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        plan = ts.plan(MLP(), {}, example_inputs=(example,), mesh={"dp": (2, "shard")})
    told = ts.explain(plan, level="step")
    check_golden("autocast_step.txt", re.sub(r" *test_explain.py:\d+", "", told) + "\n")


def test_a_step_tells_what_is_computed_again() -> None:
    example = (torch.randn(2, 8, 16),)
    plan = ts.plan(
        MLP(), {"up": "column", "down": "row"}, example_inputs=example, mesh=2, objective={"recompute": ["up", ""]}
    )
    told = ts.explain(plan, level="step", rank=1)
    assert "backward: 1 collective, 1 behind other ops; " in told and "ops of forward run again" in told
    assert "computed again" in told and "run again" not in ts.explain(_mlp().plan, level="step")


@pytest.mark.parametrize(
    "plan, rank, text",
    [({"up": "column", "down": "row"}, 2, "there is no rank 2 of 2"), ("frozen", 0, "no graph of its backward")],
)
def test_steps_that_are_none(plan: object, rank: int, text: str) -> None:
    model = MLP()
    if plan == "frozen":
        model.requires_grad_(False)
    made = ts.plan(model, {"up": "column", "down": "row"}, example_inputs=(torch.randn(2, 8, 16),), mesh=2)
    with pytest.raises(ts.InputError, match=text):
        ts.explain(made, level="step", rank=rank)


def test_the_listing_of_one_module() -> None:
    lines = ts.explain(_mlp().plan, "up").splitlines()
    assert [line.split()[0].lstrip("*") or line.split()[1] for line in lines] == ["norm_copy", "up"]


class Ordered(nn.Module):
    """Sorts and scans split features, which must be gathered first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        self.wide = nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sort(-1).values) + self.wide(x).cumsum(-1).sum(-1, keepdim=True)


def test_explain_lists_what_had_to_be_gathered_worst_first() -> None:
    with pytest.warns(UserWarning, match="gathered per step for aten.sort.default"):
        plan = ts.plan(Ordered(), {"up": "column", "wide": "column"}, example_inputs=(torch.randn(4, 8),), mesh=2)
    told = [line for line in ts.explain(plan).splitlines() if "gathered per step" in line]
    assert [line.split(" for ")[1].split()[0] for line in told] == ["aten.cumsum.default", "aten.sort.default"]
    assert "test_explain.py:" in told[0] and "what is marked ! may not be split: a !b -> a !b" in told[0]


class Scanned(nn.Module):
    """Attention that scans its queries over the features, so it can't be split by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.o((q.cumsum(-1) @ k.transpose(-1, -2)).softmax(-1) @ v)


def test_large_ops_that_run_whole_are_warned_of_and_marked() -> None:
    machine = ts.Machine("m", 40e9, 8e9, 0.8e9, 8e-5, 1.5e-4)
    with pytest.warns(UserWarning) as heard:
        plan = ts.plan(
            Scanned(), "auto", example_inputs=(torch.randn(4, 256, 64),), mesh=2, objective={"machine": machine}
        )
    told = [str(w.message) for w in heard]
    assert {w.filename for w in heard} == {__file__}  # the caller's line, not the library's
    assert len(told) == len(plan.costs.whole) and all("test_explain.py:" in text for text in told)
    (work,) = (text for text in told if "of the computation" in text)
    assert work.startswith("aten.matmul.default") and "node cumsum" in work and "wants whole what is split" in work
    (row,) = (line for line in str(plan).splitlines() if line.startswith("(the model)"))
    assert row.endswith("aten.cumsum, aten.matmul")
    assert str(ts.Plan.from_json(plan.to_json())) == str(plan)
    assert all(text in ts.explain(plan) for text in told)


class Projected(nn.Module):
    """A layer that can't be split, with a large part of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 64, proj_size=32, batch_first=True), nn.Linear(32, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def test_unrequested_whole_weights_are_reported_with_their_bytes() -> None:
    example = (torch.randn(2, 5, 64),)
    with pytest.warns(
        UserWarning, match=r"torch.lstm \(node lstm.*whole on every rank with 104.0 KiB.*: its rule does not split"
    ):
        ts.plan(Projected(), "auto", example_inputs=example, mesh=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ts.plan(Projected(), {"lstm": "replicate"}, example_inputs=example, mesh=2)
        ts.plan(Projected(), "auto", example_inputs=example, mesh=1)


IDS = torch.randint(29, (4, 8))


@nightly(but=["2"])
@pytest.mark.parametrize("mesh", [{"dp": (2, "shard")}, {"dp": 2, "tp": 2}, 2], ids=str)
def test_what_a_plan_without_a_collective_would_do_names_parameters(mesh: Any) -> None:
    plan = ts.plan(GPT(p=0.0), example_inputs=(IDS, IDS), mesh=mesh)
    told = [line for line in ts.explain(plan).replace("\n      ", " ").splitlines() if "without it" in line]
    named = {name.strip() for line in told for name in re.findall(r"([\w.*]+) is [^;]*, not", line)}
    assert told and named <= {re.sub(r"\d+", "*", name) for name in plan.parameters} | set(plan.parameters)
    assert ("one rank alone" in str(plan)) is (len(plan.axes) == 1)  # on fewer ranks a part would be larger


def test_a_value_that_is_gathered_once_for_several_ops_counts_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return y.cumsum(-1) + y.cumsum(-1).square()

    with pytest.warns(UserWarning):
        plan = ts.plan(Twice(), {"up": "column"}, example_inputs=(torch.randn(16, 8),), mesh=2)
    assert plan.costs.whole and all(kind.nbytes <= plan.costs.nbytes for kind in plan.costs.whole)


@pytest.mark.nightly
def test_an_axis_without_a_name_that_divides_the_batch_is_dp() -> None:
    for way in ("replicate", "shard"):
        plan = ts.plan(MLP(), {}, example_inputs=(torch.randn(2, 8, 16),), mesh={"dp": (2, way)})
        told = f"{plan}\n{ts.explain(plan)}\n{ts.explain(ts.Plan.from_json(plan.to_json()))}"
        assert "@dp" in told and "@tp" not in told


@pytest.mark.nightly
def test_a_part_of_a_step_saves_no_more_than_the_whole() -> None:
    plan = ts.plan(GPT(p=0.0), example_inputs=(IDS, IDS), mesh={"dp": (2, "shard")})
    held = []
    for module in ("", "blocks.0", "blocks.0.attn", "blocks.0.attn.q"):
        (size, unit), *_ = re.findall(r"([\d.]+) (B|KiB|MiB) saved", ts.explain(plan, level="step", module=module))
        held.append(float(size) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit])
    assert held == sorted(held, reverse=True) and held[0] > held[1]
    with pytest.raises(ts.InputError, match="no op of the graph belongs"):
        ts.explain(plan, level="step", module="nothing")


def test_a_collective_within_an_op_has_the_type_of_what_it_sends() -> None:
    lstm = nn.LSTM(8, 6, batch_first=True)
    plan = ts.plan(lstm, {"": "column"}, example_inputs=(torch.randn(3, 4, 8),), mesh=2)
    types = {c.type for c in plan.costs.collectives if c.is_inside and c.name == "all_gather"}
    assert types and all(text.endswith(",6]") for text in types)


@pytest.mark.parametrize("level", ["node", "step"])
def test_equal_layers_are_listed_once(level: Any) -> None:
    def listed(count: int, module: str = "") -> str:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)), nn.Linear(8, 4))
        plan = ts.plan(model, {"*.0": "column"}, (torch.randn(4, 8),), mesh=2)
        return ts.explain(plan, module, level)

    few, many = listed(12), listed(24)
    assert len(few.splitlines()) == len(many.splitlines()) < 2 * len(listed(4).splitlines())
    more = re.findall(r"and (\d+) times more: the same (\d+) lines for ([\d-]+)", many)
    assert len(more) == (1 if level == "node" else 2)
    first, last = (int(end) for end in more[0][2].split("-"))
    assert last - first + 1 == int(more[0][0]) >= 20
    assert "_10_0" in listed(24, "10") and "times more" not in listed(24, "10")  # each by itself
