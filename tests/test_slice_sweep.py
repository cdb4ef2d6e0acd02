"""PyTorch's operator database with slices as operands: a result is the whole result's slice, or a user is told.

Every tensor of the shape of an operator's first operand is sliced along each dim. What a rank then has must be the
whole result, or the slice of it that its mark says. Otherwise a warning or an error must tell.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import torchshard as ts
from tests.op_database import calls, operators
from torchshard.core.layouts import S
from torchshard.core.mesh import MeshAxis
from torchshard.core.sharding import Sharding
from torchshard.distributed.group import Group
from torchshard.distributed.ranks import Ranks
from torchshard.weights.parameter import ShardedParameter
from torchshard.weights.slice_values import Slice, SliceValue

PARTS = 20
"""The database is swept in as many tests for each number of ranks."""
LARGEST = 4096
"""Elements of the largest tensor that is sliced."""
UNCHECKED = {"lu_unpack"}
"""PyTorch's kernel writes beyond its results where the pivots of another matrix are given."""


class Held(NamedTuple):
    """How a rank holds a tensor."""

    rank: int
    ranks: int
    dim: int

    def slice_of(self, whole: Tensor) -> Tensor:
        """The rank's slice."""
        axis = MeshAxis(self.ranks)
        return Sharding.of((axis, S(self.dim))).local(whole, {axis.name: self.rank}).detach().clone()

    def marked(self, whole: Tensor, *, in_place: bool) -> Slice:
        """The rank's slice as a parameter, or as its `.data`, which may be written to."""
        group = Ranks(Group(self.rank, self.ranks, simulated=True))
        of = Sharding.of((MeshAxis(self.ranks), S(self.dim)))
        parameter = ShardedParameter.of(self.slice_of(whole), of, group, "weight", whole.shape)
        return SliceValue.sharing(parameter.plain.detach(), parameter) if in_place else parameter


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _rest(value: object) -> list[object]:
    return [leaf for leaf in pytree.tree_leaves(value) if not isinstance(leaf, Tensor)]


def _equal(own: Tensor, expected: Tensor) -> bool:
    same = own.shape == expected.shape and own.dtype == expected.dtype
    return same and torch.allclose(own.as_subclass(Tensor), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def _is_right(own: Tensor, whole: Tensor) -> bool:
    """Whether a rank's tensor is what it is said to be of the whole's."""
    if not isinstance(own, Slice) or not own.is_split:
        return _equal(own, whole)
    return own.whole == tuple(whole.shape) and _equal(own, own.sharding.local(whole, own.ranks.place))


def _run(function: Callable[..., Any], call: Any) -> Any:
    torch.manual_seed(0)
    return function(*call[0], **call[1])


def _verdict(function: Callable[..., Any], sample: Any, held: Held, *, in_place: bool) -> str:
    """'right', 'told', 'refused' or 'wrong'; '' if the whole's call fails."""
    shape = sample.input.shape

    def sliced(leaf: Tensor) -> Tensor:
        return held.marked(leaf, in_place=in_place) if leaf.shape == shape else leaf.clone()

    given = ((sample.input, *sample.args), sample.kwargs)
    whole, own = (pytree.tree_map_only(Tensor, make, given) for make in (torch.clone, sliced))
    try:
        expected = _run(function, whole)
    except Exception:
        return ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            found = _run(function, own)
        except Exception:
            return "refused"
    if any(issubclass(warning.category, ts.SliceWarning) for warning in seen):
        return "told"
    pairs = zip(_tensors((found, own)), _tensors((expected, whole)), strict=True)
    return "right" if _rest(found) == _rest(expected) and all(_is_right(a, b) for a, b in pairs) else "wrong"


def _ways(op: Any) -> Iterator[tuple[Callable[..., Any], bool]]:
    """How an operator is called, and whether that writes to its operand."""
    yield op.op, False
    if op.inplace_variant is not None:
        yield op.inplace_variant, True


def _verdicts(op: Any, ranks: int) -> Iterator[tuple[str, str]]:
    """What becomes of calls of an operator on the first and the last rank, and the calls in words."""
    for sample in calls(op, torch.float64, 12, 2):
        first = sample.input
        if not isinstance(first, Tensor) or first.layout != torch.strided or not 0 < first.numel() <= LARGEST:
            continue
        dims = (dim for dim in range(first.ndim) if first.shape[dim] > 1)
        for dim, (function, in_place), rank in itertools.product(dims, _ways(op), (0, ranks - 1)):
            verdict = _verdict(function, sample, Held(rank, ranks, dim), in_place=in_place)
            call = f"{sample.args} {sample.kwargs}"[:200]
            yield verdict, f"{op.full_name} {in_place=} {tuple(first.shape)} {dim=} {rank=}: {call}"


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_operator_mistakes_a_slice_silently(ranks: int, part: int) -> None:
    tried = (op for op in operators(part, PARTS) if op.name not in UNCHECKED)
    found = [each for op in tried for each in _verdicts(op, ranks)]
    wrong = [call for verdict, call in found if verdict == "wrong"]
    right = sum(verdict == "right" for verdict, _ in found)
    assert right > 1000 // PARTS and not wrong, (right, wrong)
