"""Common ways to write models, with the unsharded model's results: cases for `test_idioms_told.py`.

A case calls its model, differentiates the results and makes one step, with the unsharded and with the sharded
model. Results, gradients of the inputs, and results after the step are compared.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchshard as ts

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
PLAN = {"up": "column"}
Body = Callable[[Any, Any], Any]


class _Model(nn.Module):
    """A linear layer, a case's attributes, and its forward."""

    def __init__(self, body: Body = lambda m, x: m.up(x), dtype: torch.dtype = torch.float64, **attributes: Any):
        super().__init__()
        self.up = nn.Linear(6, 8, dtype=dtype)
        self.body = body
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.body(self, x)


def _x(rows: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, 6, dtype=dtype, generator=torch.Generator().manual_seed(rows))


class _Case(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any] = _x
    call: Callable[[Any, Any], Any] = lambda m, x: m(x)


# --- tensors ---------------------------------------------------------------------------------------------------------


def _unaligned() -> Tensor:
    return torch.randn(20, generator=torch.Generator().manual_seed(0))[1:19].view(3, 6)


def _conjugated() -> Tensor:
    return torch.complex(_x(3), _x(4)[:3]).conj()


def _parameters_of_one_buffer() -> nn.Module:
    model, flat = _Model(dtype=torch.float32), torch.randn(57)
    model.up.weight, model.up.bias = nn.Parameter(flat[1:49].view(8, 6)), nn.Parameter(flat[49:57])
    return model


def _with_a_conjugated_buffer() -> nn.Module:
    model = _Model(lambda m, x: m.up(x) * m.turn.imag)
    model.register_buffer("turn", torch.complex(torch.ones(8).double(), torch.arange(8).double()).conj())
    return model


def _with_a_negated_buffer() -> nn.Module:
    model = _Model(lambda m, x: m.up(x) * m.turn)
    model.register_buffer("turn", torch.tensor([1 + 2j], dtype=torch.complex128).conj().imag)
    return model


class _Codebook(nn.Parameter):
    """A parameter with a method."""

    def largest(self) -> Tensor:
        return self.abs().amax()


class _Distances(Tensor):
    """A user's tensor class that computes like any tensor."""


class _Doubled(Tensor):
    """A tensor class that doubles the results of `linear`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.nn.functional.linear else result


class _Quantized(Tensor):
    """Integers with a scale, as libraries store quantized weights."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: float) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float64)

    def __init__(self, values: Tensor, scale: float) -> None:
        self.values_, self.scale = values, scale

    def dequantize(self) -> Tensor:
        return self.values_.double() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_, args[0].scale)
        args, kwargs = pytree.tree_map(lambda t: t.dequantize() if isinstance(t, cls) else t, (args, kwargs or {}))
        return func(*args, **kwargs)


def _quantized(*shape: int) -> _Quantized:
    return _Quantized(torch.arange(math.prod(shape), dtype=torch.int8).view(shape), 0.1)


def _with_own_classes() -> nn.Module:
    def body(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.up(x) * m.up.weight.largest() * m.up.bias.scale * getattr(x, "scale", 1.0)
        own = isinstance(m.up.weight, _Codebook), isinstance(m.far, _Distances), isinstance(x, _Distances)
        return (y + m.far if all(own[:2]) else y) * (3.0 if own[2] else 1.0)

    model = _Model(body)
    model.up.weight = _Codebook(model.up.weight.detach())
    model.up.bias.scale = 2.0  # type: ignore[attr-defined]
    model.register_buffer("far", torch.arange(8.0).double().as_subclass(_Distances))
    return model


def _called_with_own_classes(model: Any, x: Tensor) -> list[Tensor]:
    own, plain = x.as_subclass(_Distances), x.clone()
    plain.scale = 5.0  # type: ignore[attr-defined]
    return [model(x), model(own).as_subclass(Tensor), model(plain)]


def _with(name: str, tensor: Tensor) -> nn.Module:
    model = _Model()
    if name == "weight":
        model.up.weight = nn.Parameter(tensor, requires_grad=False)
    else:
        model.register_buffer(name, tensor)
    return model


def _with_a_ctc_loss() -> nn.Module:
    loss, targets, lengths = nn.CTCLoss(zero_infinity=True), torch.tensor([[1, 2], [7, 7]]), torch.tensor([2, 1])
    return _Model(lambda m, x: loss(m.up(x).log_softmax(-1), targets, torch.tensor([5, 4]), lengths))


def _with_groups() -> nn.Module:
    ends = torch.tensor([1, 3], dtype=torch.int32)
    model = _Model(lambda m, x: torch._grouped_mm(m.up(x), m.experts, offs=ends), dtype=torch.float32)
    model.experts = nn.Parameter(torch.randn(2, 8, 4))
    return model


def _with_cond() -> nn.Module:
    model = _Model(lambda m, x: torch.cond(m.warm > 2, lambda h: m.up(h), lambda h: m.up(h).sin(), (x,)))
    model.register_buffer("warm", torch.tensor(1))
    return model


def _warmed(model: Any, x: Tensor) -> list[Tensor]:
    cold = model(x)
    model.warm.fill_(3)
    return [cold, model(x)]


def _float_model() -> nn.Module:
    return _Model(dtype=torch.float32)


# --- attributes ------------------------------------------------------------------------------------------------------


class _Frozen(OrderedDict[str, Any]):
    """A read-only configuration, as libraries define; its entries are attributes too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for key, value in self.items():
            setattr(self, key, value)
        self.closed = True

    def __setitem__(self, name: str, value: Any) -> None:
        self._refuse() if hasattr(self, "closed") else super().__setitem__(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse() if hasattr(self, "closed") else super().__setattr__(name, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a frozen configuration can't be changed")

    update = pop = setdefault = clear = __delitem__ = _refuse


OUR_NAMES = (
    "_group _plan _names plan graph layouts group source _layouts _programs _tensors _history _watch _fixed _slots "
    "local_graph warm_up"
)


def _with_our_names() -> nn.Module:
    model = _Model(lambda m, x: m.up(x) * m._group * m._names * m.source * m._layouts)
    for name in OUR_NAMES.split():
        object.__setattr__(model, name, 3.0)
    return model


def _by_types(m: Any, x: Tensor) -> Tensor:
    class Meta(type):
        def __call__(cls) -> int:
            return 5

    class Made(metaclass=Meta):
        pass

    y: Tensor = m.up(x)
    seen = [
        type(x) is Tensor, type(m.up.weight) is nn.Parameter, type(y) is Tensor, {Tensor: True}.get(type(x), False),
        isinstance(type(x), type), issubclass(type(m), nn.Module), type("Named", (), {}).__name__ == "Named",
        type(int) is type, type(Made) is Meta, Made() == 5, str(type[int]) == "type[int]", type.__name__ == "type",
        type(x.shape[0]) is int, isinstance(x.shape[0], int), isinstance(len(x), (str, int)), not isinstance(1, str),
        not isinstance(x.shape[0], float), isinstance(x.shape[0] / 2, float),
    ]  # fmt: skip
    return y * sum(2**i for i, found in enumerate(seen) if found)


def _registers_a_buffer(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "slopes") or len(m.slopes) < len(x):
        m.register_buffer("slopes", torch.arange(len(x), dtype=x.dtype)[:, None], persistent=False)
    y: Tensor = m.up(x) + m.slopes[: len(x)]
    return y


def _moves_a_buffer(m: Any, x: Tensor) -> Tensor:
    m.scale = m.scale.to(x.device)
    y: Tensor = m.up(x) * m.scale
    return y


def _averages_a_buffer(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.up(x) * m.scale
    m.scale = m.scale * 0.9 + 0.1 * y.detach().mean(0)
    return y


def _with_a_scale(body: Body) -> nn.Module:
    model = _Model(body)
    model.register_buffer("scale", torch.arange(8).double())
    return model


class _Cache:
    def __init__(self) -> None:
        self.keys = torch.arange(8.0).double()


def _with_a_registered_cache() -> nn.Module:
    """Returns a model with a plain object that shares its tensor with a buffer."""
    model = _Model(lambda m, x: m.up(x) * m.cache.keys, cache=_Cache())
    model.register_buffer("keys", model.cache.keys, persistent=False)  # type: ignore[union-attr]
    return model


# --- ops, containers, graphs, calls ----------------------------------------------------------------------------------


def _normalised(m: Any, x: Tensor) -> Tensor:
    degree = x.abs().sum(-1) + 1
    degree.pow_(-0.5)
    y: Tensor = m.up(x) * degree[:, None]
    return y


class _Batch(dict[str, Any]):
    """A dict registered with PyTorch's pytree without names of its entries."""


pytree.register_pytree_node(_Batch, lambda d: (list(d.values()), list(d)), lambda v, keys: _Batch(zip(keys, v)))  # noqa: B905


def _exported() -> nn.Module:
    made: nn.Module = torch.export.export(_Plain(), (_x(),)).module()
    return made


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu(self.up(x)) * 2
        return y


def _in_three_threads(model: nn.Module, x: Tensor) -> list[Any]:
    found: list[Any] = []

    def call() -> None:
        with torch.no_grad():
            found.append(model(x))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found if len(found) == 3 else [torch.tensor(math.nan)]


EQUAL: dict[str, _Case] = {
    "an input that begins within a buffer": _Case(_float_model, _unaligned),
    "a conjugated input": _Case(lambda: _Model(lambda m, x: m.up((x * 2j).imag)), _conjugated),
    "an input that is one element of many": _Case(
        lambda: _Model(lambda m, b: m.up(b["x"]) * b["by"]), lambda: {"x": _x(), "by": torch.arange(4).double()[1::3]}
    ),
    "parameters that begin within a buffer": _Case(_parameters_of_one_buffer, lambda: _x(dtype=torch.float32)),
    "a conjugated buffer": _Case(_with_a_conjugated_buffer),
    "a buffer whose sign is still to be changed": _Case(_with_a_negated_buffer),
    "classes and attributes of tensors": _Case(_with_own_classes, _x, _called_with_own_classes),
    "types of an input, of a parameter and of a value": _Case(lambda: _Model(_by_types)),
    "a ctc loss": _Case(
        _with_a_ctc_loss, lambda: torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(0)).double()
    ),
    "grouped_mm in float32": _Case(_with_groups, lambda: _x(dtype=torch.float32)),
    "torch.cond": _Case(_with_cond, _x, _warmed),
    "a frozen configuration": _Case(lambda: _Model(lambda m, x: m.up(x) * m.config["by"], config=_Frozen(by=2.0))),
    "attributes with names of ours": _Case(_with_our_names),
    "a buffer that is registered in forward": _Case(lambda: _Model(_registers_a_buffer)),
    "a buffer that is moved in forward": _Case(lambda: _with_a_scale(_moves_a_buffer)),
    "a buffer that is averaged in forward": _Case(lambda: _with_a_scale(_averages_a_buffer)),
    "a cache whose tensors are registered": _Case(_with_a_registered_cache),
    "a power in place": _Case(lambda: _Model(_normalised)),
    "containers without names": _Case(
        lambda: _Model(lambda m, b: _Batch(y=m.up(b["x"]), z=b["x"] * 2)), lambda: _Batch(x=_x())
    ),
    "a traced model": _Case(lambda: torch.fx.symbolic_trace(_Plain())),
    "an exported model": _Case(_exported),
    "the first call in a checkpoint": _Case(_Model, _x, lambda m, x: checkpoint(m, x, use_reentrant=False)),
    "three threads": _Case(_Model, _x, _in_three_threads),
}


def _outcome(case: _Case, model: Any) -> list[Tensor]:
    """Returns the results, the gradients of the inputs, and the results after a step."""
    inputs = pytree.tree_map(lambda t: t.detach().requires_grad_(), case.inputs())
    leaves = pytree.tree_leaves(inputs)
    results = pytree.tree_leaves(case.call(model, inputs))
    if results[0].requires_grad:
        sum(r.square().sum() for r in results).backward()  # type: ignore[union-attr]
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        results += [leaf.grad for leaf in leaves]
    return [r.detach().resolve_conj() for r in (*results, *pytree.tree_leaves(case.call(model, inputs)))]


def _difference(case: _Case) -> str:
    """Returns '' if the sharded model matches the unsharded one."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(case.build())
    expected = _outcome(case, models[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = _outcome(case, ts.shard(models[1], PLAN))
    tolerance = TOLERANCE[models[0].up.weight.dtype]  # type: ignore[union-attr, index]
    close = [torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(expected, got, strict=True)]
    return "" if all(close) else f"{close}"
