"""Plain attributes that forward assigns: caches and logs are accepted; state that changes later calls is refused."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import capture


class _Up(nn.Module):
    """A linear layer, and attributes that its forward may write."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.body = nn.Linear(6, 8), body
        self.step, self.hidden, self.done, self.seen, self.last = 0, None, False, [], {"n": 0}
        self.plain = torch.ones(8)
        self.holder, self.counts, self.flags = _Holder(), defaultdict(int), set()
        self.queue, self.array = deque([1]), np.zeros(2)
        self.register_buffer("frequency", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _cache(m: Any, x: Tensor) -> Tensor:
    if m.hidden is None or len(m.hidden) < len(x):
        m.hidden = torch.arange(len(x)).float().cos()[:, None]
    return m.up(x) * m.hidden[: len(x)]


def _cache_of_a_buffer(m: Any, x: Tensor) -> Tensor:
    if m.step != len(x) or m.hidden.device != x.device:
        m.step = len(x)
        m.hidden = torch.outer(torch.arange(m.step).float(), m.frequency).cos()
    return m.up(x) * m.hidden


def _new_attribute(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "made"):
        m.made = torch.arange(8.0)
    return m.up(x) * m.made


def _moved(m: Any, x: Tensor) -> Tensor:
    m.plain = m.plain.to(x.device)
    return m.up(x) * m.plain


def _log(m: Any, x: Tensor) -> Tensor:
    m.hidden = m.up(x)
    m.last["shape"] = x.shape
    m.seen.append(m.hidden.sum())
    return m.hidden * 2


def _written_buffer(m: Any, x: Tensor) -> Tensor:
    y = m.up(x) + m.frequency
    m.frequency = y.mean(0).detach()
    return y


@nightly("_cache", "_cache_of_a_buffer")
@pytest.mark.parametrize("body", [_cache, _cache_of_a_buffer, _new_attribute, _moved, _log, _written_buffer])
def test_what_makes_no_difference_may_be_left(body: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = _Up(body)
    sharded = ts.shard(model, {"up": "column"}, example_inputs=(torch.ones(4, 6),))
    for rows in (4, 4, 3, 7, 2):
        x = torch.randn(rows, 6)
        assert torch.allclose(sharded(x), model(x)), rows
    ts.distributed.destroy_process_group()


class _Experts(nn.Module):
    """A layer that stores an auxiliary loss for the training loop."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.aux_loss, self.losses, self.table = nn.Linear(6, 8), 0.0, [], None

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.aux_loss = y.square().mean()
        self.losses.append(y.mean())
        self.table = torch.arange(8.0)
        return y * self.table


def test_a_result_that_forward_leaves_in_an_attribute_is_not_read_as_if_it_were_one() -> None:
    model = nn.Sequential(_Experts(), nn.Linear(8, 6))
    with pytest.warns(UserWarning, match=r"assigns tensors to 0\.aux_loss, 0\.losses\[0\];"):
        sharded = ts.shard(model, {"0.up": "column"}, example_inputs=(torch.ones(4, 6),))
    sharded(torch.ones(4, 6))
    for name in ("aux_loss", "losses"):
        with pytest.raises(ts.InputError, match=f"'{name}' does not hold what the last call computed"):
            getattr(sharded[0], name)
    assert sharded[0].table is None
    ts.distributed.destroy_process_group()


def test_activations_that_a_hook_collects_are_told_of() -> None:
    model, kept = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), {}
    model[0].register_forward_hook(lambda module, args, output: kept.update(a=output))
    with pytest.warns(UserWarning, match=r"assigns tensors to .*kept\['a'\]"):
        ts.shard(model, {"0": "column"}, example_inputs=(torch.ones(4, 6),))
    assert not kept
    ts.distributed.destroy_process_group()


def _counter(m: Any, x: Tensor) -> Tensor:
    m.step += 1
    return m.up(x) * m.step


def _hidden_state(m: Any, x: Tensor) -> Tensor:
    y = m.up(x) if m.hidden is None else m.up(x) + m.hidden
    m.hidden = y.detach()
    return y


def _first_call(m: Any, x: Tensor) -> Tensor:
    y = m.up(x)
    if not m.done:
        y, m.done = y - y.mean(0), True
    return y


def _state_in_a_list(m: Any, x: Tensor) -> Tensor:
    y = m.up(x) + sum(m.seen)
    m.seen.append(y.detach().mean())
    return y


def _cache_of_a_written_buffer(m: Any, x: Tensor) -> Tensor:
    y = m.up(x) if m.hidden is None else m.up(x) * m.hidden
    m.frequency.add_(1)
    m.hidden = m.frequency * 2
    return y


def _written_in_place(m: Any, x: Tensor) -> Tensor:
    y = m.up(x) + m.plain
    m.plain[0].add_(1)
    return y


class _Holder:
    n = 0


def _in_an_object(m: Any, x: Tensor) -> Tensor:
    m.holder.n += 1
    return m.up(x) * m.holder.n


def _in_a_default_dict(m: Any, x: Tensor) -> Tensor:
    m.counts["n"] += 1
    return m.up(x) * m.counts["n"]


def _in_a_deque(m: Any, x: Tensor) -> Tensor:
    m.queue.append(1)
    return m.up(x) * len(m.queue)


def _in_a_set(m: Any, x: Tensor) -> Tensor:
    y = m.up(x) if "seen" in m.flags else m.up(x) * 2
    m.flags.add("seen")
    return y


def _in_an_array(m: Any, x: Tensor) -> Tensor:
    m.array += 1
    return m.up(x) * float(m.array[0])


REFUSED = {
    _in_an_object: "changes holder.n again",
    _in_a_default_dict: r"changes counts\['n'\] again",
    _in_a_deque: "changes queue.* again",
    _in_a_set: "computes something else",
    _in_an_array: "changes array again",
    _counter: "changes step again",
    _hidden_state: "reads what an earlier one has left there",
    _first_call: "computes something else",
    _state_in_a_list: "reads what an earlier one has left there",
    _cache_of_a_written_buffer: "reads what an earlier one has left there",
    _written_in_place: "plain, which is no registered buffer",
}


@pytest.mark.parametrize("body", REFUSED)
def test_state_is_refused(body: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(ts.CaptureError, match=REFUSED[body]):
        ts.shard(_Up(body), {"up": "column"}, example_inputs=(torch.ones(4, 6),))
    ts.distributed.destroy_process_group()


def _held(model: _Up) -> dict[str, str]:
    """The text of each attribute, including the attributes of `holder`."""
    return {name: repr(value) for name, value in {**vars(model), **vars(model.holder)}.items()}


@pytest.mark.parametrize("body", [_cache, _log, _new_attribute, _counter])
def test_a_capture_leaves_the_attributes_as_they_were(body: Callable[[Any, Tensor], Tensor]) -> None:
    model = _Up(body)
    before, seen = _held(model), model.seen
    try:
        capture(model, (torch.ones(4, 6),))
    except ts.CaptureError:
        assert body is _counter
    assert _held(model) == before and model.seen is seen and not hasattr(model, "made")


def test_what_cannot_be_copied_is_an_error() -> None:
    model = _Up(_cache)
    model.lock = threading.Lock()
    with pytest.raises(ts.InputError, match="can't be copied"):
        ts.shard(model, {"up": "column"})
    ts.distributed.destroy_process_group()


def test_a_weight_computed_by_a_hook() -> None:
    """The older weight_norm stores a computed tensor in an attribute; each call computes it before reading it."""
    torch.manual_seed(0)
    model = torch.nn.utils.weight_norm(nn.Linear(6, 8))
    report = ts.check(nn.Sequential(model), {}, example_inputs=(torch.randn(4, 6),), mesh=2)
    assert report.ok, str(report)
