"""The table of conversions: duals, legal routes, bytes, and agreement with the definition by layouts in lockstep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

import torchshard as ts
from tests import conversion_cases
from torchshard.checking.simulated import SimulatedConversion
from torchshard.core.conversions import (
    TABLE,
    ConversionStep,
    flat_parts,
    kernels,
    plan_conversion,
    plan_conversions,
    sent_bytes,
    shard_from,
    source_and_target,
    step_args,
)
from torchshard.core.layouts import Blocks, I, Layout, P, R, S, Shard, dual, is_whole, join, local_shape, split
from torchshard.core.mesh import MeshAxis, simulated_name
from torchshard.distributed.group import lookup
from torchshard.planner.costs import CostModel
from torchshard.planner.properties import Value
from torchshard.plans.machine import Machine

pytestmark = pytest.mark.quick

KINDS = {type(I): I, type(R): R, type(P): P, Shard: S(0)}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_the_backward_runs_the_dual_conversions(row) -> None:
    back = TABLE[row.dual]
    assert back.source is type(dual(KINDS[row.target]))
    assert back.target is type(dual(KINDS[row.source]))
    assert TABLE[back.dual] is row


def test_the_table_equals_the_one_in_the_design() -> None:
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
    assert plan_conversion(*pair) == (None if name is None else _chain(pair[0], (name, pair[1])))


def _chain(source: Layout, *steps: tuple[str, Layout]) -> tuple[ConversionStep, ...]:
    """Conversions that each start from the target of the one before."""
    ends = [source, *(target for _, target in steps)]
    return tuple(ConversionStep(name, ends[i], target) for i, (name, target) in enumerate(steps))


def test_every_pair_of_layouts_is_listed() -> None:
    layouts = (I, R, P, A)
    assert {(a, b) for a in layouts for b in layouts if a != b} | {(A, B)} == {*ROUTES, (P, R)}


def test_a_partial_sum_required_only_as_r_takes_one_all_reduce() -> None:
    assert plan_conversion(P, R) == _chain(P, ("all_reduce", R))
    assert plan_conversion(P, R, needs_grad=False) == _chain(P, ("reduce", I))


def test_a_conversion_that_several_layouts_need_is_there_once() -> None:
    assert plan_conversions(P, [I, R], needs_grad=True) == _chain(P, ("reduce", I), ("copy", R))
    assert plan_conversions(I, [R, A], needs_grad=True) == _chain(I, ("copy", R), ("narrow", A))
    assert plan_conversions(P, [R, A], needs_grad=False) == _chain(P, ("reduce", I), ("scatter", A))
    assert plan_conversions(A, [I, R], needs_grad=True) == _chain(A, ("gather", I), ("copy", R))


LAYOUTS = [I, R, P, A, B, S(0, ((3, 1), (5, 1)))]
ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 0.25}


def _rounds(taken: Iterable[ConversionStep], needs_grad: bool) -> float:
    return sum(ROUNDS.get(k, 0.0) for link in taken for k in kernels(link.name, needs_grad=needs_grad))


def _ways(have: set[Layout], allowed: set[Layout], wanted: set[Layout]) -> Iterator[list[ConversionStep]]:
    """All sequences of single conversions that reach the wanted layouts, each from a layout reached before."""
    if wanted <= have:
        yield []
        return
    for source, target in itertools.product(have, allowed - have):
        steps = plan_conversion(source, target) or ()
        if len(steps) == 1:
            for more in _ways(have | {target}, allowed, wanted):
                yield [*steps, *more]


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_planned_conversions_send_the_fewest_bytes(source: Layout, size: int) -> None:
    """Compares with an enumeration, in which I and R may be intermediate. R -> I is illegal, even via a Shard."""
    for wanted in map(set, itertools.combinations([x for x in LAYOUTS if x != source], size)):
        costs = [_rounds(way, True) for way in _ways({source}, wanted | {I, R}, wanted)]
        found = plan_conversions(source, wanted, needs_grad=True)
        assert (found is None) == (not costs or (source == R and I in wanted))
        there = {source}
        for link in found or ():
            assert link.source in there and link.target not in there
            there.add(link.target)
        assert found is None or (wanted <= there and _rounds(found, True) == min(costs)), (source, wanted, found)


MACHINES = [Machine("slow to start", launch=1.0), Machine("slow to send", link_bandwidth=1.0, launch=0.0)]
VALUES = [Value(shape, torch.float32, 4 * math.prod(shape), True) for shape in ((8, 8, 8), (2, 3, 64), (1, 512, 4))]


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value.shape))
def test_planned_conversions_are_the_fastest_on_a_machine(source: Layout, machine: Machine, value: Value) -> None:
    costs = CostModel(machine, MeshAxis(4))

    def seconds(way: Iterable[ConversionStep]) -> float:
        return sum(sent.seconds for step in way for sent in costs.sent(value, step))

    for wanted in map(set, itertools.combinations([x for x in LAYOUTS if x != source], 2)):
        found = costs.plan_conversions(value, source, wanted)
        ways = [seconds(way) for way in _ways({source}, wanted | {I, R}, wanted)]
        assert (found is None) is (not ways or (source == R and I in wanted))
        assert found is None or seconds(found) == pytest.approx(min(ways), rel=1e-9, abs=1e-15)
        assert found == costs.plan_conversions(value, source, reversed(sorted(wanted, key=str)))


def test_what_is_fastest_depends_on_the_machine() -> None:
    found = [CostModel(machine, MeshAxis(4)).plan_conversions(VALUES[0], P, [R, S(0)]) for machine in MACHINES]
    assert [[link.name for link in way or ()] for way in found] == [
        ["all_reduce", "narrow"],
        ["reduce_scatter", "all_gather"],
    ]


@pytest.mark.parametrize("layout", [I, R, P, A, S(2, ((7, 8),))], ids=str)
def test_no_conversion_to_a_layout_that_is_available(layout: Layout) -> None:
    assert plan_conversion(layout, layout) == ()


def test_other_parts_of_the_same_dim_are_gathered_first() -> None:
    fused = S(0, ((3, 1), (5, 1)))
    assert plan_conversion(A, fused) == _chain(A, ("gather", I), ("scatter", fused))


def test_without_a_gradient_invariant_and_replicate_are_one() -> None:
    assert plan_conversion(R, I, needs_grad=False) == () == plan_conversion(I, R, needs_grad=False)
    assert plan_conversion(R, A, needs_grad=False) == _chain(I, ("scatter", A))
    assert plan_conversion(R, I) is None and plan_conversion(I, R) == _chain(I, ("copy", R))


@pytest.mark.parametrize("source", [I, R, P, A, B, S(1, ((4, 1), (4, 1)))], ids=str)
@pytest.mark.parametrize("target", [I, R, P, A, B, S(1, ((4, 1), (4, 1)))], ids=str)
def test_each_step_begins_where_the_last_one_ended(source: Layout, target: Layout) -> None:
    """The step's arguments also encode both layouts, so a graph's node is enough to know its conversion."""
    at, steps = source, plan_conversion(source, target)
    for step in steps or ():
        args = step_args(step.source, step.target, (6, 8))
        assert [str(x) for x in source_and_target(step.name, args)] == [_spelled(at), _spelled(step.target)]
        at = step.target
    assert at == target or steps is None


def _spelled(layout: Layout) -> str:
    return str(shard_from(layout.dim, flat_parts((6, 8)[layout.dim], layout)) if isinstance(layout, Shard) else layout)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "sent"),
    [("none", 0), ("slice", 0), ("pad", 0), ("all_reduce", 1500), ("all_gather", 750), ("reduce_scatter", 750),
     ("all_to_all", 187.5)],
)  # fmt: skip
def test_bytes_of_a_ring_of_four(kernel: str, sent: float) -> None:
    assert sent_bytes(kernel, 1000, S(0), S(1), (8, 4), 4) == sent
    assert sent_bytes(kernel, 1000, S(0), S(1), (8, 4), 1) == 0


def test_slices_that_differ_are_sent_padded_to_the_largest() -> None:
    """Seven rows of ten bytes on three ranks are 3, 3 and 1: each sends three rows to each of the two others."""
    assert sent_bytes("all_gather", 70, S(0), I, (7, 10), 3) == pytest.approx(2 * 30)
    assert sent_bytes("reduce_scatter", 70, P, S(0), (7, 10), 3) == pytest.approx(2 * 30)
    assert sent_bytes("all_reduce", 70, P, I, (7, 10), 3) == pytest.approx(2 * 70 * 2 / 3)
    assert sent_bytes("all_gather", 0, S(0), I, (0, 10), 3) == 0


@pytest.mark.parametrize("name", TABLE)
def test_a_collective_runs_its_kernel_and_in_backward_that_of_its_dual(name: str) -> None:
    assert kernels(name, needs_grad=True) == (TABLE[name].kernel, TABLE[TABLE[name].dual].kernel)
    assert kernels(name, needs_grad=False) == (TABLE[name].kernel, "none")
    assert kernels("all_reduce_max", needs_grad=True) == ("all_reduce", "none")


# --- lockstep, the definition ----------------------------------------------------------------------------------------

TARGETS = [I, R, P, A, B, S(0, ((2, 1), (3, 1))), S(1, ((3, 2),)), S(1, ((1, 1), (5, 1)))]
PAIRS = [(a, b, steps[0].name) for a in TARGETS for b in TARGETS if len(steps := plan_conversion(a, b) or ()) == 1]


@pytest.mark.parametrize(("source", "target", "name"), PAIRS, ids=[f"{n}-{a}-{b}" for a, b, n in PAIRS])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_a_conversion_keeps_the_value_and_its_gradient(source: Layout, target: Layout, name: str, world: int) -> None:
    torch.manual_seed(0)
    pieces = [p.requires_grad_() for p in _spread(torch.randn(5, 6, dtype=torch.float64), source, world)]
    after = SimulatedConversion.apply(None, source, target, *pieces)
    assert torch.allclose(_value(after, target), _value(pieces, source), rtol=1e-14, atol=1e-14)
    assert [tuple(p.shape) for p in after] == [local_shape((5, 6), target, r, world) for r in range(world)]
    cotangents = _spread(torch.randn(5, 6, dtype=torch.float64), dual(target), world)
    grads = torch.autograd.grad(after, pieces, cotangents)
    assert torch.allclose(_value(grads, dual(source)), _value(cotangents, dual(target)), rtol=1e-14, atol=1e-14)


def _value(pieces: Sequence[Tensor], layout: Layout) -> Tensor:
    """The full tensor; asserts that all ranks agree if each has a full copy."""
    assert not is_whole(layout) or all(torch.equal(p, pieces[0]) for p in pieces)
    return join(list(pieces), layout)


def _spread(whole: Tensor, layout: Layout, world: int) -> list[Tensor]:
    """Splits a full tensor across ranks; a partial sum becomes random addends."""
    if layout != P:
        return [split(whole, layout, rank, world).clone() for rank in range(world)]
    rest = [torch.randn_like(whole) for _ in range(world - 1)]
    return [*rest, whole - sum(rest, torch.zeros_like(whole))]


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("source", [I, R, P, S(0), S(1)], ids=str)
def test_fewer_wishes_are_never_dearer(source: Layout, needs_grad: bool) -> None:
    """The cost of more layouts than the consumers need is an upper bound of the inserted conversions' cost."""
    layouts = [I, R, S(0), S(1)]
    for count in (1, 2, 3):
        for wanted in itertools.combinations(layouts, count):
            steps = plan_conversions(source, wanted, needs_grad=needs_grad)
            for fewer in (w for k in range(1, count) for w in itertools.combinations(wanted, k)):
                less = plan_conversions(source, fewer, needs_grad=needs_grad)
                assert steps is None or (less is not None and _sent(less, needs_grad) <= _sent(steps, needs_grad))


def _sent(steps: Sequence[ConversionStep], needs_grad: bool) -> float:
    shape = (6, 6)
    return sum(
        sent_bytes(kernel, 36.0, link.source, link.target, shape, 3)
        for link in steps
        for kernel in kernels(link.name, needs_grad=needs_grad)
    )


# --- operators -------------------------------------------------------------------------------------------------------

_ops = torch.ops.torchshard


def test_tests_on_ranks_run_every_conversion() -> None:
    assert {name for name, *_ in conversion_cases.cases()} == set(TABLE)


def test_a_simulated_group_has_shapes_and_no_values() -> None:
    name = simulated_name(2, 3)
    assert (lookup(name).rank, lookup(name).size, lookup(name).simulated) == (2, 3, True)
    assert _ops.scatter(torch.empty(7, 2, device="meta"), 0, [7, 1], name).shape == (1, 2)
    with pytest.raises(ts.DistributedError, match="made for simulated ranks can't communicate"):
        _ops.scatter(torch.empty(7, 2), 0, [7, 1], name)


@pytest.mark.parametrize("name", TABLE)
def test_fake_shapes_are_those_of_the_layouts(name: str) -> None:
    """Compares fake shapes with the layouts' shapes, for each of three ranks."""
    for _, source, target, shape in (c for c in conversion_cases.cases() if c[0] == name):
        for rank in range(3):
            x = split(torch.empty(shape, device="meta"), source, rank, 3)
            got = getattr(_ops, name)(x, *step_args(source, target, shape), simulated_name(rank, 3))
            assert got.shape == split(torch.empty(shape, device="meta"), target, rank, 3).shape


@pytest.mark.parametrize("needs_grad", [True, False])
def test_blocks_of_a_dynamic_size_are_never_converted(needs_grad: bool) -> None:
    blocks = Shard(0, Blocks("s0"), repeated=True)
    for other in (I, R, S(0), S(1)):
        assert plan_conversion(blocks, other, needs_grad=needs_grad) is None
        assert plan_conversion(other, blocks, needs_grad=needs_grad) is None
