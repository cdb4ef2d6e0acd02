"""Property tests of layouts and shardings.

Layouts have any shape, segments and number of ranks: uneven shards, units, empty ranks. Shardings are on meshes of
two and three axes: several placements on one dim, partial sums.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchshard.core import layouts as plain
from torchshard.core.layouts import (
    Blocks,
    I,
    Layout,
    P,
    Part,
    R,
    S,
    Shard,
    canonical,
    chunk_bounds,
    dual,
    is_whole,
    join,
    local_shape,
    local_size,
    parse_layout,
    parts_of,
    parts_size,
    ranges,
    split,
)
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.core.sharding import UNSHARDED, Cut, Sharding
from torchshard.core.sharding import local_shape as local_shape_of
from torchshard.weights.boxes import Box, overlaps
from torchshard.weights.boxes import pieces as pieces_of_boxes
from torchshard.weights.place import held_at, is_same_slice, slice_place

pytestmark = pytest.mark.quick

worlds = st.integers(1, 6)
parts = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4).map(tuple)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Tensor, Shard]:
    """Draws a tensor with distinct elements, and a `Shard` of it."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    segments = draw(st.none() | parts)
    repeated = segments is not None and parts_size(segments) > 0 and draw(st.booleans())
    shape[dim] = draw(st.integers(0, 9)) if segments is None else parts_size(segments)
    shape[dim] *= draw(st.integers(0, 3)) if repeated else 1
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return tensor, Shard(dim, segments, repeated)


def pieces(tensor: Tensor, layout: Layout, world: int) -> list[Tensor]:
    return [split(tensor, layout, rank, world) for rank in range(world)]


@given(sharded(), worlds)
def test_split_then_join_is_the_whole(made: tuple[Tensor, Shard], world: int) -> None:
    tensor, shard = made
    for layout in (I, R, P, shard):
        assert torch.equal(join(pieces(tensor, layout, world), layout), tensor)


@given(sharded(), worlds)
def test_every_element_is_on_one_rank(made: tuple[Tensor, Shard], world: int) -> None:
    tensor, shard = made
    held = torch.cat([p.flatten() for p in pieces(tensor, shard, world)])
    assert torch.equal(held.sort().values, tensor.flatten())


@given(sharded(), worlds)
def test_local_shape_is_the_shape_of_a_split_tensor(made: tuple[Tensor, Shard], world: int) -> None:
    tensor, shard = made
    for layout in (I, R, P, shard):
        for rank, piece in enumerate(pieces(tensor, layout, world)):
            assert local_shape(tensor.shape, layout, rank, world) == tuple(piece.shape)


@given(st.lists(st.integers(-9, 9), min_size=3, max_size=3), worlds)
def test_partials_sum_to_the_whole(values: list[int], world: int) -> None:
    addends = [torch.tensor(values) * rank for rank in range(world)]
    assert torch.equal(join(addends, P), torch.tensor(values) * sum(range(world)))
    assert torch.equal(sum(pieces(torch.tensor(values), P, world)), torch.tensor(values))


@given(st.integers(0, 40), worlds)
def test_chunk_bounds_are_those_of_torch_chunk(count: int, world: int) -> None:
    bounds = chunk_bounds(count, world)
    ours = [torch.arange(count)[a:b] for a, b in pairwise(bounds)]
    theirs = list(torch.arange(count).chunk(world))
    theirs += [torch.arange(0)] * (world - len(theirs))  # chunk omits the ranks with empty shards
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@given(parts.filter(parts_size), worlds, st.booleans())
def test_canonical_keeps_every_ranks_elements(segments: tuple[Part, ...], world: int, repeated: bool) -> None:
    plain, small = Shard(0, segments, repeated), canonical(0, segments, world, repeated=repeated)
    whole = torch.arange(parts_size(segments) * (1 + repeated))
    for rank in range(world):
        assert torch.equal(split(whole, small, rank, world), split(whole, plain, rank, world))


@given(parts, worlds)
def test_canonical_is_idempotent(segments: tuple[Part, ...], world: int) -> None:
    once = canonical(1, segments, world)
    assert canonical(1, parts_of(parts_size(segments), once), world) == once


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), worlds)
def test_two_spellings_of_one_split_are_equal(a: int, b: int, c: int, world: int) -> None:
    """Single-segment shards with the same elements on the same ranks have one canonical form."""
    left, right, whole = Shard(0, ((a * b, c),)), Shard(0, ((a, b * c),)), torch.arange(a * b * c)
    same = all(map(torch.equal, pieces(whole, left, world), pieces(whole, right, world)))
    assert same == (canonical(0, left.parts, world) == canonical(0, right.parts, world))


layouts = (
    st.sampled_from([I, R, P])
    | st.builds(Shard, st.integers(0, 5), st.none() | parts)
    | st.builds(Shard, st.integers(0, 5), parts, st.booleans())
)


@given(layouts)
def test_dual_of_dual(layout: Layout) -> None:
    assert dual(dual(layout)) == layout


@given(layouts)
def test_parse_reads_what_prints(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout


@given(parts, worlds)
def test_sizes_and_ranges_agree(segments: tuple[Part, ...], world: int) -> None:
    sizes = [local_size(segments, rank, world) for rank in range(world)]
    assert sum(sizes) == parts_size(segments)
    for rank, size in enumerate(sizes):
        held = [i for start, stop in ranges(segments, rank, world) for i in range(start, stop)]
        assert len(held) == size


def test_duals_and_wholes() -> None:
    assert (dual(I), dual(R), dual(P), dual(S(1))) == (I, P, R, S(1))
    assert [is_whole(x) for x in (I, R, P, S(0))] == [True, True, False, False]


@pytest.mark.parametrize(
    ("shard", "size", "world", "held"),
    [
        (S(0), 7, 2, [4, 3]),
        (S(0), 7, 4, [2, 2, 2, 1]),
        (S(0), 2, 4, [1, 1, 0, 0]),
        (S(0, ((7, 8),)), 56, 2, [32, 24]),
        (S(0, ((768, 1), (256, 1), (256, 1))), 1280, 3, [256 + 86 + 86, 256 + 86 + 86, 256 + 84 + 84]),
        (S(0, ((3, 1),), repeated=True), 12, 2, [8, 4]),
        (S(0, ((2, 1), (2, 1)), repeated=True), 8, 2, [4, 4]),
    ],
)
def test_sizes_of_ranks(shard: Shard, size: int, world: int, held: list[int]) -> None:
    assert [local_shape((size,), shard, rank, world)[0] for rank in range(world)] == held


def test_a_fused_weight_is_split_in_place() -> None:
    """Each rank gets its rows of query, key and value."""
    fused = torch.tensor([10, 11, 12, 13, 20, 21, 30, 31])
    shard = S(0, ((4, 1), (2, 1), (2, 1)))
    assert [p.tolist() for p in pieces(fused, shard, 2)] == [[10, 11, 20, 30], [12, 13, 21, 31]]


def test_batches_of_heads_are_split_by_heads() -> None:
    """Two batches of three heads share one dim: each rank gets its heads of both."""
    merged = torch.tensor([10, 11, 12, 20, 21, 22])
    assert [p.tolist() for p in pieces(merged, S(0, ((3, 1),), repeated=True), 2)] == [[10, 11, 20, 21], [12, 22]]


@pytest.mark.parametrize(
    ("dim", "segments", "world", "printed"),
    [
        (0, [(4, 8)], 2, "S(0)"),
        (0, [(7, 8)], 2, "S(0; 7x8)"),
        (1, [(7, 8)], 1, "S(1)"),
        (2, [(768, 1)] * 3, 2, "S(2; 768+768+768)"),
        (0, [(0, 1), (5, 1)], 2, "S(0)"),
        (0, [(6, 4)], 4, "S(0; 6x4)"),
        (0, [(3, 4)], 2, "S(0; 3x4)"),
        (0, [(3, 2)], 4, "S(0)"),
    ],
)
def test_printed_canonical_forms(dim: int, segments: list[Part], world: int, printed: str) -> None:
    assert str(canonical(dim, segments, world)) == printed


@pytest.mark.parametrize(
    "text", ["", "X", "S", "S()", "S(-1)", "S(1", "S(1;2)", "S(1; )", "S(1; 2+)", "S(0; 2x)", "S(0; *)", "i"]
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    expected = r"I, R, P, S\(1\), S\(2; 768\+768\+768\), S\(0; 7x8\) or S\(1; \*4\)"
    with pytest.raises(ValueError, match=f"invalid layout .*: expected {expected}"):
        parse_layout(text)


@pytest.mark.parametrize(
    "text", ["I", "R", "P", "S(0)", "S(12)", "S(1; 2+3)", "S(0; 7x8)", "S(0; 7x8+2)", "S(1; *4)", "S(0; *3x2+1)"]
)
def test_what_is_a_layout_is_read(text: str) -> None:
    assert str(parse_layout(text)) == text


# --- shardings --------------------------------------------------------------------------------------------------------


MESHES = [
    Mesh(tuple(MeshAxis(size, name) for size, name in zip(sizes, ("pod", "data", "model"), strict=False)))
    for sizes in ((2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 4))
]


@st.composite
def held(draw: st.DrawFn) -> tuple[Mesh, Tensor, Sharding]:
    """Draws a mesh, a tensor with distinct elements, and a sharding of it."""
    mesh = draw(st.sampled_from(MESHES))
    heads = draw(st.integers(1, 7))
    shape = [heads * 2, draw(st.integers(0, 9)), draw(st.integers(1, 5))]
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    placements: list[tuple[MeshAxis, Layout]] = []
    for axis in draw(st.permutations(mesh.axes)):
        dim = draw(st.integers(0, 2))
        first = all(not isinstance(layout, Shard) or layout.dim != dim for _, layout in placements)
        plain: list[Layout] = [I, R, P, Shard(dim)]
        layouts_of = [*plain, Shard(0, ((heads, 2),))] if first and not dim else plain
        placements.append((axis, draw(st.sampled_from(layouts_of))))
    return mesh, tensor, Sharding.of(*placements)


@given(held())
def test_split_then_join_is_the_whole_on_each_rank_that_has_it(made: tuple[Mesh, Tensor, Sharding]) -> None:
    mesh, tensor, of = made
    slices = [of.local(tensor, place) for place in mesh.places()]
    shapes = [local_shape_of(tensor.shape, of.cuts(place)) for place in mesh.places()]
    assert [tuple(piece.shape) for piece in slices] == shapes
    wholes = of.join(slices, mesh)
    assert all(torch.equal(whole, tensor) for whole in wholes)
    whole_axes = [axis.size for axis in mesh.axes if is_whole(dict(of).get(axis, I))]
    assert len(wholes) == torch.Size(whole_axes).numel()


@given(held(), st.data())
def test_a_slice_is_made_of_parts_of_the_whole(made: tuple[Mesh, Tensor, Sharding], data: st.DataObject) -> None:
    mesh, tensor, of = made
    of = Sharding.of(*((axis, layout) for axis, layout in of if isinstance(layout, Shard)))
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in tensor.shape]
    box = tuple((start, stop) for start, stop in ends)
    part = _part(tensor, box)
    for place in mesh.places():
        own, local = of.cuts(place), of.local(tensor, place)
        parts = [(piece.of(local), _part(tensor, piece.box)) for piece in pieces_of_boxes(tensor.shape, own)]
        assert all(torch.equal(of_slice, of_whole) for of_slice, of_whole in parts)
        assert sum(of_slice.numel() for of_slice, _ in parts) == local.numel()
        common = [(_part(local, at), view) for at, view in overlaps(tensor.shape, own, box, part)]
        assert all(torch.equal(of_slice, view) for of_slice, view in common)
        wanted = set(part.reshape(-1).tolist()) & set(local.reshape(-1).tolist())
        assert wanted == {number for _, view in common for number in view.reshape(-1).tolist()}


def test_a_slice_of_a_fused_weight_has_parts_of_all_of_its_parts() -> None:
    weight, own = torch.arange(24).reshape(12, 2), [Cut(Shard(0, ((4, 1),) * 3), 1, 2), Cut(Shard(0), 0, 2)]
    local = weight[[2, 3, 6]]
    assert [
        (piece.of(local).tolist(), _part(weight, piece.box).tolist()) for piece in pieces_of_boxes(weight.shape, own)
    ] == [
        ([[4, 5], [6, 7]],) * 2,
        ([[12, 13]],) * 2,
    ]


def _part(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(*bounds) for bounds in box)]


@given(held(), st.data())
def test_shardings_have_one_spelling_that_can_be_read(made: tuple[Mesh, Tensor, Sharding], data: st.DataObject) -> None:
    mesh, tensor, of = made
    assert (
        Sharding.parse(of.text, mesh) == Sharding.parse(of.short_text, mesh) == of == Sharding.of(*of) == of.dual.dual
    )
    place = data.draw(st.sampled_from(mesh.places()))
    read, at = held_at(slice_place("w", of, place, tensor.shape))
    assert (read, read.cuts(at)) == (of, of.cuts(place))
    assert (of == UNSHARDED) == (of.text == "I")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (("w", "S(0)", 0, 1, (4,)), ("", "I", 0, 1, (4,)), True),  # the slice of a single rank is the full tensor
        (("w", "S(0)", 1, 2, (4,)), ("", "data: S(0)", 1, 2, (4,)), True),
        (("w", "S(0)", 1, 2, (4,)), ("", "S(0)", 0, 2, (4,)), False),
        (("w", "S(0)", 1, 2, (4,)), ("", "S(0)", 1, 2, (5,)), False),
        (("w", "S(0)", 1, 2, (4,)), ("", "I", 0, 1, (4,)), False),
        (
            ("w", "model: S(0) . data: S(0)", (1, 0), (2, 2), (4,)),
            ("", "S(0)", 2, 4, (4,)),
            False,
        ),  # the same rows, cut differently
        (("w", "S(0) of", "1", 2, (4,)), ("", "S(0)", 1, 2, (4,)), False),
        (("w",), ("", "S(0)", 1, 2, (4,)), False),
    ],
)
def test_slices_are_the_same_by_what_they_are_of_the_whole(a: Any, b: Any, same: bool) -> None:
    assert is_same_slice(a, b) is is_same_slice(b, a) is same


@given(held(), st.data())
def test_the_order_of_placements_counts_on_one_dim_alone(
    made: tuple[Mesh, Tensor, Sharding], data: st.DataObject
) -> None:
    mesh, tensor, of = made
    shuffled = data.draw(st.permutations(of))
    in_order = all(
        shuffled.index(a) < shuffled.index(b)
        for i, a in enumerate(of)
        for b in of[i + 1 :]
        if isinstance(a.layout, Shard) and isinstance(b.layout, Shard) and a.layout.dim == b.layout.dim
    )
    assert (Sharding.of(*shuffled) == of) is in_order
    if in_order:
        for place in mesh.places():
            assert torch.equal(Sharding(shuffled).local(tensor, place), of.local(tensor, place))


@given(held())
def test_the_last_placement_of_a_dim_can_be_joined_over_its_own_axis(made: tuple[Mesh, Tensor, Sharding]) -> None:
    """Converting one placement only involves the ranks along its axis, which join their shards."""
    mesh, tensor, of = made
    if not of:
        return
    (axis, layout), at = of[-1], mesh.axes.index(of[-1].axis)
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for place in mesh.places():
        others = tuple(rank for i, rank in enumerate(place.values()) if i != at)
        groups.setdefault(others, []).append(of.local(tensor, place))
    for place in mesh.places():
        others = tuple(rank for i, rank in enumerate(place.values()) if i != at)
        assert torch.equal(plain.join(groups[others], layout), Sharding(of[:-1]).local(tensor, place)), axis


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("S(0)", "no axis 'model'"),
        ("data; S(0)", "no axis 'model'"),
        ("other: S(0)", "no axis 'other'"),
        ("pod: S(0), data: S(0)", r"invalid layout 'S\(0\), data: S\(0\)'"),
        ("data: T", "invalid layout 'T'"),
    ],
)
def test_a_text_that_is_no_sharding_is_refused(wrong: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Sharding.parse(wrong, MESHES[0])


def test_blocks_of_a_dynamic_size() -> None:
    layout = parse_layout("S(0; *2*s7 x 4)")
    assert isinstance(layout, Shard) and layout == Shard(0, Blocks("2*s7", 4), repeated=True)
    assert str(layout) == "S(0; *2*s7 x 4)" and plain.local_extent(24, layout, 1, 3) == 8
    assert layout.is_equal and not Shard(0, ((4, 1),), repeated=True).is_equal
    assert parse_layout("S(0; *7x8)") == Shard(0, ((7, 8),), repeated=True)
