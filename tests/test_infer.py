"""Plans for inference: no backward, memory of weights and caches, and the longest context that fits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

import torchshard as ts
from tests.helpers import command, nightly, refused, refused_input
from torchshard.testing import collective, largest, run_ranks, split

LAYERS, HEADS, HEAD, VOCAB = 3, 4, 8, 64


def _llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HEADS * HEAD, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, vocab_size=VOCAB, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _step(model: nn.Module, batch: int, length: int, plan: Any = "auto", **objective: Any) -> ts.Plan:
    return ts.plan(model, plan, ts.DecodeStep(batch, length), mesh=2, objective={"mode": "infer", **objective})


@pytest.mark.nightly
def test_a_decode_step_has_no_backward_and_sends_nothing_for_its_cache() -> None:
    plan = _step(_llama(), 2, 20)
    assert plan.costs.calls[1] == 0
    assert plan.costs.kinds["reduce"] == 2 * LAYERS
    assert set(plan.inputs.values()) == {ts.S(1)} and len(plan.inputs) == 2 * LAYERS
    assert not any("cache" in c.value for c in plan.costs.collectives)


@pytest.mark.nightly
def test_a_plan_with_split_inputs_is_read_as_it_was_written() -> None:
    plan = _step(_llama(), 2, 20)
    memory = 1.1 * _step(_llama(), 2, 20, plan=plan, memory="1GiB").costs.memory["peak"]
    for made in (plan, _step(_llama(), 2, 20, plan=plan, memory=memory)):
        again = ts.Plan.from_json(made.to_json())
        assert len(made.inputs) == 2 * LAYERS
        assert again == made and again.inputs == made.inputs and again.costs.context == made.costs.context
    assert made.costs.context is not None


def test_weights_are_held_once_and_caches_by_batch_and_length() -> None:
    model, batch, length = _llama(), 3, 50
    memory = _step(model, batch, length, memory="1GiB").costs.memory
    assert memory["gradients"] == memory["optimizer"] == 0
    assert memory["parameters"] == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert memory["caches"] == 2 * LAYERS * batch * HEADS // 2 * length * HEAD * 4


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [1, 8])
def test_the_longest_context_is_the_longest_that_can_be_planned(batch: int) -> None:
    model = _llama()
    memory = 1.2 * _step(model, batch, 40, memory="1GiB").costs.memory["peak"]
    longest = _step(model, batch, 40, memory=memory).costs.context
    assert longest is not None and longest > 40
    fits = _step(model, batch, longest, plan=_step(model, batch, 40, memory=memory), memory=memory)
    assert fits.costs.memory["peak"] <= memory
    assert refused(lambda: _step(model, batch, longest + 1, plan=fits, memory=memory), "does not fit", ts.PlanError)


@pytest.mark.nightly
def test_the_largest_batch_is_the_largest_that_can_be_planned() -> None:
    model = _llama()
    memory = 1.2 * _step(model, 4, 40, memory="1GiB").costs.memory["peak"]
    made = _step(model, 4, 40, memory=memory)
    most = made.costs.batch
    assert most is not None and most > 4 and f"fits has {most} sequences" in str(made)
    fits = _step(model, most, 40, plan=made, memory=memory)
    assert fits.costs.memory["peak"] <= memory and ts.Plan.from_json(made.to_json()).costs.batch == most
    assert refused(lambda: _step(model, most + 1, 40, plan=fits, memory=memory), "does not fit", ts.PlanError)


@pytest.mark.nightly
def test_states_that_do_not_grow_limit_no_context() -> None:
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=VOCAB, state_size=4)
    model = transformers.MambaForCausalLM(config).eval()
    costs = _step(model, 2, 20, memory="1GiB").costs
    assert costs.context is None and costs.memory["caches"] > 0


@pytest.mark.nightly
def test_a_prompt_is_planned_without_a_cache() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    plan = ts.plan(_llama(), example_kwargs={"input_ids": ids, "use_cache": False}, mesh=2, objective={"mode": "infer"})
    assert plan.costs.calls[1] == 0 and not plan.inputs


# --- models sharded for inference -------------------------------------------------------------------------------------


def _served(rank: int, plan: str) -> tuple[int, int, float]:
    """Returns a decode step's collectives, planned and run, and the largest gradient error of a later step."""
    ts.distributed.init_process_group()
    model = _llama().double()
    ids = torch.arange(12).reshape(2, 6)
    example = {"input_ids": ids, "use_cache": False}
    sharded = ts.shard(copy.deepcopy(model), plan, example_kwargs=example, objective={"mode": "infer"})
    assert not any(node.meta.get("needs_grad") for node in sharded.graph.graph.nodes)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for tokens in (ids, ids[:, :1], ids[:, :1]):
            whole, made = (m(input_ids=tokens, cache=c).logits for m, c in zip((model, sharded), caches, strict=True))
            assert (whole - made).abs().max() < 1e-12
    planned = sum(sharded.plan.costs.calls)
    rows = [row for n in sharded.local_graph.graph.nodes if (row := collective(n)) is not None]
    run = sum(row.kernel not in ("none", "slice", "pad") for row in rows)
    for m in (model, sharded):
        m(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    grads: dict[str, Tensor] = {name: p.grad for name, p in model.named_parameters()}
    error = largest(
        *(
            float((split(grads[name], sharded.layouts[name], rank, 2) - p.grad).abs().max())
            for name, p in sharded.named_parameters()
        )
    )
    assert ts.Plan.from_json(sharded.plan.to_json()) == sharded.plan
    return planned, run, error


@pytest.mark.nightly
@pytest.mark.parametrize("made", ["auto", "decode step"])
def test_a_model_for_inference_decodes_and_trains_exactly(made: str) -> None:
    plan = "auto" if made == "auto" else _step(_llama(), 2, 20).to_json()
    for planned, run, error in run_ranks(_served, 2, plan):
        assert planned == run >= 2 * LAYERS and error < 1e-12


@pytest.mark.nightly
def test_a_plan_for_inference_trains_exactly() -> None:
    ids = torch.arange(12).reshape(2, 6)
    model = _llama().double()
    example = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = ts.plan(model, example_kwargs=example, mesh=2, objective={"mode": "infer"})
    assert ts.check(model, plan, example_kwargs=example, mesh=2).ok


# --- invalid input ----------------------------------------------------------------------------------------------------


def test_options_that_do_not_go_together_are_refused() -> None:
    model, ids = _llama(), torch.zeros(1, 4, dtype=torch.long)
    example = {"input_ids": ids}
    assert refused_input(lambda: ts.plan(model, example_kwargs=example, mesh=2, objective={"mode": "serve"}), "no mode")  # type: ignore[arg-type]
    assert refused_input(lambda: _step(model, 0, 4), "no size of a decode step")
    step = ts.DecodeStep(batch=2, length=4)
    assert refused_input(lambda: ts.plan(model, "auto", step, mesh=2), "an example of a call without gradients")
    infer: dict[str, Any] = {"mesh": 2, "objective": {"mode": "infer"}}
    assert refused_input(lambda: ts.plan(model, "auto", step, example, **infer), "takes no other example arguments")
    assert refused_input(lambda: _step(nn.Linear(4, 4), 2, 4), "no decode step of a Linear")
    assert refused_input(lambda: _step(model, 2, 4, recompute="*"), "nothing is computed again")


@pytest.mark.nightly
def test_too_little_memory_says_what_a_call_takes() -> None:
    with pytest.raises(ts.PlanError, match="caches"):
        _step(_llama(), 8, 500, memory="100KiB")


@pytest.mark.nightly
def test_the_command_line_plans_a_decode_step(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _llama().config.save_pretrained(tmp_path)
    assert command("plan", str(tmp_path), "--mode", "infer", "--batch", "8", "--length", "64", "--memory", "1MiB") == 0
    shown = capsys.readouterr().out
    assert "the longest context that fits has" in shown and "0 backward" in shown


# --- tokens without full logits ---------------------------------------------------------------------------------------


class Head(nn.Module):
    """Returns tokens: the likeliest, or samples from the softmax by the Gumbel trick."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.head = nn.Linear(8, 31)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        if self.temperature:
            logits = logits / self.temperature - (-torch.rand_like(logits).log()).log()
        return logits.argmax(-1)


@nightly("2-0.7", "3-*")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_send_two_numbers_for_a_token_and_not_the_logits(temperature: float, world: int) -> None:
    torch.manual_seed(0)
    model, x = Head(temperature).eval(), torch.randn(5, 8, dtype=torch.float64)
    x[1, 3] = torch.nan
    plan = ts.plan(model.double(), {"head": "column"}, example_inputs=(x,), mesh=world, objective={"mode": "infer"})
    assert ts.check(model, plan, example_inputs=(x,), mesh=world).ok
    (sent,) = (c for c in plan.costs.collectives if c.calls)
    assert sent.name == "gather" and sent.consumers == ("argmax",)
    assert plan.costs.nbytes <= (world - 1) * 2 * 8 * len(x)
