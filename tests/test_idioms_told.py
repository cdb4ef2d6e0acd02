"""Idioms that sharding doesn't support warn or raise; the others match the unsharded model."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import refused, refused_input
from tests.test_idioms import EQUAL, PLAN, _difference, _Doubled, _Model, _Plain, _quantized, _with, _x
from torchshard.testing import join, run_ranks

# --- errors and warnings ----------------------------------------------------------------------------------------------


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
    "a sparse buffer": ("buffer edges is sparse_csr", lambda: ts.plan(_sparse(), mesh=2)),
    "a quantized weight": (
        "model.up.weight = torch.nn.Parameter(model.up.weight.dequantize())",
        lambda: ts.shard(_with("weight", _quantized(8, 6)), PLAN),
    ),
    "a quantized weight, planned": (
        "up.weight is of the class _Quantized",
        lambda: ts.plan(_with("weight", _quantized(8, 6)), example_inputs=(_x(),), mesh=2),
    ),
    "a quantized buffer, checked": (
        "model.table = model.table.dequantize()",
        lambda: ts.check(_with("table", _quantized(8)), PLAN, example_inputs=(_x(),), mesh=2),
    ),
    "a weight that computes otherwise": (
        "it overrides __torch_function__",
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
"""Case -> (text of the InputError, call that raises it)."""


def _by_levels(module: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


NUMBER = "forward converts a tensor's value to a Python number"
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
"""Case -> (text of the CaptureError, function that returns the model)."""


def _all(rank: int, names: list[str]) -> dict[str, str]:
    time.sleep(2.5 * rank)  # longer than the time-out of a call, shorter than the one at the start
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
