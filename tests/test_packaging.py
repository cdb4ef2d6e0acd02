"""The wheel is complete: it works in an otherwise empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ["pyproject.toml", "README.md", "LICENSE"]


def _run(*command: str | Path, folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # else a checkout hides the wheel
    done = subprocess.run([*map(str, command)], cwd=folder, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_wheel_does_what_the_readme_says_in_an_empty_environment(tmp_path: Path) -> None:
    """Runs the README's code on one rank, on two under torchrun, and the command line."""
    source, env = tmp_path / "source", tmp_path / "env" / "bin"
    shutil.copytree(ROOT / "torchshard", source / "torchshard", ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source, folder=tmp_path)
    venv.create(tmp_path / "env", with_pip=True)
    (wheel,) = tmp_path.glob("torchshard_fx-*.whl")
    _run(env / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, folder=tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "hello.py").write_text("\n".join(blocks))
    assert "exact: 4 ranks" in _run(env / "python", "hello.py", folder=tmp_path)
    assert "<html" in (tmp_path / "model.html").read_text()
    told = _run(env / "torchrun", "--standalone", "--nproc-per-node", "2", "hello.py", folder=tmp_path)
    assert told.count("plan for 2 ranks") == 2
    assert "plan" in _run(env / "torchshard", "--help", folder=tmp_path)
