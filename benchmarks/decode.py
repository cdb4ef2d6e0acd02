"""Milliseconds per token of a decode loop on several ranks, beside the same model cut by hand and the unsharded one.

All decode a Llama's tokens greedily, with a DynamicCache; before anything is timed their tokens must be equal.

    python benchmarks/decode.py --widths 256 768 --ranks 2 --tokens 64
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import pstats
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import torchshard as ts

LAYERS, HEAD, VOCAB, PROMPT = 12, 32, 4096, 32


def config(width: int, ranks: int = 1) -> transformers.LlamaConfig:
    """Of the model, or of one rank's part of it."""
    return transformers.LlamaConfig(
        hidden_size=width, intermediate_size=(8 * width // 3) // 32 * 32 // ranks, head_dim=HEAD,
        num_attention_heads=width // HEAD // ranks, num_key_value_heads=max(width // HEAD // 2 // ranks, 1),
        vocab_size=VOCAB, num_hidden_layers=LAYERS, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def by_hand(model: Any, width: int, rank: int, ranks: int) -> Any:
    """One rank's part of the model as Megatron cuts it: two all-reduces a layer, and the logits gathered."""
    part = transformers.LlamaForCausalLM(config(width, ranks)).eval()
    own, whole = part.state_dict(), model.state_dict()
    for name, value in own.items():
        full = whole[name]
        dims = [d for d in range(full.ndim) if full.shape[d] != value.shape[d]]
        value.copy_(full.chunk(ranks, dims[0])[rank] if dims else full)
    head = part.lm_head.weight
    part.lm_head.weight = nn.Parameter(head.detach().chunk(ranks, 0)[rank].clone())

    def reduced(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        dist.all_reduce(result)
        return result

    def gathered(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        pieces = [torch.empty_like(result) for _ in range(ranks)]
        dist.all_gather(pieces, result.contiguous())
        return torch.cat(pieces, -1)

    for layer in part.model.layers:
        layer.self_attn.o_proj.register_forward_hook(reduced)
        layer.mlp.down_proj.register_forward_hook(reduced)
    part.lm_head.register_forward_hook(gathered)
    return part


def decoded(model: Any, prompt: Tensor, count: int) -> tuple[list[int], list[float]]:
    """The tokens, and the seconds of each but the first two."""
    cache, ids, tokens, times = transformers.DynamicCache(config=model.config), prompt, [], []
    with torch.no_grad():
        for _ in range(count):
            start = time.perf_counter()
            ids = model(input_ids=ids, cache=cache).logits[:, -1:].argmax(-1)
            tokens.append(int(ids[0, 0]))
            times.append(time.perf_counter() - start)
    return tokens, times[2:]


def rank_main(width: int, count: int, rounds: int, profile: bool) -> dict[str, float]:
    """Median milliseconds per token of each way, on this rank."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    ts.distributed.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config(width)).eval()
    prompt = torch.randint(1, VOCAB, (1, PROMPT))
    ways: dict[str, Any] = {
        "unsharded": model,
        "by hand": by_hand(model, width, rank, ranks),
        "torchshard": ts.shard(copy.deepcopy(model), "auto", (), {"input_ids": prompt, "use_cache": False}),
    }
    first = {name: decoded(way, prompt, 12)[0] for name, way in ways.items()}
    assert len({tuple(tokens) for tokens in first.values()}) == 1, first
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            dist.barrier()
            found[name].append(1e3 * statistics.median(decoded(way, prompt, count)[1]))
    if profile and rank == 0:
        p = cProfile.Profile()
        p.enable()
    if profile:
        decoded(ways["torchshard"], prompt, count)
    if profile and rank == 0:
        p.disable()
        pstats.Stats(p).sort_stats("cumtime").print_stats(60)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    """Prints a line for each width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for width in options.widths:
        found = ts.distributed.launch(
            rank_main, options.ranks, (width, options.tokens, options.rounds, options.profile)
        )
        slowest = {name: max(each[name] for each in found) for name in found[0]}
        print(width, {name: f"{ms:.2f} ms, {ms / slowest['by hand']:.2f}" for name, ms in slowest.items()}, flush=True)


if __name__ == "__main__":
    main()
