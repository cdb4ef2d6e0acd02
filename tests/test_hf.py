"""Tests tiny Hugging Face models with random weights under hand-written plans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.captured import checked
from tests.helpers import nightly
from torchshard.testing import CapturedCall, capture

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 62,
    "vocab_size": 99,
}
LLAMA = {
    **dict.fromkeys(["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"], "colwise"),
    **dict.fromkeys(["*.o_proj", "*.down_proj"], "rowwise"),
    "*embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_rep",
}
BERT = {
    **dict.fromkeys(["*.self.query", "*.self.key", "*.self.value", "*.intermediate.dense"], "column"),
    **dict.fromkeys(["*.attention.output.dense", "encoder.layer.*.output.dense"], "row"),
    "*word_embeddings": "vocab",
}
GPT2 = {
    **dict.fromkeys(["*.c_attn", "*.c_fc", "lm_head"], "column"),
    **dict.fromkeys(["*.attn.c_proj", "*.mlp.c_proj"], "row"),
    "transformer.wte": "vocab",
}
T5 = {**dict.fromkeys(["*.q", "*.k", "*.v", "*.wi"], "column"), **dict.fromkeys(["*.o", "*.wo"], "row")}


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **SIZES))


def _gpt2() -> nn.Module:
    config = GPT2Config(n_layer=2, n_embd=48, n_head=6, vocab_size=99, n_positions=32, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = T5Config(d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=6, vocab_size=99, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def _ids() -> torch.Tensor:
    return torch.randint(3, 97, (2, 8))


def _mask() -> torch.Tensor:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return mask


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str], Callable[[], dict[str, Any]]]] = {
    "bert": (lambda: BertModel(BertConfig(**SIZES)), BERT, lambda: {"input_ids": _ids(), "attention_mask": _mask()}),
    "llama": (_llama, LLAMA, lambda: {"input_ids": _ids(), "labels": _ids(), "use_cache": False}),
    "llama_with_cache": (_llama, LLAMA, lambda: {"input_ids": _ids(), "attention_mask": _mask()}),
    "gpt2": (_gpt2, GPT2, lambda: {"input_ids": _ids(), "labels": _ids()}),
    "t5": (_t5, T5, lambda: {"input_ids": _ids(), "labels": _ids()}),
}


@functools.cache
def _captured(name: str) -> CapturedCall:
    build, _, inputs = CASES[name]
    torch.manual_seed(0)
    return capture(build().train(), (), inputs(), dtype=torch.float64)


@nightly(but=["llama-2"])
@pytest.mark.parametrize(
    "name, world_size",
    [("bert", 2), ("bert", 3), ("llama", 2), ("llama", 4), ("llama_with_cache", 2), ("gpt2", 2), ("t5", 2)],
)
def test_parity(name: str, world_size: int) -> None:
    report = checked(_captured(name), CASES[name][1], world_size)
    assert report.ok, str(report)


@nightly("bert")
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_no_more_collectives_than_megatron(name: str) -> None:
    """Each layer has two reduces (forward) and two copies (all-reduced backward); only embedding and head add more."""
    build, plan, inputs = CASES[name]
    kinds = capture(build().eval(), (), inputs()).plan(plan, 2).collectives()
    assert kinds.count("reduce") == 2 * 2 + 1
    assert kinds.count("copy") == 2 * 2 + (name == "llama")
    assert len(kinds) == kinds.count("reduce") + kinds.count("copy") + (name == "llama")
