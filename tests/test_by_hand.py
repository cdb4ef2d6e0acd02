"""Hand-written calls of the model-parallel API on gloo ranks: in place, uneven, asynchronous, in any groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import nightly, refused
from torchshard.testing import run_ranks

DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8, torch.complex64, torch.bfloat16)


def _sums_in_place(rank: int) -> Iterator[tuple[str, bool]]:
    world = tsd.get_group_size()
    for dtype in DTYPES:
        for how in (lambda x: x, lambda x: x.mT, lambda x: x[:, ::2], lambda x: x[1:], lambda x: x[:0]):
            whole = torch.arange(24).reshape(4, 6).to(dtype)
            x = how(whole * (rank + 1))
            expected = how(whole) * sum(range(1, world + 1))
            result = tsd.reduce(x)
            yield f"sum of {dtype} {tuple(x.shape)}", torch.equal(x, expected.to(dtype)) and result is x
    expanded = torch.ones(1, 3).expand(4, 3)
    yield "an expanded tensor is refused", world == 1 or refused(lambda: tsd.reduce(expanded), "share memory")
    leaf = torch.ones(3, requires_grad=True)
    kept = leaf * 2
    summed = tsd.reduce(kept)
    yield "with a gradient the input stays", torch.equal(kept, torch.full((3,), 2.0)) and summed is not kept
    gradient = torch.full((3,), 5.0)
    upstream = gradient.clone()
    tsd.copy(leaf).backward(gradient)
    yield "the upstream gradient stays", torch.equal(gradient, upstream) and bool((leaf.grad == 5.0 * world).all())
    with torch.no_grad():
        yield "without gradients in place", tsd.reduce(leaf) is leaf and bool((leaf == world).all())


def _lazy(rank: int) -> Iterator[tuple[str, bool]]:
    """Views with a pending negation or conjugation."""
    world = tsd.get_group_size()
    z = torch.tensor([[1 + 2j, 3 - 1j]]) * (rank + 1)
    for name, x in (("negative", z.clone().conj().imag), ("conjugated", z.conj())):
        plain = x.clone()
        expected = plain * (sum(range(1, world + 1)) / (rank + 1))
        for other in (name, f"{name}, transposed"):
            call = (lambda t: t) if other == name else (lambda t: t.mT)
            yield f"gather {other}", torch.equal(tsd.gather(call(x), 0), tsd.gather(call(plain), 0))
            yield f"to one {other}", torch.equal(tsd.gather_to(call(x), 0, 0), tsd.gather_to(call(plain), 0, 0))
            yield f"from one {other}", torch.equal(tsd.scatter_from(call(x), 0, 1), tsd.scatter_from(call(plain), 0, 1))
            yield f"slice of the sum {other}", torch.equal(tsd.reduce_scatter(call(x)), tsd.reduce_scatter(call(plain)))
        yield f"reduce {name}", torch.allclose(tsd.reduce(x), expected) and torch.allclose(x, expected)


def _stale(rank: int) -> Iterator[tuple[str, bool]]:
    """Tensors that autograd or the caller uses while a collective writes or reads them."""
    leaf = torch.ones(3, requires_grad=True)
    kept = leaf.exp()  # its backward reads its result
    tsd.reduce(kept.detach())
    try:
        kept.sum().backward()
        yield "a backward of what was summed in place is an error", tsd.get_group_size() == 1
    except RuntimeError as error:
        yield "a backward of what was summed in place is an error", "inplace operation" in str(error)
    for name, call in CALLS.items():
        x = torch.arange(35.0).reshape(5, 7)
        expected = call(x.clone())
        if name != "reduce":  # it sums in place
            handle = call(x, async_op=True)
            x.zero_()
            yield f"{name}: what is sent may change meanwhile", torch.equal(handle.wait(), expected)
        a, b = (torch.arange(35.0).reshape(5, 7).requires_grad_() for _ in range(2))
        y = b * 1
        handle = call(y, async_op=True)
        y.mul_(3)
        with torch.no_grad():
            got = handle.wait()
        call(a * 1).sum().backward()
        got.sum().backward()
        yield f"{name}: so may what it has a gradient of", torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


ASKING = ("gather", "all_gather", "all_to_all")
"""Calls that exchange the ranks' sizes, which breaks a compiled graph."""


def _compiled(rank: int) -> Iterator[tuple[str, bool]]:
    for gradient in (False, True):
        for name, call in CALLS.items():
            x = torch.arange(24.0).reshape(6, 4) if gradient else torch.arange(24.0).reshape(4, 6)
            x, y = ((x.clone() * (rank + 1)).requires_grad_(gradient) for _ in range(2))
            whole = name not in ASKING
            expected, got = call(x), torch.compile(call, backend="eager", fullgraph=whole)(y)
            yield f"{name} compiled, {gradient=}", torch.equal(got, expected) and torch.equal(x.detach(), y.detach())
            if gradient:
                cotangent = torch.arange(expected.numel(), dtype=torch.float32).reshape(expected.shape)
                expected.backward(cotangent)
                got.backward(cotangent)
                yield f"{name} compiled: gradient", x.grad is not None and torch.equal(x.grad, y.grad)


def _uneven(rank: int) -> Iterator[tuple[str, bool]]:
    world = tsd.get_group_size()
    for size in (1, 5, 7, 8, 0):
        for dim in (0, -1):
            shape = (3, size) if dim else (size, 3)
            whole = torch.arange(size * 3, dtype=torch.float64).reshape(shape).requires_grad_()
            part = tsd.scatter(whole, dim)
            again = tsd.gather(part, dim)
            yield f"{shape} split and joined on {dim}", torch.equal(again, whole)
            (again * whole.detach()).sum().backward()
            yield f"{shape} gradient on {dim}", torch.equal(whole.grad, whole.detach())
            slices = tsd.all_gather(part.detach(), dim, size=size)
            yield f"{shape} gathered with its size", torch.equal(slices, whole)
    for call in (tsd.gather, tsd.all_gather):
        whole = torch.arange(7.0)
        again = torch.compile(lambda x: call(x, 0), backend="eager")(tsd.scatter(whole, 0))  # noqa: B023
        yield f"{call.__name__} of uneven slices compiled", torch.equal(again, whole)
    odd = torch.ones(2 + rank, 2)
    for _ in range(2):
        sized = lambda: tsd.gather(odd, 0, size=2 * world)  # noqa: E731
        yield "no split of this size, twice", refused(sized, "of a split") or world == 1
    yield "dims from the end and the front", tsd.scatter(torch.ones(4, 2), -1 if rank else 1).shape[0] == 4
    square = torch.ones(2, world)
    yield "to the same dim", torch.equal(tsd.all_to_all(square, 0, 0), square)
    yield "no split has such sizes", refused(lambda: tsd.gather(odd, 0), "torch.chunk's rule") or world == 1
    yield "a dim that is not there", refused(lambda: tsd.gather(odd, 2), "has no dim 2")
    yield "no dim, no split", tsd.scatter(odd, None) is odd and tsd.gather(odd, dim=None) is odd


CALLS: dict[str, Callable[..., Any]] = {
    "copy": tsd.copy,
    "reduce": tsd.reduce,
    "all_reduce": tsd.all_reduce,
    "scatter": lambda x, **kw: tsd.scatter(x, 0, **kw),
    "narrow": lambda x, **kw: tsd.narrow(x, 1, **kw),
    "gather": lambda x, **kw: tsd.gather(x, 0, **kw),
    "all_gather": lambda x, **kw: tsd.all_gather(x, -1, **kw),
    "reduce_scatter": lambda x, **kw: tsd.reduce_scatter(x, 0, **kw),
    "all_to_all": lambda x, **kw: tsd.all_to_all(x, 0, 1, **kw),
}


def _asynchronous(rank: int) -> Iterator[tuple[str, bool]]:
    flying: list[tuple[str, Tensor, Tensor, Any]] = []
    for name, call in CALLS.items():
        x, y = (torch.full((5, 7), rank + 1.0, dtype=torch.float64).requires_grad_() for _ in range(2))
        flying.append((name, call(x), x, (call(y, async_op=True), y)))
    for name, expected, x, (handle, y) in flying:
        got = handle.wait()
        yield f"{name}: value", torch.equal(got, expected) and handle.wait() is got and handle.is_completed()
        (expected * (rank + 2)).sum().backward()
        (got * (rank + 2)).sum().backward()
        yield f"{name}: gradient", x.grad is not None and torch.equal(x.grad, y.grad)
    plain = torch.ones(4)
    handle = tsd.reduce(plain, async_op=True)
    yield "reduce in place", handle.wait() is plain and bool((plain == tsd.get_group_size()).all())


def _by_hand(rank: int) -> list[str]:
    tsd.init_process_group()
    found = [*_sums_in_place(rank), *_uneven(rank), *_asynchronous(rank), *_lazy(rank), *_stale(rank), *_compiled(rank)]
    assert len(found) > 80
    return [what for what, holds in found if not holds]


@nightly("1", "3")
@pytest.mark.parametrize("world", [1, 2, 3])
def test_by_hand(world: int) -> None:
    assert run_ranks(_by_hand, world) == [[]] * world


def test_alone_every_call_gives_its_input() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for name, call in CALLS.items():
        handle = call(x, async_op=True)
        assert call(x) is x and handle.is_completed() and handle.wait() is x, name


Place = tuple[int, int, int, int, list[int]]


def _place() -> Place:
    ranks = tsd.get_data_parallel_group()
    members = dist.get_process_group_ranks(ranks) if ranks is not None else []
    model = tsd.get_rank(), tsd.get_group_size()
    return *model, tsd.get_data_parallel_rank(), tsd.get_data_parallel_size(), members


def _places(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tsd.init_process_group(group_size=2)
    found["groups of two"] = _place()
    tsd.destroy_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dim in ("tp", "dp"):
        tsd.init_process_group(mesh=mesh[dim])
        x = torch.tensor([float(rank)])
        found[dim] = (*_place(), float(tsd.reduce(x)))
        tsd.destroy_process_group()
    found["two dims"] = refused(lambda: tsd.init_process_group(mesh=mesh), "be a model-parallel group")
    part = dist.device_mesh.DeviceMesh("cpu", [3, 1])
    tsd.init_process_group(mesh=part)
    found["left out"] = _place()
    found["mine"] = tsd.get_group() is not dist.GroupMember.NON_GROUP_MEMBER
    whole = torch.arange(4.0)
    found["joined"] = torch.equal(tsd.gather(tsd.scatter(whole, 0), 0), whole)
    found["alone"] = tsd.get_rank() >= 0 or (tsd.reduce(whole) is whole and tsd.all_gather_object(1) == [1])
    found["no graph"] = tsd.get_rank() >= 0 or refused(lambda: ts.shard(torch.nn.Linear(2, 2), {"": "column"}), "in no")
    tsd.destroy_process_group()
    found["two meshes"] = refused(lambda: tsd.init_process_group(mesh=mesh["tp" if rank else "dp"]), "not parts of one")
    return found


def test_groups_and_the_groups_across_them() -> None:
    ranks = run_ranks(_places, 4)
    pairs = [r["groups of two"] for r in ranks]
    assert pairs == [(0, 2, 0, 2, [0, 2]), (1, 2, 0, 2, [1, 3]), (0, 2, 1, 2, [0, 2]), (1, 2, 1, 2, [1, 3])]
    assert [r["tp"] for r in ranks] == [(*p, s) for p, s in zip(pairs, (1.0, 1.0, 5.0, 5.0), strict=True)]
    assert [r["dp"][:2] + r["dp"][4:] for r in ranks] == [
        (0, 2, [0, 1], 2.0),
        (0, 2, [0, 1], 4.0),
        (1, 2, [2, 3], 2.0),
        (1, 2, [2, 3], 4.0),
    ]
    assert [r["left out"][:4] for r in ranks] == [(-1, -1, -1, -1), (0, 2, 0, 1), (-1, -1, -1, -1), (1, 2, 0, 1)]
    assert all(r["joined"] and r["alone"] and r["no graph"] and r["two meshes"] for r in ranks), ranks
    assert [r["mine"] for r in ranks] == [False, True, False, True] and all(r["two dims"] for r in ranks)
