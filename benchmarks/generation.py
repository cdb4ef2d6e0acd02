"""Hugging Face's `generate()` of sharded models: are its tokens those of the unsharded model, in float32?

Of one architecture of each family of transformers that generates, a tiny one (two layers, width 64, random weights) is
split over real ranks, processes that send through gloo. Two prompts of different lengths, padded on the left, are
continued greedily, with the cache that `generate` makes for the model.

    equal      the tokens are the unsharded model's, on every rank, at all numbers of ranks
    differs    they are not
    refused    a typed error says why
    failed     anything else: an error that is not ours, or no end within the limit
    not built  the unsharded tiny model does not generate

    python benchmarks/generation.py --json generation.json --write docs/models.md
    python benchmarks/generation.py --all                    # every architecture, four hours
    python benchmarks/generation.py --models llama t5 --ranks 2 3
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import architectures
import torch
import transformers
from alone import in_processes
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes
from transformers.models.auto import modeling_auto
from zoo import SECTION, shown

import torchshard as ts

NEW = 12
"""Tokens of each answer; a decode step captures nothing from the third on."""
_WITH_DECODERS = """
    bart blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart
    prophetnet switch_transformers t5 t5gemma umt5 whisper speech_to_text moonshine
"""
KINDS = [*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(f"{kind} (other)" for kind in _WITH_DECODERS.split())]
_FAMILIES = """
    llama gemma gemma2 gemma3_text gemma3n_text qwen2 qwen3 mistral mixtral qwen2_moe qwen3_moe qwen3_next gpt_oss
    olmo2 olmoe deepseek_v2 deepseek_v3 glm4 glm4_moe minimax phi phi3 phimoe gpt2 gpt_bigcode gpt_neo gpt_neox gptj
    codegen opt bloom mpt falcon falcon_h1 falcon_mamba mamba mamba2 jamba bamba zamba zamba2 nemotron_h
    granitemoehybrid recurrent_gemma rwkv xlstm lfm2 kimi_linear cohere2 granite stablelm starcoder2 smollm3 exaone4
    ernie4_5_moe llama4_text diffllama dbrx persimmon helium xglm biogpt bert modernbert-decoder xlnet
"""
"""One architecture, or a few, of each kind of attention, state and cache among those of decoders."""
STATUSES = ("equal", "refused", "differs", "failed", "not built")


@dataclasses.dataclass
class Result:
    """What became of one model."""

    kind: str
    status: str
    why: str = ""
    captures: list[int] = dataclasses.field(default_factory=list)
    """How many graphs a conversation has taken, of each number of ranks."""


def model_and_prompt(kind: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model in eval mode, and the arguments of `generate`."""
    model, _, example = architectures.built(kind)
    model = model.eval().float()
    generation: Any = model.generation_config
    model.config.use_cache = generation.use_cache = True
    generation.eos_token_id = None
    generation.pad_token_id = 0
    if model.config.is_encoder_decoder and generation.decoder_start_token_id is None:
        generation.decoder_start_token_id = 1
    prompt = {name: value for name, value in example.items() if not name.startswith("decoder_")}
    if "input_ids" in prompt and "attention_mask" in prompt:
        prompt["input_ids"][1, :3] = 0
        prompt["attention_mask"][1, :3] = 0
    return model, prompt | {"max_new_tokens": NEW, "do_sample": False}


def tried(kind: str, ranks: list[int]) -> Result:
    """Generates without and with ranks."""
    try:
        model, prompt = model_and_prompt(kind)
        expected = model.generate(**copy.deepcopy(prompt))
    except Exception as error:
        return Result(kind, "not built", " ".join(str(error).split())[:400])
    captures = []
    for world in ranks:
        with tempfile.TemporaryDirectory() as folder:
            try:
                start_processes(_rank, (world, folder, kind, expected), world, start_method="fork")
            except ProcessRaisedException as error:
                return Result(kind, "failed", str(error).strip().splitlines()[-1], captures)
            found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(world)]
        status = next((f["status"] for f in found if f["status"] != "equal"), "equal")
        if status != "equal":
            why = next(f["why"] for f in found if f["status"] == status)
            return Result(kind, status, f"{world} ranks: {why}", captures)
        captures.append(found[0]["captures"])
    return Result(kind, "equal", captures=captures)


def _rank(rank: int, world: int, folder: str, kind: str, expected: Tensor) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    ts.distributed.init_process_group()
    model, prompt = model_and_prompt(kind)
    try:
        sharded = ts.shard(model, "auto", **_example(model, prompt), objective={"mode": "infer"})
        before = sharded.captures
        made = sharded.generate(**copy.deepcopy(prompt))
        found = {"status": "equal", "captures": sharded.captures - before}
        if not torch.equal(made, expected):
            place = (made != expected).nonzero()[0].tolist() if made.shape == expected.shape else list(made.shape)
            found = {"status": "differs", "why": f"at {place}"}
    except ts.ShardError as error:
        found = {"status": "refused", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    Path(folder, str(rank)).write_text(json.dumps(found))


def _example(model: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """An example call: the prompt without a cache."""
    inputs = {name: value for name, value in prompt.items() if isinstance(value, Tensor)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.ones(len(next(iter(inputs.values()))), 4, dtype=torch.long)
    return {"example_kwargs": inputs | {"use_cache": False}}


# --- the page --------------------------------------------------------------------------------------------------------

PAGE = """{section}

Hugging Face's `generate()` of the same tiny models, on real ranks at {ranks}, in float32: greedy answers of {new}
tokens to two prompts of different lengths, padded on the left, beside the unsharded model's.

{counts}; transformers {version}. *graphs*: how many were captured for the whole answer, on each number of ranks.

| model | tokens | graphs | |
|---|---|---|---|
"""


def page(results: dict[str, dict[str, Any]], ranks: list[int]) -> str:
    """All results as Markdown."""
    counts = Counter(result["status"] for result in results.values())
    rows = [
        f"| {r['kind']} | {r['status']} | {' '.join(map(str, r['captures']))} | {shown(r['why'])} |"
        for r in sorted(results.values(), key=lambda r: (STATUSES.index(r["status"]), r["kind"]))
    ]
    return PAGE.format(
        section=SECTION,
        ranks=" and ".join(map(str, ranks)),
        new=NEW,
        counts=", ".join(f"{counts[status]} {status}" for status in STATUSES),
        version=transformers.__version__,
    ) + "\n".join([*rows, ""])


def main() -> None:
    """Tries all models, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--all", action="store_true", help="every architecture")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one model")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="results are written here; those that are there already are kept")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a section about all results")
    given = parser.parse_args()
    families = set(_FAMILIES.split())
    kinds = given.models or [kind for kind in KINDS if given.all or kind in families or "(other)" in kind]
    known = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    todo = [kind for kind in kinds if given.models or kind not in known]
    for kind, found, seconds in in_processes(partial(tried, ranks=given.ranks), todo, given.limit, given.jobs):
        result = found if isinstance(found, Result) else Result(kind, "failed", why=found)
        known[kind] = dataclasses.asdict(result)
        print(f"{kind:28} {result.status:10} {result.captures} {seconds:6.1f} s  {result.why[:300]}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(known, indent=1))
    if given.write:
        before, _, _ = given.write.read_text().partition(SECTION)
        given.write.write_text(before + page({kind: known[kind] for kind in kinds}, given.ranks))
    print(Counter(known[kind]["status"] for kind in kinds))


if __name__ == "__main__":
    main()
