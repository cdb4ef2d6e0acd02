"""Milliseconds per token of a decode loop on several ranks: a Llama of 12 layers, its cache and greedy tokens.

    unsharded             one process, while the others wait
    by hand               the layers cut as Megatron-LM has them: two all-reduces a layer, and the logits gathered
    by hand, memory       the same through torchshard's memory, and not by gloo
    tp_plan               Hugging Face's, on the world that torchshard uses
    torchshard            torchshard.shard with objective={"mode": "infer"}: through memory, if no backend is named
    torchshard, tokens    the same of a model that returns its likeliest token in place of the logits
    torchshard, compiled  the same as torchshard, and "compile": True

Before anything is timed, all must give the same tokens. Ways are timed in turn, round by round; a ratio is the median
of the rounds' ratios to `by hand`; the slowest rank counts. Collectives per token are counted as they run, those in
which ranks compare their calls among them.

    python benchmarks/decode.py --widths 256 768 --ranks 2 --tokens 64
    python benchmarks/decode.py --backend gloo
    python benchmarks/decode.py --widths 256 --ways "by hand" torchshard --profile
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import os
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from backends import MEMORY, begin, sent, through_memory
from torch import Tensor, nn
from transformers.distributed import DistributedConfig

import torchshard as ts

LAYERS, HEAD, VOCAB, PROMPT = 12, 32, 4096, 32
HAND = "by hand"


def config(width: int, ranks: int = 1) -> transformers.LlamaConfig:
    """Of the model, or of one rank's part of it."""
    return transformers.LlamaConfig(
        hidden_size=width, intermediate_size=(8 * width // 3) // 32 * 32 // ranks, head_dim=HEAD,
        num_attention_heads=width // HEAD // ranks, num_key_value_heads=max(width // HEAD // 2 // ranks, 1),
        vocab_size=VOCAB, num_hidden_layers=LAYERS, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


# --- the ways --------------------------------------------------------------------------------------------------------


class Greedy(nn.Module):
    """A model that returns its likeliest next token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids: Tensor, cache: Any) -> Tensor:
        return self.model(input_ids=input_ids, cache=cache).logits[:, -1:].argmax(-1)


def by_hand(model: Any, width: int, group: Any) -> Any:
    """One rank's part of the model as Megatron cuts it: two all-reduces a layer, and the logits gathered."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = transformers.LlamaForCausalLM(config(width, ranks)).eval()
    own, whole = part.state_dict(), model.state_dict()
    for name, value in own.items():
        full = whole[name]
        dims = [d for d in range(full.ndim) if full.shape[d] != value.shape[d]]
        value.copy_(full.chunk(ranks, dims[0])[rank] if dims else full)
    head = part.lm_head.weight
    part.lm_head.weight = nn.Parameter(head.detach().chunk(ranks, 0)[rank].clone())

    def reduced(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        dist.all_reduce(result, group=group)
        return result

    def gathered(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        pieces = [torch.empty_like(result) for _ in range(ranks)]
        dist.all_gather(pieces, result.contiguous(), group=group)
        return torch.cat(pieces, -1)

    for layer in part.model.layers:
        layer.self_attn.o_proj.register_forward_hook(reduced)
        layer.mlp.down_proj.register_forward_hook(reduced)
    part.lm_head.register_forward_hook(gathered)
    return part


def with_tp_plan(model: Any) -> Any:
    """The model as Hugging Face's plan splits it."""
    copied = copy.deepcopy(model)
    of, _, mesh = copied.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size()))
    return copied.maybe_distribute_model(copied, of, mesh)


def with_torchshard(model: Any, tokens: bool = False, compile: bool = False) -> Any:
    """The model as torchshard's plan of a prompt splits it."""
    whole, prompt = copy.deepcopy(model), torch.zeros(1, PROMPT, dtype=torch.long)
    example: dict[str, Any] = {"input_ids": prompt, "use_cache": False}
    if tokens:
        whole, example = Greedy(whole), {"input_ids": prompt, "cache": transformers.DynamicCache(config=model.config)}
    objective = {"mode": "infer", "compile": compile}
    return ts.shard(whole, "auto", example_kwargs=example, objective=objective)


WAYS: dict[str, Callable[[Any, int, Any], Any]] = {
    "unsharded": lambda model, width, gloo: model,
    HAND: by_hand,
    HAND + MEMORY: lambda model, width, gloo: by_hand(model, width, None),
    "tp_plan": lambda model, width, gloo: with_tp_plan(model),
    "torchshard": lambda model, width, gloo: with_torchshard(model),
    "torchshard, tokens": lambda model, width, gloo: with_torchshard(model, tokens=True),
    "torchshard, compiled": lambda model, width, gloo: with_torchshard(model, compile=True),
}


# --- timing ----------------------------------------------------------------------------------------------------------


def decoded(model: Any, prompt: Tensor, count: int) -> tuple[list[int], list[float]]:
    """The tokens, and the seconds of each but the first two."""
    cache, ids, tokens, times = transformers.DynamicCache(config=model.config), prompt, [], []
    with torch.no_grad():
        for _ in range(count):
            start = time.perf_counter()
            made = model(input_ids=ids, cache=cache)
            ids = made if isinstance(made, Tensor) else made.logits[:, -1:].argmax(-1)
            tokens.append(int(ids[0, 0]))
            times.append(time.perf_counter() - start)
    return tokens, times[2:]


def per_token(model: Any, prompt: Tensor) -> int:
    """Collectives per token."""
    few, many = (sum(sent(partial(decoded, model, prompt, tokens))) for tokens in (4, 8))
    return (many - few) // 4


class Found(NamedTuple):
    """What one rank has measured of a way."""

    milliseconds: list[float]
    """Per token, the median of each round."""
    collectives: int
    """Per token."""


def rank_main(width: int, options: argparse.Namespace) -> dict[str, Found]:
    """All ways, on one rank."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    gloo = begin(options.backend)
    names = [name for name in options.ways if through_memory() or not name.endswith(MEMORY)]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config(width)).eval()
    prompt = torch.randint(1, VOCAB, (1, PROMPT))
    ways = {name: WAYS[name](model, width, gloo) for name in names}
    first = {name: decoded(way, prompt, 12)[0] for name, way in ways.items()}
    assert len({tuple(tokens) for tokens in first.values()}) == 1, first
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            dist.barrier()
            if name != "unsharded" or dist.get_rank() == 0:
                times[name].append(1e3 * statistics.median(decoded(way, prompt, options.tokens)[1]))
            dist.barrier()
    if options.profile and dist.get_rank() == 0:
        with cProfile.Profile() as profiler:
            decoded(ways["torchshard"], prompt, options.tokens)
        pstats.Stats(profiler).sort_stats("cumtime").print_stats(60)
    elif options.profile:
        decoded(ways["torchshard"], prompt, options.tokens)
    return {
        name: Found(times[name], 0 if name == "unsharded" else per_token(way, prompt)) for name, way in ways.items()
    }


def main() -> None:
    """Prints a line for each width and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 768])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--backend", default=None, help="of the world; by default memory, as torchshard chooses")
    parser.add_argument("--profile", action="store_true", help="where torchshard's time goes, by cProfile")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    for width in options.widths:
        found = ts.distributed.launch(rank_main, options.ranks, (width, options))
        slowest = {
            name: [
                max(each) for each in zip(*(f[name].milliseconds for f in found if f[name].milliseconds), strict=True)
            ]
            for name in found[0]
        }
        for name, times in slowest.items():
            base = slowest.get(HAND, times)
            ratio = statistics.median(own / hand for own, hand in zip(times, base, strict=True))
            text = f"{statistics.median(times):7.2f} ms  {ratio:5.2f} of {HAND}"
            print(f"width {width}  {name:22}{text}  {found[0][name].collectives:3} collectives", flush=True)


if __name__ == "__main__":
    main()
