"""Full parameters that stream out of a sharded model, and slices of them for engines of other sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import torchshard as ts
from tests.helpers import nightly, refused, refused_input
from torchshard.testing import on_ranks, run_ranks

CONFIG = LlamaConfig(
    vocab_size=130, hidden_size=48, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, attention_bias=True,
)  # fmt: skip
BUCKETS: list[int | str] = [1, 3000, "1MiB"]
"""A bucket for each tensor, several tensors in a bucket, and one bucket."""


class Fused(nn.Module):
    """Has a fused weight, an uneven one, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.scale = nn.Linear(8, 36), nn.Linear(12, 7), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.out(torch.tanh(q * k) * v) * self.scale
        return out


def _models() -> list[tuple[nn.Module, dict[str, Any]]]:
    torch.manual_seed(0)
    ids = torch.arange(72).reshape(12, 6)
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    return [(LlamaForCausalLM(CONFIG).double(), call), (Fused(), {"x": torch.randn(12, 8)})]


def _sharded(model: nn.Module, call: dict[str, Any], mesh: Any) -> Any:
    plan = {} if isinstance(mesh, str) else "auto"
    return ts.shard(copy.deepcopy(model), plan, example_kwargs=call, mesh=mesh, inputs="global")


MESHES = {
    "2-2": (2, 2, None),
    "2-gloo": (2, 2, "gloo"),
    "3-3": (3, 3, None),
    "3-shard-gloo": (3, "shard", "gloo"),
    "4-sharded": (4, {"dp": (2, "shard"), "tp": 2}, None),
    "4-sharded-gloo": (4, {"dp": (2, "shard"), "tp": 2}, "gloo"),
    "4-copied": (4, {"dp": 2, "tp": 2}, None),
}
ON_MESHES = pytest.mark.parametrize(("world", "mesh", "backend"), MESHES.values(), ids=list(MESHES))
DAILY = ["2-2", "2-gloo", "4-sharded"]


def _stream(rank: int, mesh: Any) -> None:
    for model, call in _models():
        sharded, own = _sharded(model, call, mesh), dict(model.named_parameters())
        for bucket in BUCKETS:
            kept = dict(sharded.named_full_parameters(bucket=bucket))
            assert list(kept) == list(own)
            for name, x in sharded.named_full_parameters(bucket=bucket):
                assert torch.equal(x, own[name]) and torch.equal(kept[name], own[name]) and not x.requires_grad, name
                x.zero_()  # the caller's, even where the parameter is replicated
        for name, x in sharded.named_full_parameters(dtype=torch.bfloat16):
            assert torch.equal(x, own[name].bfloat16()), name


@nightly(but=DAILY)
@ON_MESHES
def test_full_parameters_are_the_unsharded_models(world: int, mesh: Any, backend: str | None) -> None:
    run_ranks(_stream, world, mesh, backend=backend)


def _cut(rank: int, mesh: Any) -> None:
    (model, call), *_ = _models()
    sharded, own = _sharded(model, call, mesh), dict(model.named_parameters())
    for size in (1, 2, 4):
        make = ts.engine_slices(CONFIG, rank % size, size)
        expected = make(own)
        for bucket in BUCKETS:
            found = dict(sharded.named_slices(make, bucket=bucket))
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], x) for name, x in expected.items()), size

    def alone(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"x": full["model.norm.weight"][3:9].bfloat16()} if rank == 1 else {}

    found = dict(sharded.named_slices(alone))
    assert list(found) == ["x"] * (rank == 1) and all(torch.equal(x, alone(own)["x"]) for x in found.values())


@nightly(but=DAILY)
@ON_MESHES
def test_slices_are_cut_for_engines_of_other_sizes(world: int, mesh: Any, backend: str | None) -> None:
    run_ranks(_cut, world, mesh, backend=backend)


def _sent(rank: int) -> int:
    (model, call), *_ = _models()
    sharded, sent = _sharded(model, call, 2), 0
    all_to_all = dist.all_to_all_single

    def counted(received: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += given.nbytes
        return all_to_all(received, given, *args, **kwargs)

    name = "model.layers.0.mlp.up_proj.weight"
    assert sharded.layouts[name] == ts.S(0)
    with mock.patch.object(dist, "all_to_all_single", counted):
        found = dict(sharded.named_slices(lambda full: {"x": full[name][36:43, 5:7]}))
    assert torch.equal(found["x"], model.get_parameter(name)[36:43, 5:7])
    return sent


def test_ranks_send_only_requested_elements() -> None:
    """Rows 36 to 39 are rank 0's, for rank 1, and rows 40 to 42 rank 1's, for rank 0."""
    assert run_ranks(_sent, 2, backend="gloo") == [4 * 2 * 8, 3 * 2 * 8]


def test_engines_of_these_slices_compute_what_the_model_does() -> None:
    """Layers by hand: each rank has its slices, and the ranks' results are added."""
    (model, _), *_ = _models()
    layer, x = model.get_submodule("model.layers.0"), torch.randn(5, 48, dtype=torch.float64)
    full = dict(layer.named_parameters())
    for size in (1, 2, 4):
        q, up = [], torch.zeros_like(x)
        for rank in range(size):
            own = ts.engine_slices(CONFIG, rank, size)(full)
            qkv = F.linear(x, own["self_attn.qkv_proj.weight"], own["self_attn.qkv_proj.bias"])
            heads, kv = CONFIG.num_attention_heads // size, math.ceil(CONFIG.num_key_value_heads / size)
            q.append(qkv.unflatten(-1, (heads + 2 * kv, 12)).split([heads, kv, kv], 1))
            gate, part = F.linear(x, own["mlp.gate_up_proj.weight"]).chunk(2, -1)
            up += F.linear(F.silu(gate) * part, own["mlp.down_proj.weight"])
        torch.testing.assert_close(up, layer.get_submodule("mlp")(x), atol=1e-12, rtol=0)
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            whole = layer.get_submodule(f"self_attn.{name}")(x).unflatten(-1, (-1, 12))
            repeats = 1 if i == 0 else max(size // CONFIG.num_key_value_heads, 1)
            torch.testing.assert_close(torch.cat([parts[i] for parts in q], 1), whole.repeat_interleave(repeats, 1))


def test_engines_fuse_in_their_own_order() -> None:
    """OPT makes k and v before q; a vocabulary of 130 is padded to 192, of which the last rank has no row."""
    config = OPTConfig(hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=16)
    attention = OPTForCausalLM(config).get_submodule("model.decoder.layers.0.self_attn")
    own = {name: x for name, x in attention.named_parameters() if name.startswith(("q", "k", "v"))}
    assert next(iter(own)).startswith("k")
    fused = ts.engine_slices(CONFIG, 0, 1)(own)["qkv_proj.weight"]
    assert torch.equal(fused, torch.cat([own[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")]))
    rows = [len(ts.engine_slices(CONFIG, rank, 8)({"embed_tokens.weight": torch.ones(130, 2)})["embed_tokens.weight"])
            for rank in range(8)]  # fmt: skip
    assert rows == [24, 24, 24, 24, 24, 10, 0, 0]


def test_layouts_that_no_engine_has_are_refused() -> None:
    for size, name, shape, why in (
        (3, "attn.q_proj.weight", (48, 48), "4 heads can't be split evenly over 3 ranks"),
        (8, "attn.q_proj.weight", (48, 48), "4 heads can't be split evenly over 8 ranks"),
        (2, "attn.q_proj.weight", (30, 48), "4 heads can't be split evenly over 2 ranks"),
        (2, "conv.weight", (3, 3), "no engine's layout is known for 'conv.weight'"),
        (2, "attn.sinks", (4,), "no engine's layout is known for 'attn.sinks'"),
        (2, "mlp.up_proj.weight", (80, 48), "it joins gate_proj, up_proj, and gate_proj is missing"),
        (2, "mlp.down_proj.scale", (), "can't be split evenly"),
    ):
        cut = ts.engine_slices(CONFIG, 0, size)
        assert refused_input(lambda cut=cut, name=name, shape=shape: cut({name: torch.ones(shape)}), why), name
    assert refused_input(lambda: ts.engine_slices(CONFIG, 2, 2), "rank 2 is not one of 2 ranks")


@on_ranks(2)
def test_what_ranks_do_differently_is_refused(rank: int) -> None:
    model, call = _models()[1]
    sharded = _sharded(model, call, 2)
    weight: Callable[[Callable[[Tensor], Any]], Any] = lambda cut: sharded.named_slices(  # noqa: E731
        lambda full: {"x": cut(full["out.weight"])}
    )
    for cut in (lambda w: w * 2, lambda w: w.sum(), lambda w: float(w[0, 0]), lambda w: torch.zeros(3),
                lambda w: torch.cat([torch.zeros(1, 12), w]), lambda w: w.bfloat16().float()):  # fmt: skip
        assert refused_input(lambda cut=cut: weight(cut), "is not cut out of full parameters")
    assert refused_input(lambda: sharded.named_full_parameters(bucket="big"), "'big' is no size")
    assert refused_input(lambda: sharded.named_full_parameters(dtype=torch.int8), "is not a floating-point dtype")
    assert refused(lambda: sharded.named_full_parameters(bucket="big" if rank else "1MiB"), "'big' is no size")
    settings: list[dict[str, Any]] = [{"bucket": 1 if rank else "1MiB"}, {"dtype": torch.half if rank else None}]
    for each in settings:
        assert refused(lambda each=each: sharded.named_full_parameters(**each), "stream parameters differently")


def _interleaved(rank: int) -> bool:
    """Two models, whose streams the ranks go through in different orders."""
    model, call = _models()[1]
    sharded = _sharded(model, call, 2)
    streams = [each.named_full_parameters(bucket=1) for each in (sharded, copy.deepcopy(sharded))]
    return refused(lambda: [next(streams[(i + rank) % 2]) for i in range(4)], "about to do different things")


@pytest.mark.parametrize("backend", ["gloo", None])
def test_streams_that_ranks_interleave_differently_are_refused(backend: str | None) -> None:
    assert run_ranks(_interleaved, 2, backend=backend) == [True, True]


def _cast_between(rank: int) -> None:
    model, call = _models()[1]
    sharded, own = _sharded(model, call, 2), dict(model.named_parameters())
    stream = sharded.named_full_parameters(bucket=1)
    found = [next(stream)]
    sharded.half()
    for name, x in (*found, *stream):
        assert x.dtype == torch.float32 and torch.allclose(x, own[name], rtol=1e-3), name


@pytest.mark.parametrize("backend", ["gloo", None])
def test_a_stream_keeps_its_dtypes(backend: str | None) -> None:
    run_ranks(_cast_between, 2, backend=backend)


@on_ranks(2)
def test_each_tensor_has_a_storage_of_its_own(rank: int) -> None:
    model, call = _models()[1]
    found = dict(_sharded(model, call, 2).named_full_parameters())
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in found.values())
    x, other = found["out.weight"].requires_grad_(), found["qkv.weight"]
    y = (x * x).sum()
    other.zero_()
    y.backward()  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_a_rank_that_stops_early_is_reported(rank: int) -> None:
    model, call = _models()[1]
    sharded = _sharded(model, call, 2)

    def iterate() -> None:
        for _ in sharded.named_full_parameters(bucket=1):
            if rank:
                break
        sharded(**call)

    assert refused(iterate, "about to do different things")


def test_memory_is_used_again_unless_something_refers_to_it() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    sharded = ts.shard(model, "auto", (torch.ones(2, 64),), mesh=1)
    keep: list[Callable[[Tensor], object]] = [lambda x: x, lambda x: x[1:], lambda x: x.numpy(), lambda x: x.view(-1)]
    addresses = {x.data_ptr() for _, x in sharded.named_full_parameters(bucket=1)}
    assert len(addresses) == 2  # the caller refers to the last tensor
    for kept in keep:
        found = [(kept(x), x.data_ptr()) for _, x in sharded.named_full_parameters(bucket=1)]
        assert len({address for _, address in found}) == 8
