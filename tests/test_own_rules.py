"""Rules of users' ops, and ops with random draws or look-ups that a split must not change."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
from tests.op_cases.notation import case, f
from tests.oracle import build, row_and_choices, run
from tests.test_rules import aten
from torchshard.testing import (
    Call,
    Choice,
    PlannedCall,
    Row,
    TensorType,
    capture,
    changed_rule,
)

# --- rules of users ---------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchshard_tests::weigh", mutates_args=())
def weigh(x: Tensor, weight: Tensor) -> Tensor:
    """A user's op with its own backward: x * tanh(weight), per channel."""
    return x * weight.tanh()


weigh.register_fake(lambda x, weight: torch.empty_like(x))
weigh.register_autograd(
    lambda ctx, grad: (
        grad * ctx.saved_tensors[1].tanh(),
        (grad * ctx.saved_tensors[0] * (1 - ctx.saved_tensors[1].tanh() ** 2)).sum((0, 1)),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Weighing(nn.Module):
    """A column-split linear, the user's op, a row-split linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.weight = nn.Parameter(torch.randn(10))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.ops.torchshard_tests.weigh(self.up(x), self.weight))


PLAN = {"up": "column", "down": "row"}


def _check(world: int) -> tuple[ts.Report, list[str]]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        report = ts.check(Weighing(), PLAN, example_inputs=(torch.randn(2, 5, 6),), mesh=world)
    return report, [str(w.message) for w in heard if "sharding rule" in str(w.message)]


@pytest.mark.parametrize("world", [2, 3])
def test_an_op_without_a_rule_is_right_and_warns_once(world: int) -> None:
    report, heard = _check(world)
    assert report.ok, str(report)
    assert len(heard) == 1
    # f64[2,5,10] is gathered; each rank slices the gradient, which sends no bytes
    sent = 2 * 5 * 8 * (world - 1) * -(-10 // world)  # slices are padded to the largest
    assert heard[0].startswith(f"{sent} B gathered per step for torchshard_tests.weigh.default (node")
    assert '@torchshard.rule("torchshard_tests.weigh.default")' in heard[0]


@pytest.mark.parametrize("world", [2, 3])
def test_a_user_rule_keeps_the_op_split(world: int) -> None:
    target = torch.ops.torchshard_tests.weigh.default
    with changed_rule(target, None):
        ts.rule(target, row="... c, c -> ... c", linear=[{0}])
        report, heard = _check(world)
        made = ts.plan(Weighing(), PLAN, example_inputs=(torch.randn(2, 5, 6),), mesh=world)
        op = case(target, "_1 _0 c", f(2, 5, 7), f(7))
        assert all(run(op, choice, world).ok for choice in row_and_choices(op, world)[1])
    assert report.ok, str(report)
    assert not heard
    assert str(made.parameters["weight"]) == "S(0)"


def test_a_rule_that_does_not_fit_its_op_is_an_error_that_names_the_row() -> None:
    x = TensorType((5, 4), torch.float64)
    with pytest.raises(ts.RuleError, match="the row has 3 dims, the tensor 2"):
        Call(aten.relu.default, {"self": x}, (x,)).row("a b c -> a b c")
    assert Call(aten.relu.default, {"self": x}, (x,)).row("a b -> a b").sizes == {"a": 5, "b": 4}


# --- random ops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_dropout_draws_the_unsharded_numbers(seed: int) -> None:
    """One choice under two seeds: each run draws the values of its seed, not of the first run."""
    op = case(aten.dropout.default, None, f(6, 8), 0.5, True)
    choice = Choice("split _0", (ts.S(1),), (ts.S(1),), (("_0", ((8, 1),)),))
    made = build(op, choice, 2, seed)
    torch.manual_seed(seed)
    assert made.check().ok
    masks = []
    for each in (seed, seed + 2):
        torch.manual_seed(each)
        masks.append(made.model(*made.args)[0] == 0)
    assert not torch.equal(*masks)


def test_constants_of_a_call_are_not_remembered() -> None:
    """Rows and replacements follow the arguments of each call, for the same op and shapes."""
    for start in (1, 3):
        op = case(aten.slice.Tensor, None, f(5, 9), 1, start, start + 3)
        assert all(run(op, choice, 2).ok for choice in row_and_choices(op, 2)[1])
    for p in (0.2, 0.7):
        op = case(aten.dropout.default, None, f(5, 9), p, True)
        assert all(run(op, choice, 2).ok for choice in row_and_choices(op, 2)[1])


LOOKUPS = {
    "embedding": (nn.Embedding(7, 4), torch.tensor([[1, 7]])),
    "negative": (nn.Embedding(7, 4), torch.tensor([[1, -1]])),
}


class _Picks(nn.Module):
    """A model that looks up values along a split dim."""

    def __init__(self, pick: Any, width: int = 7) -> None:
        super().__init__()
        self.up, self.pick = nn.Linear(6, width), pick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pick(self.up(x))  # type: ignore[no-any-return]


PICKS = {
    "index_select": lambda h: h.index_select(1, torch.tensor([1, 9])),
    "gather": lambda h: h.gather(1, torch.full((30, 2), 7)),
    "cross_entropy": lambda h: F.cross_entropy(h, torch.tensor([1, 71, -100] * 10)),
}


def _with_split_picks(model: nn.Module, plan: Any, x: torch.Tensor) -> PlannedCall:
    """Plans a call with the look-up split along the dim that it looks up in, at any cost."""
    call = capture(model, (x,))
    pick = call.nodes("embedding", "index_select", "gather", "cross_entropy_loss")[0]
    split = next(c for c in call.choices(pick, 2) if c.name == "split v")
    planned = call.plan(plan, 2).plan
    return call.plan(planned.with_last(choices={pick.name: split}, conversions={}), 2)


@pytest.mark.parametrize("name", [*LOOKUPS, *PICKS])
def test_an_index_that_is_no_ranks_is_an_error(name: str) -> None:
    if name in LOOKUPS:
        model, x, plan = nn.Sequential(LOOKUPS[name][0]), LOOKUPS[name][1], {"0": "vocab"}
    else:
        model, x, plan = _Picks(PICKS[name], 70 if name == "cross_entropy" else 7), torch.randn(30, 6), {"up": "column"}
    made = _with_split_picks(model, plan, x)
    with pytest.raises(RuntimeError, match="out of range"):
        made.run()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("body", [lambda h: h.square().mean(-1), lambda h: F.mse_loss(h, torch.zeros_like(h))])
def test_means_of_halves_over_a_split_dim_do_not_overflow(dtype: torch.dtype, body: Any) -> None:
    model = _Picks(body)
    model.up = nn.Linear(6, 4096)
    nn.init.constant_(model.up.bias, 9.0)
    report = ts.check(
        model.to(dtype), {"up": "column"}, example_inputs=(torch.randn(3, 6, dtype=dtype),), mesh=2, dtype=None
    )
    assert report.ok, str(report)


def test_a_failing_rule_is_reported_with_the_op_and_its_shapes() -> None:
    def broken(call: Call) -> Row:
        raise KeyError("nothing of that name")

    text = r"the rule of torchshard_tests\.weigh\.default fails"
    with (
        changed_rule(torch.ops.torchshard_tests.weigh.default, broken),
        pytest.raises(ts.RuleError, match=text) as caught,
    ):
        ts.check(Weighing(), PLAN, example_inputs=(torch.randn(2, 5, 6),), mesh=2)
    assert "KeyError" in str(caught.value) and ", 10], [10]" in str(caught.value)


@pytest.mark.parametrize("axis", ["n", "v"])
def test_the_mean_of_a_large_batch_of_halves(axis: str) -> None:
    """The sum and the count exceed bfloat16's precision; in float16, PyTorch's own CPU sum is infinite."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter((30 * torch.randn(6000, 4)).to(torch.bfloat16))

        def forward(self, target: Tensor) -> Tensor:
            return F.cross_entropy(self.scores, target)

    torch.manual_seed(0)
    model, target = Loss(), torch.randint(4, (6000,))
    layouts = {"scores": ts.S("nv".index(axis))}
    made = capture(model, (target,), dynamic=False).plan(
        {}, 2, objective={"machine": "cpu-gloo", "split": "all"}, layouts=layouts
    )
    report = made.check()
    assert report.ok, str(report)
    assert not any(c.value == "scores" for c in made.plan.costs.collectives)
