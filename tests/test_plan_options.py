"""Options of a plan: machines, axes and memory limits."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import BACKENDS, allocated
from tests.models import GPT, MLP
from tests.test_plans import IDS, _gpt
from torchshard.testing import CapturedCall, capture, predicted_memory, run_ranks

# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        ({"memory": "24"}, "'24' is no size"),
        ({"memory": "0GiB"}, "'0GiB' is no size"),
        ({"memory": -1}, "-1 is no size"),
        ({"memory": True}, "True is no size"),
        ({"machine": "h100"}, "'h100' is no machine"),
        ({"split": "batch"}, "'batch' is no choice of what may be split"),
    ],
)
def test_knobs_that_are_none(objective: dict[str, Any], text: str) -> None:
    with pytest.raises(ts.InputError, match=text) as caught:
        ts.plan(GPT(p=0.0), example_inputs=(IDS, IDS), mesh=2, objective=objective)
    assert str(caught.value).count("\n") == 3


def test_invalid_machines_are_refused() -> None:
    for field, value in (("flops", 0), ("latency", -1), ("flops", float("nan")), ("link_bandwidth", "fast")):
        with pytest.raises(ts.InputError, match=f"is no {field.replace('_', ' ')}"):
            ts.Machine("mine", **{field: value})


def test_ranks_beyond_one_domain_send_over_the_network() -> None:
    near = ts.Machine("m", domain=8, network_bandwidth=1e9, network_latency=1e-4)
    far = dataclasses.replace(near, domain=1)
    assert [near.sends("all_gather", 1e9, 1e9, ranks) for ranks in (8, 16)] == [1e9 / near.link_bandwidth, 1.0]
    assert near.begins("all_gather", 16) == near.begins("all_gather", 8) + 1e-4
    same, slower = (_gpt(machine=machine).costs for machine in (near, far))
    assert same.seconds < slower.seconds and sum(same.compute.values()) == sum(slower.compute.values())


def test_a_collective_of_a_backward_is_hidden_behind_the_weights_gradients() -> None:
    """The all-reduce of the gradient of `up`'s input runs while the gradient of its weight is computed."""
    flops = 1e9
    machine = ts.Machine("m", flops, 1e15, link_bandwidth=1e8, latency=0.0, launch=1e-6)
    model, x = MLP(32, 16, 32), torch.randn(64, 32, requires_grad=True)
    plan = ts.plan(model, {"up": "column", "down": "row"}, example_inputs=(x,), mesh=2, objective={"machine": machine})
    copied, reduced = plan.costs.collectives
    assert (copied.name, reduced.name) == ("copy", "reduce")
    sent = 64 * 32 * 4 / 1e8
    assert reduced.forward.seconds == pytest.approx(1e-6 + sent)
    hidden = 2 * 64 * 32 * 16 / 2 / flops
    assert copied.backward.seconds == pytest.approx(1e-6 + sent - hidden)
    fast = dataclasses.replace(machine, link_bandwidth=1e12)
    copied, _ = ts.plan(model, plan, example_inputs=(x,), mesh=2, objective={"machine": fast}).costs.collectives
    assert copied.backward.seconds == pytest.approx(1e-6)  # the launch is not hidden


@pytest.mark.nightly
def test_fewer_ranks_are_suggested_if_they_are_faster() -> None:
    idle = ts.Machine("m", 1e15, 1e13, launch=1e-2)
    busy = ts.Machine("m", 1e7, 1e7, 1e13, 0.0, 0.0)
    many, few = (_gpt(mesh=4, machine=machine) for machine in (idle, busy))
    assert set(many.costs.fewer) == {1, 2}
    assert many.costs.fewer[1] < many.costs.fewer[2] <= many.costs.seconds and "fewer ranks are faster" in str(many)
    assert few.costs.seconds < few.costs.fewer[2] < few.costs.fewer[1] and "fewer ranks" not in str(few)
    overlapped = many.with_last(costs=dataclasses.replace(many.costs, step=many.costs.fewer[1] / 2))
    assert "fewer ranks" not in str(overlapped)  # the overlapped time counts
    assert "one rank alone: " in str(few) and str(ts.Plan.from_json(many.to_json())) == str(many)
    whole = _gpt(mesh=1, machine=busy)
    assert few.costs.fewer[1] == pytest.approx(sum(whole.step_seconds.values()), rel=1e-6) and "alone" not in str(whole)


def test_a_faster_link_makes_a_faster_step_and_ranks_no_slower_work() -> None:
    slow, fast = (ts.Machine("m", 1e12, 1e11, bandwidth, 1e-6, 1e-6) for bandwidth in (1e8, 1e10))
    assert _gpt(machine=fast).costs.seconds < _gpt(machine=slow).costs.seconds


def test_the_batch_is_split_when_asked_and_only_then() -> None:
    """An MLP with a large batch: split over it, the ranks only sum the small gradients of weights."""
    model, x = MLP(8, 16, 8), torch.randn(4096, 8)
    machine = ts.Machine("m", 1e9, 1e9, 1e8, 1e-6, 1e-6)
    objective = ts.Objective(machine=machine, memory="1GiB")
    split = ts.plan(model, "auto", (x,), mesh=2, objective=dataclasses.replace(objective, split="all"))
    whole = ts.plan(model, {"up": "replicate", "down": "replicate"}, (x,), mesh=2, objective=objective)
    assert set(map(str, split.parameters.values())) == {"I"} and split.costs.seconds < 0.7 * whole.costs.seconds
    assert {c.name for c in split.costs.collectives} == {"scatter", "copy", "gather"}
    assert ts.check(model, split, example_inputs=(x,), mesh=2).ok
    kept = ts.plan(model, "auto", (x,), mesh=2, objective=objective)
    assert all("f32[4096" not in c.type or c.name in ("copy", "reduce") for c in kept.costs.collectives)


def test_a_machine_goes_through_a_file_and_others_are_refused(tmp_path: Path) -> None:
    path, call = tmp_path / "machine.json", _captured_alike()
    for machine in ts.MACHINES.values():
        machine.save(path)
        assert ts.Machine.load(path) == machine
        assert all(
            call.plan({}, 1, objective={"machine": given}).plan.machine == machine for given in (path, str(path))
        )
    for text in ("", "[]", '{"speed": 1}', '{"flops": -1}', '{"flops": "fast"}'):
        path.write_text(text)
        with pytest.raises(ts.InputError, match="is no flops" if "flops" in text else "holds no machine"):
            ts.Machine.load(path)


def _measured(rank: int) -> tuple[ts.Machine, float]:
    ts.distributed.init_process_group()
    machine = ts.measure_machine(width=256)
    model, x = MLP(), torch.randn(3, 12)
    return machine, ts.shard(model, "auto", (x,), objective={"machine": machine}).plan.costs.seconds


@pytest.mark.nightly
def test_all_ranks_measure_the_same_machine() -> None:
    (machine, seconds), (other, _) = run_ranks(_measured, 2)
    assert machine == other and machine.name == "a machine measured with 2 ranks" and seconds > 0
    assert 1e8 < machine.flops < 1e15 and 1e7 < machine.link_bandwidth < 1e13
    assert 1e-7 < machine.op_overhead < 1e-2 and 1e7 < machine.elementwise_bandwidth < 1e13


def test_a_machine_of_one_rank_is_measured_alone() -> None:
    ts.distributed.init_process_group()
    assert ts.measure_machine(width=128).memory_bandwidth > 1e7


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_fastest_plan_that_fits_or_how_much_is_missing() -> None:
    free = _gpt(memory="1GiB")
    tight = predicted_memory(free)["peak"]
    lean = ts.plan(GPT(p=0.0), example_inputs=(IDS, IDS), mesh=2, objective={"memory": 0.9 * tight})
    assert lean.costs.memory["peak"] <= 0.9 * tight < free.costs.memory["peak"]
    slower = lean.costs.seconds - free.costs.seconds
    assert slower >= 0 and lean.costs.gap >= slower - 1e-12
    even_share = 4 * sum(p.nbytes for p in GPT(p=0.0).parameters()) / 2
    with pytest.raises(ts.PlanError, match=r"no plan for 2 ranks fits .*: the leanest takes .* too much") as caught:
        _gpt(memory=1.001 * even_share)
    assert "optimizer" in str(caught.value)


class _Uncapturable(MLP):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("it is captured")


def test_what_no_plan_can_fit_is_refused_before_the_model_is_captured() -> None:
    model = _Uncapturable(8, 16, 8)
    size = 4 * sum(p.nbytes for p in model.parameters()) / 2
    share = "an even share of parameters, gradients, optimizer takes"
    refused = ts.PlanError, rf"no plan for 2 ranks fits .*: {share} .* too much"
    captured = ts.CaptureError, "it is captured"
    for memory, (error, text) in ((size - 1, refused), (size + 1, captured)):
        with pytest.raises(error, match=text):
            ts.plan(model, example_inputs=(torch.randn(2, 8),), mesh=2, objective={"memory": memory})
    model.requires_grad_(False)
    with pytest.raises(ts.CaptureError):
        ts.plan(model, example_inputs=(torch.randn(2, 8),), mesh=2, objective={"memory": size / 3})


_WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}


def _trained(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 500, (4, 64))
    if name == "vit":
        config: Any = transformers.ViTConfig(**_WIDE, image_size=32, patch_size=4, num_labels=50)
        images = torch.randn(8, 3, 32, 32)
        return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.arange(8)}
    if name == "t5":
        config = transformers.T5Config(
            d_model=128, d_kv=32, d_ff=256, num_heads=4, num_layers=2, vocab_size=500, decoder_start_token_id=0
        )
        config.use_cache = False
        return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}
    kinds = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"num_key_value_heads": 2}),
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig, {}),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, {"num_key_value_heads": 4}),
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, {}),
        "opt": (transformers.OPTForCausalLM, transformers.OPTConfig, {"ffn_dim": 256, "word_embed_proj_dim": 128}),
        "neox": (transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig, {}),
        "olmo2": (transformers.Olmo2ForCausalLM, transformers.Olmo2Config, {"num_key_value_heads": 4}),
    }
    model, kind, more = kinds[name.removesuffix(" recomputed")]
    made = model(kind(**_WIDE, vocab_size=500, use_cache=False, **more)).train()
    if name.endswith(" recomputed"):
        made.gradient_checkpointing_enable()
    return made, {"input_ids": ids, "labels": ids}


def _peaks(rank: int, name: str) -> tuple[float, float]:
    """Returns this rank's peak memory of a step, predicted and measured by the allocator."""
    ts.distributed.init_process_group()
    model, batch = _trained(name)
    sharded = ts.shard(model, "auto", example_kwargs=batch)
    optimizer = torch.optim.AdamW(sharded.parameters())

    def step() -> None:
        out = sharded(**batch)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # the second call records step graphs
        step()
    steady = [*sharded.parameters(), *sharded.buffers()]
    steady += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    held = sum(t.numel() * t.element_size() for t in {id(t): t for t in steady}.values())
    gc.collect()  # frees the garbage of the capture
    return predicted_memory(sharded.plan)["peak"], held + min(allocated(step) for _ in range(3))


MEASURED = ["llama", "bert", "vit", "t5", "llama recomputed"]
MORE = ["qwen2", "gpt2", "opt", "neox", "olmo2", "gpt2 recomputed"]
"""Further models, run by `make nightly`."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*MEASURED, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_the_predicted_peak_is_the_allocators(name: str) -> None:
    predicted, measured = run_ranks(_peaks, 2, name)[0]
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize("pins", [{"tok": "vocab"}, {"head": "column"}, {"tok": 1}])
def test_one_rank_takes_pins_of_a_tied_weight(pins: dict[str, Any]) -> None:
    """On one rank, ops without a pin use the tied weight as the pinned op does."""
    check = ts.check(GPT(), pins, example_inputs=(torch.zeros(2, 5, dtype=torch.long),) * 2, mesh=1)
    assert check.ok


def test_auto_splits_a_linear_by_columns() -> None:
    assert capture(MLP(), (torch.randn(3, 12),)).plan("auto", 2).plan.parameters["up.weight"] == ts.S(0)


# --- memory limits ----------------------------------------------------------------------------------------------------


LAYERS = 10


class Alike(nn.Module):
    """A model of equal layers, which stay replicated one by one as a memory limit allows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _alike(plan: Any = "auto", **objective: Any) -> ts.Plan:
    return ts.plan(Alike(), plan, (torch.randn(4, 8),), mesh=2, objective=objective)


@functools.cache
def _captured_alike() -> CapturedCall:
    """Captures the model once, for the many plans of the tests below."""
    return capture(Alike(), (torch.randn(4, 8),))


def _alike_with_whole_layers(count: int) -> ts.Plan:
    """Plans the first `count` layers replicated, the others split."""
    pins = {f"layers.{i}.*": "replicate" for i in range(count)}
    for i in range(count, LAYERS):
        pins |= {f"layers.{i}.0": "column", f"layers.{i}.2": "row"}
    return _captured_alike().plan(pins, 2).plan


@functools.cache
def _peaks_by_whole_layers() -> list[float]:
    return [_peak(_alike_with_whole_layers(count)) for count in range(LAYERS + 1)]


@pytest.mark.nightly
@pytest.mark.parametrize("share", [0.2, 0.5, 0.65, 0.75, 0.95])
def test_of_equal_layers_as_many_stay_whole_as_fit(share: float) -> None:
    peaks = _peaks_by_whole_layers()
    limit = peaks[0] + share * (peaks[-1] - peaks[0])
    made = _alike(memory=limit)
    assert made.costs.memory["peak"] <= limit
    whole = sum(made.parameters[f"layers.{i}.0.weight"] == ts.I for i in range(LAYERS))
    assert whole >= sum(peak <= limit for peak in peaks) - 1
    assert ts.check(Alike(), made, example_inputs=(torch.randn(4, 8),), mesh=2).ok


def _peak(plan: ts.Plan) -> float:
    return predicted_memory(plan)["peak"]


def test_a_plan_that_is_given_must_fit_too() -> None:
    made = _alike()
    assert _alike(plan=made, memory="1GiB").costs.memory["peak"] == _peak(made)
    with pytest.raises(ts.PlanError, match=r"the plan does not fit 1\.0 KiB: it takes"):
        _alike(plan=made, memory="1KiB")


@pytest.mark.nightly
def test_the_next_best_plan_is_reported_within_the_time_limit() -> None:
    """Alternatives under the same limit are not faster; a pin that costs time under a limit is named."""
    fast, small = _alike(memory="1GiB"), _alike()
    made = _alike(memory=(_peak(fast) + _peak(small)) / 2)
    told = re.findall(r"without it: a step takes [\d.]+ \w+ (\w+)", ts.explain(made))
    assert told and set(told) == {"more"}
    pinned = _alike(plan={"layers.*.0": "column", "layers.*.2": "row"}, memory="1GiB")
    assert "makes a step slower" in ts.explain(pinned)


@pytest.mark.nightly
def test_a_loaded_plan_is_explained_with_its_alternatives() -> None:
    made = _gpt()
    again = _gpt(plan=ts.Plan.from_json(made.to_json()))
    assert ts.explain(again) == ts.explain(made)


class _LooksAt(nn.Module):
    """A model that only reads one parameter's shape, and leaves out another parameter by default."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.shape, self.other = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x: Tensor, use: bool = False) -> Tensor:
        y = self.up(x).reshape_as(self.shape.weight)
        return self.other(y) if use else y


def test_a_pinned_parameter_that_is_only_looked_at_is_split() -> None:
    plan, x = {"up": "column", "shape": "row", "other": "column"}, torch.randn(3, 6)
    model = _LooksAt()
    made = ts.plan(model, plan, example_inputs=(x,), mesh=2)
    assert made.parameters["shape.weight"] == ts.S(1) and made.parameters["other.weight"] == ts.S(0)
    assert ts.check(model, plan, example_inputs=(x,), mesh=2).ok
    sharded = ts.shard(model, plan, example_inputs=(x,))
    assert torch.allclose(sharded(x, True), model(x, True))
    ts.distributed.destroy_process_group()


def _default_machine(rank: int) -> str:
    ts.distributed.init_process_group()
    model = ts.shard(nn.Linear(6, 8), "auto", (torch.ones(4, 6),))
    return model.plan.costs.machine


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_machine_the_ranks_are_priced_by_what_they_talk_through(backend: str) -> None:
    assert run_ranks(_default_machine, 2, backend=backend) == [f"cpu-{backend}"] * 2
