"""Errors for wrong rules of users and for failing models name the cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchshard as ts
from tests.models import MLP
from tests.test_errors import X, _plan, _raises
from torchshard.testing import changed_rule


@pytest.mark.parametrize("row", ["... c -> ... c", "... c -> ... c, d"], ids=["too much", "no row"])
def test_a_wrong_rule_of_the_users_is_told_as_theirs(row: str) -> None:
    with pytest.raises(ts.RuleError, match=r"the rule of .*sixteen|the row"):
        _with_rule(row)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"local": {"c": lambda x: x}}, "the local function of the rule"),
        ({"local": {"c": 5}}, "is no function"),
        ({"local": {"q": lambda local, x: x}}, "factor q is in no tensor"),
        ({"together": {"q"}}, "factor q is in no tensor"),
    ],
    ids=["fails", "no function", "no axis", "no axes"],
)
def test_options_of_a_rule_of_the_users(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ts.RuleError, match=text):
        _with_rule("... c -> ... c", **options)


def _with_rule(row: str, **options: Any) -> None:
    with changed_rule(torch.ops.shardtest.sixteen.default, None):
        ts.rule(torch.ops.shardtest.sixteen.default, row=row, **options)
        ts.check(_Sixteen(), {"up": "column", "down": "row"}, example_inputs=(X,), mesh=2)


def test_no_op_and_no_rule() -> None:
    with pytest.raises(ts.RuleError, match="no op, but the name of its overloads"):
        ts.rule(torch.ops.shardtest.sixteen, row="... -> ...")
    with pytest.raises(ts.RuleError, match="5 is no rule"):
        ts.rule(torch.ops.shardtest.sixteen.default)(5)  # type: ignore[arg-type]


@torch.library.custom_op("shardtest::sixteen", mutates_args=())
def _sixteen(x: Tensor) -> Tensor:
    return x[..., :1].expand(*x.shape[:-1], 16).clone()


@_sixteen.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], 16)


_sixteen.register_autograd(lambda ctx, grad: nn.functional.pad(grad.sum(-1, keepdim=True), (0, 15)))


class _Sixteen(MLP):
    def __init__(self) -> None:
        super().__init__(12, 16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.ops.shardtest.sixteen(self.up(x)))


class _Widened(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bc,cd->bd", self.up(x), torch.ones(self.up.out_features, 3))


class _Raising(MLP):
    def specialize(self, x: Tensor) -> Tensor:
        raise ValueError("a dynamic value")

    def forward(self, x: Tensor) -> Tensor:
        return self.specialize(x)


def test_whose_fault_a_failing_forward_is() -> None:
    assert "dtype=x.dtype" in _raises(lambda: ts.check(_Widened(), {}, example_inputs=(X,), mesh=2))
    assert "without torchshard first" in _raises(lambda: _plan({}, _Raising()))
