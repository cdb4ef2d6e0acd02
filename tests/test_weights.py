"""Sharding and creating weights: no rank allocates more than it needs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import torchshard as ts
from tests.helpers import nightly, refused
from torchshard.testing import on_ranks, run_ranks


def _allocated(run: Callable[[], object]) -> tuple[int, int]:
    """Returns the most CPU bytes that a function allocates at once, and the bytes that it leaves allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    total = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    del kept
    return most, total


def _blocks() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))
    return nn.Sequential(*blocks, nn.BatchNorm1d(256))


def _bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _shards(rank: int, plan: Any) -> tuple[float, float]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model, x, held = _blocks(), torch.randn(4, 256), []
    most, left = _allocated(lambda: held.append(ts.shard(model, plan, (x,))))
    own = _bytes_of((*held[0].parameters(), *held[0].buffers()))
    return most / own, left / own


@nightly("3-*")
@pytest.mark.parametrize("plan", ["auto", {"*.0": "column", "*.2": "row"}], ids=["auto", "dict"])
@pytest.mark.parametrize("world", [2, 3])
def test_to_shard_takes_the_memory_of_the_slices_alone(plan: Any, world: int) -> None:
    for most, left in run_ranks(_shards, world, plan):
        assert 0.98 < left <= most < 1.02


def _changes_the_original(rank: int) -> list[bool]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model, x = _blocks().double().eval(), torch.randn(4, 256, dtype=torch.float64)
    sharded, before = ts.shard(model, "auto", (x,)), model(x)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    result: Tensor = sharded(x)
    return [torch.allclose(result, before, rtol=0, atol=1e-10)]


def test_slices_share_no_memory_with_the_original() -> None:
    assert run_ranks(_changes_the_original, 2) == [[True], [True]]


# --- lazy models -----------------------------------------------------------------------------------------------------


class _Idioms(nn.Module):
    """A model with common ways to create and initialise parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.product = nn.Parameter(torch.randn(3, 4) @ torch.randn(4, 3))
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.b.bias)
        self.a.bias.data.normal_()
        self.b.bias.data[1:] = 0.5
        self.register_buffer("table", torch.linspace(0, 1, 5)[1:])
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.listed = torch.linspace(0, 1, 3).tolist()
        self.array = torch.ones(2).numpy()
        self.maybe = nn.Linear(2, 2) if torch.rand(1).item() > 0.5 else nn.Linear(3, 3)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(5)
            self.seeded = nn.Linear(3, 3)
        self.again = nn.Linear(3, 3)
        for _ in range(2):
            torch.manual_seed(5)
            self.last = nn.Linear(3, 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
        self.copied = copy.deepcopy(self.last)
        self.plain = torch.arange(3.0)
        with torch.no_grad():
            self.shuffled = nn.Parameter(torch.rand(6))
            self.shuffled.copy_(self.shuffled.flip(0))
            self.counted = nn.Parameter(torch.poisson(torch.rand(20) * 30))
            self.after = nn.Linear(2, 3)
            self.after.weight[0].normal_()
            self.after.weight.copy_(self.after.weight + self.after.bias[:, None])


def _in_half() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        model = nn.Linear(3, 4)
        model.register_buffer("table", torch.arange(4) / 3)
        return model
    finally:
        torch.set_default_dtype(before)


class _DrawsIntoValues(nn.Module):
    """A model with a constructor that draws into an existing tensor."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.given = nn.Parameter(given.normal_())
        self.second = nn.Linear(3, 2)


class _OwnGenerator(nn.Module):
    """A model with a constructor that draws from its own generator, and from the process's."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Linear(3, 4)
        nn.init.normal_(self.first.weight, generator=generator)
        self.second = nn.Parameter(torch.randn(3, generator=generator))
        self.process = nn.Parameter(torch.rand(3, generator=torch.default_generator))
        with torch.no_grad():
            self.second[1:].uniform_(generator=generator)
            rates = torch.rand(5, generator=generator) * 30
            self.counted = nn.Parameter(torch.poisson(rates, generator=generator))
            self.chosen = nn.Parameter(torch.bernoulli(rates / 30, generator=generator))
        self.later = nn.Parameter(torch.randn(3, generator=generator))
        self.drawn = torch.randn(2, generator=generator).tolist()
        self.third = nn.Linear(3, 3)
        nn.init.trunc_normal_(self.third.weight, generator=generator)
        state = generator.get_state()
        self.restored = nn.Parameter(torch.rand(2, generator=generator))
        self.again = nn.Parameter(torch.rand(2, generator=generator.set_state(state)))


def _hf(kind: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**sizes))


_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1}
BUILT: dict[str, Callable[[], nn.Module]] = {
    "idioms": _Idioms,
    "values": lambda: _DrawsIntoValues(torch.empty(3).zero_()),
    "generator": _OwnGenerator,
    "layers": lambda: nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.LSTM(3, 4), nn.BatchNorm1d(4)),
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32),
    "half": _in_half,
    "cast": lambda: nn.Linear(4, 5).to(torch.bfloat16),
    "llama": _hf("LlamaForCausalLM", "LlamaConfig", **_SIZES, num_key_value_heads=2, vocab_size=50),
    "tied": _hf("LlamaForCausalLM", "LlamaConfig", **_SIZES, vocab_size=50, tie_word_embeddings=True),
    "bert": _hf("BertForMaskedLM", "BertConfig", **_SIZES, vocab_size=50),
    "t5": _hf("T5ForConditionalGeneration", "T5Config", **_T5, vocab_size=50),
    "mixtral": _hf("MixtralForCausalLM", "MixtralConfig", **_SIZES, num_local_experts=4, vocab_size=50),
    "vit": _hf("ViTForImageClassification", "ViTConfig", **_SIZES, image_size=32, patch_size=8),
    "swin": _hf(
        "SwinForImageClassification", "SwinConfig", image_size=32, embed_dim=8, depths=[1, 1], num_heads=[2, 2]
    ),
}


def _both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Returns a model, and the lazy model of the same seed."""
    torch.manual_seed(3)
    model = build()
    torch.manual_seed(3)
    with ts.lazy():
        lazy = build()
    torch.manual_seed(99)
    return model, lazy


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))


@pytest.mark.parametrize("kind", BUILT)
def test_a_lazy_model_gets_the_values_of_the_model_bit_for_bit(kind: str) -> None:
    model, lazy = _both(BUILT[kind])
    expected, given = _named(model), _named(lazy)
    state = torch.get_rng_state()
    values = {id(t): t.value() for t in given.values() if hasattr(t, "value")}
    assert torch.equal(torch.get_rng_state(), state)
    assert given.keys() == expected.keys() and values
    for name, tensor in given.items():
        value = values.get(id(tensor), tensor)
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
        assert isinstance(tensor, nn.Parameter) == isinstance(expected[name], nn.Parameter), name
        assert tensor.requires_grad == expected[name].requires_grad, name


def test_what_a_constructor_computes_with_is_real() -> None:
    model, lazy = _both(_Idioms)
    assert lazy.rates == model.rates and lazy.listed == model.listed and lazy.array.tolist() == [1.0, 1.0]
    assert lazy.maybe.in_features == model.maybe.in_features  # type: ignore[union-attr]


def test_models_that_are_built_one_after_the_other() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    torch.manual_seed(0)
    with ts.lazy():
        lazy_first = nn.Linear(3, 3)
    with ts.lazy():
        lazy_second = nn.Linear(3, 3)
    torch.manual_seed(0)
    with ts.lazy():
        seeded = nn.Linear(3, 3)
    drawn = torch.randn(9)
    with ts.lazy():
        later = nn.Linear(3, 3)
    lazies = [lazy_first, lazy_second, seeded, later]
    values = [model.weight.value() for model in lazies]
    expected = [first.weight, second.weight, first.weight]
    assert all(torch.equal(value, weight) for value, weight in zip(values, expected, strict=False))
    assert len({tuple(value.flatten().tolist()) for value in (*values[1:], drawn)}) == 4


def test_a_lazy_model_takes_no_memory() -> None:
    most, _ = _allocated(lambda: _lazily(_blocks))
    assert most < 0.01 * _bytes_of(_blocks().parameters())


def _lazily(build: Callable[[], nn.Module]) -> nn.Module:
    with ts.lazy():
        return build()


def test_a_lazy_tensor_cannot_be_pickled() -> None:
    _, lazy = _both(BUILT["cast"])
    assert refused(lambda: pickle.dumps(lazy), "a lazy tensor can't be pickled", ts.InputError)


def test_a_lazy_tensor_cannot_be_resized() -> None:
    _, lazy = _both(BUILT["cast"])
    assert refused(lambda: lazy.weight.data.resize_(2, 2), "can't be resized by resize_", ts.InputError)  # type: ignore[union-attr]


def test_plans_and_checks_take_lazy_models() -> None:
    model, lazy = _both(_blocks)
    x = torch.randn(4, 256)
    plans = [ts.plan(m, example_inputs=(x,), mesh=2) for m in (model, lazy)]
    assert plans[0].to_json() == plans[1].to_json()
    assert ts.check(lazy, plans[1], example_inputs=(x,), mesh=2).ok


def _shards_lazily(rank: int, kind: str) -> list[bool]:
    ts.distributed.init_process_group()
    model, lazy = _both(BUILT[kind])
    ids = torch.arange(16).reshape(2, 8)
    whole, sharded = (ts.shard(m, "auto", (), {"input_ids": ids, "use_cache": False}) for m in (model, lazy))
    same = [torch.equal(a, b) for a, b in zip(_named(whole).values(), _named(sharded).values(), strict=True)]
    return [
        *same,
        torch.equal(whole(input_ids=ids, use_cache=False).logits, sharded(input_ids=ids, use_cache=False).logits),
    ]


@nightly(but=["2-tied"])
@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_gets_its_slices_of_a_lazy_model(kind: str, world: int) -> None:
    assert all(all(same) for same in run_ranks(_shards_lazily, world, kind))


def _shards_lazily_within(rank: int) -> tuple[float, float]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    with ts.lazy():
        model = _blocks()
    x, held = torch.randn(4, 256), []
    most, _ = _allocated(lambda: held.append(ts.shard(model, "auto", (x,))))
    own = _bytes_of((*held[0].parameters(), *held[0].buffers()))
    return most - own, 1024 * 256 * 4


def test_to_shard_a_lazy_model_takes_the_slices_and_one_parameter() -> None:
    for beyond, largest in run_ranks(_shards_lazily_within, 2):
        assert -0.02 * largest < beyond < 1.1 * largest


@on_ranks(2)
def test_lazy_models_that_differ_between_the_ranks_are_refused(rank: int) -> None:
    ts.distributed.init_process_group()
    torch.manual_seed(rank)
    with ts.lazy():
        model = _blocks()
    assert refused(lambda: ts.shard(model, "auto", (torch.ones(4, 256),)), "the ranks hold different models")
