"""Functions of slices: a result is the right slice of the full result, or the user gets a warning or an error.

Sweeps PyTorch's operator database with slices as operands, then tests which chosen functions are followed.

The sweep slices every tensor with the shape of an operator's first operand along each dim. A rank's result must be
the full result, or the slice of it that its mark describes. Otherwise the call must warn or raise.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import torchshard as ts
from tests.op_database import calls, operators
from torchshard.core.layouts import Part, S, Shard
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.core.sharding import Sharding
from torchshard.distributed.group import Group
from torchshard.distributed.ranks import Ranks
from torchshard.weights.following import SliceType, follow
from torchshard.weights.local_slice import LocalSlice
from torchshard.weights.op_layouts import Lost
from torchshard.weights.parameter import ShardedParameter

PARTS = 20
"""The number of tests into which the sweep is divided, for each number of ranks."""
LARGEST = 4096
"""The most elements of a tensor that is sliced."""
UNCHECKED = {"lu_unpack"}
"""Operators that are not swept: PyTorch's kernel writes out of bounds if it gets another matrix's pivots."""


class Held(NamedTuple):
    """A rank's placement of a tensor that is split along a dim."""

    rank: int
    ranks: int
    dim: int

    def slice_of(self, whole: Tensor) -> Tensor:
        """The rank's slice."""
        axis = MeshAxis(self.ranks)
        return Sharding.of((axis, S(self.dim))).local(whole, {axis.name: self.rank}).detach().clone()

    def marked(self, whole: Tensor, *, in_place: bool) -> LocalSlice:
        """The rank's slice as a parameter, or as its `.data`, which may be written to."""
        group = Ranks(Group(self.rank, self.ranks, simulated=True))
        of = Sharding.of((MeshAxis(self.ranks), S(self.dim)))
        parameter = ShardedParameter.of(self.slice_of(whole), of, group, "weight", whole.shape)
        return LocalSlice.sharing(parameter.plain.detach(), parameter) if in_place else parameter


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _rest(value: object) -> list[object]:
    return [leaf for leaf in pytree.tree_leaves(value) if not isinstance(leaf, Tensor)]


def _equal(own: Tensor, expected: Tensor) -> bool:
    same = own.shape == expected.shape and own.dtype == expected.dtype
    return same and torch.allclose(own.as_subclass(Tensor), expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def _is_right(own: Tensor, whole: Tensor) -> bool:
    """Whether a rank's tensor is the full one, or the slice of it that its mark describes."""
    if not isinstance(own, LocalSlice) or not own.is_split:
        return _equal(own, whole)
    return own.whole == tuple(whole.shape) and _equal(own, own.sharding.local(whole, own.ranks.place))


def _run(function: Callable[..., Any], call: Any) -> Any:
    torch.manual_seed(0)
    return function(*call[0], **call[1])


def _verdict(function: Callable[..., Any], sample: Any, held: Held, *, in_place: bool) -> str:
    """'right', 'told' (warned), 'refused' or 'wrong'; '' if the unsharded call fails."""
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
    """The ways to call an operator, and whether each writes to its operand."""
    yield op.op, False
    if op.inplace_variant is not None:
        yield op.inplace_variant, True


def _verdicts(op: Any, ranks: int) -> Iterator[tuple[str, str]]:
    """The verdicts on an operator's calls on the first and the last rank, with descriptions of the calls."""
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


# --- chosen functions -------------------------------------------------------------------------------------------------


TP, DP = MeshAxis(2, "tp"), MeshAxis(2, "dp")
SEGMENTS: tuple[Part, ...] = ((2, 2), (4, 1))
WORDS: dict[str, Sharding] = {
    "rows": Sharding.of((TP, Shard(0))),
    "columns": Sharding.of((TP, Shard(1))),
    "parts": Sharding.of((TP, Shard(0, SEGMENTS))),
    "twice": Sharding.of((TP, Shard(0)), (DP, Shard(0))),
    "both": Sharding.of((TP, Shard(1)), (DP, Shard(0))),
}
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda p: p * 2,
    "in place": lambda p: p.mul_(2).add_(p),
    "transposed": lambda p: p.t() * 1,
    "flat": lambda p: p.reshape(-1),
    "viewed by its sizes": lambda p: p.reshape(p.shape[0], p.shape[1] // 2, 2),
    "unsqueezed": lambda p: p.unsqueeze(0).expand(3, -1, -1),
    "a column": lambda p: p[:, 1],
    "a row": lambda p: p[0],
    "sums of rows": lambda p: p.sum(1),
    "sums of columns": lambda p: p.sum(0),
    "norms of rows": lambda p: p.norm(dim=1),
    "softmax of rows": lambda p: p.softmax(1),
    "softmax of columns": lambda p: p.softmax(0),
    "sorted rows": lambda p: p.sort(1),
    "sorted columns": lambda p: torch.msort(p),
    "product": lambda p: p @ p.t(),
    "linear": lambda p: F.linear(p, torch.ones(3, p.shape[1], dtype=p.dtype)),
    "joined": lambda p: torch.cat([p, p * 2]),
    "joined along rows": lambda p: torch.cat([p, p * 2], 1),
    "stacked": lambda p: torch.stack([p, p]),
    "turned": lambda p: torch.rot90(p),
    "shuffled": lambda p: F.channel_shuffle(p[None, :, :, None], 2),
    "foreach": lambda p: torch._foreach_mul([p, p], 2.0),
    "foreach in place": lambda p: torch._foreach_addcdiv_([p], [p * 1], [p.abs() + 1], [0.5]),
    "written column": lambda p: p.__setitem__((slice(None), 1), 2.0),
    "written row": lambda p: p.__setitem__(0, 2.0),
    "zeros": lambda p: p.zero_(),
    "like": lambda p: torch.ones_like(p),
    "layer norm": lambda p: F.layer_norm(p, (p.shape[1],)),
    "einsum": lambda p: torch.einsum("ij,ij->i", p, p),
    "where": lambda p: torch.where(p > 0, p, 0.0),
    "repeated": lambda p: p.repeat(2, 1),
    "chunks": lambda p: p.chunk(2, 1),
    "Fourier": lambda p: torch.fft.fft(p, dim=1),
    "scattered": lambda p: p.scatter_reduce(1, torch.zeros(p.shape[0], 1, dtype=torch.long), p[:, :1] * 1, "sum"),
    "of no slice": lambda p: p.new_zeros(3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("words", WORDS)
def test_what_is_called_a_slice_is_one(words: str, name: str) -> None:
    """Each rank's result is the slice of the full result that its type describes, or is marked as lost."""
    of, f = WORDS[words], FUNCTIONS[name]
    whole = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for place in Mesh((TP, DP)).places():
        given, local = whole.clone(), of.local(whole, place).clone()
        before, expected, got = local.clone(), f(given), f(local)
        outcome = follow(f, (before,), {}, {0: SliceType(of, (8, 12))}, place, got)
        for own, all_of, known in zip(_tensors(got), _tensors(expected), outcome.results, strict=True):
            if isinstance(known, SliceType):
                assert known.whole == tuple(all_of.shape)
            if not isinstance(known, Lost):
                torch.testing.assert_close(own, all_of if known is None else known.sharding.local(all_of, place))
        if not isinstance(outcome.written.get(0), Lost):
            torch.testing.assert_close(local, of.local(given, place))


def test_following_is_no_excuse_for_losing_all() -> None:
    """With a weight that is split by rows, all functions except these return slices."""
    lost = set[str]()
    for name, f in FUNCTIONS.items():
        local = torch.randn(4, 12, dtype=torch.float64)
        outcome = follow(f, (local,), {}, {0: SliceType(WORDS["rows"], (8, 12))}, {"tp": 0}, f(local.clone()))
        if any(isinstance(of, Lost) for of in (*outcome.results, *outcome.written.values())):
            lost.add(name)
    assert lost == {
        "a row", "sums of columns", "softmax of columns", "sorted columns", "product", "shuffled", "written row",
        "Fourier", "scattered",
    }  # fmt: skip


def test_what_fits_the_whole_is_not_taken_for_a_slices() -> None:
    """An argument of a slice's size is not assumed to refer to the slice if the full tensor accepts it, too."""

    def followed(f: Callable[..., Any], whole: tuple[int, ...], of: Sharding, *others: Any) -> Any:
        local = of.local(torch.zeros(whole), {"tp": 0}).clone()
        return follow(f, (local, *others), {}, {0: SliceType(of, whole)}, {"tp": 0}, f(local.clone(), *others))

    rows, columns, index = WORDS["rows"], WORDS["columns"], torch.zeros(4, 3, dtype=torch.long)
    assert followed(F.channel_shuffle, (1, 4, 3), columns, 2).results == (Lost(),)
    assert followed(Tensor.scatter, (8, 3), rows, 0, index, torch.ones(4, 3)).results == (Lost(),)
    assert followed(Tensor.reshape, (8, 3), rows, 4, -1).results == (SliceType(rows, (8, 3)),)
    assert followed(Tensor.mul, (8, 3), rows, torch.ones(4, 3)).results == (SliceType(rows, (8, 3)),)
    assert followed(Tensor.sum_to_size, (2,), rows, 1).results == (Lost(),)
    assert followed(torch.complex, (3, 2), columns, torch.ones(3, 2)).results == (Lost(),)
    assert followed(Tensor.unsqueeze_, (8, 3), rows, 2).written == {0: SliceType(rows, (8, 3, 1))}


def test_a_count_of_heads_is_the_wholes() -> None:
    """A number of heads refers to the full tensor: a rank's view with this number is not a slice of the full view."""

    def viewed(whole: tuple[int, ...], of: Sharding, *sizes: int, view: Any = Tensor.reshape) -> Any:
        local = of.local(torch.zeros(whole), {"tp": 0}).clone()
        (result,) = follow(view, (local, *sizes), {}, {0: SliceType(of, whole)}, {"tp": 0}, view(local, *sizes)).results
        return result

    rows, columns = WORDS["rows"], WORDS["columns"]
    for counts in ((2, -1, 6), (4, -1, 6), (2, -1), (2, 2, 6), (2, 2, -1), (2, 12)):
        assert viewed((8, 6), rows, *counts) == Lost(), counts
    for counts in ((5, 2, -1), (5, 2, 2), (5, 4, -1)):
        assert viewed((5, 8), columns, *counts) == Lost(), counts
    assert viewed((8, 6), rows, 0, (2, -1), view=Tensor.unflatten) == Lost()
    assert viewed((8, 6), rows, 0, (-1, 2), view=Tensor.unflatten) == SliceType(rows, (4, 2, 6))
    assert viewed((8,), rows, 2, -1) == Lost()
    for sizes, whole in {(4, -1): (8, 6), (4, 1, -1): (8, 1, 6), (4, 3, 2): (8, 3, 2), (24,): (48,)}.items():
        assert viewed((8, 6), rows, *sizes) == SliceType(rows, whole), sizes
    assert viewed((8, 3, 3, 3), rows, 12, -1) == SliceType(rows, (24, 9))
