"""Are steps as long as predicted? Ten models of transformers on meshes of two ranks, on the machine measured before.

`measure_machine` has seen none of these models. A step is the forward, the backward and AdamW's update.

    python benchmarks/steps.py
    python benchmarks/steps.py --backend gloo
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from backends import begin
from torch import Tensor, nn

import torchshard as ts
from torchshard.cli.measured_steps import OPTIMIZER, MeasuredStep, measured_step
from torchshard.core.units import time_text

RANKS = 2
BATCH, LENGTH, WORDS = 4, 128, 1000
Case = tuple[nn.Module, dict[str, Tensor]]
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _of_words(name: str, **options: Any) -> Case:
    config = getattr(transformers, f"{name}Config")(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **options)
    ids = torch.randint(WORDS, (BATCH, LENGTH))
    heads = {"Bert": "ForMaskedLM", "GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}
    model = getattr(transformers, name + heads.get(name, "ForCausalLM"))(config)
    return model, {"input_ids": ids, "labels": ids}


def gpt2() -> Case:
    return _of_words(
        "GPT2", n_embd=256, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )


def llama() -> Case:
    return _of_words(
        "Llama", hidden_size=384, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip


def qwen3() -> Case:
    return _of_words(
        "Qwen3", hidden_size=512, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, use_cache=False,
    )  # fmt: skip


def bert() -> Case:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    return _of_words("Bert", **sizes, **NO_DROPOUT)


def t5() -> Case:
    sizes = {"d_model": 256, "d_ff": 1024, "num_layers": 2, "num_heads": 4, "d_kv": 64}
    return _of_words("T5", **sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False)


def vit() -> Case:
    config = transformers.ViTConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, image_size=96,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    images, labels = torch.randn(BATCH, 3, 96, 96), torch.zeros(BATCH, dtype=torch.long)
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


TP: dict[str, Any] = {"tp": 2}
FSDP: dict[str, Any] = {"fsdp": (2, "shard")}
DDP: dict[str, Any] = {"dp": (2, "replicate")}
CASES: list[tuple[Callable[[], Case], dict[str, Any]]] = [
    (gpt2, TP), (llama, TP), (qwen3, TP), (bert, TP), (vit, TP), (t5, TP), (gpt2, FSDP), (qwen3, FSDP), (llama, DDP),
    (bert, DDP),
]  # fmt: skip


def rank_main(backend: str | None) -> list[MeasuredStep]:
    """The step of each case."""
    begin(backend)
    machine, found = ts.measure_machine(), []
    for build, mesh in CASES:
        torch.manual_seed(0)
        model, call = build()
        objective = {"machine": machine, "optimizer": OPTIMIZER}
        sharded = ts.shard(model, "auto", example_kwargs=call, mesh=mesh, objective=objective)
        name = f"{build.__name__} {next(iter(mesh))}"
        found.append(measured_step(name, sharded, lambda sharded=sharded, call=call: sharded(**call).loss))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default=None, help="of the ranks; by default memory, as torchshard chooses")
    options = parser.parse_args()
    steps = ts.distributed.launch(partial(rank_main, options.backend), RANKS, ())[0]
    for step in steps:
        predicted, measured = time_text(step.predicted), time_text(step.measured)
        print(f"{step.name:12} predicted {predicted:>8}, measured {measured:>8}, ratio {step.ratio:.2f}")
    errors = [step.error for step in steps]
    print(f"mean |ratio - 1| {statistics.mean(errors):.3f}, largest {max(errors):.3f}")


if __name__ == "__main__":
    main()
