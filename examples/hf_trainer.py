"""Hugging Face's `Trainer` with a model that is split over the ranks: its losses are the whole model's, and it resumes.

    python examples/hf_trainer.py                                    # starts its ranks itself
    torchrun --nproc-per-node 2 examples/hf_trainer.py

Every rank runs the whole loop on the same batches. For that the Trainer must take itself for a job of one process, or
accelerate would wrap the model in DistributedDataParallel: `hide_launcher`. Every rank writes the whole model into a
folder of its own; `ts.save_pretrained` writes it once.
"""

import os
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, logging

import torchshard as ts

CHARACTERS, LENGTH = 256, 64


def new_model() -> LlamaForCausalLM:
    """The same on every rank."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=CHARACTERS))


def sequences() -> list[dict[str, Tensor]]:
    """This file, cut in pieces."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def settings(folder: str, steps: int, **more: Any) -> dict[str, Any]:
    """The arguments of a loop with clipping and a schedule."""
    return {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": 8,
        "max_grad_norm": 0.5, "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "use_cpu": True, "log_level": "error", **more,
    }  # fmt: skip


def losses(trainer: Trainer) -> list[float]:
    """Those that were logged, one for each step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(model: Any, folder: str, steps: int, checkpoint: str | None = None, **more: Any) -> list[float]:
    """Trains a model, from a checkpoint if there is one; gives the losses, and last that of an evaluation."""
    data = sequences()
    arguments = TrainingArguments(**settings(folder, steps, save_steps=steps // 2, **more))
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    return [*losses(trainer), trainer.evaluate()["eval_loss"]]


def split_model() -> ts.ShardedModule:
    """The model, split as the planner likes it."""
    call = {name: piece[None] for name, piece in sequences()[0].items()}
    return ts.shard(new_model(), "auto", example_kwargs=call)


def run(folder: str, steps: int, bf16: bool) -> None:
    """Trains the model split and whole, and split from the checkpoint in the middle; rank 0 prints."""
    ts.distributed.hide_launcher()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    own, model = f"{folder}/rank{dist.get_rank()}", split_model()
    split = train(model, own, steps, bf16=bf16)
    ts.save_pretrained(model, f"{folder}/exported")
    again = train(split_model(), own, steps, f"{own}/checkpoint-{steps // 2}", bf16=bf16)
    if dist.get_rank() == 0:
        whole = train(new_model(), f"{folder}/whole", steps, bf16=bf16)
        for step, (a, b) in enumerate(zip(whole, split, strict=True), start=1):
            print(f"{f'step {step:2}' if step <= steps else 'evaluated'}   whole {a:.6f}   split {b:.6f}")
        worst, resumed = (max(abs(a - b) for a, b in zip(split, other, strict=True)) for other in (whole, again))
        print(f"largest difference of the losses: {worst:.1e}; after a resume: {resumed:.1e}")
        exported = LlamaForCausalLM.from_pretrained(f"{folder}/exported")
        print(f"exported {sum(p.numel() for p in exported.parameters()):,} parameters")


def rank_main(folder: str, steps: int, bf16: bool) -> None:
    """One of the ranks."""
    ts.distributed.init_process_group()
    run(folder, steps, bf16)
    ts.distributed.destroy_process_group()


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--steps", type=int, default=8, help="of training (8)")
    parser.add_argument("--ranks", type=int, default=2, help="that the model is split over (2); under torchrun, all")
    parser.add_argument("--folder", help="for checkpoints, which all ranks have (a temporary one)")
    parser.add_argument("--bf16", action="store_true", help="mixed precision")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        if "RANK" in os.environ:
            rank_main(options.folder or "hf_trainer_checkpoints", options.steps, options.bf16)
        else:
            ts.distributed.launch(rank_main, options.ranks, (options.folder or temporary, options.steps, options.bf16))


if __name__ == "__main__":
    main()
