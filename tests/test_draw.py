"""Pictures: valid XML, every collective once and with its shape, equal at each run; and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import torchshard as ts
from tests.captured import planned_case
from tests.helpers import nightly
from tests.models import CASES, GPT
from torchshard.testing import capture, collective

SVG = "{http://www.w3.org/2000/svg}"


def _drawn(name: str, folder: Path) -> ElementTree.Element:
    ts.draw(planned_case(name).plan, folder / "model.svg")
    return ElementTree.parse(folder / "model.svg").getroot()


def _collectives(name: str) -> list[str]:
    return sorted(n.name for n in planned_case(name).graph.graph.nodes if collective(n) is not None)


@nightly(but=["mlp", "mlp_*"])
@pytest.mark.parametrize("name", CASES)
def test_every_collective_is_drawn_as_a_hexagon(name: str, tmp_path: Path) -> None:
    groups = _drawn(name, tmp_path).findall(f"{SVG}g")
    hexagons = [g for g in groups if g.find(f"{SVG}polygon") is not None]
    assert sorted(n for g in hexagons for n in g.attrib["data-nodes"].split()) == _collectives(name)
    assert all(g.findall(f"{SVG}text")[0].text.startswith("⬡ ") for g in hexagons)  # readable without colour
    assert len({n for g in groups for n in g.attrib["data-nodes"].split()}) >= len(groups)


@nightly("attention_dropout", "conv", "encoder_decoder", "fused_by_split_7_heads", "gpt_*")
@pytest.mark.parametrize("name", CASES)
def test_nothing_lies_outside_the_picture(name: str, tmp_path: Path) -> None:
    root = _drawn(name, tmp_path)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) + float(rect.attrib["width"]) <= width
        assert float(rect.get("y", 0)) + float(rect.attrib["height"]) <= height


@nightly(but=[".dot"])
@pytest.mark.parametrize("suffix", [".svg", ".html", ".dot"])
def test_a_step_shows_each_collective_of_both_passes(suffix: str, tmp_path: Path) -> None:
    made = planned_case("gpt").plan
    path = tmp_path / f"step{suffix}"
    ts.draw(made, path, step=True)
    text = path.read_text()
    begun = [text.count(sign) for sign in ("▼ all-", "▲ all-", "▼ all-reduce")]
    if suffix == ".dot":  # only here each sign occurs once per collective
        assert begun[:2] == list(made.costs.calls)
    assert all(begun) and "begin_reduce" in text


@pytest.mark.nightly
def test_it_is_the_same_at_each_run(tmp_path: Path) -> None:
    case = CASES["gpt"]
    for file in ("one.svg", "two.svg"):
        ts.draw(capture(case.build(), case.inputs(), case.kwargs).plan(case.plan, 2).plan, tmp_path / file)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_rows_show_shape_layout_and_bytes_sent(tmp_path: Path) -> None:
    root = _drawn("mlp", tmp_path)
    texts = {g.attrib["data-nodes"]: [t.text for t in g.findall(f"{SVG}text")] for g in root.findall(f"{SVG}g")}
    rows = [[t for t in row if t] for row in texts.values()]
    ((_, reduce_detail, reduced),) = [r for n, r in texts.items() if n.endswith("_reduce")]
    assert str(reduce_detail).startswith("from f32[batch,5] P@tp, ▼ all-reduce") and reduced == "f32[batch,5]"
    ((copied, copy_detail, copy),) = [r for n, r in texts.items() if n.endswith("_copy")]
    assert copied == "⬡ copy" and "▲ all-reduce" in str(copy_detail) and str(copy).endswith("] R@tp")
    column = [
        r for r in rows if re.fullmatch(r"weight f32\[(\d+@tp),\d+\], bias f32\[\1\]", " ".join(map(str, r[1:2])))
    ]
    assert column and all(str(row[-1]).endswith("@tp]") for row in column)


def test_a_sharded_module_and_one_rank(tmp_path: Path) -> None:
    case = CASES["mlp"]
    ts.draw(ts.shard(case.build(), case.plan, case.inputs()), tmp_path / "one.svg")
    assert "1 rank," in (tmp_path / "one.svg").read_text()


def test_what_is_refused(tmp_path: Path) -> None:
    case = CASES["mlp"]
    with pytest.raises(ts.InputError, match=r"(?s)can't be written as '\.png'.*try: +'model\.html'"):
        ts.draw(planned_case("mlp").plan, tmp_path / "model.png")
    with pytest.raises(ts.InputError, match="can't be written as 'a file without a suffix'"):
        ts.draw(planned_case("mlp").plan, tmp_path / "model")
    with pytest.raises(ts.InputError, match="a MLP has no plan"):
        ts.draw(case.build(), tmp_path / "model.svg")  # type: ignore[arg-type]
    with pytest.raises(ts.InputError, match="no graph is captured yet"):
        ts.draw(ts.shard(case.build(), case.plan), tmp_path / "model.svg")
    assert not list(tmp_path.iterdir())
    ts.draw(planned_case("mlp").plan, str(tmp_path / "model.svg"))
    assert (tmp_path / "model.svg").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [{"dp": (2, "shard"), "tp": 2}, 2], ids=str)
def test_sums_of_a_page_are_those_of_all_axes(mesh: Any, tmp_path: Path) -> None:
    ids = torch.randint(29, (4, 8))
    plan = ts.plan(GPT(p=0.0), example_inputs=(ids, ids), mesh=mesh)
    ts.draw(plan, tmp_path / "page.html")
    tiles = re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span>', (tmp_path / "page.html").read_text())
    found = {name: value for value, name in tiles}
    calls = sum(map(int, found["collectives forward + backward"].split(" + ")))
    kinds = [int(value) for value, name in tiles if re.fullmatch(r"all-\w+|reduce-scatter|all-to-all", name)]
    assert calls == sum(kinds) == sum(c.calls for each in plan.axes for c in each.costs.collectives)
    assert ("sent by a rank per step over tp" in found) is (mesh != 2)
    badges = [int(n) for n in re.findall(r'class="badge">⬡ (\d+)', (tmp_path / "page.html").read_text())]
    assert max(badges) <= calls
