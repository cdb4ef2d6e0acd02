"""The traps of exporting a model, each with a model that is captured exactly or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import torchshard as ts
from tests.models import CASES, EncoderDecoder, Seq2SeqOutput
from torchshard.testing import capture


def _names(model: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    return [n.name for n in capture(model, args, kwargs).graph.graph.nodes if n.op == "call_function"]


def _exact(model: nn.Module, *args: Any, plan: dict[str, Any] | None = None, **kwargs: Any) -> None:
    report = ts.check(model, plan or {"*up": "column"}, example_inputs=args, example_kwargs=kwargs, mesh=2)
    assert report.ok, str(report)


class _Up(nn.Module):
    """A linear layer and a norm, called by the function `body`."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.norm, self.body = nn.Linear(6, 8), nn.LayerNorm(8), body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


X = torch.randn(3, 6)


def test_names_follow_the_module_path() -> None:
    case = CASES["gpt"]
    names = _names(case.build(), *case.inputs())
    assert {"tok", "pos", "blocks_0_attn_q", "blocks_1_attn_o", "blocks_0_norm2", "blocks_1_mlp_1", "head"} <= set(
        names
    )
    assert "blocks_0_attn_scaled_dot_product_attention" in names


class _NamedAsCode(nn.Module):
    """Buffers, parameters and modules with names that have a meaning in the code of a graph."""

    names = ("as", "None", "self", "torch", "device", "inf", "tangents_1", "a-b", "\u00e9", "linear", "x")

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            self.register_buffer(name, torch.rand(6))
        self.parts = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("class", "True", "print", "0", "a-b")})
        self.weights = nn.ParameterDict({name: torch.rand(6) for name in ("lambda", "torch", "output")})

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = x * getattr(self, name)
        for name, part in self.parts.items():
            x = torch.tanh(part(x)) + len(name)
        return x * self.weights["lambda"] * self.weights["torch"] * self.weights["output"]


def test_names_may_be_words_of_python_and_of_generated_code() -> None:
    _exact(_NamedAsCode().double(), X.double(), plan={"parts.*": "column"})


def test_nodes_know_the_users_line() -> None:
    graph = capture(EncoderDecoder(), (torch.ones(2, 4, dtype=torch.long), torch.ones(2, 3, dtype=torch.long))).graph
    sources = {n.name: n.meta["source"] for n in graph.graph.nodes if n.op == "call_function"}
    assert all("models.py:" in sources[name] for name in ("encoder_q", "norm2", "tanh"))


def test_two_arguments_that_are_one_tensor_stay_two() -> None:
    model = _Up(lambda m, a, b: m.up(a) * b.sum())
    call = capture(model, (X, X))
    assert call.captured.inputs == ("args[0]", "args[1]")
    used = [n for n in call.graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input"]
    assert all(n.users for n in used)
    _exact(model, X, X)


def test_a_model_that_seeds_the_stream_is_refused() -> None:
    """The graph would be seeded only once, so its numbers would differ from the model's from the second call on."""

    def body(m: _Up, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return m.up(F.dropout(x))

    with pytest.raises(ts.CaptureError, match="the model seeds the random numbers"):
        capture(_Up(body), (X,))
    torch.manual_seed(0)


def test_a_model_without_inputs() -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.up = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 6)

        def forward(self) -> Tensor:
            return self.up(self.table)

    _exact(Codes())
    assert ts.check(Codes(), {"up": "column"}, mesh=3).ok


def test_no_gradient_flows_into_a_no_grad_block() -> None:
    def body(m: _Up, x: Tensor) -> Tensor:
        h = m.up(x)
        with torch.no_grad():
            scale = m.norm(h).std()
            with torch.enable_grad():
                shift = (h * 2).mean()
        return h * scale + shift

    _exact(_Up(body), X.clone().requires_grad_())


@pytest.mark.parametrize("given", [lambda h: h, lambda h: h.to(h.dtype), lambda h: h.contiguous()])
def test_a_value_passed_through_a_no_grad_block_keeps_its_gradient(given: Callable[[Tensor], Tensor]) -> None:
    def body(m: _Up, x: Tensor) -> Tensor:
        h = m.up(x)
        with torch.no_grad():
            same = given(h)
            scale = same.std()
        return same * scale

    _exact(_Up(body), X.clone().requires_grad_())


def test_what_a_no_grad_block_casts_has_none() -> None:
    def body(m: _Up, x: Tensor) -> Tensor:
        h = m.up(x)
        with torch.no_grad():
            cast = h.to(torch.float32)
        return h * cast

    _exact(_Up(body), X.clone().requires_grad_())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_are_flattened(reentrant: bool) -> None:
    def body(m: _Up, x: Tensor) -> Tensor:
        return checkpoint(lambda y: F.relu(m.up(y)), x, use_reentrant=reentrant)

    _exact(_Up(body), X.clone().requires_grad_())


@pytest.mark.parametrize("reentrant", [True, False])
def test_ops_in_an_activation_checkpoint_are_marked(reentrant: bool) -> None:
    def body(m: _Up, x: Tensor) -> Tensor:
        first = checkpoint(lambda y: m.up(y).relu(), x, use_reentrant=reentrant)
        inner = functools.partial(checkpoint, torch.sin, use_reentrant=reentrant)
        return checkpoint(inner, first.cos(), use_reentrant=reentrant)

    graph = capture(_Up(body), (X.clone().requires_grad_(),)).graph.graph
    regions = {node.name: node.meta.get("recompute") for node in graph.nodes if node.op == "call_function"}
    assert regions["up"] == regions["relu"] == "checkpoint 0" and regions["cos"] is None
    assert regions["sin"] not in (None, "checkpoint 0")


def test_train_and_eval_are_different_graphs() -> None:
    model = _Up(lambda m, x: F.dropout(m.up(x), 0.5, m.training))
    for mode in (True, False):
        assert [node.args[2] for node in capture(model.train(mode), (X,)).nodes("dropout")] == [True] * mode
        _exact(model, X)


@dataclass
class _Batch:
    x: Tensor
    scale: float
    extra: dict[str, Tensor]


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, batch: _Batch, *, flag: bool = False, missing: None = None) -> dict[str, Any]:
        h = self.up(batch.x) * batch.scale + batch.extra["bias"]
        return {"h": h, "pair": (h.sum(), [h.mean()]), "flag": flag, "out": Seq2SeqOutput(h, h * 2)}


def test_containers_dataclasses_and_keywords_in_and_out() -> None:
    model = _Nested()
    batch = _Batch(X, 2.0, {"bias": torch.ones(8)})
    sharded = ts.shard(model, {"up": "column"})
    expected, got = model(batch, flag=True), sharded(batch, flag=True)
    assert torch.equal(expected["h"], got["h"]) and torch.equal(expected["pair"][1][0], got["pair"][1][0])
    assert got["flag"] is True and isinstance(got["out"], Seq2SeqOutput) and got["out"].loss is None
    again = sharded(_Batch(X, 3.0, {"bias": torch.ones(8)}), flag=False)
    assert torch.equal(again["h"], model.up(X) * 3.0 + 1) and again["flag"] is False
    ts.distributed.destroy_process_group()


def test_buffers_are_written() -> None:
    model = nn.Sequential(nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6)).double()
    sharded = ts.shard(model, {"0": "column"})
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    for _ in range(5):
        assert torch.allclose(model(x), sharded(x))
    state = sharded.full_state_dict()
    assert state["1.num_batches_tracked"] == 5
    assert all(torch.allclose(state[name], tensor) for name, tensor in model.state_dict().items())
    ts.distributed.destroy_process_group()


def test_sizes_that_the_graph_does_not_hold_for_are_captured_anew() -> None:
    model = _Up(lambda m, x: m.up(x) * (2.0 if x.shape[0] > 4 else 1.0))
    sharded = ts.shard(model, {"up": "column"})
    for rows in (3, 4, 5, 9, 1, 2):
        x = torch.randn(rows, 6)
        assert torch.equal(sharded(x), model(x)), rows
    ts.distributed.destroy_process_group()


def test_two_models_with_numbers_of_their_sizes() -> None:
    """Rows are cached for all models, so finding a row must not compare one model's symbolic sizes with another's."""
    for _ in range(2):
        model = _Up(lambda m, x: m.up(x) * (x.shape[0] * x.shape[1] / 2))
        made = ts.plan(model, {"up": "column"}, example_inputs=(torch.randn(4, 6),), mesh=2)
        assert made.source is not None and not made.source.assumed


def test_meta_inputs_will_do() -> None:
    case = CASES["gpt"]
    ids = torch.zeros(2, 5, dtype=torch.long, device="meta")
    made = ts.plan(case.build().to("meta"), case.plan, example_inputs=(ids, ids), mesh=8)
    assert made.world_size == 8 and made.parameters["blocks.0.attn.q.weight"] == ts.S(0)


def test_a_parameter_that_is_not_the_models_own_is_refused() -> None:
    other = nn.Linear(6, 8)
    with pytest.raises(ts.CaptureError, match="not its own") as caught:
        capture(_Up(lambda m, x: m.up(x) + x @ other.weight.t()), (X,))
    assert "test_capture.py" in str(caught.value)


def test_a_forward_set_on_the_instance_is_captured() -> None:
    model = nn.Linear(6, 8)
    model.forward = lambda x: F.linear(x, model.weight) * 2  # type: ignore[method-assign]
    before = model.forward
    assert capture(model, (X,)).graph is not None
    assert model.forward is before


@torch.no_grad()
def _gradients_within_none(m: _Up, x: Tensor) -> Tensor:
    h = m.up(x)
    with torch.enable_grad():
        return m.up(x) * h + (h * 2).sum()


def test_gradients_enabled_within_a_block_without() -> None:
    _exact(_Up(_gradients_within_none), X, plan={"up": "column"})
    with torch.no_grad(), pytest.raises(ts.CaptureError, match=r"called without[\s\S]*outside of torch.no_grad"):
        capture(_Up(_gradients_within_none), (X,))


def _gradient_inside(m: _Up, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(m.up(x).sum(), x, create_graph=True)[0]


def test_gradients_by_autograd_inside_the_model_are_refused() -> None:
    with pytest.raises(ts.CaptureError, match=r"(?s)differentiates within forward by torch.autograd.*torch.func.grad"):
        capture(_Up(_gradient_inside), (X,))


def test_flex_attention_is_refused() -> None:
    def body(m: _Up, x: Tensor) -> Tensor:
        q = m.up(x).unsqueeze(0).unsqueeze(0)
        return flex_attention(q, q, q)  # type: ignore[return-value]

    with torch.no_grad(), pytest.raises(ts.CaptureError, match=r"score_mod[\s\S]*scaled_dot_product_attention"):
        capture(_Up(body), (X,))


def _raises_if_negative(h: Tensor) -> Tensor:
    if (h < 0).any():
        raise ValueError("negative")
    return h


def _goes_on_after_an_error(m: _Up, x: Tensor) -> Tensor:
    try:
        return _raises_if_negative(m.up(x))
    except ValueError:
        return m.up(x).abs()


def _branches(m: _Up, x: Tensor) -> Tensor:
    return m.up(x) if (x > 0).all() else x


@pytest.mark.parametrize("body", [_goes_on_after_an_error, _branches])
def test_branches_on_values_are_refused(
    body: Callable[[_Up, Tensor], Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ts.CaptureError, match="depend on the values of a tensor"):
        capture(_Up(body), (X,))
    assert capfd.readouterr() == ("", ""), "the error says it all: export's own print of the graph is left out"


def test_control_flow_by_an_operator_is_refused() -> None:
    """`torch.cond` calls TorchDynamo, which restores the RNG state; that must not count as the model's seeding."""

    def body(m: _Up, x: Tensor) -> Tensor:
        up = m.up(x)
        return torch.cond(up.sum() > 0, torch.sin, torch.cos, (up,))  # type: ignore[no-any-return]

    with pytest.raises(ts.CaptureError, match=r"(?s)test_capture\.py:\d+ in body.*torch\.cond.*torch\.where"):
        capture(_Up(body), (X,))


def test_shapes_that_depend_on_values() -> None:
    model = _Up(lambda m, x: m.up(x)[x[:, 0] > 0])
    sharded = ts.shard(model, {"up": "column"})
    for seed in range(4):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(sharded(x), model(x))
    ts.distributed.destroy_process_group()
    _exact(model, X, plan={"up": "row"})


def test_sizes_are_static_if_the_model_is_valid_for_no_others() -> None:
    scales = {3: 2.0, 5: 4.0}
    model = _Up(lambda m, x: m.up(x) * scales[x.shape[0]])
    sharded = ts.shard(model, {"up": "column"})
    for rows in (3, 5, 3):
        x = torch.randn(rows, 6)
        assert torch.equal(sharded(x), model(x))
    with pytest.raises(ts.CaptureError, match="KeyError: 4"):
        sharded(torch.randn(4, 6))
    ts.distributed.destroy_process_group()
