"""Carried values, which a call stores in its arguments: exact, and split between calls without communication."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly, refused, refused_input
from torchshard.testing import kept_graphs, largest, on_ranks, run_ranks, split

WIDTH, HEADS = 12, 3
COLUMNS = {"q": "column", "k": "column", "v": "column", "o": "row"}


# --- models from outside of Hugging Face ------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention over all earlier positions, with a `store` that keeps keys and values for the next call."""

    def __init__(self, store: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.store = store
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, past: Any) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = self.store(past, k, v)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Returning(Attention):
    """Attention that also returns the values that it stores."""

    def forward(self, x: Tensor, past: Any) -> Any:
        made = super().forward(x, past)
        return made, past["k"], {"past": past}


@dataclass
class Past:
    """A user's own object."""

    keys: Tensor | None = None
    values: Tensor | None = None
    position: int = 0


def _in_object(past: Past, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    past.keys = k if past.keys is None else torch.cat([past.keys, k], 2)
    past.values = v if past.values is None else torch.cat([past.values, v], 2)
    past.position += k.shape[2]
    return past.keys, past.values


def _in_list(past: list[tuple[Tensor, Tensor]], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if past:
        k, v = torch.cat([past[0][0], k], 2), torch.cat([past[0][1], v], 2)
        past[0] = k, v
    else:
        past.append((k, v))
    return k, v


def _in_dict(past: dict[str, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    past["k"] = torch.cat([past["k"], k], 2) if "k" in past else k
    past["v"] = torch.cat([past["v"], v], 2) if "v" in past else v
    return past["k"], past["v"]


class Buffered(nn.Module):
    """Writes in place to tensors of a fixed length, at a position that is a tensor, like gpt-fast."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, past: dict[str, Tensor], position: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        past["k"].index_copy_(2, position, k)
        past["v"].index_copy_(2, position, v)
        mask = torch.arange(past["k"].shape[2]) <= position[:, None]
        return self.o(F.scaled_dot_product_attention(q, past["k"], past["v"], mask).transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    """Writes in place to its state, a tensor argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        state.mul_(0.5).add_(self.up(x))
        return self.back(state.tanh())


def _tensors(past: Any) -> list[Tensor]:
    found: list[Tensor] = []
    torch.utils._pytree.tree_map_only(Tensor, found.append, vars(past) if isinstance(past, Past) else past)
    return found


def test_what_is_returned_is_whole() -> None:
    for found in run_ranks(_returns, 2):
        assert found == {"whole": True, "own": True, "split": True}


def _returns(rank: int) -> dict[str, bool]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = Returning(_in_dict).double()
    sharded, pasts = ts.shard(copy.deepcopy(model), COLUMNS), [{}, {}]
    with torch.no_grad():
        for length in (4, 2, 3):
            x = torch.randn(2, length, WIDTH, dtype=torch.double)
            (_, expected, _), (_, got, held) = (m(x, past) for m, past in zip((model, sharded), pasts, strict=True))
    return {
        "whole": type(got) is Tensor and torch.allclose(got, expected, rtol=0, atol=1e-12),
        "own": held["past"] is pasts[1],
        "split": hasattr(pasts[1]["k"], "full_tensor"),
    }


class Logging(Attention):
    """Counts its calls in an attribute that does not affect its results."""

    calls = 0

    def forward(self, x: Tensor, past: Any) -> Tensor:
        self.calls = min(self.calls + 1, 1)
        return super().forward(x, past)


KEPT: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "object": (lambda: Attention(_in_object), Past),
    "list": (lambda: Attention(_in_list), list),
    "dict": (lambda: Attention(_in_dict), dict),
    "dict, beside an attribute": (lambda: Logging(_in_dict), dict),
}


def _grows(rank: int, kind: str) -> dict[str, Any]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    build, empty = KEPT[kind]
    model = build().double()
    sharded = ts.shard(copy.deepcopy(model), COLUMNS)
    pasts, error = [empty(), empty()], 0.0
    with torch.no_grad():
        for length in (4, 1, 1, 2, 2, 3):
            x = torch.randn(2, length, WIDTH, dtype=torch.double)
            expected, got = (m(x, past) for m, past in zip((model, sharded), pasts, strict=True))
            error = largest(error, float((expected - got).abs().max()))
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in _tensors(pasts[1])]
    for theirs, ours in zip(_tensors(pasts[0]), whole, strict=True):
        error = largest(error, float((theirs - ours).abs().max()))
    shapes = [tuple(t.shape) for t in _tensors(pasts[1])]
    return {
        "error": error,
        "heads": {shape[1] for shape in shapes},
        "graphs": len(kept_graphs(sharded)),
        "position": pasts[1].position if kind == "object" else 13,
    }


@nightly(but=["dict"])
@pytest.mark.parametrize("kind", KEPT)
def test_what_grows_stays_split(kind: str) -> None:
    for rank, found in enumerate(run_ranks(_grows, 2, kind)):
        assert found.pop("error") < 1e-12
        # one graph for the empty object, one for later calls of length 1, one for all other lengths
        assert found == {"heads": {2 - rank}, "graphs": 3, "position": 13}


def _written(rank: int) -> dict[str, Any]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = Buffered().double()
    sharded = ts.shard(copy.deepcopy(model), COLUMNS)
    pasts = [{name: torch.zeros(2, HEADS, 9, 4, dtype=torch.double) for name in "kv"} for _ in range(2)]
    error = 0.0
    with torch.no_grad():
        for positions in ([0, 1, 2], [3], [4], [5, 6]):
            x, at = torch.randn(2, len(positions), WIDTH, dtype=torch.double), torch.tensor(positions)
            expected, got = (m(x, past, at) for m, past in zip((model, sharded), pasts, strict=True))
            error = largest(error, float((expected - got).abs().max()))
    recurrent = Recurrent().double()
    split = ts.shard(copy.deepcopy(recurrent), {"up": "column", "back": "row"})
    states = [torch.zeros(2, WIDTH, dtype=torch.double) for _ in range(2)]
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, WIDTH, dtype=torch.double)
            expected, got = (m(x, state) for m, state in zip((recurrent, split), states, strict=True))
            error = largest(error, float((expected - got).abs().max()), float((states[0] - states[1]).abs().max()))
    return {"error": error, "heads": pasts[1]["k"].shape[1], "state": type(states[1]) is Tensor}


@pytest.mark.nightly
def test_what_is_written_in_place() -> None:
    for rank, found in enumerate(run_ranks(_written, 2)):
        assert found.pop("error") < 1e-12
        # a tensor argument stays the caller's own tensor, unsharded
        assert found == {"heads": 2 - rank, "state": True}


def test_an_argument_that_is_passed_twice_is_refused() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, state: Tensor, other: Tensor) -> Tensor:
            state.add_(x)
            return other * 2

    sharded, x, state = ts.shard(Both(), {}), torch.ones(3), torch.zeros(3)
    for _ in range(2):
        assert refused_input(lambda: sharded(x, state, state), "state and other are one tensor")
        assert torch.equal(sharded(x, state.clone(), state), torch.zeros(3))
    ts.distributed.destroy_process_group()


def test_an_object_that_is_passed_twice_is_refused_if_forward_changes_it() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, past: Any, others: dict[str, Any], *, keep: bool = True) -> Tensor:
            if keep:
                past.append(x)
            return x + sum(others["seen"]) + len(others)

    sharded, x = ts.shard(Both(), {}), torch.ones(3)
    for _ in range(2):
        shared: list[Tensor] = [torch.ones(3)]
        assert refused_input(lambda shared=shared: sharded(x, shared, {"seen": shared}), "is passed twice")  # type: ignore[misc]
        assert torch.equal(sharded(x, [], {"seen": shared}), 3 * x)
        assert torch.equal(sharded(x, shared, {"seen": shared, "again": shared}, keep=False), 4 * x)
    ts.distributed.destroy_process_group()


def _past(length: int, *, grad: bool = False) -> dict[str, Tensor]:
    return {name: torch.randn(2, HEADS, length, 4).requires_grad_(grad) for name in "kv"}


CHECKED: dict[str, tuple[Callable[[], nn.Module], dict[str, str], Callable[[], tuple[Any, ...]]]] = {
    "an empty dict": (KEPT["dict"][0], COLUMNS, lambda: (torch.randn(2, 4, WIDTH), {})),
    "a dict": (KEPT["dict"][0], COLUMNS, lambda: (torch.randn(2, 4, WIDTH), _past(5, grad=True))),
    "an object": (KEPT["object"][0], COLUMNS, lambda: (torch.randn(2, 4, WIDTH), Past())),
    "a list": (KEPT["list"][0], COLUMNS, lambda: (torch.randn(2, 4, WIDTH), [tuple(_past(3, grad=True).values())])),
    "written": (Buffered, COLUMNS, lambda: (torch.randn(2, 2, WIDTH), _past(5), torch.tensor([1, 2]))),
    "an argument": (Recurrent, {"up": "column", "back": "row"}, lambda: (torch.randn(2, WIDTH), torch.randn(2, WIDTH))),
}


@nightly(but=["an argument-*", "an object-2"])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", CHECKED)
def test_what_is_left_has_the_unsharded_models_gradients(name: str, world: int) -> None:
    torch.manual_seed(0)
    build, plan, inputs = CHECKED[name]
    report = ts.check(build(), plan, example_inputs=inputs(), mesh=world, dtype=torch.float64)
    assert report.ok, report
    assert name == "an argument" or "3 outputs" in str(report)


@pytest.mark.nightly
@on_ranks(2)
def test_gradients_flow_from_call_to_call(rank: int) -> None:
    """Truncated backpropagation: gradients flow through the carried values of earlier calls."""
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = Attention(_in_dict).double()
    sharded = ts.shard(copy.deepcopy(model), COLUMNS)
    worst = 0.0
    for _ in range(3):
        inputs = [torch.randn(2, length, WIDTH, dtype=torch.double) for length in (4, 2, 2)]
        for m in (model, sharded):
            past: dict[str, Tensor] = {}
            m.zero_grad()
            torch.stack([m(x, past).square().sum() for x in inputs]).sum().backward()
        own = dict(sharded.named_parameters())
        for name, p in model.named_parameters():
            mine = split(p.grad, sharded.layouts[name], rank, 2)
            worst = largest(worst, float((mine - own[name].grad.as_subclass(Tensor)).abs().max()))
    assert worst < 1e-10


# --- slices ----------------------------------------------------------------------------------------------------------


def _used(rank: int) -> dict[str, Any]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = Attention(_in_dict).double()
    sharded, other = (ts.shard(copy.deepcopy(model), COLUMNS) for _ in range(2))
    past: dict[str, Any] = {}
    x = torch.randn(2, 4, WIDTH, dtype=torch.double)
    with torch.no_grad():
        sharded(x, past)
    keys = past["k"]
    whole = keys.full_tensor()
    beams = torch.tensor([1, 0, 0])
    computed = {
        "index_select": (keys.index_select(0, beams), whole.index_select(0, beams)),
        "indexed": (keys[beams, ...], whole[beams, ...]),
        "cropped": (keys[..., :-2, :], whole[..., :-2, :]),
        "repeated": (keys.repeat_interleave(3, dim=0), whole.repeat_interleave(3, dim=0)),
        "joined": (torch.cat([keys, keys]), torch.cat([whole, whole])),
        "scaled": (keys * 2, whole * 2),
        "cast": (keys.float(), whole.float()),
        "copied": (copy.deepcopy(keys), whole),
    }
    refusals = {
        "with a gradient": refused_input(lambda: sharded(x, state := {}) is None or state["k"] * 2, "has a gradient"),
        "sum": refused_input(lambda: keys.sum(), "can't be computed of this rank's slice"),
        "heads chosen": refused_input(lambda: keys[:, 0], "can't be computed of this rank's slice"),
        "saved": refused_input(lambda: torch.save(past, io.BytesIO()), "can't be computed of this rank's slice"),
        "of another model": refused_input(lambda: other(x, past), "left by a call of another sharded model"),
    }
    with torch.no_grad():
        refusals["on one rank"] = refused_input(lambda: sharded(x, {} if rank else past), "the tensors of the call")
        refusals["another batch"] = refused(lambda: sharded(x[:1], past), "Expected 2 in dimension 0 but got 1")
        sharded(x, past)
        seconds: dict[str, Any] = {}
        sharded(-x, seconds), sharded(x, seconds)
        refusals["two of one length, swapped on one rank"] = refused_input(
            lambda: sharded(x, past if rank else seconds), "the calls that have left split inputs"
        )
    return {
        "computed": {name: torch.equal(ours.full_tensor(), theirs) for name, (ours, theirs) in computed.items()},
        "refused": refusals,
        "shown": repr(keys).startswith(f"f64[2,3@tp,4,4] on rank {rank} of 2: tensor("),
        "goes on": tuple(past["k"].whole) == (2, 3, 8, 4),
    }


def test_slices_are_computed_with_or_refused() -> None:
    for found in run_ranks(_used, 2):
        assert all(found["computed"].values()), found
        assert all(found["refused"].values()), found
        assert found["shown"] and found["goes on"]
