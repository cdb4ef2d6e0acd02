"""The page in a real browser, offline: folding, the panel, search, keys, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import torchshard as ts
from tests.captured import captured_case, planned_case
from tests.models import CASES
from torchshard.testing import capture

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

ACTIONS = """
<script>(() => {
const said = {}, rows = [...document.querySelectorAll(".row")], seen = (e) => e.checkVisibility();
said.folded = [...document.querySelectorAll("main details")].every((d) => !d.open);
said.hidden = rows.filter((r) => !seen(r)).length;
document.querySelector("main details > summary").click();
said.one = document.querySelectorAll("main details[open]").length;
document.getElementById("open-all").click();
said.shown = rows.every((r) => seen(r) || r.closest(".book"));
document.getElementById("fold-all").click();
const search = document.getElementById("search");
search.value = "mlp_2_linear";
search.dispatchEvent(new Event("input", { bubbles: true }));
const hits = document.getElementById("hits");
said.hits = hits.textContent;
document.getElementById("next").click();
search.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
said.found = [...document.querySelectorAll(".found")].every(seen);
said.second = hits.textContent;
document.getElementById("before").click();
said.first = hits.textContent + (document.querySelector(".found") === document.querySelector(".picked"));
document.querySelector("#panel [data-key]").click();
said.copied = hits.textContent;
document.querySelector("[data-row]").click();
said.picked = document.querySelector(".picked") !== null && seen(document.querySelector(".picked"));
said.panel = document.getElementById("panel").innerText;
document.querySelector("#panel .link").click();
said.followed = document.getElementById("panel").innerText !== said.panel;
document.getElementById("close").click();
said.closed = !seen(document.getElementById("panel"));
const books = [...document.querySelectorAll(".row.book")], others = rows.filter((r) => !r.matches(".collective"));
document.getElementById("open-all").click();
said.books = [books.length > 0 && !books.some(seen)];
document.getElementById("books").click();
said.books.push(books.every(seen));
document.getElementById("only").click();
said.only = !others.some(seen) && rows.some(seen);
document.getElementById("only").click();
document.querySelector("#tree summary").focus();
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
for (let i = 0; i < 60 && !document.activeElement.matches(".row.collective"); i++) press("ArrowDown");
said.hover = document.activeElement.title + document.activeElement.querySelector("u").title;
press("Enter");
said.entered = document.activeElement.classList.contains("picked");
press("/");
said.searching = document.activeElement === search;
said.errors = window.failures;
document.title = JSON.stringify(said);
})();</script>
"""


def _page(folder: Path, *models: Any) -> str:
    ts.draw(list(models), folder / "page.html")
    return (folder / "page.html").read_text()


def _in_browser(text: str, folder: Path) -> dict[str, Any]:
    """Returns the page's state after some clicks, which a script writes into its title."""
    failures = "<script>window.failures = []; window.onerror = (text) => window.failures.push(text);</script>"
    (folder / "acted.html").write_text(
        text.replace("<body>", f"<body>{failures}").replace("</body>", f"{ACTIONS}</body>")
    )
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([*command, str(folder / "acted.html")], capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@needs_browser
def test_it_opens_folded_expands_clicks_and_finds(tmp_path: Path) -> None:
    said = _in_browser(_page(tmp_path, planned_case("gpt").plan), tmp_path)
    assert said["errors"] == [] and said["folded"] and said["hidden"] > 10 and said["one"] == 1 and said["shown"]
    assert said["hits"] == "2 found" and said["found"] and said["picked"] and said["followed"] and said["closed"]
    assert (said["second"], said["first"]) == ("2 of 2", "1 of 2true")
    assert said["copied"] == 'copied "blocks.*.mlp.2": "row"'
    assert said["books"] == [True, True] and said["only"] and said["entered"] and said["searching"]
    assert "each rank uses it for its own part" in said["hover"] and "whole on each rank" in said["hover"]
    for part in ("why", "costs", "type", "source", "models.py:", "KiB"):
        assert part in said["panel"], part


@pytest.mark.nightly
def test_it_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = _page(tmp_path, planned_case("gpt").plan)
    assert not re.search(r"src\s*=|href\s*=(?!\"#)|@import|url\((?!#)|https?://(?!www\.w3\.org)", text)
    assert "prefers-color-scheme: dark" in text and text.count("<script") == 2


def test_every_collective_is_drawn_with_its_own_symbol_and_in_the_badges(tmp_path: Path) -> None:
    made = planned_case("gpt").plan
    text = _page(tmp_path, made)
    rows = re.findall(r'<div class="row collective[ a-z]*" id="[^"]+"><b>⬡ (\w+)', text)
    assert len(rows) == text.count('class="row collective') > 3
    badges = [int(n) for n in re.findall(r'class="badge">⬡ (\d+) ', text)]
    assert max(badges) <= sum(c.calls for c in made.costs.collectives) and badges
    assert "2 × blocks.*" in text
    facts = json.loads(re.search(r'type="application/json">(.*?)</script>', text, re.DOTALL)[1].replace("<\\/", "</"))  # type: ignore[index]
    (of_rows,) = facts["sides"].values()
    assert len(of_rows) == text.count('<div class="row')
    assert all(near < len(of_rows) for near, *_ in of_rows for near in near)
    assert all(number < len(facts["texts"]) for _, *numbers in of_rows for number in numbers)


@pytest.mark.nightly
def test_two_plans_lie_side_by_side(tmp_path: Path) -> None:
    call, pins = captured_case("gpt", None), CASES["gpt"].plan
    text = _page(tmp_path, *(call.plan(pins, ranks, objective={"machine": "cpu-gloo"}).plan for ranks in (2, 3)))
    assert text.count("<section>") == 2 and "2 ranks, cpu-gloo and 3 ranks, cpu-gloo" in text
    ids = re.findall(r' id="([ab]\d+)"', text)
    assert len(set(ids)) == len(ids) and {i[0] for i in ids} == {"a", "b"}


def test_texts_cant_break_the_page(tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("</script><b>", torch.nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, "</script><b>")(x)

    made = capture(Odd(), (torch.randn(2, 4),)).plan("auto", 2).plan
    text = _page(tmp_path, made)
    assert text.count("</script>") == 2 and "<b></b>" not in text


def test_dot_is_text_for_graphviz(tmp_path: Path) -> None:
    made = planned_case("gpt").plan
    ts.draw(made, tmp_path / "x.dot")
    text = (tmp_path / "x.dot").read_text()
    assert text.startswith("digraph model {") and text.count("{") == text.count("}")
    assert text.count("shape=hexagon") > 3 and text.count(" -> ") > 20


def test_what_a_page_cant_be(tmp_path: Path) -> None:
    made = planned_case("gpt").plan
    for model, name, text in (
        ([made, made], "x.svg", "can't be written as '.svg'"),
        ([], "x.html", "nothing to draw"),
        (made, "no/x.html", "can't be written"),
        (ts.Plan.from_json(made.to_json(question=False)), "x.html", "the plan has no graph"),
    ):
        with pytest.raises(ts.InputError, match=text):
            ts.draw(model, tmp_path / name)
    assert not list(tmp_path.iterdir())
