"""Gradient accumulation by `no_sync()`: ranks keep partial gradients, and the next call outside sums them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly, refused, refused_input
from tests.test_batches import Casts, _batch, _llama, _model, _own
from torchshard.testing import (
    awaited,
    begun,
    full_gradient,
    gradient_error,
    largest,
    on_ranks,
    rank_graph,
    run_ranks,
    step_graphs,
)

Mesh = dict[str, Any] | str
LENGTHS = (12, 7, 12)


def _ids(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = model(*batch)[0]
    return loss


def _with_labels(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    made = model(input_ids=batch[0], labels=batch[1])
    loss: Tensor = made.loss + made.logits.square().mean()  # uses logits and loss: two segments
    return loss


def _frozen() -> nn.Module:
    model = _model()
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)
    return model


def _lora() -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(_llama()[0].double(), config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "gpt": (_model, _ids),
    "frozen": (_frozen, _ids),
    "tied": (lambda: _llama()[0].double(), _with_labels),
    "lora": (_lora, _with_labels),
}


def _place(rank: int, mesh: Mesh) -> tuple[int, int]:
    """Returns the index of this rank's batch shard, and the number of shards."""
    world = torch.distributed.get_world_size()
    weights = 1 if isinstance(mesh, str) else mesh.get("tp", 1)
    return rank // weights, world // weights


def _accumulated(rank: int, names: list[str], options: dict[str, Any]) -> dict[str, float]:
    """Returns each model's largest error of an accumulated gradient against the unsharded model on full batches."""
    worst = {}
    part, parts = _place(rank, options["mesh"])
    for name in names:
        make, loss_of = MODELS[name]
        torch.manual_seed(0)
        model = make()
        sharded = ts.shard(copy.deepcopy(model), {}, **options)
        for _ in range(2):
            model.zero_grad()
            sharded.zero_grad()
            for turn, length in enumerate(LENGTHS):
                batch = _batch(parts, length)
                torch.manual_seed(turn)
                loss_of(model, batch).backward()
                torch.manual_seed(turn)
                with sharded.no_sync() if turn < len(LENGTHS) - 1 else nullcontext():
                    loss = loss_of(sharded, _own(batch, part))
                loss.backward()
            for p, own in zip(model.parameters(), sharded.parameters(), strict=True):
                found = full_gradient(own)
                assert (p.grad is None) == (found is None)
                if found is not None:
                    error = (found - p.grad).abs().max() / p.grad.abs().max().clamp(min=1)
                    worst[name] = largest(worst.get(name, 0.0), error.item())
    return worst


@nightly("2-names1-options1")
@pytest.mark.parametrize(
    ("world", "names", "options"),
    [
        (2, ["gpt", "frozen"], {"mesh": "replicate"}),
        (2, ["gpt", "tied"], {"mesh": "shard"}),
        pytest.param(
            2, ["gpt"], {"mesh": "shard", "objective": {"compile": {"backend": "aot_eager"}}},
            marks=pytest.mark.nightly,
        ),
        pytest.param(3, ["frozen", "lora"], {"mesh": "shard"}, marks=pytest.mark.nightly),
        pytest.param(
            4, ["gpt", "frozen", "tied"], {"mesh": {"dp": (2, "shard"), "tp": 2}}, marks=pytest.mark.nightly,
        ),
        pytest.param(
            4, ["gpt", "lora"], {"mesh": {"a": (2, "replicate"), "b": (2, "shard")}}, marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_accumulated_gradients_are_those_of_all_calls(world: int, names: list[str], options: dict[str, Any]) -> None:
    for worst in run_ranks(_accumulated, world, names, options, seconds=300):
        assert max(worst.values()) < 1e-10, worst


@nightly("replicate")
@pytest.mark.parametrize("data", ["replicate", "shard"])
def test_no_gradient_of_a_parameter_is_summed_within(data: str) -> None:
    plan = ts.plan(_model(), {}, example_inputs=_own(_batch(2), 0), mesh={"dp": (2, data)})
    assert plan.graph is not None
    local = rank_graph(plan)
    names = {node.name for node in local.graph.find_nodes(op="placeholder")}
    assert len(_summed(local) & names) > 14
    assert not _summed(local, local.meta["group"]) & names


def _summed(local: Any, *unsummed: str) -> set[str]:
    """Returns the names of the values for which the backward sums gradients over ranks."""
    nodes = step_graphs(local, unsummed=unsummed).backward.graph.nodes
    ends = [(node, begun(begin).kernel) for node in nodes if (begin := awaited(node)) is not None]
    sums = [node for node, kernel in ends if kernel in ("all_reduce", "reduce_scatter")]
    return {name for node in sums for name in node.meta.get("gradient_of", ())}


def _habits(rank: int, data: str) -> dict[str, bool]:
    """Tries unusual orders of calls, backwards and steps; returns whether each works or raises as expected."""
    model, batch = _model(p=0.0), _batch(2)
    sharded, own = ts.shard(copy.deepcopy(model), {}, mesh=data), _own(batch, rank)
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
    weight, found = sharded.get_parameter("head.weight"), {}

    def kept() -> None:
        with sharded.no_sync():
            sharded(*own)[0].backward()

    def is_summed(times: float) -> bool:
        model.zero_grad()
        (times * model(*batch)[0]).backward()
        pairs = zip(model.parameters(), sharded.parameters(), strict=True)
        same = all(torch.allclose(p.grad, full_gradient(q), rtol=1e-10, atol=1e-12) for p, q in pairs)
        sharded.zero_grad()
        return same

    unsummed = "the ranks have not summed a gradient"
    kept()
    found["a step"] = refused_input(optimizer.step, unsummed)
    found["a norm"] = refused_input(lambda: torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0), unsummed)
    found["ours"] = refused_input(lambda: ts.clip_grad_norm_(sharded, 1.0), unsummed)
    scaler = ts.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    found["a scaler"] = refused_input(lambda: scaler.unscale_(optimizer), unsummed)
    optimizer.zero_grad()
    found["dropped"] = weight.grad is None
    sharded(*own)[0].backward()
    found["after that"] = is_summed(1)
    kept()
    optimizer.zero_grad(set_to_none=False)
    kept()
    weight.grad = None
    found["one"] = refused_input(lambda: sharded.get_parameter("tok.weight").grad, unsummed)
    for p in sharded.parameters():
        p.grad = None
    sharded(*own)[0].backward()
    with sharded.no_sync():
        loss = sharded(*own)[0]
    loss.backward()  # only the forward ran within it
    loss = sharded(*own)[0]
    with sharded.no_sync():
        loss.backward()
    found["between others"] = is_summed(3)
    with sharded.no_sync():
        gradients = torch.autograd.grad(sharded(*own)[0], [weight])
        norm = sharded.get_parameter("blocks.0.n1.weight")
        sharded(*own)[0].backward(inputs=[norm])
    found["asked for"] = weight.grad is None and refused_input(lambda: norm.grad, unsummed)
    sharded(*own)[0].backward(inputs=[norm, weight])
    model.zero_grad()
    model(*batch)[0].backward()
    pairs = (
        (model.head.weight, gradients[0], 1),
        (model.head.weight, weight.grad, 1),
        (model.blocks[0].n1.weight, norm.grad, 2),
    )
    for p, gradient, times in pairs:
        whole = weight if p is model.head.weight else norm
        gradient = whole.ranks.gathered(gradient.as_subclass(Tensor), whole.sharding, whole.whole)
        found[f"asked for {times} {p.ndim}"] = torch.allclose(times * p.grad, gradient, rtol=1e-10, atol=1e-12)
    sharded.zero_grad()
    kept()
    ts.distributed.debug(True)
    sharded(*own)[0].backward()
    ts.distributed.debug(None)
    found["each collective verified"] = is_summed(2)
    kept()
    (gradient,) = torch.autograd.grad(sharded(*own)[0], [weight], create_graph=True)
    gradient.square().sum().backward()
    sharded.zero_grad()
    with sharded.no_sync():
        loss = sharded(*own)[0]
    hooks = [weight.register_hook(lambda gradient: gradient * 2), norm.register_hook(lambda gradient: gradient * 2)]
    found["a hook"] = refused_input(loss.backward, "a hook of a gradient can't run within no_sync()")
    for hook in hooks:
        hook.remove()
    sharded.zero_grad()
    kept()
    added = (lambda p=p: p.register_hook(lambda gradient: gradient * 2) for p in (weight, norm))
    found["a hook in between"] = all(refused_input(add, "can't run within no_sync()") for add in added)
    sharded.zero_grad()
    with sharded.no_sync() if rank else nullcontext():
        found["on one rank"] = refused(lambda: sharded(*own), "some ranks are within no_sync()", ts.DistributedError)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("data", ["replicate", pytest.param("shard", marks=pytest.mark.nightly)])
def test_other_orders(data: str) -> None:
    for found in run_ranks(_habits, 2, data):
        assert all(found.values()), found


class Branches(nn.Module):
    """A model with two branches; each call reaches the parameters of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return ((self.a if first else self.b)(x)).square().mean()


@on_ranks(2)
def test_a_later_call_may_reach_other_parameters(rank: int) -> None:
    torch.manual_seed(0)
    model, x = Branches().double(), torch.randn(8, 6).double()
    sharded = ts.shard(copy.deepcopy(model), {}, mesh="shard")
    with sharded.no_sync():
        sharded(x[4 * rank :][:4], True).backward()
    sharded(x[4 * rank :][:4], False).backward()
    for first in (True, False):
        model(x, first).backward()
    pairs = zip(model.parameters(), sharded.parameters(), strict=True)
    assert all(torch.allclose(p.grad, full_gradient(q), rtol=1e-12, atol=1e-14) for p, q in pairs)


@on_ranks(2)
def test_under_autocast(rank: int) -> None:
    """Partial gradients in float32 of parameters that autocast casts are summed in float32."""
    torch.manual_seed(0)
    model, x = Casts(), torch.randn(2, 6, 8)
    sharded, found = ts.shard(copy.deepcopy(model), {}, mesh="shard"), True
    for turn in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            losses = [model(part) for part in x[turn].split(3)]
            with sharded.no_sync() if turn == 0 else nullcontext():
                sharded(x[turn, 3 * rank :][:3]).backward()
        for loss in losses:
            loss.backward()
    pairs = zip(model.parameters(), sharded.parameters(), strict=True)
    assert found and all(torch.allclose(p.grad, full_gradient(q), rtol=1e-6, atol=1e-6) for p, q in pairs)


def test_without_data_it_does_nothing() -> None:
    whole, batch = _model(p=0.0), _batch(1)
    model = ts.shard(copy.deepcopy(whole), {})
    with model.no_sync():
        model(*batch)[0].backward()
    whole(*batch)[0].backward()
    assert gradient_error(model, whole) < 1e-10
