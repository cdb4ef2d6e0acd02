"""Plans again without the model, from a plan's file: the same plan, or others under other constraints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import torchshard as ts
from tests.captured import planned_case
from tests.helpers import command, nightly
from tests.models import CASES, MLP
from tests.test_plans import WRONG_VALUES, _changed, _places

UNWRITTEN = {"recurrent"}
"""Models with graphs that files can't store: they call a function without a name."""
QUICK = ["mlp_uneven", "gqa_2_kv_heads", "fused_by_view_5_heads", "conv", "dense_moe", "writes"]
LLAMA = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _mlp(plan: Any = "auto", mesh: Any = 2, **objective: Any) -> ts.Plan:
    return ts.plan(MLP(), plan, (torch.randn(4, 6, 12),), mesh=mesh, objective=objective)


def _again(plan: ts.Plan) -> ts.Plan:
    """Returns the plan made from the contents of a plan's file."""
    return ts.what_if(ts.Plan.from_json(plan.to_json()))


def _is_same(a: ts.Plan, b: ts.Plan) -> bool:
    return a == b and ts.explain(a) == ts.explain(b) and a.to_json(question=False) == b.to_json(question=False)


@nightly("2-conv", "2-dense_moe", "2-gqa_2_kv_heads")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_the_same_question_has_the_same_answer(name: str, ranks: int) -> None:
    made = planned_case(name, ranks).plan
    if name in UNWRITTEN:
        with pytest.raises(ts.PlanError, match="does not hold the graph"):
            _again(made)
    else:
        again = _again(made)
        steps = [ts.explain(plan, level="step").splitlines() for plan in (again, made)]
        assert _is_same(again, made) and len(steps[0]) == len(steps[1]) and steps[0][0] == steps[1][0]


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2, "tp": 2}},
        {"mesh": {"dp": (3, "shard"), "tp": 2}},
        {"mesh": {"dp": (2, "shard")}},
        {"split": "all"},
        {"memory": "12KiB", "recompute": "up"},
        {"mode": "infer", "machine": "a100x8"},
        {"plan": {"up": "row", "down": "replicate"}},
    ],
    ids=str,
)
def test_so_it_has_with_all_that_a_plan_may_be_asked_for(options: dict[str, Any]) -> None:
    made = _mlp(**options)
    assert _is_same(_again(made), made)


@pytest.mark.nightly
def test_so_it_has_for_a_step_with_a_cache() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    made = ts.plan(model, example_inputs=ts.DecodeStep(batch=2, length=5), mesh=2, objective={"mode": "infer"})
    again = _again(made)
    assert _is_same(again, made) and "past" in ts.explain(again, level="node")


def test_pins_a_machine_and_memory_change_the_answer(tmp_path: Path) -> None:
    made = _mlp(plan={"up": "column"})
    made.save(tmp_path / "plan.json")
    other = ts.what_if(tmp_path / "plan.json", {"down": "column"})
    asked = _mlp(plan={"up": "column", "down": "column"})
    assert other == asked and other != made and "down.weight: " in ts.diff(made, other)
    assert ts.what_if(made, {"up": "replicate", "down": "replicate"}).parameters == dict.fromkeys(made.parameters, ts.I)
    faster = ts.what_if(made, machine="h100x8")
    assert faster.machine == ts.MACHINES["h100x8"] and faster.costs.seconds < made.costs.seconds
    assert ts.what_if(made, memory="1GiB").costs.memory["peak"] > 0
    assert ts.what_if(other) == other, "it keeps what it was asked with"


def test_a_loaded_plan_has_its_graph_again() -> None:
    made = planned_case("gpt").plan
    loaded = ts.Plan.from_json(made.to_json())
    assert ts.explain(loaded) == ts.explain(made) and ts.explain(loaded, level="node") == ts.explain(made, level="node")
    steps = [ts.explain(plan, level="step").splitlines() for plan in (loaded, made)]
    assert len(steps[0]) == len(steps[1]), "names of sizes may differ"
    without = ts.Plan.from_json(made.to_json(question=False))
    with pytest.raises(ts.InputError, match=r"the plan has no graph(?s:.*)does not hold the graph"):
        ts.explain(without, level="node")
    assert str(made) in ts.explain(without), "the table needs none"
    assert loaded.to_json() == made.to_json(), "a file that was read can be written"


def test_what_cant_be_asked_is_told() -> None:
    made = _mlp()
    with pytest.raises(ts.PlanError, match="'nope' matches no module"):
        ts.what_if(made, {"nope": "column"})
    with pytest.raises(ts.PlanError, match=r"fits 16 B: an even share"):
        ts.what_if(made, memory=16)
    with pytest.raises(ts.InputError, match="a str is no pins"):
        ts.what_if(made, "up=column")  # type: ignore[arg-type]
    without = ts.Plan.from_json(made.to_json(question=False))
    with pytest.raises(ts.PlanError, match="does not hold the graph"):
        ts.what_if(without)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"node":"x"', '"node":"y"'),
        ('"shape":[', '"shapes":['),
        ('"dtype":"float32"', '"dtype":"float31"'),
        ('"sizes":{', '"sizes":{"s":1,'),
        ('"op":"placeholder"', '"op":"get_attr"'),
        ('"mesh":[{', '"mesh":[1,{'),
    ],
)
def test_a_file_with_a_broken_graph_is_refused(old: str, new: str) -> None:
    text = _mlp(plan={"up": "column"}).to_json()
    head, question = text.split('"question"')
    assert old in question
    broken = ts.Plan.from_json(f'{head}"question"{question.replace(old, new)}')
    with pytest.raises(ts.PlanError, match="the graph in the plan's file can't be read"):
        ts.what_if(broken)


@nightly("constraints", "facts", "graph")
@pytest.mark.parametrize("part", ["graph", "multiples", "facts", "constraints", "inputs", "batches"])
def test_a_file_that_was_tampered_with_is_refused_or_planned(part: str) -> None:
    """Replaces each value by a third of the wrong ones: either a plan results, or a typed error of four lines."""
    body = json.loads(_mlp(plan={"up": "column"}).to_json())
    outcomes = []
    for number, path in enumerate(place for place in _places(body["question"]) if place[0] == part):
        for value in WRONG_VALUES[number % 3 :: 3]:
            try:
                other = ts.what_if(ts.Plan.from_json(_changed(body, ["question", *path], value)))
                assert str(other)
            except ts.ShardError as error:
                assert str(error).count("\n") == 3, (path, value, str(error))
                outcomes.append("refused")
            else:
                outcomes.append("planned")
    assert "refused" in outcomes


def test_nothing_in_a_file_is_run() -> None:
    """Names in a file are looked up, not evaluated."""
    text = _mlp().to_json()
    for wrong in ("os.system", "builtins.eval.default", "torch.ops.load_library", "aten.linear", "operator.attrgetter",
                  "operator.call", "operator.methodcaller", "_operator.setitem", "operator.iadd"):  # fmt: skip
        broken = ts.Plan.from_json(text.replace("aten.linear.default", wrong))
        with pytest.raises(ts.PlanError, match="can't be read"):
            ts.what_if(broken)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page, other = (str(tmp_path / name) for name in ("plan.json", "x.html", "other.json"))
    assert command("plan", "tests.test_what_if:factory", "--pin", "up=column", "--json", file) == 0
    capsys.readouterr()
    assert command("whatif", file, "--pin", "*=replicate", "--json", other, "--html", page) == 0
    printed = capsys.readouterr().out
    assert "up.weight: [20@tp,12] -> [20,12]" in printed and "time per step: " in printed
    assert set(ts.Plan.load(other).parameters.values()) == {ts.I} and "what if" in Path(page).read_text("utf-8")
    assert command("show", file, "--level", "node") == 0
    assert "f32[batch,20@tp]" in capsys.readouterr().out
    assert command("draw", file, "-o", str(tmp_path / "x.svg")) == 0
    assert command("show", file, "--pin", "up=row") == 3 and command("plan", "x", "--plan", file, "--pin", "a=row") == 3
    assert command("whatif", file, "--pin", "up") == 2


def factory() -> tuple[nn.Module, tuple[Any, ...]]:
    return MLP(), (torch.randn(3, 12),)
