"""Thousands of answers of one sharded model: its tokens stay the unsharded model's, and its memory stays what it was.

Prompts and answers have changing lengths and batches. Each rank reads its memory when a quarter of the answers are
done, for by then every kind of call has its graph, and at the end.

    python benchmarks/soak.py --answers 2000 --ranks 2
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import resource
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import torchshard as ts

LAYERS, VOCAB = 2, 64
MOST_GROWTH = 2e6
"""Bytes that the allocator may keep more of at the end: a leak of an answer's cache alone would be ten times that."""


class Found(NamedTuple):
    """What one rank has seen."""

    graphs: tuple[int, int]
    """How many were captured, after a quarter of the answers and at the end."""
    resident: tuple[int, int]
    """Bytes of the process in memory, likewise."""
    wrong: int
    """How many answers differ from the unsharded model's; each tenth is compared."""


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def rank_main(answers: int) -> Found:
    """All answers, on one rank."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.zeros(2, 8, dtype=torch.long)
    sharded: Any = ts.shard(
        copy.deepcopy(model), "auto", (), {"input_ids": ids, "use_cache": False}, objective={"mode": "infer"}
    )
    draw, wrong, seen = random.Random(0), 0, list[tuple[int, int]]()
    for number in range(answers):
        batch, length, new = draw.randint(1, 4), draw.randint(1, 24), draw.randint(1, 6)
        prompt = torch.tensor([[draw.randrange(VOCAB) for _ in range(length)] for _ in range(batch)])
        made = sharded.generate(prompt, max_new_tokens=new, do_sample=False)
        if number % 10 == 0:
            wrong += not torch.equal(made, model.generate(prompt, max_new_tokens=new, do_sample=False))
        if number + 1 in (answers // 4, answers):
            seen.append((sharded.captures, resident()))
    first, last = seen
    return Found((first[0], last[0]), (first[1], last[1]), wrong)


def main() -> None:
    """Prints a line for each rank; exits with 1 if an answer differs, or memory or graphs have grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    found = ts.distributed.launch(rank_main, options.ranks, (options.answers,))
    for rank, one in enumerate(found):
        grown = one.resident[1] - one.resident[0]
        memory = f"{one.resident[0] / 1e6:.0f} MB, {grown / 1e6:+.2f} at the end"
        print(f"rank {rank}: {one.graphs[0]} graphs, then {one.graphs[1]}; {memory}; {one.wrong} wrong answers")
    if any(f.wrong or f.graphs[0] != f.graphs[1] or f.resident[1] - f.resident[0] > MOST_GROWTH for f in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
