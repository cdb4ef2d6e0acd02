"""Recomputation in the backward: equal gradients, fewer saved bytes, collectives and draws not repeated."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torchshard as ts
from tests.helpers import nightly, refused
from tests.models import CASES, GPT, Reversal
from tests.test_step import compared, sent
from torchshard.testing import (
    Partition,
    capture,
    kept_graphs,
    largest,
    nbytes,
    on_ranks,
    predicted_memory,
    run_ranks,
    split,
)

RECOMPUTED = {"gpt": ["blocks.*"], "dense_moe": ["*"], "conv": [""], "attention_7_heads": [""], "writes": ["*"]}
"""Model -> globs of the modules to recompute."""


def _saved(parts: Partition) -> float:
    """Returns the bytes saved for the backward, except parameters, buffers and inputs."""
    known = {n.name for n in parts.forward.graph.nodes if n.op == "placeholder"}
    results = {n.name: n for n in parts.forward.graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    return sum(nbytes(results[name].meta["val"]) for name in parts.saved if name in results and name not in known)


@nightly(but=["conv"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_gradients_are_those_of_autograd(name: str) -> None:
    worst, parts = compared(name, 3, RECOMPUTED[name])
    _, kept = compared(name, 3)
    assert worst < 1e-12
    for again, once in zip(parts, kept, strict=True):
        assert sent(again.forward) == sent(once.forward) and sent(again.backward) == sent(once.backward)
    assert _saved(parts[0]) < _saved(kept[0])


class _Checkpointed(GPT):
    """A GPT with its blocks in checkpoints, as in PyTorch's tutorials."""

    use_reentrant = False

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class _Reentrant(_Checkpointed):
    use_reentrant = True


def _saved_by(call: Callable[[], Any], model: nn.Module) -> tuple[Any, int]:
    """Returns a call's result and the bytes that it saves for the backward, except the parameters'."""
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    return result, sum(storage.nbytes() for key, storage in storages.items() if key not in known)


def _trained(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[float], int]:
    """Returns the losses of three steps of SGD, and the bytes saved by the last."""
    optimizer, losses, saved = torch.optim.SGD(model.parameters(), 0.1), [], 0
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        out, saved = _saved_by(lambda: model(**batch), model)
        out["loss"].backward()
        optimizer.step()
        losses.append(float(out["loss"]))
    return losses, saved


def _hugging_face(checkpointing: bool) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
        vocab_size=97, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _ratios(rank: int, kind: str) -> tuple[float, float, float, float]:
    """Returns the largest error, whether losses are equal, and the ratio of saved bytes, sharded and unsharded."""
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    ids = torch.randint(0, 97, (4, 16))
    batch, recompute = {"labels": ids}, []
    if kind == "hugging face":
        batch["input_ids"], plan = ids, "auto"
        plain, model = _hugging_face(False).double(), _hugging_face(True).double()
    else:
        batch["ids"], plan = ids, CASES["gpt"].plan
        plain = GPT(p=0.1).double()
        model = {"reentrant": _Reentrant, "checkpoint": _Checkpointed, "recompute": GPT}[kind](p=0.1).double()
        recompute = ["blocks.*"] if kind == "recompute" else []
    model.load_state_dict(plain.state_dict())
    unsharded = [copy.deepcopy(plain), copy.deepcopy(model)]
    sharded = [
        ts.shard(plain, plan, example_kwargs=batch),
        ts.shard(model, plan, example_kwargs=batch, objective={"recompute": recompute}),
    ]
    (kept, before), (losses, after) = (_trained(each, batch) for each in sharded)
    (wanted, full), (_, fewer) = (_trained(each, batch) for each in unsharded)
    state, expected = sharded[1].full_state_dict(), unsharded[0].state_dict()
    worst = largest(*(float((state[name] - expected[name]).abs().max()) for name in expected))
    worst = largest(worst, *(abs(a - b) for a, b in zip(losses, wanted, strict=True)))
    return worst, float(kept == losses), after / before, fewer / full


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["checkpoint", "reentrant", "recompute", "hugging face"])
def test_training_is_the_same_and_saves_less(kind: str) -> None:
    """Dropout masks equal those of the graph that keeps all values, bit for bit."""
    for worst, same, ours, theirs in run_ranks(_ratios, 2, kind):
        assert worst < 1e-10 and same
        assert ours < 0.45 and ours < theirs + 0.3


def test_globs_name_modules() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())), torch.randn(2, 4)
    assert refused(
        lambda: ts.plan(model, example_inputs=(x,), mesh=2, objective={"recompute": "2"}), "'2' matches no module"
    )
    plan = ts.plan(model, example_inputs=(x,), mesh=2, objective={"recompute": ["1.*", "1"]})
    assert plan.recompute == ("1",) and ts.Plan.from_json(plan.to_json()).recompute == ("1",)
    graph = capture(model, (x,)).plan(plan, 2).graph.graph
    assert {n.meta.get("recompute") for n in graph.nodes if n.meta.get("module") == "1.1"} == {"1"}


@pytest.mark.parametrize(
    ("paths", "expected"), [(["a.b", "a", "ab"], ("a", "ab")), (["", "a"], ("",)), ([], ()), (["a", "a"], ("a",))]
)
def test_the_outermost_modules(paths: Sequence[str], expected: tuple[str, ...]) -> None:
    model = nn.Sequential(OrderedDict(a=nn.Sequential(OrderedDict(b=nn.Linear(4, 4))), ab=nn.Linear(4, 4)))
    plan = ts.plan(model, "auto", (torch.randn(2, 4),), mesh=2, objective={"recompute": list(paths)})
    assert plan.recompute == expected


# --- memory limits ----------------------------------------------------------------------------------------------------


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


SLOW_TO_SEND = ts.Machine("slow to send", link_bandwidth=1e6, launch=1e-2)


@pytest.mark.nightly
@pytest.mark.parametrize(("batch", "again"), [(512, True), (2, False)])
def test_a_limit_is_met_by_what_takes_less_time(batch: int, again: bool) -> None:
    """With many activations, just enough layers are recomputed; with many weights, the weights are split."""
    x = torch.randn(batch, 8)
    slow = ts.Objective(machine=SLOW_TO_SEND)
    free = ts.plan(_Layers(), "auto", (x,), mesh=2, objective=replace(slow, memory="1GiB"))
    assert not free.recompute
    limit = 0.7 * free.costs.memory["peak"]
    made = ts.plan(_Layers(), "auto", (x,), mesh=2, objective=replace(slow, memory=limit))
    assert made.costs.memory["peak"] <= limit and made.costs.seconds > free.costs.seconds
    assert bool(made.recompute) is again
    assert made.costs.gap == pytest.approx(made.costs.seconds - free.costs.seconds)
    if again:
        assert list(made.recompute) == [f"layers.{i}" for i in range(len(made.recompute))]
        modules = f"{len(made.recompute)} module{'s' * (len(made.recompute) > 1)}"
        assert f"computes {modules} again, in place of keeping their values: layers.0" in str(made)
        assert f"layers.0-{len(made.recompute) - 1}" in str(made) or len(made.recompute) == 1
        fewer = ts.plan(_Layers(), made.with_last(recompute=made.recompute[:-1]), (x,), mesh=2, objective=slow)
        assert predicted_memory(fewer)["peak"] > limit
    assert ts.check(_Layers(), made, example_inputs=(x,), mesh=2).ok


class _KeptWhole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: Reversal.apply(self.up(y)), x, use_reentrant=False)


@pytest.mark.nightly
def test_a_checkpoint_that_has_no_effect_is_told(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(2, 4)
    ts.shard(_KeptWhole(), {}, (x,))(x).sum().backward()
    assert "nothing is computed again" in caplog.text
    caplog.clear()
    ts.shard(GPT(), {}, objective={"recompute": "blocks.*"})(torch.zeros(1, 4, dtype=torch.long))[
        "logits"
    ].sum().backward()
    assert "nothing is computed again" not in caplog.text


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        up = self.up(x)
        return up, x + self.down(F.gelu(up[:, None].expand(-1, 2, -1))).mean(1)


class _Stages(nn.Module):
    """A model that returns a value from within each block, which the rest of the block uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Stage() for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        results = []
        for block in self.blocks:
            up, x = block(x)
            results += [up, x]
        return results


@on_ranks(2)
def test_a_result_of_what_is_computed_again_is_an_argument_of_the_next(rank: int) -> None:
    torch.manual_seed(0)
    model, x = _Stages().double(), torch.randn(4, 8, dtype=torch.double)
    sharded = ts.shard(copy.deepcopy(model), {"blocks.*": "replicate"}, objective={"recompute": "blocks.*"})
    for call in (model, sharded):
        first, *_, last = call(x)
        (first.sin().sum() + last.square().sum()).backward()
    assert all(kept.has_step_graphs for kept in kept_graphs(sharded))
    grads = {n: p.grad for n, p in model.named_parameters()}
    pairs = ((split(grads[n], sharded.layouts[n], rank, 2), p.grad) for n, p in sharded.named_parameters())
    assert largest(*(float((a - b).abs().max()) for a, b in pairs)) < 1e-12


class _ReturnsItsBias(nn.Module):
    """A model with a bias that is masked with a number, and is a result too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = self.table(ids)
        return self.down(torch.relu(self.up(x + torch.where(ids[..., None] > 3, bias, -9.0)))), bias


def test_a_step_on_the_meta_device_has_all_gradients() -> None:
    """On meta, PyTorch records no gradient for some ops: the bias would only get the gradient of one use."""
    steps, estimates = [], []
    for device in ("cpu", "meta"):
        model = _ReturnsItsBias().to(device)
        call = torch.zeros(2, 8, 16, device=device), torch.zeros(2, 8, dtype=torch.long, device=device)
        made = ts.plan(model, example_inputs=call, mesh=2, objective={"memory": "1GiB", "machine": "cpu-gloo"})
        steps.append(ts.explain(made, level="step").replace("device=meta", "device=cpu"))
        estimates.append(made.costs.memory)
    assert steps[0] == steps[1] and estimates[0] == estimates[1] and "where" in steps[0].partition("backward:")[2]
