"""Real gloo processes: training matches the unsharded model, and errors are the same on every rank."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchshard as ts
from tests.helpers import nightly
from tests.models import CASES, GPT, MLP
from torchshard.testing import gradient_error, kept_graphs, largest, run_ranks, split

STEPS = 3


def _floats(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    torch.utils._pytree.tree_map_only(Tensor, found.append, vars(value) if hasattr(value, "logits") else value)
    return [t for t in found if t.is_floating_point()]


def _step(model: nn.Module, inputs: tuple[Any, ...], optimizer: torch.optim.Optimizer, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    outputs = _floats(model(*inputs))
    optimizer.zero_grad()
    sum(out.square().mean() for out in outputs).backward()  # type: ignore[union-attr]
    optimizer.step()
    return [out.detach() for out in outputs]


def _train(rank: int, name: str) -> dict[str, Any]:
    ts.distributed.init_process_group()
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().double()
    inputs = tuple(x.detach().double() if x.is_floating_point() else x for x in case.inputs())
    sharded = ts.shard(model, case.plan)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, sharded)]
    error = 0.0
    for seed in range(STEPS):
        expected = _step(model, inputs, optimizers[0], seed)
        got = _step(sharded, inputs, optimizers[1], seed)
        error = largest(error, *(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True)))
    whole, mine = model.state_dict(), sharded.state_dict()
    full = sharded.full_state_dict()
    replicated = {n: mine[n] for n, p in sharded.layouts.items() if p == ts.I and n in mine}
    return {
        "outputs": error,
        "names": sorted(mine) == sorted(whole),
        "parameters": {n: float((full[n] - t).abs().max()) for n, t in whole.items() if t.is_floating_point()},
        "buffers": all(torch.equal(full[n], t) for n, t in whole.items() if not t.is_floating_point()),
        "replicated": {n: t.clone() for n, t in replicated.items()},
        "split": [n for n, layout in sharded.layouts.items() if layout != ts.I],
    }


TRAINED = {
    2: ["gpt", "fused_gqa", "conv", "encoder_decoder", "dense_moe", "writes"],
    3: ["recurrent", "gpt_hidden_30", "attention_7_heads", "fused_by_split_7_heads", "mlp_uneven"],
    4: ["gpt", "gqa_1_kv_head", "fused_by_view_5_heads"],
}
"""Number of ranks -> models to train on them."""


@nightly(but=["3-fused_by_split_7_heads"])
@pytest.mark.parametrize(
    "world_size, name",
    [
        *((world, name) for world, names in TRAINED.items() for name in names),
        pytest.param(2, "fused_by_view", marks=pytest.mark.quick),
    ],
)
def test_training_beside_the_unsharded_model(world_size: int, name: str) -> None:
    results = run_ranks(_train, world_size, name)
    assert all(r["names"] and r["buffers"] and r["split"] for r in results)
    assert max(r["outputs"] for r in results) < 1e-8
    errors = {n: max(r["parameters"][n] for r in results) for n in results[0]["parameters"]}
    # Adam divides by the gradient's size. If a gradient is zero on paper (a key bias), only its noise remains.
    assert all(e < 1e-8 for n, e in errors.items() if not n.endswith("k.bias")), errors
    for other in results[1:]:
        for n, tensor in results[0]["replicated"].items():
            assert torch.equal(tensor, other["replicated"][n]), f"{n} drifted apart"


def _message(fn: Any) -> tuple[str, str]:
    try:
        fn()
    except ts.ShardError as error:
        return type(error).__name__, str(error)
    return "", "no error"


def _faults(rank: int) -> dict[str, tuple[str, str]]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = ts.shard(MLP(), {"up": "column", "down": "row"})
    x, found = torch.randn(3, 12), {}
    found["shape"] = _message(lambda: model(torch.zeros(3 + rank, 12)))
    found["dtype"] = _message(lambda: model(x.double() if rank else x))
    found["device or kind"] = _message(lambda: model(x) if rank else model(x, x))
    found["values"] = _message(lambda: model(x + rank))
    model(x)
    found["mode"] = _message(lambda: model.train(rank == 0)(x))
    model.train()
    found["works again"] = _message(lambda: model(torch.ones(5, 12)))
    found["shape after capture"] = _message(lambda: model(torch.ones(5 + rank, 12)))
    torch.manual_seed(rank)
    found["weights"] = _message(lambda: ts.shard(MLP(), {"up": "column"}))
    torch.manual_seed(0)
    plan = {"up": "row" if rank else "column"}
    found["plan"] = _message(lambda: ts.shard(MLP(), plan, example_inputs=(x,)))
    gpt = ts.shard(GPT(), {"tok": "vocab"})
    torch.manual_seed(rank)
    found["RNG state"] = _message(lambda: gpt(torch.zeros(1, 4, dtype=torch.long)))
    found["RNG state that nothing draws from"] = _message(lambda: gpt.eval()(torch.zeros(1, 4, dtype=torch.long)))
    torch.manual_seed(0)
    gpt.train()(torch.zeros(1, 4, dtype=torch.long))
    torch.manual_seed(rank)
    found["RNG state after capture"] = _message(lambda: gpt(torch.zeros(1, 4, dtype=torch.long)))
    found["values after capture"] = _message(lambda: model(torch.ones(5, 12) + rank))
    torch.manual_seed(0)
    y, mlp = torch.randn(4, 12), MLP()
    found["order of values"] = _message(lambda: ts.shard(mlp, {"up": "column"})(y.flip(0) if rank else y))
    mlp.up.weight.data = mlp.up.weight.flip(0) if rank else mlp.up.weight
    found["order of weights"] = _message(lambda: ts.shard(mlp, {"up": "column"}))
    found["plan key"] = _message(lambda: ts.shard(MLP(), {"uq" if rank else "up": "column"}))
    torch.manual_seed(0)
    once = ts.shard(MLP(), {"up": "column"})
    found["example inputs"] = _message(lambda: once(x) if rank else once.warm_up((x,), {}))
    once(x)
    found["captured anew"] = _message(lambda: (once if rank else once.double().float())(x))
    made = ts.plan(MLP(), {"up": "column"}, example_inputs=(x,), mesh=5)
    found["world size"] = _message(lambda: ts.shard(MLP(), made))
    return found


def test_faults_are_the_same_error_on_every_rank() -> None:
    ranks = run_ranks(_faults, 2)
    expected = {
        "shape": ("InputError", "rank 0: f32[3,12]; rank 1: f32[4,12]"),
        "dtype": ("InputError", "rank 0: f32[3,12]; rank 1: f64[3,12]"),
        "device or kind": ("InputError", "different arguments"),
        "values": ("InputError", "different values"),
        "mode": ("InputError", "modules in training mode"),
        "works again": ("", "no error"),
        "shape after capture": ("InputError", "rank 0: f32[5,12]; rank 1: f32[6,12]"),
        "weights": ("DistributedError", "different models"),
        "plan": ("DistributedError", "different programs"),
        "RNG state": ("DistributedError", "RNG states differ"),
        "RNG state that nothing draws from": ("", "no error"),
        "RNG state after capture": ("DistributedError", "RNG states differ"),
        "values after capture": ("InputError", "different values"),
        "order of values": ("InputError", "different values"),
        "order of weights": ("DistributedError", "different models"),
        "plan key": ("PlanError", "rank 1: the plan's key 'uq' matches no module"),
        "example inputs": ("InputError", "rank 0: a capture for example inputs; rank 1: a call"),
        "captured anew": ("DistributedError", "rank 0: to be captured now; rank 1: captured before"),
        "world size": ("PlanError", "for 5 ranks, the group has 2"),
    }
    for name, (kind, text) in expected.items():
        for found in ranks:
            assert found[name][0] == kind and text in found[name][1], f"{name}: {found[name]}"
        assert ranks[0][name] == ranks[1][name]


class _Embedded(nn.Module):
    """A model that computes before it communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(10, 12), MLP()

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return self.mlp(self.words(ids) * scale)


class _Events(TorchDispatchMode):
    """Records matrix products in the list that also records the ranks' comparisons."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.events.append("product")
        return func(*args, **(kwargs or {}))


def _compared_while_computing(rank: int) -> dict[str, Any]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = _Embedded().double()
    sharded = ts.shard(copy.deepcopy(model), {"words": "replicate", "mlp.up": "column", "mlp.down": "row"})
    ids, scale = torch.arange(6).view(2, 3), torch.ones(1, dtype=torch.double)

    def step(m: nn.Module, ids: Tensor, scale: Tensor) -> None:
        m.zero_grad()
        m(ids, scale).square().sum().backward()

    for _ in range(3):
        step(sharded, ids, scale)
        with torch.no_grad():
            sharded(ids, scale)
    odd = rank == 1
    found: dict[str, Any] = {}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found[f"values {grad}"] = _message(lambda: sharded(ids + odd, scale))
            found[f"shape {grad}"] = _message(lambda: sharded(ids[: 2 - odd], scale))
            found[f"refused {grad}"] = _message(lambda: sharded(ids, scale.float() if odd else scale))
            found[f"refused at once {grad}"] = _message(lambda: sharded(ids, None if odd else scale))
            found[f"fails while computing {grad}"] = _message(lambda: sharded(ids + 10 * odd, scale))
    step(sharded, ids, scale)
    step(model, ids, scale)
    whole = ts.distributed.all_gather_object(_errors(model, sharded))
    found["error"] = max(whole)
    events: list[str] = []
    wire = sys.modules["torchshard.distributed.wire"]
    settle = wire.settle
    with pytest.MonkeyPatch.context() as patch, _Events(events), torch.no_grad():
        patch.setattr(wire, "settle", lambda: (events.append("compared"), settle()) if wire.has_comparison() else None)
        sharded(ids, scale)
    found["events"] = events
    return found


def _errors(model: nn.Module, sharded: Any) -> float:
    own = dict(sharded.named_parameters())
    rank, size = ts.distributed.get_rank(), ts.distributed.get_group_size()
    parts = {n: split(p.grad, sharded.layouts[n], rank, size) for n, p in model.named_parameters()}
    return largest(*(float((part - own[n].grad.as_subclass(Tensor)).abs().max()) for n, part in parts.items()))


def test_ranks_compute_while_they_compare_calls() -> None:
    first, second = run_ranks(_compared_while_computing, 2)
    assert first == second
    assert first.pop("events") == ["product", "product", "compared"]
    assert first.pop("error") < 1e-10
    assert all(kind == "InputError" for kind, _ in first.values()), first


def _shapes_and_modes(rank: int) -> list[int]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = GPT().double()
    sharded, counts = ts.shard(model, CASES["gpt"].plan), []
    for mode, shape in [
        (True, (2, 7)),
        (True, (3, 5)),
        (False, (2, 7)),
        (False, (4, 9)),
        (True, (2, 8)),
        (False, (1, 6)),
    ]:
        model.train(mode)
        sharded.train(mode)
        ids = torch.randint(0, 97, shape)
        seed = torch.get_rng_state()
        expected = model(ids, labels=ids)
        torch.set_rng_state(seed)
        got = sharded(ids, labels=ids)
        assert set(got) == {"logits", "loss"}
        assert all(torch.allclose(expected[k], got[k], rtol=1e-12, atol=1e-12) for k in expected)
        counts.append(len(kept_graphs(sharded)))
    with torch.no_grad():
        assert not sharded(ids)["logits"].requires_grad
    return counts


@pytest.mark.nightly
def test_one_graph_per_kind_of_call() -> None:
    """A graph serves several sizes; train, eval and a batch of one have separate graphs."""
    assert run_ranks(_shapes_and_modes, 2) == [[1, 1, 2, 2, 2, 3]] * 2


def _frozen(rank: int) -> list[float]:
    """Freezes and thaws parameters after sharding; returns the gradient errors."""
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model, x = MLP().double(), torch.randn(3, 12).double()
    sharded = ts.shard(model, {"up": "column", "down": "row"}, example_inputs=(x,))
    errors = []
    for frozen in (["up.weight"], ["up.weight", "up.bias", "down.weight"], []):
        for m in (model, sharded):
            for name, p in m.named_parameters():
                p.grad = None
                p.requires_grad_(name not in frozen)
            m(x).square().sum().backward()
        errors.append(gradient_error(sharded, model))
    return errors


def test_frozen_parameters() -> None:
    assert largest(*(largest(*e) for e in run_ranks(_frozen, 2))) < 1e-10


def _clipped(rank: int) -> list[tuple[float, float, float]]:
    """Returns (norm, unsharded norm, largest gradient error) with split, replicated and frozen parameters."""
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = GPT(p=0.0).double()
    model.pos.weight.requires_grad_(False)
    sharded, found = ts.shard(model, CASES["gpt"].plan), []
    ids = torch.randint(0, 97, (2, 7))
    for norm_type in (2.0, 1.0, float("inf")):
        for m in (model, sharded):
            m.zero_grad()
            m(ids, labels=ids)["loss"].backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        got = ts.clip_grad_norm_(sharded, 0.1, norm_type)
        found.append((float(got), float(expected), gradient_error(sharded, model)))
    return found


@pytest.mark.nightly
def test_clipping_by_the_norm_of_the_whole_model() -> None:
    for rank in run_ranks(_clipped, 3):
        for got, expected, error in rank:
            assert got == pytest.approx(expected, rel=1e-9) and error < 1e-12


def _scaled(rank: int) -> tuple[list[float], float]:
    """Makes a gradient overflow in only the last rank's slice; returns the parameters' errors and the scale."""
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = MLP()
    sharded, x = ts.shard(model, {"up": "column", "down": "row"}), torch.randn(3, 12)
    for m in (model, sharded):
        optimizer, scaler = torch.optim.SGD(m.parameters(), 0.1), ts.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(m(x).square().sum()).backward()
            bias = m.get_parameter("up.bias").grad
            if step == 1 and bias is not None and (m is model or rank == 1):
                bias[-1] = float("inf")
            scaler.step(optimizer)
            scaler.update()
    whole = sharded.full_state_dict()
    return [float((whole[n] - p).abs().max()) for n, p in model.named_parameters()], scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for errors, scale in run_ranks(_scaled, 2):
        assert largest(*errors) < 1e-5 and scale == 2.0
