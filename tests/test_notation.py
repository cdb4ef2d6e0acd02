"""Rows: the meaning of their text, their choices, and invalid rows next to valid ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from torchshard.core.choices import choices, factor_groups, local_replacement, spread
from torchshard.core.errors import RuleError
from torchshard.core.layouts import S, Shard, local_shape, parse_layout
from torchshard.core.mesh import MeshAxis
from torchshard.core.notation import bind
from torchshard.core.rows import Choice, Local, Row, dim_size
from torchshard.planner.styles import WORDS, StyleWord
from torchshard.plans.machines import MACHINES, MachineName

pytestmark = pytest.mark.quick

BOTH = (frozenset({0}), frozenset({1}))
FIRST = (frozenset({0}),)


def listed(row: Row, world: int = 2, hints: Any = ()) -> list[str]:
    """Returns the choices as lines of text."""

    def line(choice: Choice) -> str:
        operands, results = (", ".join(map(str, side)) for side in (choice.operands, choice.results))
        return f"{choice.name}: {operands} -> {results}"

    return [line(c) for c in choices(row, world, hints)]


LINEAR = bind("... k, n k -> ... n", [(2, 5, 7), (4, 7)], [(2, 5, 4)], linear=BOTH)
VIEW = bind("a b (c d) -> a b c d", [(2, 5, 56)], [(2, 5, 7, 8)], {"c": 7, "d": 8}, linear=FIRST)
SPLIT = bind("a x+y+z -> a x, a y, a z", [(5, 9)], [(5, 2), (5, 3), (5, 4)], linear=FIRST)
CAT = bind("a x, a y -> a x+y", [(5, 3), (5, 4)], [(5, 7)], linear=(frozenset({0, 1}),))
FUSED = bind("a (k c d) -> a k c d", [(5, 42)], [(5, 3, 7, 2)], {"k": 3, "c": 7, "d": 2})


# --- choices ---------------------------------------------------------------------------------------------------------


def test_linear() -> None:
    assert listed(LINEAR) == [
        "I: I, I -> I",
        "R: R, R -> R",
        "P: P, R -> P",
        "P: R, P -> P",
        "split _1: S(0), R -> S(0)",
        "split _0: S(1), R -> S(1)",
        "split k: S(2), S(1) -> P",
        "split n: R, S(0) -> S(2)",
    ]


def test_view_splits_a_merged_dim_in_units_of_its_minor_axes() -> None:
    assert listed(VIEW) == [
        "I: I -> I",
        "R: R -> R",
        "P: P -> P",
        "split c: S(2; 7x8) -> S(2)",
        "split d: S(2; 8+8+8+8+8+8+8) -> S(3)",
        "split a: S(0) -> S(0)",
        "split b: S(1) -> S(1)",
    ]


def test_seven_heads_have_a_plain_layout_if_the_ranks_divide_them() -> None:
    assert "split c: S(2) -> S(2)" in listed(VIEW, world=7)


def test_pieces_are_split_together() -> None:
    assert listed(SPLIT)[3:] == ["split a: S(0) -> S(0), S(0), S(0)", "split x y z: S(1; 2+3+4) -> S(1), S(1), S(1)"]
    assert listed(CAT)[2:] == ["P: P, P -> P", "split a: S(0), S(0) -> S(0)", "split x y: S(1), S(1) -> S(1; 3+4)"]
    assert factor_groups(SPLIT) == [("a",), ("x", "y", "z")]


def test_a_middle_axis_gives_parts() -> None:
    """In fused query, key and value, heads are split within each of the three."""
    assert listed(FUSED)[2:5] == [
        "split k: S(1; 3x14) -> S(1)",
        "split c: S(1; 7x2+7x2+7x2) -> S(2)",
        "split d: S(1; " + "+".join(["2"] * 21) + ") -> S(3)",
    ]


def test_hints_say_in_which_parts() -> None:
    fused = S(1, ((4, 8), (3, 8)))
    row = bind("a (c d) -> a c d", [(5, 56)], [(5, 7, 8)], {"c": 7, "d": 8})
    assert "split c: S(1; 32+3x8) -> S(1; 4+3)" in listed(row, hints=[(0, fused)])
    assert "split c: S(1; 32+3x8) -> S(1; 4+3)" in listed(row, hints=[(1, S(1, ((4, 1), (3, 1))))])
    assert not any("4+3" in line for line in listed(row))


def test_hints_that_no_axis_can_have_change_nothing() -> None:
    row = bind("a (c d) -> a c d", [(5, 56)], [(5, 7, 8)], {"c": 7, "d": 8})
    assert listed(row, hints=[(0, S(1, ((3, 1), (53, 1))))]) == listed(row)


def test_a_pinned_unit_spreads_to_the_other_tensors() -> None:
    assert list(spread(VIEW, 2, [(1, S(2))])) == [(0, S(2, ((7, 8),))), (0, S(2, ((8, 1),) * 7))]


@pytest.mark.parametrize(
    ("text", "operands", "results", "sizes", "never"),
    [
        ("a !c, c -> a !c", [(5, 4), (4,)], [(5, 4)], {}, "split c"),
        ("a a -> a", [(4, 4)], [(4,)], {}, "split a"),
        ("1 b -> a b", [(1, 4)], [(3, 4)], {}, "split 1"),
        ("a x+!y -> a x", [(5, 4)], [(5, 3)], {"y": 1}, "split x y"),
        ("a (b c) -> a (b c)", [(5, 130)], [(5, 130)], {"b": 65, "c": 2}, "split c"),
        ("a b -> a", [(5, 0)], [(5,)], {}, "split b"),
    ],
    ids=["unsplittable", "twice in a tensor", "a one", "unsplittable with its group", "too many segments", "empty"],
)
def test_what_is_never_split(text: str, operands: Any, results: Any, sizes: Any, never: str) -> None:
    names = [c.name for c in choices(bind(text, operands, results, sizes), 2)]
    assert never not in names
    assert ("split a" in names) == (text != "a a -> a")


def test_a_mark_on_one_occurrence_blocks_all() -> None:
    row = bind("a !c, c -> a c", [(5, 4), (4,)], [(5, 4)])
    assert row.unsplittable == {"c"} and factor_groups(row) == [("a",)]


def test_an_axis_that_only_operands_have_is_summed() -> None:
    assert "split k: S(0), S(0) -> P" in listed(bind("k, k -> ", [(4,), (4,)], [()]))


def test_a_replacement_that_reduces_makes_it_invariant() -> None:
    row = bind("n v -> n", [(5, 4)], [(5,)], local={"v": print}, reduced=frozenset("v"))
    assert "split v: S(1) -> I" in listed(row)
    assert local_replacement(row, choices(row, 2)[-1]) is print
    assert local_replacement(row, choices(row, 2)[0]) is None


def test_a_replacement_that_needs_a_start_gets_one_run() -> None:
    hints = [(0, S(1, ((1, 1), (3, 1))))]
    free, bound = (bind("n v -> n v", [(5, 4)], [(5, 4)], local=local) for local in ({}, {"v": print}))
    assert "split v: S(1; 1+3) -> S(1; 1+3)" in listed(free, hints=hints)
    assert [line for line in listed(bound, hints=hints) if "split v" in line] == ["split v: S(1) -> S(1)"]


def test_operands_that_are_written_to_are_never_converted() -> None:
    row = bind("!n c, c -> !n c", [(5, 4), (4,)], [(5, 4)], mutates=frozenset({1}))
    assert listed(row) == ["I: I, I -> I", "split c: S(1), S(0) -> S(1)"]


# --- dynamic sizes ---------------------------------------------------------------------------------------------------


def test_a_dynamic_axis_is_never_split() -> None:
    n = sympy.Symbol("s0", integer=True, positive=True)
    row = bind("... k, n k -> ... n", [(n, 5, 7), (4, 7)], [(n, 5, 4)])
    assert [c.name for c in choices(row, 2)] == ["I", "R", "split _0", "split k", "split n"]


def splits(row: Row, hints: Any = ()) -> list[str]:
    return [line for line in listed(row, 2, hints) if line.startswith("split")]


@pytest.mark.parametrize("major", [True, False])
def test_a_dim_merged_with_a_dynamic_one(major: bool) -> None:
    """In `(a b)`, b is split in a repeated pattern if a is dynamic; a can't be split if its unit b is dynamic."""
    n = sympy.Symbol("s0", integer=True, positive=True)
    a, b = (n, 4) if major else (4, n)
    merged, alone = bind("a b -> (a b)", [(a, b)], [(a * b,)]), bind("a b -> a b", [(a, b)], [(a, b)])
    assert splits(merged) == (["split b: S(1) -> S(0; *4)"] if major else [])
    assert splits(alone) == ["split b: S(1) -> S(1)" if major else "split a: S(0) -> S(0)"]


def test_so_many_times_a_dynamic_size_is_split_in_parts_that_repeat() -> None:
    n = sympy.Symbol("s0", integer=True, positive=True)
    shape = (6 * n, 5, 3)
    product = bind("b m k, b k n -> b m n", [shape, (6 * n, 3, 7)], [(6 * n, 5, 7)], linear=BOTH)
    assert splits(product)[-1] == "split b*: S(0; *6), S(0; *6) -> S(0; *6)"
    heads = S(0, ((3, 2),), repeated=True)
    assert "split b*: S(0; *3x2), S(0; *3x2) -> S(0; *3x2)" in splits(product, [(0, heads)])
    assert splits(bind("!a b c -> !a b c", [shape], [shape])) == ["split b: S(1) -> S(1)", "split c: S(2) -> S(2)"]
    local = {"a": lambda *args: None}  # a replacement for slices of a doesn't fit slices of its factor 6
    assert splits(bind("a !b !c -> a !b !c", [shape], [shape], local=local)) == []


def test_a_rank_writes_its_part_of_a_dynamic_size() -> None:
    n = sympy.Symbol("s0", integer=True, positive=True)
    row = bind("a (b c) -> (a b) c", [(n, 21)], [(3 * n, 7)], {"b": 3, "c": 7})
    heads = next(c for c in choices(row, 2) if c.name == "split b")
    assert [Local(row, heads, MeshAxis(2).coordinate(rank)).resize([15, 7]) for rank in (0, 1)] == [[10, 7], [5, 7]]
    assert Local(row, heads, MeshAxis(2).coordinate(0)).resize([-1, 7]) == [-1, 7]


def test_a_split_of_unknown_size_must_leave_no_rank_empty() -> None:
    n = sympy.Symbol("s0", integer=True, positive=True)
    rows = [bind("a b -> a b", [(6 * n, 5)], [(6 * n, 5)], fills_ranks=fills) for fills in (False, True)]
    assert [["split a*" in {c.name for c in choices(row, world)} for row in rows] for world in (2, 4)] == [
        [True, True],
        [True, False],
    ]


def test_pieces_of_a_concatenation_may_lie_in_parts_of_their_own() -> None:
    fused = bind("x+y -> x, y", [(12,)], [(4,), (8,)], local={"x": len, "y": len}, by_size=True)
    hints = [(2, S(0, ((4, 1), (4, 1))))]
    assert "split x y: S(0; 4+4+4) -> S(0), S(0; 4+4)" in splits(fused, hints)
    starting = bind("x+y -> x, y", [(12,)], [(4,), (8,)], local={"x": len, "y": len})
    assert splits(starting, hints) == ["split x y: S(0; 4+8) -> S(0), S(0)"]


# --- a rank's queries -------------------------------------------------------------------------------------------------


def test_local_sizes_and_starts() -> None:
    split = next(c for c in choices(LINEAR, 3) if c.name == "split k")
    ranks = [Local(LINEAR, split, MeshAxis(3).coordinate(rank)) for rank in range(3)]
    assert [r.size("k") for r in ranks] == [3, 3, 1]
    assert [r.start("k") for r in ranks] == [0, 3, 6]
    assert [r.size("n") for r in ranks] == [4, 4, 4]
    assert ranks[0].whole_shape() == [2, 5, 4]


def test_resize_writes_this_ranks_size() -> None:
    split = next(c for c in choices(VIEW, 2) if c.name == "split c")
    ranks = [Local(VIEW, split, MeshAxis(2).coordinate(rank)) for rank in (0, 1)]
    assert [rank.resize([2, 5, -1, 8]) for rank in ranks] == [[2, 5, 4, 8], [2, 5, 3, 8]]


def test_a_split_in_several_runs_has_no_start() -> None:
    fused = next(c for c in choices(FUSED, 2, [(1, S(2, ((3, 1), (4, 1))))]) if c.name == "split c")
    with pytest.raises(RuleError, match="factor c has no single start"):
        Local(FUSED, fused, MeshAxis(2).coordinate(0)).start("c")
    plain = next(c for c in choices(FUSED, 2) if c.name == "split c")
    assert Local(FUSED, plain, MeshAxis(2).coordinate(1)).start("c") == 4


# --- binding, and errors ----------------------------------------------------------------------------------------------


def test_bind_reads_sizes_from_plain_dims() -> None:
    row = bind("a (b c), b -> a b c", [(2, 12), (3,)], [(2, 3, 4)])
    assert dict(row.sizes) == {"a": 2, "b": 3, "c": 4}
    assert [dim_size(d, row.sizes) for d in row.operands[0]] == [2, 12]


def test_leading_dims_are_aligned_at_their_last_and_broadcast() -> None:
    row = bind("... k, ... k -> ... k", [(2, 5, 7), (1, 7)], [(2, 5, 7)])
    assert row.operands[1] == (((),), (("k",),)) and row.operands[0][:2] == ((("_1",),), (("_0",),))
    assert listed(row)[2:4] == ["split _1: S(0), R -> S(0)", "split _0: S(1), R -> S(1)"]


def test_an_empty_side_is_a_scalar_or_nothing() -> None:
    assert bind(" -> a", [], [(3,)]).operands == ()
    assert bind(" -> ", [()], [()]).operands == ((),)
    assert bind("a,  -> a", [(3,), ()], [(3,)]).operands[1] == ()


ACCEPTED = bind("a b -> a", [(5, 4)], [(5,)])


def test_a_size_for_an_axis_in_no_tensor_is_refused() -> None:
    """If a factor in no tensor were split, the ranks would sum the full value once each."""
    assert bind("(a b) -> a b", [(6,)], [(3, 2)], {"a": 3, "b": 2})
    with pytest.raises(RuleError, match="factor c is in no tensor"):
        bind("(a b) -> a b", [(6,)], [(3, 2)], {"a": 3, "b": 2, "c": 1})


@pytest.mark.parametrize(
    ("text", "operands", "results", "says"),
    [
        ("a b", [(5, 4)], [(5,)], "the row 'a b' needs one '->'"),
        ("a -> b -> a", [(5, 4)], [(5,)], "needs one '->'"),
        ("a b, a -> a", [(5, 4)], [(5,)], "the row has 2 operands and 1 results, the op 1 tensors and 1 results"),
        ("a b -> a, a", [(5, 4)], [(5,)], "the row has 1 operands and 2 results, the op 1 tensors and 1 results"),
        (" -> a", [(5, 4)], [(5,)], "the row has 1 operands|the row has 0 dims, the tensor 2"),
        ("a -> a", [(5, 4)], [(5,)], "the row has 1 dims, the tensor 2"),
        ("a b -> b", [(5, 4)], [(5,)], "factor b has two sizes\n  where: a b -> b\n  why:   4 and 5"),
        ("a b -> c", [(5, 4)], [(6,)], None),
        ("(a b) c -> a", [(6, 4)], [(5,)], "factor b has no size\n.*\n  try:   pass it in sizes="),
        ("(a b) b -> a", [(6, 4)], [(5,)], "has two sizes\n.*\n  why:   20 and 6"),
        ("(a b -> a", [(5, 4)], [(5,)], r"invalid dim '\(a b '"),
        ("a b) -> a", [(5, 4)], [(5,)], r"invalid dim 'b\) '"),
        ("a b+ -> a", [(5, 4)], [(5,)], r"invalid dim 'b\+'"),
        ("a-b -> a", [(5, 4)], [(5,)], "invalid dim 'a-b'"),
        ("... ... b -> a", [(5, 4)], [(5,)], r"a tensor has two '\.\.\.'"),
    ],
)
def test_text_that_does_not_fit(text: str, operands: Any, results: Any, says: str | None) -> None:
    assert ACCEPTED.sizes == {"a": 5, "b": 4}
    if says is None:
        assert bind(text, operands, results).sizes == {"a": 5, "b": 4, "c": 6}
        return
    with pytest.raises(RuleError, match=says) as caught:
        bind(text, operands, results)
    assert f"where: {text}" in str(caught.value)


# --- laws ------------------------------------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[int, int, int], tuple[Any, Any]]] = {
    "a (b c) -> a b c": lambda a, b, c: ([(a, b * c)], [(a, b, c)]),
    "a b+c -> a b, a c": lambda a, b, c: ([(a, b + c)], [(a, b), (a, c)]),
    "(a b) c -> a (b c)": lambda a, b, c: ([(a * b, c)], [(a, b * c)]),
    "a b c -> c (a b)": lambda a, b, c: ([(a, b, c)], [(c, a * b)]),
    "a c, b c -> a b": lambda a, b, c: ([(a, c), (b, c)], [(a, b)]),
}


@given(st.sampled_from(sorted(SHAPES)), st.tuples(*[st.integers(1, 7)] * 3), st.integers(1, 5))
def test_a_split_deals_all_tensors_alike(text: str, sizes: tuple[int, int, int], world: int) -> None:
    """Local shapes by layout equal those by the rank's sizes of the factors."""
    operands, results = SHAPES[text](*sizes)
    row = bind(text, operands, results, dict(zip("abc", sizes, strict=True)))
    tensors = [*zip(row.operands, operands, strict=True), *zip(row.results, results, strict=True)]
    for choice in choices(row, world):
        for rank in range(world):
            held = Local(row, choice, MeshAxis(world).coordinate(rank))
            local = {axis: held.size(axis) for axis in "abc"}
            for (dims, shape), layout in zip(tensors, (*choice.operands, *choice.results), strict=True):
                wanted = tuple(dim_size(d, local) for d in dims) if isinstance(layout, Shard) else shape
                assert local_shape(shape, layout, rank, world) == wanted


def test_the_words_that_type_checkers_know_are_those_that_are_read() -> None:
    words, _ = get_args(StyleWord)
    assert set(get_args(words)) == set(WORDS) - {"ColwiseParallel", "RowwiseParallel", "SequenceParallel"}
    assert set(get_args(MachineName)) == set(MACHINES)


# --- blocks of a dynamic size ----------------------------------------------------------------------------------------


BATCH, LENGTH, OTHER = (sympy.Symbol(name, integer=True, positive=True) for name in ("b", "l", "m"))


def _joined(length: sympy.Symbol) -> Row:
    """Rows of a flattened batch and sequence."""
    return bind("a b c -> (a b) c", [(BATCH, length, 4)], [(BATCH * length, 4)], {}, [length])


def test_a_length_that_is_joined_with_a_batch_has_blocks() -> None:
    assert "split b: S(1) -> S(0; *l)" in listed(_joined(LENGTH))
    assert "split b: S(1) -> S(0; *m)" in listed(_joined(OTHER))  # rows of another length are other rows
    major = bind("a b -> (a b)", [(LENGTH, 3)], [(3 * LENGTH,)], {}, [LENGTH])
    assert splits(major)[0] == "split a: S(0) -> S(0)"


def test_a_row_of_blocks_is_split_as_its_operand_is() -> None:
    hints = [(0, parse_layout("S(0; *l)"))]
    shapes = [(BATCH * LENGTH, 4), (6, 4)], [(BATCH * LENGTH, 6)]
    assert "split n: S(0; *l), R -> S(0; *l)" in splits(bind("n k, m k -> n m", *shapes, {}, [LENGTH]), hints)
    unknown = bind("n k, m k -> n m", *shapes)  # not known to be a multiple of the ranks
    ordered = bind("n k -> n k", shapes[0][:1], shapes[0][:1], {}, [LENGTH], contiguous=True)
    assert not any("*l" in line for row in (unknown, ordered) for line in splits(row, hints))


def test_what_is_joined_and_parted_again_is_as_before() -> None:
    back = bind("(a b) c -> a b c", [(BATCH * LENGTH, 4)], [(BATCH, LENGTH, 4)], {}, [LENGTH])
    assert "split b: S(0; *l) -> S(1)" in listed(back)
    other = bind("(a b) c -> a b c", [(BATCH * LENGTH, 4)], [(LENGTH, BATCH, 4)], {}, [LENGTH])
    assert not any("*l" in line for line in splits(other, [(0, parse_layout("S(0; *l)"))]))
