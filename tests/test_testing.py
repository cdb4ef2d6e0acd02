"""Tests `torchshard.testing`: rules of users' ops, functions on ranks, calls under any plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchshard as ts
from torchshard import testing


@torch.library.custom_op("torchshard_testing::sums", mutates_args=())
def sums(x: Tensor, scale: Tensor) -> Tensor:
    """Scaled sums of rows."""
    return x.sum(1) * scale


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors  # type: ignore[attr-defined]
    return (grad * scale)[:, None].expand(x.shape), grad * x.sum(1)


sums.register_fake(lambda x, scale: x.new_empty(x.shape[0]))
sums.register_autograd(_backward, setup_context=_save)
OP = torch.ops.torchshard_testing.sums.default


def _call() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, scale = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    return x.requires_grad_(), scale.requires_grad_()


def test_a_right_rule_is_checked_under_each_of_its_choices() -> None:
    with testing.changed_rule(OP, lambda call: call.row("a k, a -> a", linear=[{0}])):
        names = {choice.name for choice in testing.check_rule(OP, *_call())}
        assert names == {"I", "R", "P", "split a", "split k"}
        assert OP in testing.ops_with_rules()
    assert testing.rule_of(OP) is None and OP not in testing.ops_with_rules()


@pytest.mark.parametrize(
    ("row", "linear"),
    [("a k, a -> a", [{1}, {0, 1}]), ("a k, k -> a", []), ("a k, b -> a", [{0}]), ("a k, b -> b", [{0}])],
)
def test_a_wrong_rule_is_an_error(row: str, linear: list[set[int]]) -> None:
    with testing.changed_rule(OP, lambda call: call.row(row, linear=linear)):
        with pytest.raises((testing.CheckError, ts.RuleError)):
            testing.check_rule(OP, *_call())


def test_an_op_without_a_rule_is_an_error() -> None:
    for rule in (None, lambda call: None):
        with testing.changed_rule(OP, rule), pytest.raises(ts.RuleError, match="has no rule for this call"):
            testing.check_rule(OP, *_call())


def test_a_changed_rule_is_put_back() -> None:
    relu = torch.ops.aten.dropout.default
    before = testing.rule_of(relu)
    with pytest.raises(ValueError), testing.changed_rule(relu, None):
        assert before is not None and testing.rule_of(relu) is None
        raise ValueError
    assert testing.rule_of(relu) is before


# --- ranks -----------------------------------------------------------------------------------------------------------


@testing.on_ranks(2)
def test_a_test_on_ranks_has_fixtures(rank: int, tmp_path: Path) -> None:
    (tmp_path / str(rank)).write_text("here")
    dist.barrier()
    assert dist.get_world_size() == 2 and sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("rows", [2, 5])
@testing.on_ranks(3)
def test_a_test_on_ranks_has_parameters(rank: int, rows: int) -> None:
    x = torch.full((rows,), float(rank))
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * rows


@testing.on_ranks(2)
def _doubled(rank: int, number: int, *, minus: int = 0) -> int:
    return 2 * (rank + number) - minus


@testing.on_ranks(2)
def _fails_on_one(rank: int) -> None:
    assert rank == 0, "the cause"


def test_results_come_back_and_failures_are_raised() -> None:
    assert _doubled(4) == [8, 10] and _doubled(4, minus=1) == [7, 9]
    with pytest.raises(RuntimeError, match=r"rank 1:\n[\s\S]*AssertionError: the cause"):
        _fails_on_one()


# --- calls -----------------------------------------------------------------------------------------------------------


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_a_call_is_captured_once_and_planned_in_many_ways() -> None:
    torch.manual_seed(0)
    call = testing.capture(_Net(), (torch.randn(4, 6),), dtype=torch.float64)
    assert not call.ops_without_rule() and [node.name for node in call.nodes("linear")] == ["up_linear", "down_linear"]
    assert {"split n", "split k"} <= {choice.name for choice in call.choices(call.nodes("linear")[0], 2)}
    made = call.plan({"up": "column", "down": "row"}, 3)
    assert made.collectives() == ["reduce"] and "down_linear_reduce" in made.listing()
    assert made.shardings["up.weight"] == "model: S(0)" and made.shardings["down.bias"] == "I"
    assert [made.state(rank)["up.weight"].shape[0] for rank in range(3)] == [4, 4, 2]
    expected = call.model(*call.args)
    for results in made.run():
        torch.testing.assert_close(results[0], expected.detach())
    assert made.check(by_graphs=True).ok
    for seed in range(3):
        assert call.plan_at_random(2, seed).check().ok


def test_a_changed_graph_is_seen() -> None:
    torch.manual_seed(0)
    made = testing.capture(_Net(), (torch.randn(4, 6),), dtype=torch.float64).plan({"up": "column", "down": "row"}, 2)
    graph = made.graph_copy()
    (reduce,) = (node for node in graph.graph.nodes if testing.collective(node) is not None)
    reduce.replace_all_uses_with(reduce.args[0])
    graph.graph.erase_node(reduce)
    assert testing.collectives(graph) == [] and made.collectives() == ["reduce"]
    with pytest.raises(testing.CheckError):
        made.check(graph).raise_on_error()


def test_the_collectives_of_a_step_begin_early() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    made = testing.capture(_Net(), (x,)).plan({"up": "column", "down": "row"}, 2)
    parts = made.step_graphs()
    for graph, planned in zip((parts.forward, parts.backward), made.plan.costs.calls, strict=True):
        begun = [node for node in graph.graph.nodes if testing.begun(node) is not None]
        ends = [testing.awaited(node) for node in graph.graph.nodes if testing.awaited(node) is not None]
        assert len(begun) == planned == 1 and ends == begun
