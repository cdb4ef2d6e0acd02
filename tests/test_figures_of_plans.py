"""Figures of several plans, and errors of figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torchshard as ts
from tests.captured import planned_case
from tests.models import CASES
from tests.test_figures import _mesh_plan
from torchshard.testing import capture


def test_layers_that_lie_otherwise_are_each_named(tmp_path: Path) -> None:
    def plan(styles: list[str]) -> ts.Plan:
        layers = (nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in styles)
        pins = {f"{i}.0": style for i, style in enumerate(styles)}
        return ts.plan(nn.Sequential(*layers), pins, example_inputs=(torch.randn(4, 16),), mesh=2)

    ts.draw([plan(["column"] * 4), plan(["replicate", "row", "row", "replicate"])], tmp_path / "x.html")
    rows = re.findall(r'<th scope="row">(\*\.0\.weight[^<]*)</th><td class="n">([^<]*)</td><td class="n">([^<]*)<',
                      (tmp_path / "x.html").read_text())  # fmt: skip
    outer = ("*.0.weight (0, 3)", "[16@tp,16]", "[16,16]")
    assert sorted(rows) == [outer, ("*.0.weight (1, 2)", "[16@tp,16]", "[16,16@tp]")]


@pytest.mark.nightly
def test_what_lies_otherwise_over_the_axis_of_the_batch_is_told(tmp_path: Path) -> None:
    ts.draw([_mesh_plan("replicate"), _mesh_plan("shard")], tmp_path / "x.html")
    told = (tmp_path / "x.html").read_text().partition('<div class="columns">')[0]
    assert '>*.1.weight</th><td class="n">[64@tp,16]</td><td class="n">[64@tp@dp,16]</td>' in told


def test_two_plans_fold_the_same_layers_and_have_the_same_boxes(tmp_path: Path) -> None:
    """In one plan the first layer lacks a copy; in the other all layers and all modules look the same."""
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
    model, x = nn.Sequential(*blocks), torch.randn(4, 16)
    split, whole = (
        ts.plan(model, pins, example_inputs=(x,), mesh=2)
        for pins in ({"*.0": "column", "*.2": "row"}, {"*": "replicate"})
    )
    ts.draw({"split": split, "whole": whole}, tmp_path / "two.html")
    tree = (tmp_path / "two.html").read_text().partition('<div id="tree">')[2].partition("</main>")[0]
    assert re.findall(r'class="title">([^<]*)<', tree) == ["0", "2", "2 × *", "0", "2"]
    assert tree.count("linear</b>") == 2 * 4 and "<div></div><div" not in tree
    ts.draw(whole, tmp_path / "one.html")
    assert re.findall(r'class="title">([^<]*)<', (tmp_path / "one.html").read_text()) == ["3 × *"]


def test_what_a_figure_cant_be(tmp_path: Path) -> None:
    plan = planned_case("gpt").program.plan
    for name, layer, text in (
        ("x.html", "blocks.0", "can't be written as '.html'"),
        ("x.svg", "blocks.7", "(?s)there is no figure of 'blocks.7'.*try: +a layer's path, as 'blocks.1'"),
    ):
        with pytest.raises(ts.InputError, match=text):
            ts.draw(plan, tmp_path / name, layer=layer)
    for model, layer in (([plan, plan], "blocks.0"), (plan, 0)):
        with pytest.raises(ts.InputError, match="a figure shows a module, by its path"):
            ts.draw(model, tmp_path / "x.svg", layer=layer)
    with pytest.raises(ts.InputError, match="there is nothing to draw"):
        ts.draw({}, tmp_path / "x.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_names_and_differences_of_several_plans(tmp_path: Path) -> None:
    case = CASES["gpt"]
    torch.manual_seed(0)
    plan = {key: "replicate" if ".mlp." in key else word for key, word in case.plan.items()}
    whole = capture(case.build(), case.inputs(), case.kwargs).plan(plan, 2).program
    ts.draw({"as it is": planned_case("gpt").program, "mlp whole": whole}, tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert "as it is and mlp whole</h1>" in text
    rows = re.findall(
        r'<tr class="differs"><th scope="row">([^<]*)</th><td class="n">([^<]*)</td><td class="n">([^<]*)<', text
    )
    assert ("blocks.*.mlp.0.weight", "[48@tp,24]", "[48,24]") in rows and any(name == "per step" for name, *_ in rows)
    assert 'class="line differs"' in text and "blocks.*.attn.q.weight" not in dict((name, a) for name, a, _ in rows)


@pytest.mark.nightly
def test_pages_of_large_models_are_small(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16, "d_kv": 64}
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))
    ids = torch.zeros(2, 64, dtype=torch.long, device="meta")
    plan = ts.plan(
        model.bfloat16(), example_kwargs={"input_ids": ids, "labels": ids}, mesh=4, objective={"machine": "h100x8"}
    )
    ts.draw(plan, tmp_path / "t5.html")
    assert (tmp_path / "t5.html").stat().st_size < 150_000
