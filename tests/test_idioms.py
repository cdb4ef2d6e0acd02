"""How people write models, and what they pass by mistake: as the unsharded model does, or told in words of ours.

Most cases run one after the other on two ranks. A model's case is called, its loss differentiated and one step made, of
the unsharded and of the sharded model: results, gradients of the inputs and parameters after the step are compared.
"""

from __future__ import annotations

import gc
import math
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import refused, refused_input
from torchshard.testing import join, run_ranks

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
PLAN = {"up": "column"}
Body = Callable[[Any, Any], Any]


class _Model(nn.Module):
    """A linear, attributes that a case wants beside it, and a forward."""

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
    """A tensor of the user's own class, which computes as any."""


class _Doubled(Tensor):
    """A tensor that computes otherwise."""

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
    """A configuration that can't be written to, as libraries have it; its entries are attributes too."""

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
    """A plain object whose tensors are the model's buffers too."""
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
    """Registered with PyTorch's pytree, but without names of its entries."""


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
    """Results, gradients of the inputs, and results after a step."""
    inputs = pytree.tree_map(lambda t: t.detach().requires_grad_(), case.inputs())
    leaves = pytree.tree_leaves(inputs)
    results = pytree.tree_leaves(case.call(model, inputs))
    if results[0].requires_grad:
        sum(r.square().sum() for r in results).backward()  # type: ignore[union-attr]
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        results += [leaf.grad for leaf in leaves]
    return [r.detach().resolve_conj() for r in (*results, *pytree.tree_leaves(case.call(model, inputs)))]


def _difference(case: _Case) -> str:
    """'' where the sharded model does what the unsharded one does."""
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


# --- told ------------------------------------------------------------------------------------------------------------


def _sharded(dtype: torch.dtype = torch.float64, **kwargs: Any) -> Any:
    return ts.shard(_Model(dtype=dtype), PLAN, **kwargs)


def _first(model: nn.Module) -> Any:
    return ts.shard(model, {})(_x())


def _own_generator() -> nn.Module:
    own = torch.Generator().manual_seed(0)
    return _Model(lambda m, x: m.up(x) + torch.randn(8, generator=m.own), own=own)


class _Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.LazyLinear(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        return y


def _sparse() -> nn.Module:
    model = _Plain()
    model.register_buffer("edges", torch.eye(8).to_sparse_csr())
    return model


def _sized_wrongly() -> Any:
    tsd.debug(False)
    try:
        return tsd.gather(torch.ones(3), 0, size=8)
    finally:
        tsd.debug(None)


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "a sharded model": ("the model is sharded already", lambda: ts.shard(_sharded(), PLAN)),
    "a wrapped model": ("a DistributedDataParallel can't be", lambda: ts.shard(DistributedDataParallel(_Plain()), {})),
    "a lazy model": ("parameter 'up.weight' is not initialised yet", lambda: ts.shard(_Lazy(), PLAN)),
    "a sparse buffer": ("buffer edges is sparse_csr", lambda: ts.plan(_sparse(), world_size=2)),
    "a quantized weight": (
        "model.up.weight = torch.nn.Parameter(model.up.weight.dequantize())",
        lambda: ts.shard(_with("weight", _quantized(8, 6)), PLAN),
    ),
    "a quantized weight, planned": (
        "up.weight is of the class _Quantized",
        lambda: ts.plan(_with("weight", _quantized(8, 6)), example_inputs=(_x(),), world_size=2),
    ),
    "a quantized buffer, checked": (
        "model.table = model.table.dequantize()",
        lambda: ts.check(_with("table", _quantized(8)), PLAN, example_inputs=(_x(),), world_size=2),
    ),
    "a weight that computes otherwise": (
        "_Doubled.__torch_function__ computes them",
        lambda: ts.shard(_with("weight", torch.randn(8, 6).double().as_subclass(_Doubled)), PLAN),
    ),
    "a quantized input": ("x.dequantize()", lambda: _sharded()(_quantized(3, 6))),
    "another dtype": ("input x is float32, the model float64", lambda: _sharded()(_x(dtype=torch.float32))),
    "an input without values": ("input x has no values", lambda: _sharded()(_x().to("meta"))),
    "a plan drawn to nowhere": ("not to a NoneType", lambda: ts.draw(_sharded(example_inputs=(_x(),)).plan, None)),
    "a loss of logits split somehow": ("must be told how the logits", lambda: ts.nn.ParallelCrossEntropyLoss()),
    "a norm that is a text": ("invalid max_norm '1'", lambda: ts.clip_grad_norm_(_sharded(), "1")),  # type: ignore
    "names to clip": ("of parameters, not of a str", lambda: ts.clip_grad_norm_(["up.weight"], 1.0)),  # type: ignore
    "a size that the slices have not": ("of a split of 8", _sized_wrongly),
    "a gradient by torch.func": (
        "reduce was called within a transform",
        lambda: torch.func.grad(lambda t: tsd.reduce(t).sum())(_x()),
    ),
    "a batch of calls by torch.func": ("gather was called within", lambda: torch.func.vmap(tsd.gather)(_x())),
    "a broadcast in a transform": ("broadcast was called within", lambda: torch.func.vmap(tsd.broadcast)(_x())),
}
"""What is done -> what an InputError says."""


def _by_levels(module: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


NUMBER = "forward makes a Python number of a tensor's value"
UNCAPTURED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "a generator of the model's own": ("draws random numbers from a generator of its own", _own_generator),
    "gradients in forward": (
        "forward computes gradients",
        lambda: _Model(lambda m, x: torch.autograd.grad(m.up(x).sum(), m.up.weight, create_graph=True)[0]),
    ),
    "forward mode by levels": ("torch.func.jvp of a function", lambda: _Model(lambda m, x: _by_levels(m.up, x))),
    "a number as a result": (NUMBER, lambda: _Model(lambda m, x: (m.up(x), x.sum().item()))),
    "a number as a factor": (NUMBER, lambda: _Model(lambda m, x: m.up(x) * x.sum().item())),
}
"""What is called -> what a CaptureError says."""


def _all(rank: int, names: list[str]) -> dict[str, str]:
    time.sleep(2.5 * rank)  # longer than a call may wait, but not longer than the start
    tsd.init_process_group(timeout_seconds=2.0, start_seconds=60.0, collective_seconds=20.0)
    tsd.destroy_process_group()
    tsd.init_process_group(timeout_seconds=20.0)
    found = {}
    for name in names:
        try:
            found[name] = _tried(name)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _tried(name: str) -> str:
    if name in EQUAL:
        return _difference(EQUAL[name])
    if name in REFUSED:
        text, call = REFUSED[name]
        return "" if refused_input(call, text) else "accepted, or in other words"
    text, build = UNCAPTURED[name]
    return "" if refused(lambda: _first(build()), text, ts.CaptureError) else "accepted, or in other words"


def test_as_the_unsharded_model_or_told() -> None:
    names = [*EQUAL, *REFUSED, *UNCAPTURED]
    for found in run_ranks(_all, 2, names):
        assert len(found) == len(names)
        assert {name: text for name, text in found.items() if text} == {}


# --- in one process --------------------------------------------------------------------------------------------------


def test_the_first_argument_may_be_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    tsd.init_process_group("gloo")
    assert (dist.get_backend(), tsd.get_group_size()) == ("gloo", 1)


BAD_WAITS: list[dict[str, Any]] = [
    {"timeout_seconds": 0},
    {"timeout_seconds": timedelta(seconds=60)},
    {"start_seconds": -1.0},
    {"start_seconds": math.inf},
    {"collective_seconds": "60"},
    {"collective_seconds": math.nan},
]


@pytest.mark.parametrize("wait", BAD_WAITS, ids=str)
def test_waits_are_finite_numbers_of_seconds(wait: dict[str, Any]) -> None:
    assert refused_input(lambda: tsd.init_process_group(**wait), "is not a finite number of seconds above 0")
    tsd.init_process_group(timeout_seconds=1, start_seconds=2, collective_seconds=3.5)


def test_a_number_of_ranks_given_as_text_is_refused() -> None:
    assert refused(lambda: tsd.launch(print, "2"), "'2' ranks can't be started", ts.DistributedError)  # type: ignore


def test_sums_of_partial_values_keep_their_dtype() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.bfloat16):
        made = join([torch.full((2,), 3, dtype=dtype)] * 2, ts.P)
        assert made.dtype == dtype and made.tolist() == [6, 6]


def test_a_tool_around_a_call_counts_the_call_alone() -> None:
    models = _Model(), _sharded(example_inputs=(_x(),))
    for _ in range(3):  # the second call records the graphs of its step
        counted = []
        for model in models:
            with FlopCounterMode(display=False) as counter:
                model(_x(4)).sum().backward()
            counted.append(counter.get_total_flops())
        assert counted[0] == counted[1]


def test_a_cast_model_still_shows_its_plan() -> None:
    sharded = _sharded(example_inputs=(_x(),))
    made = sharded.plan
    sharded.float()
    assert sharded.plan is made and "up" in ts.explain(sharded)
    assert sharded(_x(dtype=torch.float32)).dtype == torch.float32


def test_a_capture_for_fixed_sizes_is_told() -> None:
    scales = {3: 2.0}
    with pytest.warns(UserWarning, match="can't be captured for varying batch and sequence sizes"):
        _first(_Model(lambda m, x: m.up(x) * scales[x.shape[0]]))


@pytest.mark.nightly
def test_graphs_that_are_called_no_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchshard.runtime.compiled.MOST_GRAPHS", 3)
    model = _Model(lambda m, given: given[1](m.up(given[0])))
    sharded, kept, x = ts.shard(model, {}), [], _x()
    for factor in (1.0, 2.0, 3.0, 4.0, 1.0):
        by = lambda h: h * factor  # noqa: B023, E731
        assert torch.equal(sharded((x, by)), model((x, by)))
        kept.append(weakref.ref(sharded.graph))
    gc.collect()
    assert [graph() is None for graph in kept] == [True, True, False, False, False]


def test_threads_may_capture_different_models() -> None:
    found: list[bool] = []

    def train() -> None:
        model = _Plain()
        sharded = ts.shard(model, PLAN)
        for rows in (3, 4):
            found.append(torch.allclose(sharded(_x(rows)), model(_x(rows))))

    tsd.init_process_group()
    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6
