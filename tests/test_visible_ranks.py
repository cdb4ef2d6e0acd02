"""A change on one rank raises on every rank; a look at an object never runs code of its class."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import refused
from tests.visible import Applies, Config, Sees, X
from torchshard.testing import gradient_error, largest, run_ranks

# --- ranks -----------------------------------------------------------------------------------------------------------


def _changed_on_one_rank(rank: int) -> list[bool]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    sharded = ts.shard(Sees(Config()), {"up": "column"}, example_inputs=(X,))
    sharded.config.scale = 2.0 if rank else 1.0
    found = [refused(lambda: sharded(X), "changed last: config.scale", ts.InputError)]
    sharded.config.scale = 3.0 + rank
    found.append(refused(lambda: sharded(X), "the attributes and globals that forward reads", ts.InputError))
    sharded.config.scale = 1.0
    return [*found, sharded(X) is not None]


def test_a_change_on_one_rank_is_an_error_on_all() -> None:
    assert run_ranks(_changed_on_one_rank, 2) == [[True] * 3] * 2


class _Scaled(nn.Module):
    """A model that reads an array of its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config = SimpleNamespace(scale=np.arange(4, dtype=np.float32).reshape(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * torch.from_numpy(self.config.scale))


def test_an_array_of_equal_bytes_and_another_shape_is_another_value() -> None:
    ts.distributed.init_process_group()
    model, x = _Scaled(), torch.randn(4, 4)
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (x,))
    assert torch.equal(sharded(x), model(x))
    model.config.scale = model.config.scale.reshape(4, 1)
    assert torch.equal(sharded(x), model(x))


# --- classes that compute on reads ------------------------------------------------------------------------------------


class _Registry(OrderedDict[str, type[nn.Module]]):
    """Makes a new module at each read, like transformers' `ACT2FN`."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = _Registry(relu=nn.ReLU, tanh=nn.Tanh)


def _error_beside(sharded: nn.Module, model: nn.Module) -> float:
    """Returns the largest difference of the output and of every gradient."""
    inputs = X.double().requires_grad_(), X.double().requires_grad_()
    outputs = sharded(inputs[0]), model(inputs[1])
    for output in outputs:
        output.square().sum().backward()
    assert inputs[0].grad is not None and inputs[1].grad is not None
    differences = (outputs[0] - outputs[1], inputs[0].grad - inputs[1].grad)
    return largest(*(one.abs().max().item() for one in differences), gradient_error(sharded, model))


@pytest.mark.parametrize("registry", [ACTIVATIONS, MappingProxyType(ACTIVATIONS)], ids=["dict", "read-only view"])
def test_a_registry_that_makes_modules_is_left_as_it_is(registry: Any, own_process_group: None) -> None:
    before = dict(OrderedDict.items(ACTIVATIONS))
    model = Applies(lambda x: registry["relu"](x)).double()
    model.registry = registry
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X.double(),))
    assert _error_beside(sharded, model) < 1e-10
    assert dict(OrderedDict.items(ACTIVATIONS)) == before == {"relu": nn.ReLU, "tanh": nn.Tanh}
    OrderedDict.__setitem__(ACTIVATIONS, "relu", nn.Tanh)
    try:
        assert _error_beside(sharded, model) < 1e-10 and sharded.captures == 3
    finally:
        OrderedDict.__setitem__(ACTIVATIONS, "relu", nn.ReLU)


READS_OF_CLASSES: list[str] = []


def _noting(base: type, name: str) -> Any:
    def read(self: Any, *args: Any) -> Any:
        READS_OF_CLASSES.append(f"{type(self).__name__}.{name}")
        return getattr(base, name)(self, *args)

    return read


def _touchy(base: type, *names: str) -> type:
    """Returns a class that records each call of its methods, which may compute, count or raise."""
    noted = [name for name in ("__iter__", "__len__", "__getitem__", "__contains__", *names) if hasattr(base, name)]
    body = {name: _noting(base, name) for name in noted}
    return type(f"_Touchy{base.__name__.title()}", (base,), {**body, "__reduce_ex__": _itself})


def _itself(self: Any, protocol: int) -> Any:
    """Makes `copy.deepcopy` return the object itself."""
    return partial(_the, self), ()


def _the(value: Any) -> Any:
    return value


class _Computes:
    """Has attributes that are computed when they are read."""

    __slots__ = ("__dict__", "empty", "kept")

    def __init__(self) -> None:
        self.kept, self.other = 2.0, 3.0

    shape = property(_noting(object, "shape"))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            READS_OF_CLASSES.append(name)
        raise AttributeError(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself(self, protocol)


_OF_DICTS = ("keys", "values", "items", "get", "update", "__setitem__", "__delitem__")
TOUCHY = [
    *(_touchy(base, *_OF_DICTS)({"a": 1.0}) for base in (dict, OrderedDict, UserDict, ChainMap)),
    _touchy(defaultdict, *_OF_DICTS, "__missing__")(list, a=1.0),
    *(_touchy(base, "append", "clear", "extend")([1.0]) for base in (list, deque)),
    _touchy(tuple)((1.0,)),
    _touchy(set, "clear", "update")({1.0}),
    _Computes(),
]


@pytest.mark.parametrize("value", TOUCHY, ids=lambda value: type(value).__name__)
def test_no_code_of_a_class_runs_because_an_object_is_looked_at(value: Any, own_process_group: None) -> None:
    model = Applies(lambda x: torch.relu(x) if value is not None else x).double()
    model.value = model.up.value = value
    READS_OF_CLASSES.clear()
    sharded = ts.shard(model, {"up": "column", "down": "row"}, (X.double(),))
    assert _error_beside(sharded, model) < 1e-10 and not READS_OF_CLASSES
