"""Bad input raises a typed error with a problem, a place, a reason and advice; similar input is accepted."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from tests.models import CASES, GPT, MLP
from torchshard.testing import Layout, Shard

X = torch.randn(3, 12)


def _plan(plan: Any, model: nn.Module | None = None, **kwargs: Any) -> Any:
    return ts.plan(model or MLP(), plan, mesh=2, **({"example_inputs": (X,)} | kwargs))


def _four_lines(error: ts.ShardError) -> str:
    lines = str(error).splitlines()
    labels = [line.split()[0] for line in lines[1:]]
    assert labels == ["where:", "why:", "try:"], str(error)
    return str(error)


def test_a_key_that_matches_nothing_names_the_nearest() -> None:
    model = CASES["gpt"].build()
    with pytest.raises(ts.PlanError, match="matches no module") as caught:
        _plan({"blocks.*.attn.qproj": "column"}, model, example_inputs=(torch.zeros(1, 4, dtype=torch.long),))
    text = _four_lines(caught.value)
    assert "blocks.*.attn" in text.splitlines()[-1]
    assert _plan({"up": "column"}).parameters["up.weight"] == ts.S(0)


def test_two_keys_that_disagree() -> None:
    with pytest.raises(ts.PlanError, match="disagree") as caught:
        _plan({"up": "column", "u*": "row"})
    text = _four_lines(caught.value)
    assert "'up' wants column" in text and "'u*' wants row" in text
    assert _plan({"up": "column", "u*": 1})


@pytest.mark.nightly
def test_one_parameter_with_two_layouts_is_refused() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ts.PlanError, match="two ways") as caught:
        _plan({"tok": "column", "head": "column"}, GPT(), example_inputs=(ids,))
    _four_lines(caught.value)
    assert _plan({"tok": "vocab", "head": "column"}, GPT(), example_inputs=(ids,)).parameters["tok.weight"] == ts.S(0)


@nightly("blocks.0-row")
@pytest.mark.parametrize("key, style", [("norm", "column"), ("blocks.0", "row"), ("blocks.0.attn.q", "vocabulary")])
def test_a_style_that_a_module_cannot_have(key: str, style: str) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ts.PlanError) as caught:
        _plan({key: style}, GPT(), example_inputs=(ids,))
    assert key in _four_lines(caught.value)


def test_dtensor_styles_are_taken_by_name() -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    made = _plan({"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert (made.parameters["up.weight"], made.parameters["down.weight"]) == (ts.S(0), ts.S(1))
    for refused in (ColwiseParallel(output_layouts=Replicate()), SequenceParallel(sequence_dim=2)):
        with pytest.raises(ts.PlanError) as caught:
            _plan({"up": refused})
        _four_lines(caught.value)


class _Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class _ReadsItem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: int(x[0, 0].item())]


@pytest.mark.parametrize("model", [_Branches(), _ReadsItem()], ids=lambda m: type(m).__name__)
def test_a_model_that_cannot_be_captured(model: nn.Module) -> None:
    with pytest.raises(ts.CaptureError) as caught:
        _plan({}, model)
    text = _four_lines(caught.value)
    assert "test_errors.py" in text, text


def test_example_inputs_of_the_wrong_kind() -> None:
    for bad in (X, {"x": X}):
        with pytest.raises(ts.InputError, match="example_inputs is a") as caught:
            _plan({}, example_inputs=bad)
        _four_lines(caught.value)
    with pytest.raises(ts.InputError, match="does not take these arguments") as caught:
        _plan({}, example_inputs=(X, X))
    _four_lines(caught.value)


def test_auto_needs_example_inputs() -> None:
    with pytest.raises(ts.PlanError, match="needs example_inputs") as caught:
        ts.shard(MLP(), "auto")
    _four_lines(caught.value)


def test_a_plan_for_another_number_of_ranks(tmp_path: Path) -> None:
    made = _plan({"up": "column", "down": "row"})
    with pytest.raises(ts.PlanError, match="is for 2 ranks, the group has 1") as caught:
        ts.shard(MLP(), made, example_inputs=(X,))
    _four_lines(caught.value)
    ts.distributed.destroy_process_group()
    path = tmp_path / "plan.json"
    path.write_text(made.to_json())
    assert ts.check(MLP(), path, example_inputs=(X,), mesh=2).ok


@pytest.mark.parametrize("text", ["{", "{}", '{"version": 99}', "no/such/file.json"])
def test_a_plan_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ts.PlanError) as caught:
        _plan(text)
    _four_lines(caught.value)


def test_a_plan_of_another_model() -> None:
    made = _plan({"up": "column", "down": "row"})
    with pytest.raises(ts.PlanError, match="the plan was made for another model") as caught:
        _plan(made, nn.Sequential(nn.Linear(12, 3)))
    _four_lines(caught.value)
    body = json.loads(made.to_json())
    body["axes"][0]["choices"]["up_linear"]["operands"] = ["S(0)", "S(1)"]
    with pytest.raises(ts.PlanError, match="not legal") as caught:
        _plan(json.dumps(body))
    _four_lines(caught.value)


def test_an_input_on_another_device() -> None:
    model = MLP().to("meta")
    assert ts.plan(model, {"up": "column"}, example_inputs=(X.to("meta"),), mesh=2)
    fake = _Elsewhere(X)
    with pytest.raises(ts.InputError, match="is on") as caught:
        _plan({}, example_inputs=(fake,))
    _four_lines(caught.value)


class _Elsewhere(Tensor):
    """A tensor that reports a GPU as its device, also on machines without one."""

    @staticmethod
    def __new__(cls: type, data: Tensor) -> Tensor:
        return Tensor._make_subclass(cls, data)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def _raises(fn: Callable[[], Any]) -> str:
    with pytest.raises(ts.ShardError) as caught:
        fn()
    return _four_lines(caught.value)


def test_access_before_the_first_capture() -> None:
    model = ts.shard(MLP(), {"up": "column"})
    assert "no graph is captured yet" in _raises(lambda: model.graph)
    model(X)
    assert "up" in ts.explain(model)
    ts.distributed.destroy_process_group()


def test_a_state_dict_that_does_not_fit() -> None:
    model = ts.shard(MLP(), {"up": "column"}, example_inputs=(X,))
    whole = MLP().state_dict()
    model.load_full_state_dict(whole)
    assert all(torch.equal(a, whole[name]) for name, a in model.full_state_dict().items())
    bad: dict[str, Tensor] = {**whole, "up.weight": torch.zeros(2, 2)}
    assert "'up.weight'" in _raises(lambda: model.load_full_state_dict(bad))
    ts.distributed.destroy_process_group()


def test_casts_moves_and_assigned_states_are_followed() -> None:
    torch.manual_seed(0)
    whole = MLP()
    model = ts.shard(whole, {"up": "column", "down": "row"}, example_inputs=(X,))
    assert torch.allclose(model(X), whole(X), atol=1e-6)
    model.double()
    assert torch.allclose(model(X.double()), whole.double()(X.double()))
    other = MLP().double()
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.allclose(model(X.double()), other(X.double()))
    empty = ts.shard(MLP().to("meta"), {"up": "column"})
    empty.to_empty(device="cpu").load_full_state_dict(whole.state_dict())
    assert torch.allclose(empty(X), whole.float()(X), atol=1e-6)
    ts.distributed.destroy_process_group()


BAD: dict[str, Callable[[], Any]] = {
    "key": lambda: _plan({nn.Linear: "column"}),
    "ranks": lambda: ts.plan(MLP(), {}, example_inputs=(X,), mesh=0),
    "check ranks": lambda: ts.check(MLP(), {}, example_inputs=(X,), mesh="2"),  # type: ignore[arg-type]
    "function": lambda: ts.shard(lambda x: x, {}),  # type: ignore[arg-type]
    "script": lambda: ts.shard(torch.jit.trace(MLP(), X), {}),
    "keyword inputs": lambda: _plan({}, example_kwargs=[1]),
    "norm": lambda: ts.clip_grad_norm_(ts.shard(MLP(), {}), 1.0, 0.0),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_arguments_of_the_wrong_type(name: str) -> None:
    with pytest.raises(ts.ShardError) as caught:
        BAD[name]()
    _four_lines(caught.value)
    ts.distributed.destroy_process_group()


LAYOUTS: dict[str, Layout] = {"S(9)": ts.S(9), "S(0; 3+4)": Shard(0, ((3, 1), (4, 1))), "P": ts.P}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_whose_layouts_do_not_fit(layout: str) -> None:
    made = _plan({"up": "column"})
    made = made.with_last(parameters={**made.parameters, "up.weight": LAYOUTS[layout]})
    for call in (_plan, lambda plan: ts.shard(MLP(), plan)):
        with pytest.raises(ts.PlanError, match="does not fit") as caught:
            call(made.with_last(axis=dataclasses.replace(made.last.axis, size=2 if call is _plan else 1)))
        _four_lines(caught.value)
    ts.distributed.destroy_process_group()


def test_an_op_that_gives_lists_within_its_results() -> None:
    class Histogram(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.histogramdd(x, [2, 2]).hist

    with pytest.raises(ts.CaptureError, match="list within its results") as caught:
        ts.plan(Histogram(), {}, example_inputs=(torch.rand(5, 2),), mesh=2)
    _four_lines(caught.value)


def test_what_is_sharded_or_split_already_is_told() -> None:
    sharded = ts.shard(MLP(), {"up": "column"}, (X,))
    for part in (sharded.up, nn.Sequential(sharded), sharded):
        assert "is sharded already" in _raises(partial(_plan, {}, part))
        assert "is sharded already" in _raises(partial(ts.check, part, {}, mesh=2))
    assert "is sharded already" in _raises(lambda: ts.shard(sharded.up, {}, (X,)))
    assert "has no values" in _raises(lambda: ts.shard(sharded.source, {}, (X,)))
    assert "can't be copied by itself" in _raises(lambda: copy.deepcopy(sharded.up))
    assert torch.equal(copy.deepcopy(sharded)(X), sharded(X))
    ts.distributed.destroy_process_group()


def test_values_that_neither_the_model_nor_the_files_have(tmp_path: Path) -> None:
    save_file({"up.weight": MLP().up.weight.detach()}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="keep the model's values"):
        ts.shard(MLP(), {}, (X,), weights=tmp_path)
    text = _raises(lambda: ts.shard(MLP().to("meta"), {}, (X,), weights=tmp_path))
    assert "have no values" in text and "down.weight" in text
    ts.distributed.destroy_process_group()


def test_more_ranks_than_elements_where_ranks_divide_the_batch() -> None:
    model, x = nn.Linear(2, 2), torch.randn(8, 2)
    assert "more than any dim" in _raises(lambda: ts.plan(model, example_inputs=(x,), mesh=4))
    for data in ("replicate", "shard"):
        assert ts.check(model, "auto", example_inputs=(x,), mesh={"dp": (4, data)}).ok


@pytest.mark.parametrize(
    "mesh, share, advice",
    [
        (4, 4, "more ranks"),
        ({"dp": (4, "replicate")}, 1, 'mesh= with "shard" for the ranks of the batch'),
        ({"dp": (4, "shard")}, 4, "more ranks"),
        ({"dp": 2, "tp": 2}, 2, 'mesh= with "shard" for the ranks of the batch'),
        ({"dp": (2, "shard"), "tp": 2}, 4, "more ranks"),
    ],
    ids=str,
)
def test_what_no_plan_can_fit_says_what_would_help(mesh: Any, share: int, advice: str) -> None:
    size = 4 * sum(p.nbytes for p in MLP().parameters()) / share
    text = _raises(lambda: ts.plan(MLP(), example_inputs=(X,), mesh=mesh, objective={"memory": 0.99 * size}))
    assert "no plan for 4 ranks" in text and f"try:   {advice}" in text


def test_several_axes_without_a_word_are_named_together() -> None:
    text = _raises(lambda: ts.plan(MLP(), example_inputs=(X,), mesh={"a": (2, "replicate"), "b": 2, "c": 2}))
    mesh: dict[str, Any] = {"a": (2, "replicate"), "b": (2, "replicate"), "c": 2}
    assert str(mesh) in text
    assert ts.plan(MLP(), example_inputs=(X[:2],), mesh=mesh)


def test_styles_that_a_layer_can_have_are_named() -> None:
    text = _raises(lambda: ts.plan(nn.LSTM(4, 8), {"": "row"}, example_inputs=(torch.randn(3, 2, 4),), mesh=2))
    assert "the model can't be split by row" in text and "try:   'column' or 'replicate'" in text


@pytest.mark.parametrize(
    "call",
    [
        lambda: ts.save(MLP(), "run"),  # type: ignore[arg-type]
        lambda: ts.load(MLP(), "run"),  # type: ignore[arg-type]
        lambda: ts.save_pretrained("out", MLP()),  # type: ignore[arg-type]
        lambda: _plan({}, objective={"recompute": 5}),
        lambda: ts.measure_machine(width=1.5),  # type: ignore[arg-type]
        lambda: ts.distributed.launch(lambda: 0, 1),
        lambda: ts.distributed.init_process_group(None),  # type: ignore[arg-type]
        lambda: ts.Plan.load("a\0b"),
        lambda: ts.what_if("{}"),
        lambda: ts.nn.ParallelLinear(4, 4, style=["row"]),  # type: ignore[arg-type]
        lambda: ts.clip_grad_norm_(MLP(), 1.0, "most"),  # type: ignore[arg-type]
        lambda: ts.explain(_plan({}), level="step", rank="0"),  # type: ignore[arg-type]
        lambda: ts.from_pretrained("no/such/folder", {}),
    ],
)
def test_arguments_in_another_order_or_of_another_type(call: Callable[[], Any]) -> None:
    with pytest.raises(ts.ShardError):
        call()
