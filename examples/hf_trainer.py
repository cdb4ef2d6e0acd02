"""Hugging Face's `Trainer` with a model that is split over the ranks: its losses are the whole model's, and it resumes.

    python examples/hf_trainer.py                                    # starts its ranks itself
    torchrun --nproc-per-node 2 examples/hf_trainer.py

Every rank runs the whole loop on the same batches. For that the Trainer must take itself for a job of one process, or
accelerate would wrap the model in DistributedDataParallel: `hide_launcher`.
"""

import inspect
import os
from argparse import ArgumentParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, logging
from transformers.utils.generic import find_labels

import torchshard as ts

CHARACTERS, LENGTH = 256, 64


class Arguments(TrainingArguments):
    """Rank 0 logs, and writes what is no tensor."""

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return dist.get_rank()

    local_process_index = process_index


class ShardedTrainer(Trainer):
    """Saves and loads each rank's slices, and exports the whole model.

    What forward takes, it reads off the unsharded model's class: the names of labels for evaluation, the columns of
    the data, and whether losses are divided by the number of tokens of several batches.
    """

    def __init__(self, model: nn.Module, arguments: TrainingArguments, of: type[nn.Module], **more: Any) -> None:
        super().__init__(model, arguments, **more)
        parameters = inspect.signature(of.forward).parameters
        self.label_names = find_labels(of)
        self.model_accepts_loss_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._signature_columns = [*parameters, *self.label_names, "label", "label_ids"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes what `from_pretrained` reads."""
        ts.save_pretrained(self.model, output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        ts.save(Path(output_dir) / "ranks", self.model, self.optimizer, scheduler=self.lr_scheduler)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # it is the same on all ranks
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The weights come with the optimizer's state."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            ts.load(Path(checkpoint) / "ranks", self.model, self.optimizer, scheduler=self.lr_scheduler)

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        """Not counted."""
        return 0


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


def train_split(folder: str, steps: int, checkpoint: str | None = None) -> list[float]:
    """Trains the split model, from a checkpoint if there is one; gives the losses, and last that of an evaluation."""
    data = sequences()
    model = ts.shard(new_model(), "auto", example_kwargs={name: piece[None] for name, piece in data[0].items()})
    arguments = Arguments(**settings(folder, steps, save_steps=steps // 2))
    trainer = ShardedTrainer(model, arguments, LlamaForCausalLM, train_dataset=data, eval_dataset=data[:8])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    return [*losses(trainer), trainer.evaluate()["eval_loss"]]


def train_whole(folder: str, steps: int) -> list[float]:
    """Trains the unsharded model, as `train_split`."""
    arguments = TrainingArguments(**settings(folder, steps, save_strategy="no"))
    data = sequences()
    trainer = Trainer(new_model(), arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [*losses(trainer), trainer.evaluate()["eval_loss"]]


def run(folder: str, steps: int) -> None:
    """Trains the model split and whole, and split from the checkpoint in the middle; rank 0 prints."""
    ts.distributed.hide_launcher()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    checkpoint = f"{folder}/checkpoint-{steps // 2}"
    split, again = train_split(folder, steps), train_split(folder, steps, checkpoint)
    if dist.get_rank() == 0:
        whole = train_whole(folder, steps)
        for step, (a, b) in enumerate(zip(whole, split, strict=True), start=1):
            print(f"{f'step {step:2}' if step <= steps else 'evaluated'}   whole {a:.6f}   split {b:.6f}")
        worst, resumed = (max(abs(a - b) for a, b in zip(split, other, strict=True)) for other in (whole, again))
        print(f"largest difference of the losses: {worst:.1e}; after a resume: {resumed:.1e}")
        exported = LlamaForCausalLM.from_pretrained(checkpoint)
        print(f"exported {sum(p.numel() for p in exported.parameters()):,} parameters")


def rank_main(folder: str, steps: int) -> None:
    """One of the ranks."""
    ts.distributed.init_process_group()
    run(folder, steps)
    ts.distributed.destroy_process_group()


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--steps", type=int, default=8, help="of training (8)")
    parser.add_argument("--ranks", type=int, default=2, help="that the model is split over (2); under torchrun, all")
    parser.add_argument("--folder", help="for checkpoints, which all ranks have (a temporary one)")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        if "RANK" in os.environ:
            rank_main(options.folder or "hf_trainer_checkpoints", options.steps)
        else:
            ts.distributed.launch(rank_main, options.ranks, (options.folder or temporary, options.steps))


if __name__ == "__main__":
    main()
