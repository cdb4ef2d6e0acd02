"""The pages made by scripts are what the scripts make of what the examples print."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.helpers import run_ranks

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


def _runs(rank: int, page: str, folder: str) -> int:
    """Runs the Python of a page, block after block, in a folder of its own."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return len(blocks)


def test_the_readme_runs(tmp_path: Path) -> None:
    assert run_ranks(_runs, 2, "README.md", str(tmp_path)) == [3, 3]
    assert (tmp_path / "model.html").stat().st_size > 10_000


def test_the_page_of_weights_runs(tmp_path: Path) -> None:
    assert run_ranks(_runs, 2, "docs/weights.md", str(tmp_path)) == [9, 9]


def test_the_page_of_generation_runs(tmp_path: Path) -> None:
    assert run_ranks(_runs, 2, "docs/generation.md", str(tmp_path)) == [4, 4]
