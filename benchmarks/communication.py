"""Collectives and bytes per training step: what plans predict, and what real ranks send. Counted, not timed.

    hand-written   Megatron-LM's layout, as a dict plan: column and row parallel attention and MLP, vocabulary, all else
                   whole
    auto           the planner's
    DTensor        parallelize_module with the same plan, the vocabulary as PyTorch's tutorial splits it (Llama)
    tp_plan        Hugging Face's (Llama)

Every model has twelve layers of width 64, and of the rest as much as the real one has; the loss is inside, and the
logits are a result too. Bytes are those that a rank sends by rings. Calls are counted where PyTorch dispatches them, so
that everything that is sent is seen; the ranks' own checks are off.

    python benchmarks/communication.py --ranks 2 --json communication.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, parallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed import DistributedConfig

import torchshard as ts
from torchshard.planner.pins import matching

LAYERS, BATCH, SEQUENCE = 12, 4, 128
COLUMN, ROW, VOCAB, WHOLE = "column", "row", "vocab", "replicate"


# --- what is sent ----------------------------------------------------------------------------------------------------

KERNELS = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "broadcast_": "broadcast", "broadcast": "broadcast",
}  # fmt: skip
"""The operators of torch.distributed, in place and functional -> what they do."""


class Sent(TorchDispatchMode):
    """Counts the collectives that this rank calls, and the bytes that it sends for them by a ring."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.calls, self.nbytes = ranks, Counter[str](), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and name in KERNELS:
            kernel = KERNELS[name]
            self.calls[kernel] += 1
            self.nbytes += self._bytes(kernel, name, args)
        return func(*args, **(kwargs or {}))

    def _bytes(self, kernel: str, name: str, args: Any) -> float:
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
        given = tensors[1] if name in ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_") else tensors[0]
        size, others = given.numel() * given.element_size(), self.ranks - 1
        factor = {"all_reduce": 2 / self.ranks, "all_gather": 1.0, "reduce_scatter": 1 / self.ranks}
        if kernel == "all_to_all":
            own = args[4] if name == "alltoall_base_" else args[2]
            return size * (1 - own[dist.get_rank()] / max(sum(own), 1))
        return size * others * factor.get(kernel, 1 / self.ranks)


@dataclass(frozen=True)
class Count:
    """Of one step."""

    calls: int
    nbytes: float
    kinds: str

    def __str__(self) -> str:
        return f"{self.calls:4} calls {self.nbytes / 1024:9.1f} KiB"


def counted(step: Any, ranks: int) -> Count:
    """What a step sends, after two to warm up: in the second one the ranks compare the graphs of the step."""
    step()
    step()
    with Sent(ranks) as sent:
        step()
    return Count(sum(sent.calls.values()), sent.nbytes, ", ".join(f"{n} {k}" for k, n in sorted(sent.calls.items())))


def predicted(plan: ts.Plan) -> Count:
    """What a plan says that a step sends."""
    ways = [way for c in plan.costs.collectives for way in (c.forward, c.backward) if way.nbytes]
    kinds = Counter(way.kernel for way in ways)
    return Count(len(ways), sum(way.nbytes for way in ways), ", ".join(f"{n} {k}" for k, n in sorted(kinds.items())))


# --- models ----------------------------------------------------------------------------------------------------------


class DenseExperts(nn.Module):
    """Mixtral's experts, each on every token; a mask of the two best says which count."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.gate, self.up, self.down = (
            nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(experts))
            for sizes in ((width, hidden), (width, hidden), (hidden, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        kept = scores >= scores.topk(2, dim=-1).values[..., -1:]
        weights = scores.masked_fill(~kept, float("-inf")).softmax(-1)
        out = torch.zeros_like(x)
        for i, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            out = out + weights[..., i, None] * down(nn.functional.silu(gate(x)) * up(x))
        return out


_SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_LLAMA = {**_SIZES, "intermediate_size": 224, "num_key_value_heads": 2, "vocab_size": 1000, "use_cache": False}
_ATTENTION = {**dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj"), COLUMN), "*.o_proj": ROW}
_LLAMA_PLAN = {**_ATTENTION, "*.gate_proj": COLUMN, "*.up_proj": COLUMN, "*.down_proj": ROW,
               "model.embed_tokens": VOCAB, "lm_head": COLUMN}  # fmt: skip


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA))


def _mixtral() -> nn.Module:
    model = _llama()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp = DenseExperts(64, 224, 4)
    return model


def _gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=LAYERS, n_embd=64, n_head=4, vocab_size=2560, n_positions=128, use_cache=False)
    )


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**_SIZES, intermediate_size=256, vocab_size=1500, max_position_embeddings=128)
    )


def _t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=256, num_layers=LAYERS, num_heads=4, vocab_size=2000, decoder_start_token_id=0
    )
    config.use_cache = False
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**_SIZES, intermediate_size=256, image_size=32, patch_size=4, num_labels=64)
    )


MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "GPT-2": (_gpt2, {"*.c_attn": COLUMN, "*.attn.c_proj": ROW, "*.c_fc": COLUMN, "*.mlp.c_proj": ROW,
                      "transformer.wte": VOCAB, "lm_head": COLUMN}),
    "Llama": (_llama, _LLAMA_PLAN),
    "Mixtral": (_mixtral, {**_ATTENTION, "*.mlp.gate.*": COLUMN, "*.mlp.up.*": COLUMN, "*.mlp.down.*": ROW,
                           "model.embed_tokens": VOCAB, "lm_head": COLUMN}),
    "T5": (_t5, {"*.q": COLUMN, "*.k": COLUMN, "*.v": COLUMN, "*.o": ROW, "*.wi": COLUMN, "*.wo": ROW,
                 "shared": VOCAB, "*.embed_tokens": VOCAB, "lm_head": COLUMN, "*.relative_attention_bias": COLUMN}),
    "ViT": (_vit, {**_ATTENTION, "*.fc1": COLUMN, "*.fc2": ROW}),
    "BERT": (_bert, {"*.self.query": COLUMN, "*.self.key": COLUMN, "*.self.value": COLUMN,
                     "*.attention.output.dense": ROW, "bert.encoder.layer.*.output.dense": ROW,
                     "*.intermediate.dense": COLUMN, "*.word_embeddings": VOCAB, "cls.predictions.decoder": COLUMN}),
}  # fmt: skip
"""name -> (model, Megatron-LM's layout of it)."""


def inputs(name: str) -> dict[str, Tensor]:
    """A call with its labels."""
    if name == "ViT":
        return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(0, 64, (BATCH,))}
    ids = torch.randint(0, 1000, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


def hand_written(model: nn.Module, plan: dict[str, str]) -> dict[str, str]:
    """The layout, with every other module that has weights of its own whole."""
    named = {m for key in plan for m in matching(key, [n for n, _ in model.named_modules()])}
    own = [
        n for n, m in model.named_modules() if n and n not in named and any(True for _ in m.parameters(recurse=False))
    ]
    return {**plan, **dict.fromkeys(own, WHOLE)}


# --- runs ------------------------------------------------------------------------------------------------------------


def _step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()


def _ours(name: str, plan: Any, ranks: int) -> tuple[Count, Count, float]:
    torch.manual_seed(0)
    model, batch = MODELS[name][0](), inputs(name)
    sharded = ts.shard(model, plan(model), example_kwargs=batch, objective={"machine": "h100x8"})
    whole, held = sharded.plan.parameter_bytes()
    return predicted(sharded.plan), counted(lambda: _step(sharded, batch), ranks), held / whole


def _dtensor(ranks: int) -> Count:
    torch.manual_seed(0)
    model, batch = _llama(), inputs("Llama")
    styles = {COLUMN: parallel.ColwiseParallel, ROW: parallel.RowwiseParallel}
    mesh = init_device_mesh("cpu", (ranks,))
    for path, module in list(model.named_modules()):
        word = next((w for key, w in _LLAMA_PLAN.items() if w in styles and path.endswith(key.lstrip("*"))), None)
        if word and isinstance(module, nn.Linear) and path != "lm_head":
            parallel.parallelize_module(module, mesh, styles[word]())
    whole = Replicate()
    parallel.parallelize_module(model.model.embed_tokens, mesh, parallel.RowwiseParallel(input_layouts=whole))
    parallel.parallelize_module(model.lm_head, mesh, parallel.ColwiseParallel(output_layouts=whole))
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.config.num_attention_heads = 4 // ranks
        layer.self_attn.config.num_key_value_heads = 2 // ranks
    return counted(lambda: _step(model, batch), ranks)


def _tp_plan(ranks: int) -> Count:
    """As `from_pretrained(..., distributed_config=...)` does it, without the loading, which wants accelerate."""
    torch.manual_seed(0)
    model, batch = _llama(), inputs("Llama")
    config, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=ranks))
    model = model.maybe_distribute_model(model, config, mesh)
    return counted(lambda: _step(model, batch), ranks)


def _rank(rank: int, ranks: int, folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))  # where Hugging Face looks
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    ts.distributed.init_process_group()
    ts.distributed.debug(False)
    found: dict[str, Any] = {}
    for name in names:
        plan = MODELS[name][1]
        for way, made in (("hand-written", lambda m, plan=plan: hand_written(m, plan)), ("auto", lambda m: "auto")):
            found[f"{name}, {way}"] = _ours(name, made, ranks)
    if "Llama" in names:
        for way, run in (("DTensor", lambda: _dtensor(ranks)), ("tp_plan", lambda: _tp_plan(ranks))):
            try:
                found[f"Llama, {way}"] = run()
            except Exception as error:  # another library's refusal is a result too
                found[f"Llama, {way}"] = f"{type(error).__name__}: {str(error).splitlines()[0]:.100}"
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (given.ranks, folder, given.models), nprocs=given.ranks)
        found = torch.load(f"{folder}/found.pt", weights_only=False)
    print(f"per rank and step, {given.ranks} ranks, {LAYERS} layers of width 64      planned                  counted"
          "                  weights on a rank")  # fmt: skip
    for name, row in found.items():
        if isinstance(row, tuple):
            plan, run, share = row
            same = "equal" if (plan.calls, round(plan.nbytes)) == (run.calls, round(run.nbytes)) else "DIFFERENT"
            print(f"{name:24} {plan}   {run}   {same}   {share:.2f}   {run.kinds}")
        else:
            print(f"{name:24} {'':25}   {row}   {row.kinds if isinstance(row, Count) else ''}")
    if given.json:
        shown = {
            n: [vars(c) if isinstance(c, Count) else c for c in (r if isinstance(r, tuple) else (r,))]
            for n, r in found.items()
        }
        given.json.write_text(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
