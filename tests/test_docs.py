"""Generated pages are up to date; blocks, commands and links of all pages work."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import torchshard as ts
from tests.helpers import command, nightly
from torchshard.testing import run_ranks

ROOT = Path(__file__).parent.parent


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made
    spec.loader.exec_module(made)
    return made


def test_the_page_of_collectives_is_up_to_date() -> None:
    made = _module(ROOT / "docs" / "make_collectives.py")
    printed = (ROOT / "tests" / "golden" / "collectives.txt").read_text()
    held = made.sections(printed)
    assert len(held) == 20 and all(len(section.ranks) == 4 for section in held)
    for name, content in made.files(printed).items():
        assert (ROOT / "docs" / name).read_text() == content, f"run docs/make_collectives.py: {name} is old"
        if name.endswith(".svg"):
            ElementTree.fromstring(content)


BLOCK = re.compile(r"^(?:```python|<!-- run)\n(.*?)^(?:```|-->)$", re.DOTALL | re.MULTILINE)
"""Python that a page shows, and hidden Python that it needs first."""
MADE_OF_EXAMPLES = {"collectives.md"}
"""Pages with blocks from the script that generates them."""


def _runs(rank: int, page: str, folder: str) -> None:
    """Runs the Python blocks of a page in order, in a separate folder."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    names: dict[str, Any] = {"__name__": page}
    for block in BLOCK.findall((ROOT / page).read_text()):
        exec(compile(block, page, "exec"), names)


PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
WITH_BLOCKS = [
    page for page in PAGES if "```python" in (ROOT / page).read_text() and Path(page).name not in MADE_OF_EXAMPLES
]


@nightly(
    but=[
        "README.md",
        "docs/errors.md",
        "docs/gradients.md",
        "docs/hang.md",
        "docs/index.md",
        "docs/install.md",
        "docs/multi_node.md",
        "docs/through_memory.md",
    ]
)
@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_every_block_of_a_page_runs(page: str, tmp_path: Path) -> None:
    ranks = re.search(r"<!-- ranks: (\d+) -->", (ROOT / page).read_text())
    run_ranks(_runs, int(ranks[1]) if ranks else 2, page, str(tmp_path), seconds=280)
    for path in tmp_path.glob("*.svg"):
        kept = ROOT / "docs" / "figures" / path.name
        assert not kept.exists() or kept.read_text() == path.read_text(), f"docs/figures/{path.name} is old"


COMMAND = re.compile(r"^(?:    |\$ )torchshard (.*)(?<!\.\.\.)$", re.MULTILINE)
"""A command that a page shows in full."""
WITH_COMMANDS = [page for page in PAGES if COMMAND.search((ROOT / page).read_text())]


@pytest.mark.nightly
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the commands in a folder with only a plan file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for given in ["plan gpt2 --json plan.json", *COMMAND.findall((ROOT / page).read_text())]:
        assert command(*shlex.split(given, comments=True)) == 0, given


def test_the_site_has_every_page_and_every_link_leads_somewhere() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = [line for block in re.findall(r"```\{toctree\}(.*?)```", index, re.DOTALL) for line in block.split("\n")]
    pages = [f"docs/{line}.md" for line in listed if re.fullmatch(r"\w+", line)]
    assert sorted([*pages, "docs/index.md"]) == sorted(PAGES[1:])
    for page in PAGES:
        shown = re.sub(r"`[^`\n]*`", "", (ROOT / page).read_text())
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", shown):
            if not re.match(r"https?://", link):
                assert ((ROOT / page).parent / link).exists(), (page, link)


def test_machines_err_as_far_as_their_page_shows() -> None:
    """`Machine.error` is the mean |ratio - 1| of the machine's rows."""
    runs = _module(ROOT / "benchmarks" / "published.py")
    rows = [line.strip("| \n").split(" | ") for line in (ROOT / "docs" / "machines.md").read_text().splitlines()]
    ratios = {
        row[0]: float(row[3].replace(",", "")) / float(row[2].replace(",", ""))
        for row in rows
        if len(row) == 5 and row[4][:1].isdigit()
    }
    errors: dict[str, list[float]] = {}
    for run in (*runs.ROWS, *runs.DECODES):
        machine = run.machine if isinstance(run.machine, str) else run.machine.name
        known = {"h200x4": "h200x8", "a100x8-330w": "a100x8"}.get(machine, machine)
        errors.setdefault(known, []).append(abs(ratios[run.name] - 1))
    for name, found in errors.items():
        assert ts.MACHINES[name].error == pytest.approx(sum(found) / len(found), abs=0.006), name  # type: ignore[index]
    gpus = {name for name in ts.MACHINES if not name.startswith("cpu")}
    assert {name for name in gpus if math.isfinite(ts.MACHINES[name].error)} == set(errors)
