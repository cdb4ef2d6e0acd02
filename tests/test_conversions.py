"""The table of conversions: closed under duals, legal routes, and what the definition by layouts gives in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torchshard.conversions import (
    TABLE,
    ends,
    flat_parts,
    route,
    shard_from,
    step_args,
    step_bytes,
    wire_bytes,
)
from torchshard.layouts import I, Layout, P, R, S, Shard, dual, is_whole, join, local_shape, split
from torchshard.lockstep import _Conversion

KINDS = {type(I): I, type(R): R, type(P): P, Shard: S(0)}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_the_backward_is_the_conversion_of_the_duals(row) -> None:
    back = TABLE[row.dual]
    assert back.source is type(dual(KINDS[row.target]))
    assert back.target is type(dual(KINDS[row.source]))
    assert TABLE[back.dual] is row


def test_the_table_is_that_of_the_design() -> None:
    letters = {type(I): "I", type(R): "R", type(P): "P", Shard: "S"}
    shown = {
        name: f"{letters[r.source]} -> {letters[r.target]} {r.kernel} / {TABLE[r.dual].kernel}"
        for name, r in TABLE.items()
    }
    assert shown == {
        "copy": "I -> R none / all_reduce",
        "reduce": "P -> I all_reduce / none",
        "gather": "S -> I all_gather / slice",
        "scatter": "I -> S slice / all_gather",
        "reduce_scatter": "P -> S reduce_scatter / all_gather",
        "all_gather": "S -> R all_gather / reduce_scatter",
        "all_to_all": "S -> S all_to_all / all_to_all",
        "narrow": "R -> S slice / pad",
        "pad": "S -> P pad / slice",
        "all_reduce": "P -> R all_reduce / all_reduce",
    }


# --- routes ----------------------------------------------------------------------------------------------------------

A, B = S(0), S(1)
ROUTES: dict[tuple[Layout, Layout], str | None] = {
    (I, R): "copy",
    (I, A): "scatter",
    (I, P): None,
    (R, I): None,
    (R, P): None,
    (R, A): "narrow",
    (P, I): "reduce",
    (P, A): "reduce_scatter",
    (A, I): "gather",
    (A, R): "all_gather",
    (A, P): None,
    (A, B): "all_to_all",
}


@pytest.mark.parametrize(("pair", "name"), ROUTES.items(), ids=lambda x: "-".join(map(str, x)) if x else "none")
def test_one_conversion_or_none(pair: tuple[Layout, Layout], name: str | None) -> None:
    assert route(*pair) == (None if name is None else [(name, pair[1])])


def test_every_pair_of_layouts_is_listed() -> None:
    layouts = (I, R, P, A)
    assert {(a, b) for a in layouts for b in layouts if a != b} | {(A, B)} == {*ROUTES, (P, R)}


def test_a_sum_is_reduced_once_and_then_copied() -> None:
    """It may be wanted as I elsewhere; where it is not, `simplify` makes one all_reduce of the two."""
    assert route(P, R) == [("reduce", I), ("copy", R)]
    assert route(P, R, needs_grad=False)[0] == ("reduce", I)


@pytest.mark.parametrize("layout", [I, R, P, A, S(2, ((7, 8),))], ids=str)
def test_no_conversion_to_what_is_there(layout: Layout) -> None:
    assert route(layout, layout) == []


def test_other_parts_of_the_same_dim_go_through_the_whole() -> None:
    fused = S(0, ((3, 1), (5, 1)))
    assert route(A, fused) == [("gather", I), ("scatter", fused)]


def test_without_a_gradient_invariant_and_replicate_are_one() -> None:
    assert route(R, I, needs_grad=False) == [] == route(I, R, needs_grad=False)
    assert route(R, A, needs_grad=False) == [("scatter", A)]
    assert route(R, I) is None and route(I, R) == [("copy", R)]


@pytest.mark.parametrize("source", [I, R, P, A, B, S(1, ((4, 1), (4, 1)))], ids=str)
@pytest.mark.parametrize("target", [I, R, P, A, B, S(1, ((4, 1), (4, 1)))], ids=str)
def test_each_step_begins_where_the_last_one_ended(source: Layout, target: Layout) -> None:
    """And its arguments spell its ends, so that a node of a graph says what it converts."""
    at = source
    for name, after in route(source, target) or []:
        assert [str(x) for x in ends(name, step_args(name, at, after, (6, 8)))] == [_spelled(at), _spelled(after)]
        at = after
    assert at == target or route(source, target) is None


def _spelled(layout: Layout) -> str:
    return str(shard_from(layout.dim, flat_parts((6, 8)[layout.dim], layout)) if isinstance(layout, Shard) else layout)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "sent"),
    [("none", 0), ("slice", 0), ("pad", 0), ("all_reduce", 1500), ("all_gather", 750), ("reduce_scatter", 750),
     ("all_to_all", 187.5)],
)  # fmt: skip
def test_bytes_of_a_ring_of_four(kernel: str, sent: float) -> None:
    assert wire_bytes(kernel, 1000, 4) == sent
    assert wire_bytes(kernel, 1000, 1) == 0


@pytest.mark.parametrize("name", TABLE)
def test_a_step_costs_its_forward_and_the_forward_of_its_dual(name: str) -> None:
    forward, back = (wire_bytes(TABLE[n].kernel, 640, 4) for n in (name, TABLE[name].dual))
    assert step_bytes(name, 640, 4, needs_grad=False) == forward
    assert step_bytes(name, 640, 4, needs_grad=True) == forward + back


# --- what lockstep, the definition, does -----------------------------------------------------------------------------

TARGETS = [I, R, P, A, B, S(0, ((2, 1), (3, 1))), S(1, ((3, 2),)), S(1, ((1, 1), (5, 1)))]
PAIRS = [(a, b, n) for a in TARGETS for b in TARGETS for n, _ in [(route(a, b) or [("", a)])[0]]
         if n and len(route(a, b) or ()) == 1]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "name"), PAIRS, ids=[f"{n}-{a}-{b}" for a, b, n in PAIRS])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_a_conversion_keeps_the_value_and_its_gradient(source: Layout, target: Layout, name: str, world: int) -> None:
    torch.manual_seed(0)
    pieces = [p.requires_grad_() for p in _spread(torch.randn(5, 6, dtype=torch.float64), source, world)]
    after = _Conversion.apply(source, target, *pieces)
    assert torch.allclose(_value(after, target), _value(pieces, source))
    assert [tuple(p.shape) for p in after] == [local_shape((5, 6), target, r, world) for r in range(world)]
    cotangents = _spread(torch.randn(5, 6, dtype=torch.float64), dual(target), world)
    grads = torch.autograd.grad(after, pieces, cotangents)
    assert torch.allclose(_value(grads, dual(source)), _value(cotangents, dual(target)))


def _value(pieces: Sequence[Tensor], layout: Layout) -> Tensor:
    """The whole tensor; where every rank holds it, all hold the same."""
    assert not is_whole(layout) or all(torch.equal(p, pieces[0]) for p in pieces)
    return join(list(pieces), layout)


def _spread(whole: Tensor, layout: Layout, world: int) -> list[Tensor]:
    """A whole tensor on the ranks; a Partial as random addends."""
    if layout != P:
        return [split(whole, layout, rank, world).clone() for rank in range(world)]
    rest = [torch.randn_like(whole) for _ in range(world - 1)]
    return [*rest, whole - sum(rest, torch.zeros_like(whole))]
