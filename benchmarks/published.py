"""Are the prices true where nobody here can measure? Predicted and published training speeds, in tokens/s per GPU.

A row is a training run that someone published: its model, mesh, batch, activation checkpointing, machine, and what it
reached. `ts.plan` plans the same layout on the same machine; the step that it predicts, with the optimizer's, gives the
tokens per second. No number of a machine is fitted to a row (docs/machines.md has the source of each).

    python benchmarks/published.py
    python benchmarks/published.py --only torchtitan
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

import torchshard as ts
from torchshard.plans.machine import Transfer

Config = dict[str, Any]
LLAMA_8B: Config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}  # fmt: skip
QWEN3_32B = LLAMA_8B | {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
    "num_attention_heads": 64, "head_dim": 128, "vocab_size": 151936}  # fmt: skip
QWEN25_32B = LLAMA_8B | {
    "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
    "num_attention_heads": 40, "vocab_size": 152064}  # fmt: skip

QWEN25_7B = LLAMA_8B | {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}  # fmt: skip

FULL = ("model.layers.*",)
SELECTIVE = ("*.k_proj", "*.o_proj", "*.up_proj", "*norm", "*.act_fn")
"""torchtitan's per-op checkpointing keeps attention and every other product of a layer."""
MEGATRON = {
    **dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj", "*lm_head"), "column"),
    **dict.fromkeys(("*.o_proj", "*.down_proj"), "row"),
    **dict.fromkeys(("*layernorm", "*model.norm"), "sequence"),
}
"""torchtitan's tensor parallelism: Megatron's, with the sequence split between the blocks."""


@dataclass(frozen=True)
class Row:
    """A published training run."""

    name: str
    config: Config
    mesh: dict[str, Any]
    batch: int
    """Sequences of one rank of the batch in a forward."""
    length: int
    published: float
    """Tokens per second and GPU."""
    source: str
    machine: str | ts.Machine = "h100x8"
    recompute: tuple[str, ...] = FULL
    compile: bool = False
    lora: int = 0
    micro: int = 1
    """Forwards and backwards in a step of the optimizer."""
    plan: Any = field(default_factory=lambda: MEGATRON)

    @property
    def tp(self) -> int:
        """Ranks that share a sequence."""
        return self.mesh.get("tp", 1)


def fsdp(dp: int, tp: int = 1) -> dict[str, Any]:
    return {"fsdp": (dp, "shard")} | ({"tp": tp} if tp > 1 else {})


TITAN, ASYNC = "torchtitan llama3_h100_202412", "torchtitan asyncTP_llama3_h100_2025-06"
ISSUE, QWEN, NEMO = "pytorch#88838", "torchtitan#1690", "NeMo AutoModel performance summary"
KEMPNER = "KempnerForge mfu_scaling"
SLOW = ts.MACHINES["h100x8-500w"]
H200X4 = dataclasses.replace(ts.MACHINES["h200x8"], name="h200x4", domain=4, network_bandwidth=0.85 * 200e9)
LORA = {"lora": 16, "compile": True}
# fmt: off
ROWS = [
    Row("8B selective compiled", LLAMA_8B, fsdp(8), 2, 8192, 6667, TITAN, SLOW, SELECTIVE, compile=True),
    Row("8B selective eager", LLAMA_8B, fsdp(8), 2, 8192, 5762, TITAN, SLOW, SELECTIVE),
    Row("8B selective compiled 128 ranks", LLAMA_8B, fsdp(128), 2, 8192, 6514, TITAN, SLOW, SELECTIVE, compile=True),
    Row("8B selective eager 128 ranks", LLAMA_8B, fsdp(128), 2, 8192, 5605, TITAN, SLOW, SELECTIVE),
    Row("8B full eager", LLAMA_8B, fsdp(8), 1, 8192, 5169, ISSUE, SLOW),
    Row("8B full eager tp4", LLAMA_8B, fsdp(2, 4), 4, 8192, 3825, ISSUE, SLOW),
    Row("8B selective compiled tp8", LLAMA_8B, fsdp(8, 8), 12, 8192, 4378, ASYNC, SLOW, SELECTIVE, compile=True),
    Row("70B full compiled tp8", LLAMA_70B, fsdp(32, 8), 16, 8192, 597.3, ASYNC, SLOW, compile=True),
    Row("Qwen3 32B full compiled", QWEN3_32B, fsdp(8), 2, 4096, 1874, QWEN, compile=True),
    Row("Qwen3 32B full eager tp8", QWEN3_32B, fsdp(4, 8), 16, 4096, 876, QWEN, SLOW),
    Row("Qwen3 32B full eager tp8, 32", QWEN3_32B, fsdp(4, 8), 32, 4096, 883, QWEN, SLOW),
    Row("Qwen3 32B full eager tp8, 64 ranks", QWEN3_32B, fsdp(8, 8), 32, 4096, 873, QWEN, SLOW),
    Row("8B LoRA one GPU", LLAMA_8B, {"tp": 1}, 2, 4096, 12472.87, NEMO, recompute=(), micro=16, **LORA),
    Row("Qwen2.5 7B LoRA one GPU", QWEN25_7B, {"tp": 1}, 2, 4096, 14110.05, NEMO, recompute=(), micro=16, **LORA),
    Row("70B LoRA full tp2", LLAMA_70B, fsdp(4, 2), 2, 4096, 1091.85, NEMO, micro=4, **LORA),
    Row("70B LoRA full tp2, 16 ranks", LLAMA_70B, fsdp(8, 2), 2, 4096, 984.85, NEMO, micro=2, **LORA),
    Row("Qwen2.5 32B LoRA full tp2", QWEN25_32B, fsdp(4, 2), 2, 4096, 2250.31, NEMO, micro=4, **LORA),
    Row("Qwen2.5 32B LoRA full tp2, 16 ranks", QWEN25_32B, fsdp(8, 2), 2, 4096, 2072.89, NEMO, micro=2, **LORA),
    Row("H200 8B full compiled", LLAMA_8B, fsdp(4), 4, 4096, 38983 / 4, KEMPNER, H200X4, compile=True, micro=2),
    Row("H200 8B full compiled tp2", LLAMA_8B, fsdp(2, 2), 4, 4096, 25980 / 4, KEMPNER, H200X4, compile=True, micro=2),
    Row("H200 8B full compiled tp4, 32 ranks", LLAMA_8B, fsdp(8, 4), 4, 4096, 155917 / 32, KEMPNER, H200X4,
        compile=True, micro=2),
    Row("H200 70B full compiled tp4, 32 ranks", LLAMA_70B, fsdp(8, 4), 2, 4096, 17657 / 32, KEMPNER, H200X4,
        compile=True, micro=4),
]
# fmt: on


@dataclass(frozen=True)
class Decode:
    """A published speed of decoding one sequence: compiled, under CUDA graphs."""

    name: str
    config: Config
    tp: int
    published: float
    """Tokens per second."""
    source: str
    machine: ts.Machine


ONE_SHOT = tuple(Transfer("all_reduce", ranks, us * 1e-6, 100e9) for ranks, us in ((2, 9), (4, 10), (8, 13)))
"""Each rank reads the others' values itself: PyTorch's intra-node all-reduce (pytorch#114001), as gpt-fast uses it."""
A100_330W = dataclasses.replace(
    ts.MACHINES["a100x8"], name="a100x8-330w", memory_bandwidth=0.9 * 1700e9, transfers=ONE_SHOT
)
"""gpt-fast's: power limited to 330 W, "peak bandwidth is about 1700 GB/s", a hybrid cube mesh."""
GPT_FAST = "gpt-fast README"
LLAMA2_7B = LLAMA_8B | {"intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}
LLAMA2_70B = LLAMA_70B | {"vocab_size": 32000}
DECODES = [
    Decode(f"{name} decode tp{tp}", config, tp, published, GPT_FAST, A100_330W)
    for name, config, speeds in (
        ("Llama 2 7B", LLAMA2_7B, {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43}),
        ("Llama 2 70B", LLAMA2_70B, {2: 21.32, 4: 38.01, 8: 62.5}),
        ("Llama 3.1 8B", LLAMA_8B, {1: 93.83, 2: 149.1, 4: 217.21, 8: 276.01}),
        ("Llama 3.1 70B", LLAMA_70B, {4: 37.45, 8: 58.78}),
    )
    for tp, published in speeds.items()
]


def decoded(row: Decode) -> tuple[float, dict[str, float]]:
    """Tokens per second, and the seconds of one by cause."""
    config = transformers.AutoConfig.for_model(**row.config, max_position_embeddings=2048)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    objective = {"machine": row.machine, "mode": "infer", "compile": True}
    whole = {"lm_head": "replicate", "*embed_tokens": "replicate"}  # as in gpt-fast's `tp.py`
    plan = ts.plan(model, whole, ts.DecodeStep(batch=1, length=256), mesh=row.tp, objective=objective)
    parts = plan.step_seconds
    return 1 / sum(parts.values()), parts


def build(row: Row) -> nn.Module:
    """The model in bfloat16, without memory."""
    options = {"max_position_embeddings": row.length, "use_cache": False, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(**(row.config | options))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        if row.lora:
            import peft

            targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            options = peft.LoraConfig(r=row.lora, target_modules=targets)
            model = peft.get_peft_model(model, options)
    return model.to(torch.bfloat16)


def planned(row: Row) -> ts.Plan:
    ids = torch.zeros(row.batch, row.length, dtype=torch.long, device="meta")
    recompute = tuple(f"base_model.model.{glob}" if row.lora and "model." in glob else glob for glob in row.recompute)
    objective = {"machine": row.machine, "recompute": recompute, "compile": row.compile}
    if row.tp > 1:
        objective["split"] = "sequence"
    plan = {
        f"{key}.base_layer" if row.lora and key.endswith("_proj") else key: style for key, style in row.plan.items()
    }
    return ts.plan(
        build(row),
        plan if row.tp > 1 else "auto",
        example_kwargs={"input_ids": ids, "labels": ids},
        mesh=row.mesh,
        objective=objective,
    )


def predicted(row: Row) -> tuple[float, dict[str, float]]:
    """Tokens per second and GPU, and the seconds of a step by cause."""
    plan = planned(row)
    parts = plan.step_seconds
    parts["the optimizer"] /= row.micro
    if row.tp > 1 and not row.compile:
        parts["as DTensor sends"] = _of_dtensor(plan, row)
    return row.batch * row.length / row.tp / sum(parts.values()), parts


def _of_dtensor(plan: ts.Plan, row: Row) -> float:
    """Seconds that eager DTensor takes more: it waits for all collectives, and full checkpointing sends all again."""
    over_weights = plan.costs.collectives
    waits = sum(sent.hidden for c in over_weights for sent in c.sent)
    again = sum(c.forward.seconds for c in over_weights if not c.again.nbytes and row.recompute == FULL)
    return waits + again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name or source contains this")
    options = parser.parse_args()
    logs = []
    print("| run | source | published | predicted | ratio |\n|---|---|--:|--:|--:|")
    for row in (*ROWS, *DECODES):
        if options.only in row.name + row.source:
            found, _ = decoded(row) if isinstance(row, Decode) else predicted(row)
            logs.append(math.log(found / row.published))
            ratio = f"{found / row.published:.2f}"
            print(f"| {row.name} | {row.source} | {row.published:,.0f} | {found:,.0f} | {ratio} |", flush=True)
    print(f"\nmean |log ratio| {statistics.mean(map(abs, logs)):.3f} of {len(logs)}")


if __name__ == "__main__":
    main()
