"""Caches of Hugging Face's models stay split from call to call; bad input is refused."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, StaticCache

import torchshard as ts
from torchshard.testing import collective, kept_graphs, largest, run_ranks

# --- Hugging Face ----------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "num_hidden_layers": 2, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SILENT = {"none", "slice", "pad"}
"""Kernels of conversions without communication."""
CALL = {"input_ids": torch.arange(10).reshape(2, 5), "use_cache": False}


def _model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, decoder_start_token_id=0,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).eval()
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=8)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def _calls(rank: int, static: bool) -> dict[str, Any]:
    ts.distributed.init_process_group()
    model = _model("llama").double()
    sharded = ts.shard(copy.deepcopy(model), "auto", (), CALL)
    if static:
        caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    else:
        caches = [DynamicCache(config=model.config) for _ in range(2)]
    ids, error, own = CALL["input_ids"], 0.0, True
    with torch.no_grad():
        for _ in range(5):
            expected, got = (m(input_ids=ids, past_key_values=c) for m, c in zip((model, sharded), caches, strict=True))
            error = largest(error, float((expected.logits - got.logits).abs().max()))
            own &= got.past_key_values is caches[1]
            ids = expected.logits[:, -1:].argmax(-1)
    keys = caches[1].layers[1].keys
    nodes = sharded.local_graph.graph.nodes
    sent = [n for n in nodes if (row := collective(n)) is not None and row.kernel not in SILENT]
    return {
        "error": error,
        "own": own,
        "same": torch.allclose(keys.full_tensor(), caches[0].layers[1].keys, rtol=0, atol=1e-12),
        "heads": keys.shape[1],
        "graphs": len(kept_graphs(sharded)) - 1,  # one for the example inputs
        "sent": len(sent),
    }


@pytest.mark.nightly
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_caches_stay_split_and_are_sent_to_nobody(static: bool) -> None:
    for found in run_ranks(_calls, 2, static):
        assert found.pop("error") < 1e-12
        # sent: two per layer, the embeddings, the logits; graphs: a static cache is unsharded in the first call
        assert found == {"own": True, "same": True, "heads": 1, "graphs": 2, "sent": 6}


GENERATED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "lookup": {"prompt_lookup_num_tokens": 2},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
}


def _generates(rank: int, kind: str, ways: list[str], length: int) -> dict[str, Any]:
    ts.distributed.init_process_group()
    model = _model(kind)
    sharded = ts.shard(copy.deepcopy(model), "auto", (), CALL) if kind != "t5" else ts.shard(copy.deepcopy(model), {})
    ids = torch.randint(2, 64, (2, 5))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0  # prompts of different lengths, padded on the left
    same = {}
    for way in ways:
        rows = slice(0, 1) if way == "lookup" else slice(None)
        made = []
        for m in (model, sharded):
            torch.manual_seed(1)
            call = {"attention_mask": mask[rows], "max_new_tokens": length, **GENERATED[way]}
            found = m.generate(ids[rows], **call)
            made.append(
                found if isinstance(found, Tensor) else torch.cat([h[-1].flatten() for h in found.hidden_states])
            )
        same[way] = torch.equal(*made) if way != "hidden states" else torch.allclose(*made, atol=1e-6)
    before = len(kept_graphs(sharded))
    sharded.generate(ids, attention_mask=mask, max_new_tokens=length + 3)
    return {"same": same, "graphs": before, "more": len(kept_graphs(sharded)) - before}


@pytest.mark.parametrize(
    "ways",
    [
        ["greedy", "sampled", "beams", "sampled beams", "several"],  # all of them make the same kind of call
        pytest.param(["greedy", "static", "lookup"], marks=pytest.mark.nightly),
        pytest.param(["greedy", "no cache", "hidden states"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_generation(ways: list[str]) -> None:
    for found in run_ranks(_generates, 2, "llama", ways, 7, seconds=300):
        assert found["same"] == dict.fromkeys(ways, True)
        assert not found["more"]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "world"), [("mistral", 2), ("t5", 2), ("llama", 4)])
def test_generation_of_other_models(kind: str, world: int) -> None:
    for found in run_ranks(_generates, world, kind, ["greedy", "beams"], 12, seconds=300):
        assert found["same"] == {"greedy": True, "beams": True}
        assert not found["more"]


class Words:
    """A tokenizer for streams: each token is a word."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"{number} " for number in ids)


def _streams(rank: int) -> dict[str, bool]:
    """Generates answers in batches, and streams an answer that another thread generates."""
    ts.distributed.init_process_group()
    model = _model("llama")
    sharded: Any = ts.shard(copy.deepcopy(model), "auto", (), CALL, objective={"mode": "infer"})
    same = {}
    for batch in (1, 3, 8):
        ids = torch.randint(2, 64, (batch, 9))
        mask = (torch.arange(9) >= torch.arange(batch)[:, None]).long()  # one length per prompt
        made = [m.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False) for m in (model, sharded)]
        same[f"{batch} prompts"] = torch.equal(*made)
    prompt = ids[:1]
    stream: Any = transformers.TextIteratorStreamer(Words(), skip_prompt=True, timeout=60)  # type: ignore[arg-type]
    options = {"max_new_tokens": 6, "do_sample": False, "streamer": stream}
    thread = threading.Thread(target=sharded.generate, args=(prompt,), kwargs=options)
    thread.start()
    words = "".join(stream).split()
    thread.join()
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
    return same | {"streamed": [int(word) for word in words] == expected.tolist()}


@pytest.mark.nightly
def test_batches_and_streams() -> None:
    for found in run_ranks(_streams, 2):
        assert all(found.values()), found


# --- bad input -------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Any, Tensor, int], object], type[ts.ShardError], str]] = {
    "different prompts": (lambda m, ids, rank: m.generate(ids + rank, max_new_tokens=3), ts.InputError, "input_ids"),
    "different seeds": (
        lambda m, ids, rank: (torch.manual_seed(rank), m.generate(ids, max_new_tokens=8, do_sample=True)),
        ts.InputError,
        "different values",
    ),
    "different positions": (lambda m, ids, rank: _decoded(m, ids, 1 + rank), ts.ShardError, "rank"),
    "another batch": (lambda m, ids, rank: _decoded(m, ids, 1, rows=1), ts.CaptureError, "can't be captured"),
    "a token beyond the vocabulary": (
        lambda m, ids, rank: m.generate(ids + 1000, max_new_tokens=3), ts.InputError, "an index is out of range",
    ),
}  # fmt: skip
"""Name -> the mistake, its error, and a part of the error's text."""


def _decoded(model: Any, ids: Tensor, steps: int, rows: int = 2) -> None:
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, cache=cache)
    for _ in range(steps):
        model(input_ids=ids[:rows, :1], cache=cache)
    model(input_ids=ids[:rows, :2], cache=cache)


def _wrong(rank: int) -> dict[str, str]:
    ts.distributed.init_process_group()
    sharded: Any = ts.shard(_model("llama"), "auto", (), CALL)
    ids, found = torch.randint(2, 60, (2, 5)), {}
    with torch.no_grad():
        for name, (call, kind, text) in WRONG.items():
            try:
                call(sharded, ids, rank)
                found[name] = "no error"
            except kind as error:
                found[name] = "" if text in str(error) else str(error)
    return found


@pytest.mark.nightly
def test_what_differs_between_ranks_or_does_not_fit_is_refused_on_each() -> None:
    assert run_ranks(_wrong, 2) == [dict.fromkeys(WRONG, "")] * 2


def _killed(rank: int, path: str) -> None:
    ts.distributed.init_process_group(timeout_seconds=20)
    sharded: Any = ts.shard(_model("llama"), "auto", (), CALL)
    ids = torch.randint(2, 60, (2, 5))
    sharded.generate(ids, max_new_tokens=3)

    class Dies(transformers.StoppingCriteria):
        def __call__(self, ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
            if rank == 1 and ids.shape[1] == 9:
                os._exit(0)
            return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(ts.DistributedError) as caught:
        sharded.generate(ids, max_new_tokens=20, stopping_criteria=[Dies()])
    Path(path).write_text(str(caught.value))


@pytest.mark.nightly
def test_a_rank_that_dies_while_it_generates_is_told(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError):  # rank 1 returns no result
        run_ranks(_killed, 2, str(tmp_path / "error"))
    assert "no word from rank 1" in (tmp_path / "error").read_text()
