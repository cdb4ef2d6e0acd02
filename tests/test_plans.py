"""Tests of plans: files, comparison, and the styles of other libraries."""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.captured import checked
from tests.helpers import nightly
from tests.models import CASES, GPT, MLP
from torchshard.testing import CapturedCall, capture

IDS = torch.zeros(2, 7, dtype=torch.long)


@functools.cache
def _captured_gpt() -> CapturedCall:
    return capture(GPT(p=0.0), (IDS, IDS))


def _gpt(plan: Any = "auto", mesh: Any = 2, **objective: Any) -> ts.Plan:
    """Returns the plan of `ts.plan`; the model is captured once for all tests."""
    return _captured_gpt().plan(plan, mesh, objective).plan


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_plan_comes_back_from_its_file_with_all_it_says(tmp_path: Path) -> None:
    made = _gpt()
    made.save(tmp_path / "plan.json")
    loaded = ts.Plan.load(tmp_path / "plan.json")
    assert loaded == made and loaded.costs == made.costs and loaded.stored == made.stored
    assert str(loaded) == str(made) and list(tmp_path.iterdir()) == [tmp_path / "plan.json"]
    again = ts.plan(GPT(p=0.0), tmp_path / "plan.json", example_inputs=(IDS, IDS), mesh=2)
    assert again == made and again.costs.collectives == made.costs.collectives


@pytest.mark.nightly
def test_a_plan_brings_its_machine_unless_one_is_named(tmp_path: Path) -> None:
    machine = ts.Machine("mine", 1e12, 1e11, 1e9, domain=4)
    made = _gpt(machine=machine)
    made.save(tmp_path / "plan.json")
    loaded = ts.Plan.load(tmp_path / "plan.json")
    assert loaded.machine == made.machine == machine
    model, example = GPT(p=0.0), (IDS, IDS)
    again = ts.plan(model, loaded, example_inputs=example, mesh=2)
    named = ts.plan(model, loaded, example_inputs=example, mesh=2, objective={"machine": "cpu-gloo"})
    assert again.machine == machine and again.costs.seconds == made.costs.seconds
    assert named.machine.name == named.costs.machine == "cpu-gloo" and named.choices == made.choices
    text = made.to_json().replace('"domain": 4', '"domain": -4')
    with pytest.raises(ts.PlanError, match="is no domain"):
        ts.Plan.from_json(text)


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    text = _gpt().to_json()
    body = json.loads(text)
    other = json.dumps(body | {"version": 1})
    (axis,) = body["axes"]
    first, *others = axis["parameters"]
    fewer = json.dumps(body | {"axes": [axis | {"parameters": {n: axis["parameters"][n] for n in others}}]})
    for name, content, why in (
        ("short.json", text[:-200], "JSONDecodeError"),
        ("old.json", other, "version 1, this library reads 9"),
        ("fewer.json", fewer, f"{first} has no layout"),
        ("list.json", "[1, 2]", "TypeError"),
        ("binary.json", None, "can't decode"),
    ):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00" if content is None else content.encode())
        with pytest.raises(ts.PlanError, match=why) as caught:
            ts.Plan.load(tmp_path / name)
        assert name in str(caught.value) and str(caught.value).count("\n") == 3
    with pytest.raises(ts.PlanError, match=r"(?s)a Linear is not the path of a plan.*model\.plan"):
        ts.what_if(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def _changed(body: Any, path: list[Any], value: Any) -> str:
    """Returns the JSON of a plan with the value at one path replaced."""
    made = json.loads(json.dumps(body))
    at = made
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(made)


def _places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of the first few items of each container in nested JSON."""
    items = list(body.items()) if isinstance(body, dict) else list(enumerate(body)) if isinstance(body, list) else []
    for key, value in items[:12]:
        yield (*path, key)
        yield from _places(value, (*path, key))


FIELDS = ["version", "title", "fingerprint", "stored", "axes"]
"""The fields of a plan file."""
OF_AXIS = ["axis", "static", "recompute", "machine", "parameters", "inputs", "choices", "conversions", "costs"]
"""The fields of each axis in a plan file."""
WRONG_VALUES = (None, -2, 2.5, 1e999, "S(7)", "x", [], {}, [[]], True)


@functools.cache
def _mlp_and_body() -> tuple[CapturedCall, Any]:
    """Returns a captured call, and the JSON of a plan for it."""
    model, x = MLP(), torch.randn(3, 12)
    made = ts.plan(model, "auto", example_inputs=(x,), mesh=2)
    return capture(model, (x,), dtype=torch.float64), json.loads(made.to_json(question=False))


def test_these_are_the_fields_of_a_plan_file() -> None:
    body = _mlp_and_body()[1]
    assert list(body) == FIELDS and list(body["axes"][0]) == OF_AXIS


@nightly("choices", "machine", "stored")
@pytest.mark.parametrize("field", [*FIELDS[:-1], *OF_AXIS])
def test_a_plan_file_that_was_tampered_with_is_refused_or_exact(field: str) -> None:
    """Replaces each value by wrong ones: either a typed error is raised, or the plan computes correctly."""
    call, body = _mlp_and_body()
    outcomes = []
    for path in (path for path in _places(body) if path[0] == field or path[2:3] == (field,)):
        for value in WRONG_VALUES:
            try:
                plan = ts.Plan.from_json(_changed(body, list(path), value))
                assert str(plan) and ts.explain(plan)
                report = checked(call, plan, 2)
            except ts.ShardError as error:
                assert str(error).count("\n") == 3, str(error)
                outcomes.append("refused")
                continue
            assert report.ok, (path, value)
            outcomes.append("exact")
    assert outcomes.count("refused") >= 0.8 * len(outcomes) > 0


def test_a_plan_of_another_model_is_refused_with_the_differences(tmp_path: Path) -> None:
    made = _gpt()
    with pytest.raises(ts.PlanError, match="made for another model") as caught:
        ts.plan(GPT(vocab=98, p=0.0), made, example_inputs=(IDS, IDS), mesh=2)
    assert "(98, 24) here, and (97, 24) in the plan's model" in str(caught.value)


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ts.InputError, match="can't be written"):
        _gpt().save(tmp_path / "no" / "plan.json")
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(ts.InputError, match="can't be written"):
        _gpt().save(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"]


# --- special files, two plans, and other libraries' styles ------------------------------------------------------------


def test_files_that_are_no_plain_files(tmp_path: Path) -> None:
    """Saving follows links, keeps modes and writes to pipes; an invalid path leaves no file."""
    made = _gpt()
    target, link, pipe = (tmp_path / name for name in ("plan.json", "link.json", "pipe"))
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    made.save(link)
    assert link.is_symlink() and ts.Plan.load(target) == made and target.stat().st_mode & 0o777 == 0o600
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    got: list[str] = []
    reader.start()
    made.save(pipe)
    reader.join(10)
    assert got == [made.to_json()] and pipe.is_fifo()
    with pytest.raises(ts.InputError, match="can't be written"):
        made.save(f"{tmp_path}/a\0b")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "pipe", "plan.json"]


@pytest.mark.nightly
def test_diff_shows_the_changes_and_their_costs() -> None:
    case = CASES["gpt"]
    model = case.build()
    a = ts.plan(model, case.plan, example_inputs=case.inputs(), mesh=2)
    b = ts.plan(model, {**case.plan, "head": "replicate", "tok": "replicate"}, example_inputs=case.inputs(), mesh=2)
    lines = ts.diff(a, b).splitlines()
    assert lines[0].endswith("kinds of parameters are sharded differently")
    assert "  tok.weight: [97@tp,24] -> [97,24]" in lines
    assert any(line.startswith("  parameters on a rank: ") for line in lines)
    assert any(line.startswith("  copy: ") for line in lines)
    assert ts.diff(a, a) == "parameters are alike"


@pytest.mark.nightly
def test_a_weight_pinned_whole_does_not_allow_others_to_stay_whole() -> None:
    case = CASES["gpt"]
    pinned = {"head": "replicate", "tok": "replicate"}
    plans = [ts.plan(case.build(), p, example_inputs=case.inputs(), mesh=2) for p in ("auto", pinned)]
    whole = [{name for name, stored in plan.stored.items() if len(stored.shape) > 1 and plan.parameters[name] == ts.I}
             for plan in plans]  # fmt: skip
    assert whole[1] == whole[0] | {"tok.weight"}


class _Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(MLP(16, 32, 16) for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.nightly
def test_styles_of_hugging_face_and_dtensor_are_accepted() -> None:
    plan = {"tok": "vocab", "blocks.*.up": "column", "blocks.*.down": "row", "head": "column"}
    made = ts.plan(_Linears(), plan, example_inputs=(torch.zeros(2, 7, dtype=torch.long),), mesh=2)
    assert made.to_hf() == {
        "tok": "embedding_rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }
    again = ts.plan(_Linears(), made.to_hf(), example_inputs=(torch.zeros(2, 7, dtype=torch.long),), mesh=2)
    weights = [name for name in made.parameters if name.endswith("weight")]
    assert [again.parameters[name] for name in weights] == [made.parameters[name] for name in weights]
    styles = {path: type(style).__name__ for path, style in made.to_dtensor().items()}
    assert styles["blocks.1.up"] == "ColwiseParallel" and styles["blocks.1.down"] == styles["tok"] == "RowwiseParallel"


class Tied(nn.Module):
    """A model with an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.up, self.down = nn.Embedding(64, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.tok(ids)).relu()))


class Scored(nn.Module):
    """A model with a loss over a vocabulary that may be split."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(64, 16), nn.Linear(16, 4096)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.tok(ids)).flatten(0, 1), labels.flatten())


def test_ties_and_losses_are_beyond_their_words() -> None:
    tied = ts.plan(Tied(), {"tok": "vocab"}, example_inputs=(IDS,), mesh=2)
    with pytest.raises(ts.PlanError, match=r"tok\.weight, which is head\.weight too"):
        tied.to_hf()
    ids = torch.randint(0, 64, (8, 64))
    loss = ts.plan(Scored(), {"head": "column", "tok": "replicate"}, example_inputs=(ids, ids), mesh=2)
    assert any(c.is_inside and c.calls for c in loss.costs.collectives)
    with pytest.raises(ts.PlanError, match="inside"):
        loss.to_dtensor()


class _OwnWeight(nn.Module):
    """A model with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 12, dtype=torch.float64))
        self.down = nn.Linear(12, 8).double()

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.relu(x @ self.weight))


@pytest.mark.parametrize(("word", "layout"), [("column", "S(1)"), ("row", "S(0)"), ("replicate", "I")])
def test_the_model_itself_has_an_empty_path(word: str, layout: str) -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    report = ts.check(_OwnWeight(), {"": word, "down": "row"}, example_inputs=(x,), mesh=2)
    plan = ts.plan(_OwnWeight(), {"": word, "down": "row"}, example_inputs=(x,), mesh=2)
    assert report.ok and str(plan.parameters["weight"]) == layout
    with pytest.raises(ts.PlanError, match="'' is the model itself"):
        ts.plan(_OwnWeight(), {"weight": word}, example_inputs=(x,), mesh=2)


class _PartlyFrozen(nn.Module):
    """A model with two layers; the first runs under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(12, 20, 12) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[0](x)
        return self.layers[1](x)


def test_layers_under_no_grad_have_the_styles_that_the_plan_names() -> None:
    plan, x = {"layers.*.up": "column", "layers.*.down": "row"}, torch.randn(3, 12)
    assert ts.check(_PartlyFrozen(), plan, example_inputs=(x,), mesh=2).ok
    parameters = ts.plan(_PartlyFrozen(), plan, example_inputs=(x,), mesh=2).parameters
    assert [str(parameters[f"layers.{i}.up.weight"]) for i in (0, 1)] == ["S(0)", "S(0)"]


def test_a_glob_stands_only_for_what_is_all_split() -> None:
    made = ts.plan(
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3))),
        {
            "0": "replicate",
            "0.*": "replicate",
            **{f"{i}.0": "column" for i in (1, 2)},
            **{f"{i}.2": "row" for i in (1, 2)},
        },
        example_inputs=(torch.randn(2, 8),),
        mesh=2,
    )
    assert made.to_hf() == {"1.0": "colwise", "1.2": "rowwise", "2.0": "colwise", "2.2": "rowwise"}


def test_what_their_words_cant_say_is_named() -> None:
    case = CASES["fused_by_split"]
    made = ts.plan(case.build(), case.plan, example_inputs=case.inputs(), mesh=2)
    for words in (made.to_hf, made.to_dtensor):
        with pytest.raises(ts.PlanError, match="can't be said in these words") as caught:
            words()
        assert "qkv.weight as [72@tp(24+24+24),24]" in str(caught.value)
