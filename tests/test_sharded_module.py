# ruff: noqa: F811 - pytest passes fixtures by their names
"""A sharded module behaves as a module: attributes, methods, hooks and copies."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchshard as ts
from tests.test_calls import X, _doubled, pair  # noqa: F401
from torchshard.testing import gradient_error, run_ranks

# --- the sharded model -----------------------------------------------------------------------------------------------


def test_submodules_are_instances_of_their_class_and_follow_its_mode(pair: Any) -> None:
    model, sharded = pair
    sharded.train()
    for m in (*model.modules(), *sharded.modules()):
        if isinstance(m, nn.Dropout):
            m.training = False
    assert [type(m).__name__ for m in sharded.modules()] == ["_Scaled", "Linear", "Dropout"]
    assert isinstance(sharded, ts.ShardedModule) and not isinstance(sharded.up, nn.Dropout)
    assert not sharded.drop.training and sharded.up.training and torch.equal(model(X), sharded(X))
    assert sharded.up.in_features == 6 and sharded.config == {"width": 8} and "Dropout(p=0.5" in repr(sharded)


def test_submodules_cannot_be_called_or_changed(pair: Any) -> None:
    _, sharded = pair
    with pytest.raises(ts.InputError, match="can't be called by itself"):
        sharded.up(X)
    with pytest.raises(ts.InputError, match="can't be changed after sharding"):
        sharded.up.forward = _doubled
    with pytest.raises(ts.InputError, match="can't be replaced after sharding"):
        sharded.drop = nn.Identity()
    with pytest.raises(ts.InputError, match="can't have forward hooks"):
        sharded.up.register_forward_hook(_doubled)
    with pytest.raises(AttributeError, match="nothing"):
        _ = sharded.up.nothing


class _OddNames(nn.Module):
    """A model with submodules and a buffer named like attributes of a sharded module."""

    def __init__(self) -> None:
        super().__init__()
        self.plan, self.graph, self.layouts, self.source = (nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("group", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.source(self.layouts(self.graph(self.plan(x)))) * self.group


def test_submodules_may_have_any_names() -> None:
    model = _OddNames()
    sharded = ts.shard(model, {"plan": "column", "graph": "row"}, example_inputs=(X,))
    assert torch.equal(sharded(X), model(X)) and set(sharded.state_dict()) == set(model.state_dict())
    assert torch.equal(sharded.full_state_dict()["source.weight"], model.source.weight)
    ts.distributed.destroy_process_group()


def test_parameters_and_buffers_may_be_replaced(pair: Any) -> None:
    model, sharded = pair
    sharded(X)
    for m in (model, sharded):
        m.up.bias = nn.Parameter(torch.arange(8.0))
        m.up.load_state_dict({"weight": torch.ones(8, 6), "bias": torch.ones(8)}, assign=True)
    assert torch.equal(model(X), sharded(X))
    given = {"up.weight": torch.full((8, 6), 2.0), "up.bias": torch.zeros(8)}
    assert torch.equal(torch.func.functional_call(sharded, given, (X,)), torch.func.functional_call(model, given, (X,)))
    assert torch.equal(model(X), sharded(X))
    for m in (model, sharded):
        m.up.bias.requires_grad_(False)
        m.up.weight = nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double())
        m.up.bias = nn.Parameter(m.up.bias.double())
    assert torch.equal(model(X.double()), sharded(X.double()))
    sharded.up.bias = nn.Parameter(torch.ones(3))
    with pytest.raises(ts.InputError, match="replaced by an incompatible tensor"):
        sharded(X)


def test_a_copy_is_independent_of_the_model(pair: Any) -> None:
    model, sharded = pair
    sharded(X)
    for made in (copy.deepcopy(sharded), torch.optim.swa_utils.AveragedModel(sharded).module):
        with torch.no_grad():
            made.up.weight.zero_()
        assert torch.equal(made(X), model.up.bias.expand(4, 8)) and torch.equal(sharded(X), model(X))
    with pytest.raises(ts.InputError, match="can't be pickled"):
        pickle.dumps(sharded)


def test_the_first_call_may_be_in_inference_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
    sharded = ts.shard(model, {"0": "column", "2": "row"})
    with torch.inference_mode():
        assert torch.allclose(sharded(X), model(X))
    sharded(X).sum().backward()
    assert all(p.grad is not None for p in sharded.parameters())
    ts.distributed.destroy_process_group()


def test_fake_inputs_will_do() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    model = nn.Linear(6, 8)
    assert torch.equal(ts.shard(model, {}, example_inputs=(fake,))(X), model(X))
    ts.distributed.destroy_process_group()


def _tied_by_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight.data = model[0].weight.data
    return model


def _hooked() -> nn.Module:
    model = nn.Linear(6, 6)
    model.weight.register_hook(lambda g: g * 0)
    return model


@pytest.mark.parametrize("build, text", [(_tied_by_memory, "share memory"), (_hooked, "gradient hooks")])
def test_what_slices_could_not_keep_is_refused(build: Any, text: str) -> None:
    for call in (lambda m: ts.shard(m, {}), lambda m: ts.check(m, {}, example_inputs=(X,), mesh=2)):
        with pytest.raises(ts.InputError, match=text):
            call(build())
    ts.distributed.destroy_process_group()


def test_many_graphs_are_worth_a_warning(pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="torchshard"):
        for i in range(16):
            pair[1](X, i)
    assert "16 graphs captured" in caplog.text


class _Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.named = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Sequential(nn.Linear(6, 6), nn.ReLU())})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.named.values()):
            x = layer(x)
        return x * self.scales[0] * self.scales[1]


def test_containers_can_be_looked_through() -> None:
    model = _Containers()
    sharded = ts.shard(model, {"layers.0": "column", "layers.1": "row"})
    assert torch.equal(sharded(X), model(X)) and len(sharded.layers) == 3 and len(sharded.named["b"]) == 2
    assert [type(layer.source).__name__ for layer in sharded.layers] == ["Linear"] * 3
    assert sharded.layers[-1] is list(sharded.layers)[2] and len(sharded.layers[1:]) == 2
    assert list(sharded.named) == list(sharded.named.keys()) == ["a", "b"] and "a" in sharded.named
    assert [p.shape for p in sharded.scales] == [(6,), (6,)] and sharded.scales[1].requires_grad
    ts.distributed.destroy_process_group()


class _Keys(nn.Module):
    """Has layers, a parameter and a method with the names of a dict's methods."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(6, 6), nn.Linear(6, 6)
        self.pop = nn.Parameter(torch.ones(6))

    def items(self) -> list[str]:
        return [name for name, _ in self.named_children()]

    def forward(self, x: Tensor) -> Tensor:
        return self.keys(x) * self.values(x) * self.pop


def test_layers_may_have_the_names_of_a_dicts_methods() -> None:
    model = nn.Sequential(_Keys())
    sharded = ts.shard(model, {"0.keys": "column", "0.values": "column"}, (X,))
    part = sharded[0]
    assert torch.equal(sharded(X), model(X)) and part.values.weight.shape == part.keys.weight.shape == (6, 6)
    assert part.items() == ["keys", "values"] and part.pop.shape == (6,) and bool(part) and len(sharded) == 1
    with pytest.raises(TypeError, match="no len"):
        len(part)
    ts.distributed.destroy_process_group()


class _Unknown(dict[str, Tensor]):
    """A dict unknown to pytree."""


class _Returns(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _Unknown(x=x * 2)


def test_a_result_that_cannot_be_taken_apart_is_refused() -> None:
    with pytest.raises(ts.CaptureError, match="returns a _Unknown, which can't be taken apart"):
        ts.shard(_Returns(), {})(X)
    ts.distributed.destroy_process_group()


class _Helpful(nn.Module):
    """A language model with typical methods of its own."""

    low = False

    def __init__(self) -> None:
        super().__init__()
        self.config = {"window": 6}
        self.embed, self.drop, self.head = nn.Embedding(12, 8), nn.Dropout(0.0), nn.Linear(8, 12, bias=False)
        self.scale = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.embed(ids)).cumsum(1)) * (self.scale / 2 if self.low else self.scale)

    @property
    def window(self) -> int:
        return self.config["window"]

    @property
    def temperature(self) -> float:
        return self.scale

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.scale = value

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    def get_num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def configure_optimizers(self, rate: float) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}], lr=rate)

    def loss(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits = self(ids[:, -self.window :])[:, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        return ids

    def freeze(self) -> None:
        self.embed.weight.requires_grad_(False)

    def encode(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def weight_norm(self) -> Tensor:
        return self.head.weight.norm()

    def parent(self) -> int:
        return len(list(super().parameters()))


def _helped(model: Any, ids: Tensor) -> list[Any]:
    """Returns the methods' results in three steps, with changes of the model in between."""
    optimizer, found = model.configure_optimizers(0.1), [model.get_num_params(), model.window, model.name()]
    for change in ("scale", "temperature", "low"):
        setattr(model, change, 3.0 if change != "low" else True)
        loss = model.loss(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.manual_seed(0)
        found += [loss.detach(), getattr(model, change), model.generate(ids, 4)]
    model.freeze()
    model.drop.p = 1.0
    return [*found, model(ids).detach(), model.embed.weight.requires_grad]


def _runs_methods(rank: int) -> tuple[bool, float, list[str]]:
    torch.manual_seed(0)
    model, ids = _Helpful().double(), torch.randint(12, (2, 5))
    sharded: Any = ts.shard(copy.deepcopy(model), {"embed": "column", "head": "row"}, example_inputs=(ids,))
    expected, got = _helped(model, ids), _helped(sharded, ids)
    for m in (model, sharded):
        m.loss(ids).backward()
    errors = []
    for call in (lambda: sharded.encode(ids), sharded.weight_norm, sharded.parent, sharded.head.reset_parameters):
        with pytest.raises(ts.InputError) as error:
            call()
        errors.append(str(error.value))
    tensors = [(a, b) for a, b in zip(expected, got, strict=True) if isinstance(a, Tensor)]
    full = sharded.full_state_dict()
    tensors += [(value, full[name]) for name, value in model.state_dict().items()]
    others = [a == b for a, b in zip(expected, got, strict=True) if not isinstance(a, Tensor)]
    error = max(gradient_error(sharded, model), *(float((a - b).abs().max()) for a, b in tensors))
    return all(others), error, errors


def test_the_models_own_methods_run() -> None:
    """Methods that use the model, its parameters or flags run; those that need an unsharded part raise with advice."""
    for same, error, (part, norm, parent, torch_own) in run_ranks(_runs_methods, 2):
        assert same and error < 1e-10
        assert "Embedding within a sharded model can't be called by itself" in part and "forward compute this" in part
        assert "weight_norm() can't be called" in norm and "slice for the whole: norm()" in norm
        assert "parent() can't be called" in parent and "super()" in parent
        assert "initialise the unsharded model, then ts.shard" in torch_own


def test_loops_read_forwards_signature_and_may_wrap_it(pair: Any) -> None:
    """Hugging Face's Trainer reads labels off the class; accelerate replaces forward for mixed precision."""
    model, sharded = pair
    assert inspect.signature(sharded.forward) == inspect.signature(model.forward)
    assert [*inspect.signature(type(sharded).forward).parameters] == ["self", "x", "by"]
    whole = model(X, by=2).sum()
    original = sharded.forward
    sharded.forward = MethodType(torch.autocast("cpu", torch.bfloat16)(original.__func__), sharded)
    with torch.autocast("cpu", torch.bfloat16):
        expected = original(X, by=2)
    assert sharded(X, by=2).dtype == torch.bfloat16 and torch.equal(sharded(X, by=2), expected)
    del sharded.forward
    assert torch.equal(sharded(X, by=2).sum(), whole) and sharded.forward == original
