"""Carried values with the batch split across ranks: caches, states, and `generate()`."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import holding, nightly, refused_input
from tests.test_carried_caches import GENERATED, _model
from torchshard.testing import full_gradient, gradient_error, largest, run_ranks

Ways = str | dict[str, str]
MESHES: list[tuple[dict[str, int], Ways]] = [
    ({"dp": 2, "tp": 2}, "replicate"),
    ({"dp": 2, "tp": 2}, "shard"),
    ({"dp": 4}, "shard"),
    ({"hosts": 2, "fsdp": 2}, {"hosts": "replicate", "fsdp": "shard"}),
]
WAYS = ["greedy", "to their ends", "beams", "static"]
ROWS = 2
"""Rows of a rank's part of the batch."""


class State(nn.Module):
    """A recurrent state for each row, and a mean that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        if state:
            h = h + 0.5 * state["h"] * state["mean"]
        state["h"] = h.tanh()
        state["mean"] = state["h"].mean(0)
        y = self.b(state["h"])
        return y, y.square().mean()


class Stacked(State):
    """Carries a state with the batch as its second dim."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        result = super().forward(x, state)
        state["h"] = torch.stack([state["h"], state["h"]])
        return result


def _pins(mesh: dict[str, int]) -> dict[str, str]:
    return {"a": "column", "b": "row"} if "tp" in mesh else {}


@nightly("False-mesh0-replicate", "False-mesh2-shard", "True-mesh1-shard", "True-mesh3-data3")
@pytest.mark.parametrize(("mesh", "data"), MESHES)
@pytest.mark.parametrize("begun", [False, True])
def test_what_a_call_leaves_is_that_of_the_whole_batch(mesh: dict[str, int], data: Any, begun: bool) -> None:
    torch.manual_seed(0)
    model, x = State(), torch.randn(8, 6)
    state = {"h": torch.randn(8, 8, requires_grad=True), "mean": torch.randn(8)} if begun else {}
    report = ts.check(model, _pins(mesh), mesh=holding(mesh, data), example_inputs=(x, state))
    report.raise_on_error()


def _carried(rank: int, mesh: dict[str, int], data: Any) -> dict[str, float]:
    """Errors after two calls with gradients through the state between them, and a third call without gradients."""
    torch.manual_seed(0)
    whole, (first, second) = State().double(), torch.randn(2, 8, 6).double()
    model = ts.shard(copy.deepcopy(whole), _pins(mesh), mesh=holding(mesh, data))
    place, rows = rank // mesh.get("tp", 1), 8 * mesh.get("tp", 1) // 4
    own = slice(place * rows, (place + 1) * rows)
    state, expected = dict[str, Tensor](), dict[str, Tensor]()
    losses = model(first[own], state)[1], model(second[own], state)[1]
    (losses[0] + losses[1]).backward()
    of_whole = whole(first, expected)[1], whole(second, expected)[1]
    (of_whole[0] + of_whole[1]).backward()
    found = {"loss": float((losses[1] - of_whole[1]).abs())}
    with torch.no_grad():
        result, _ = model(first[own], state)
        found["result"] = float((result - whole(first, expected)[0][own]).abs().max())
    kept = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
    found["state"] = float((kept["h"] - expected["h"][own]).abs().max())
    found["mean"] = float((kept["mean"] - expected["mean"]).abs().max())
    pairs = zip(whole.named_parameters(), model.parameters(), strict=True)
    return found | {name: float((full_gradient(own) - p.grad).abs().max()) for (name, p), own in pairs}


@nightly(but=["mesh3-data3"])
@pytest.mark.parametrize(("mesh", "data"), MESHES)
def test_gradients_flow_from_call_to_call(mesh: dict[str, int], data: Any) -> None:
    for found in run_ranks(_carried, 4, mesh, data):
        assert len(found) == 8 and largest(*found.values()) < 1e-12, found


def _answers(rank: int, kind: str, mesh: dict[str, int], data: Any, ways: list[str]) -> dict[str, bool]:
    model = _model(kind)
    tp = mesh.get("tp", 1)
    torch.manual_seed(5)
    prompt = torch.randint(4, 16, (ROWS * math.prod(mesh.values()) // tp, 5))
    mask = torch.ones_like(prompt)
    prompt[::2, :2] = mask[::2, :2] = 0
    own = slice(ROWS * (rank // tp), ROWS * (rank // tp) + ROWS)
    example: dict[str, Any] = {"input_ids": prompt[own], "use_cache": False}
    if kind == "t5":
        example["decoder_input_ids"] = prompt[own]
    sharded = ts.shard(model, "auto", (), example, mesh=holding(mesh, data), objective={"mode": "infer"})
    found = dict[str, bool]()
    # the first part's first tokens end an answer, so the first part ends before the others
    first = model.generate(prompt, attention_mask=mask, max_new_tokens=1, do_sample=False)[:ROWS, -1].tolist()
    for name in ways:
        options = GENERATED.get(name, {}) | {"max_new_tokens": 10, "do_sample": False}
        options |= {"eos_token_id": first} if name == "to their ends" else {}
        expected = model.generate(prompt, attention_mask=mask, **options)[own]
        answer = sharded.generate(prompt[own], attention_mask=mask[own], **options)
        length = answer.shape[1]  # the full batch continues until all its rows have ended
        found[name] = torch.equal(answer, expected[:, :length]) and not bool(expected[:, length:].any())
        if (kind, name) == ("llama", "to their ends") and rank < tp:
            found["the first part ends before the others"] = length < expected.shape[1]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "mesh", "data", "ways"),
    [
        pytest.param("llama", {"dp": 2}, "shard", ["to their ends"], id="llama-two ranks"),
        *(
            pytest.param(kind, mesh, data, WAYS, marks=pytest.mark.nightly, id=f"{kind}-{i}")
            for kind in ("llama", "t5")
            for i, (mesh, data) in enumerate(MESHES)
        ),
    ],
)
def test_ranks_answer_prompts_of_their_own(kind: str, mesh: dict[str, int], data: Any, ways: list[str]) -> None:
    for found in run_ranks(_answers, math.prod(mesh.values()), kind, mesh, data, ways, seconds=300):
        assert all(found.values()), found


def _refused(rank: int) -> dict[str, bool]:
    x, place = torch.randn(8, 6), rank
    own = x[4 * place : 4 * place + 4]
    local = ts.shard(State(), {}, mesh="replicate")
    whole = ts.shard(State(), {}, mesh="replicate", inputs="global")
    stacked = ts.shard(Stacked(), {}, mesh="replicate")
    left = dict[str, Tensor]()
    local(own, left)
    return {
        "the whole batch": refused_input(lambda: whole(x, {}), "and each rank passes the whole batch"),
        "another dim": refused_input(lambda: stacked(own, {}), "has the batch in another dim than the first"),
        "other lengths": refused_input(lambda: local(own[rank:], left), "the ranks were called with different"),
        "another state": refused_input(
            lambda: local(own, {**left, "mean": left["mean"] + rank}), "inputs of the same shape but different values"
        ),
    }


def test_what_can_not_be_left_is_refused_on_every_rank() -> None:
    for found in run_ranks(_refused, 2):
        assert all(found.values()), found


def _bank(h: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Carries the rows of all calls so far: of two calls, then of three."""
    bank = torch.cat([state["q"], h.detach()]) if "q" in state else h.detach()
    loss = torch.logsumexp(h @ state["q"].t(), 1).mean() if "q" in state else h.sum()
    state["q"] = bank
    return loss


def _queue(h: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Carries the last 12 rows of all ranks."""
    return _bank(h, state) + (state.update(q=state["q"][-12:]) or 0)  # type: ignore[func-returns-value]


def _summary(h: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Reads a carried value with a row per sample, and stores a mean over the batch."""
    loss = (h + state["m"]).square().mean()
    state["m"] = h.detach().mean(0)
    return loss


def _first_row(h: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Reads one row for all samples, and stores one row per sample."""
    h = (h + 0.5 * state["h"]).tanh()
    state["h"] = h.detach()
    return h.square().mean()


def _covariance(h: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Carries a 4 x 4 matrix. A rank has 4 rows, too; the call that stored the matrix knows that it is not batched."""
    narrow = h[:, :4]
    covariance = narrow.t() @ narrow / h.shape[0]
    loss = (covariance * state["c"]).sum() if "c" in state else covariance.sum()
    state["c"] = covariance.detach()
    return loss


LEFT: dict[str, tuple[Any, dict[str, Tensor]]] = {
    "bank": (_bank, {}),
    "queue": (_queue, {}),
    "summary of rows": (_summary, {"m": torch.linspace(-1, 1, 64).view(8, 8)}),
    "first row": (_first_row, {"h": torch.linspace(-1, 1, 8)}),
    "covariance": (_covariance, {}),
}


class _Leaves(nn.Module):
    """Stores a carried value, and returns a loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.name = nn.Linear(6, 8), name

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        loss: Tensor = LEFT[self.name][0](self.a(x).tanh(), state)
        return loss


def _calls(rank: int) -> dict[str, float]:
    """Case -> the largest error of a loss or gradient over four calls."""
    found = dict[str, float]()
    for name, (_, first) in LEFT.items():
        own = slice(4 * rank, 4 * rank + 4)
        whole = _Leaves(name).double()
        model = ts.shard(copy.deepcopy(whole), {}, mesh="replicate")
        state = {key: (t[own] if t.shape[0] == 8 and t.ndim > 1 else t).double() for key, t in first.items()}
        expected, worst = {key: t.double() for key, t in first.items()}, 0.0
        for seed in range(4):
            torch.manual_seed(seed)
            x = torch.randn(8, 6, dtype=torch.float64)
            losses = whole(x, expected), model(x[own], state)
            for each, loss in zip((whole, model), losses, strict=True):
                each.zero_grad()
                loss.backward()
            worst = largest(worst, gradient_error(model, whole), float((losses[0] - losses[1]).abs()))
        found[name] = worst
    return found


@pytest.mark.nightly
def test_what_comes_in_may_be_left_in_another_layout() -> None:
    for found in run_ranks(_calls, 2, seconds=300):
        assert found.keys() == LEFT.keys() and largest(*found.values()) < 1e-10, found
