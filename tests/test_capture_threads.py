"""A capture has no effect on other threads, and does not attribute their actions to the model."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import capture

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
LOGGER = logging.getLogger("torch.fx.experimental.symbolic_shapes")


class _Doubling(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.seed()
        return x * torch.ones(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class _Model(nn.Module):
    """Calls in forward every function that a capture intercepts."""

    def __init__(self, body: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(6, 8), nn.Linear(8, 6), body

    def forward(self, x: Tensor) -> Tensor:
        self.body()
        self.register_buffer("cache", torch.ones(8))
        self.shape = x.detach() * 0
        return self.down(checkpoint(_Doubling.apply, self.up(x) * self.cache, use_reentrant=False))


@contextmanager
def _beside(loop: Callable[[], None], *, rounds: int = 0) -> Iterator[None]:
    """Repeats a function in another thread, at least `rounds` times; fails if the function raises."""
    done, enough, failures = threading.Event(), threading.Event(), list[BaseException]()

    def run() -> None:
        count = 0
        try:
            while not done.is_set():
                loop()
                count += 1
                if count >= rounds:
                    enough.set()
                done.wait(0.001)
        except BaseException as error:
            failures.append(error)
            enough.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
        enough.wait(60)
    finally:
        done.set()
        thread.join()
    assert not failures, failures


def _seeds_and_draws() -> None:
    torch.manual_seed(seed=7)
    random.seed(7)
    np.random.seed(7)
    assert [torch.rand(()).item(), random.random(), np.random.rand()] == DRAWN


def _drawn() -> list[float]:
    torch.manual_seed(7)
    return [torch.rand(()).item(), random.Random(7).random(), np.random.RandomState(7).rand()]


DRAWN = _drawn()


def _restores_a_state() -> None:
    state = torch.get_rng_state()
    torch.rand(3)
    torch.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(torch.seed(), int)


def _registers_buffers() -> None:
    module = nn.Module()
    module.register_buffer("cache", torch.ones(2), persistent=False)
    assert "cache" in dict(module.named_buffers()) and "cache" not in vars(module)


def _applies_a_function() -> None:
    x = torch.ones(2, requires_grad=True)
    _Doubling.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def _checkpoints() -> None:
    calls: list[None] = []
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda x: (calls.append(None), x.sin())[1], x, use_reentrant=False).sum().backward()
    assert len(calls) == 2, "the backward computes the forward again"


@contextmanager
def _log_records() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    try:
        yield records
    finally:
        LOGGER.removeHandler(handler)


def _logs() -> None:
    with _log_records() as records:
        LOGGER.warning("of another thread")
    assert [record.getMessage() for record in records] == ["of another thread"]


@nightly(but=["_logs", "_registers_buffers", "_seeds_and_draws"])
@pytest.mark.parametrize(
    "loop",
    [_seeds_and_draws, _restores_a_state, _registers_buffers, _applies_a_function, _checkpoints, _logs],
    ids=lambda loop: loop.__name__,
)
def test_another_thread_sees_nothing(loop: Callable[[], None]) -> None:
    model = _Model()  # outside, because the initial values are random numbers too
    with _beside(loop, rounds=20):
        for _ in range(3):
            graph = capture(model, (X,)).graph.graph
            assert any("recompute" in node.meta for node in graph.nodes)


def _rng_states() -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),
    }


def test_nothing_is_left_behind() -> None:
    functions = [torch.manual_seed, torch.random.manual_seed, torch.seed, torch.set_rng_state]
    model = _Model()
    level, states = LOGGER.level, _rng_states()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        capture(model, (X,))
        assert warnings.filters == filters
    assert functions == [torch.manual_seed, torch.random.manual_seed, torch.seed, torch.set_rng_state]
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    assert LOGGER.level == level
    assert _rng_states() == states
    assert "register_buffer" not in vars(model.up) and "cache" not in vars(model) and "forward" not in vars(model)
    assert [str(warning.message) for warning in seen if "tensor attribute" in str(warning.message)] == []


class _Logging(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        LOGGER.warning("of export")
        LOGGER.error("an error")
        return x * 2


def test_only_warnings_that_export_logs_are_dropped() -> None:
    with _log_records() as records:
        capture(_Logging(), (X,))
    warnings_and_errors = [record for record in records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings_and_errors] == ["an error"]


def test_a_filter_that_another_thread_adds_meanwhile_stays() -> None:
    with warnings.catch_warnings():
        capture(_Model(lambda: warnings.filterwarnings("ignore", message="added meanwhile")), (X,))
        assert any(entry[1] and "added meanwhile" in str(entry[1]) for entry in warnings.filters)


def test_a_function_that_is_replaced_meanwhile_stays() -> None:
    original = torch.seed
    try:
        capture(_Model(_replace_seed), (X,))
        assert torch.seed is _other_seed
    finally:
        torch.seed = original


def _other_seed() -> int:
    return 0


def _replace_seed() -> None:
    torch.seed = _other_seed


USES: dict[str, Callable[[], object]] = {
    "random": random.random,
    "random.seed": lambda: random.seed(1),
    "numpy": np.random.rand,
    "torch.default_generator": lambda: torch.default_generator.manual_seed(1),
}


@pytest.mark.parametrize("use", USES)
def test_a_forward_that_uses_a_generator_is_refused_beside_another_thread(use: str) -> None:
    random.seed(0)
    torch.manual_seed(0)
    with pytest.raises(ts.CaptureError, match=r"draws random numbers from|seeds the random numbers"):
        with _beside(lambda: None):
            capture(_Model(USES[use]), (X,))


def test_a_thread_that_draws_all_the_time_is_not_taken_for_the_model() -> None:
    with _beside(lambda: (random.random(), torch.rand(()), None)[-1]):
        for _ in range(3):
            capture(_Model(), (X,))
