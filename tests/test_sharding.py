"""Laws of words, on meshes of two and three axes: uneven sizes, several placements on one dim, partial sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from torchshard.core import layouts
from torchshard.core.layouts import I, Layout, P, R, Shard, is_whole
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.core.sharding import UNSHARDED, Cut, Sharding, local_shape
from torchshard.weights.boxes import Box, overlaps, pieces
from torchshard.weights.state_slices import held_at, is_same_slice, slice_place

pytestmark = pytest.mark.quick

MESHES = [
    Mesh(tuple(MeshAxis(size, name) for size, name in zip(sizes, ("pod", "data", "model"), strict=False)))
    for sizes in ((2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 4))
]


@st.composite
def held(draw: st.DrawFn) -> tuple[Mesh, Tensor, Sharding]:
    """A mesh, a tensor whose elements are all different, and a sharding for it."""
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
    shapes = [local_shape(tensor.shape, of.cuts(place)) for place in mesh.places()]
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
        parts = [(piece.of(local), _part(tensor, piece.box)) for piece in pieces(tensor.shape, own)]
        assert all(torch.equal(of_slice, of_whole) for of_slice, of_whole in parts)
        assert sum(of_slice.numel() for of_slice, _ in parts) == local.numel()
        common = [(_part(local, at), view) for at, view in overlaps(tensor.shape, own, box, part)]
        assert all(torch.equal(of_slice, view) for of_slice, view in common)
        wanted = set(part.reshape(-1).tolist()) & set(local.reshape(-1).tolist())
        assert wanted == {number for _, view in common for number in view.reshape(-1).tolist()}


def test_a_slice_of_a_fused_weight_has_parts_of_all_of_its_parts() -> None:
    weight, own = torch.arange(24).reshape(12, 2), [Cut(Shard(0, ((4, 1),) * 3), 1, 2), Cut(Shard(0), 0, 2)]
    local = weight[[2, 3, 6]]
    assert [(piece.of(local).tolist(), _part(weight, piece.box).tolist()) for piece in pieces(weight.shape, own)] == [
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
        (("w", "S(0)", 0, 1, (4,)), ("", "I", 0, 1, (4,)), True),  # what one rank has saved is whole
        (("w", "S(0)", 1, 2, (4,)), ("", "data: S(0)", 1, 2, (4,)), True),
        (("w", "S(0)", 1, 2, (4,)), ("", "S(0)", 0, 2, (4,)), False),
        (("w", "S(0)", 1, 2, (4,)), ("", "S(0)", 1, 2, (5,)), False),
        (("w", "S(0)", 1, 2, (4,)), ("", "I", 0, 1, (4,)), False),
        (
            ("w", "model: S(0) . data: S(0)", (1, 0), (2, 2), (4,)),
            ("", "S(0)", 2, 4, (4,)),
            False,
        ),  # the same rows, cut otherwise
        (("w", "S(0) of", "1", 2, (4,)), ("", "S(0)", 1, 2, (4,)), False),
        (("w",), ("", "S(0)", 1, 2, (4,)), False),
    ],
)
def test_slices_are_the_same_by_what_they_are_of_the_whole(a: Any, b: Any, same: bool) -> None:
    assert is_same_slice(a, b) is is_same_slice(b, a) is same


@given(held(), st.data())
def test_the_order_of_placements_counts_on_one_dim_only(
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
    """A conversion changes one placement: the ranks of its axis join what they hold, and no other rank takes part."""
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
        assert torch.equal(layouts.join(groups[others], layout), Sharding(of[:-1]).local(tensor, place)), axis


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
