"""torch.distributed's primitives on the group: values by their definition, gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torchshard.distributed as tsd
from tests.helpers import nightly, refused_input
from torchshard.testing import Shard, run_ranks, split

Op = tsd.ReduceOp
Primitive = Callable[[Tensor], Tensor]


def _primitives(world: int) -> dict[str, tuple[Primitive, Callable[[Sequence[Tensor], int], Tensor]]]:
    """Returns name -> (the call, a function from all ranks' inputs and a rank to its expected result)."""
    last = world - 1

    def part(x: Tensor, rank: int, dim: int = 0) -> Tensor:
        return split(x, Shard(dim), rank, world)

    def only(x: Tensor, rank: int, at: int) -> Tensor:
        return x if rank == at else torch.zeros_like(x)

    return {
        "broadcast": (lambda x: tsd.broadcast(x, last), lambda xs, r: xs[last]),
        "all_reduce sum": (tsd.all_reduce, lambda xs, r: sum(xs)),  # type: ignore[dict-item, return-value]
        "all_reduce mean": (lambda x: tsd.all_reduce(x, Op.AVG), lambda xs, r: sum(xs) / world),  # type: ignore[dict-item, return-value]
        "reduce_to": (lambda x: tsd.reduce_to(x, last), lambda xs, r: only(sum(xs), r, last)),  # type: ignore[arg-type]
        "reduce_to mean": (
            lambda x: tsd.reduce_to(x, last, Op.AVG),
            lambda xs, r: only(sum(xs) / world, r, last),  # type: ignore[arg-type, operator]
        ),
        "scatter_from": (lambda x: tsd.scatter_from(x, last, 0), lambda xs, r: part(xs[last], r)),
        "gather_to": (
            lambda x: tsd.gather_to(tsd.narrow(x, 0), last, 0),
            lambda xs, r: torch.cat([part(x, i) for i, x in enumerate(xs)]) if r == last else xs[0][:0],
        ),
        "all_gather": (
            lambda x: tsd.all_gather(tsd.narrow(x, 0), 0),
            lambda xs, r: torch.cat([part(x, i) for i, x in enumerate(xs)]),
        ),
        "reduce_scatter": (lambda x: tsd.reduce_scatter(x, 0), lambda xs, r: part(sum(xs), r)),  # type: ignore[arg-type]
        "all_to_all": (
            lambda x: tsd.all_to_all(tsd.narrow(x, 0), 0, 1),
            lambda xs, r: part(torch.cat([part(x, i) for i, x in enumerate(xs)]), r, 1),
        ),
    }


def _shared(x: Tensor) -> list[Tensor]:
    """Returns all ranks' tensors, gathered by `torch.distributed` instead of the tested functions."""
    held: list[Any] = [None] * tsd.get_group_size()
    torch.distributed.all_gather_object(held, x)
    return held


def _gradient_by_differences(call: Primitive, x: Tensor, cotangent: Tensor, rank: int) -> Tensor:
    """Returns the gradient of the sum over ranks of <result, cotangent> by this rank's input."""
    found = torch.zeros_like(x)
    for owner in range(tsd.get_group_size()):
        for i in range(x.numel()):
            losses = []
            for step in (0.5, -0.5):
                moved = x.clone()
                moved.view(-1)[i] += step if rank == owner else 0.0
                losses.append(sum(float(t) for t in _shared((call(moved) * cotangent).sum())))
            if rank == owner:
                found.view(-1)[i] = losses[0] - losses[1]
    return found


def _values_and_gradients(rank: int, shape: tuple[int, ...]) -> Iterator[tuple[str, bool]]:
    for name, (call, defined) in _primitives(tsd.get_group_size()).items():
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        kept = x.detach().clone()
        got = call(x)
        yield f"{name}: value", torch.allclose(got, defined(_shared(kept), rank), rtol=1e-14, atol=0)
        yield f"{name}: no alias", got.untyped_storage()._cdata != x.untyped_storage()._cdata
        cotangent = torch.randn(got.shape, dtype=torch.float64, generator=generator)
        (grad,) = torch.autograd.grad(got, x, cotangent, create_graph=True)
        expected = _gradient_by_differences(call, kept, cotangent, rank)
        yield f"{name}: gradient", torch.allclose(grad, expected, rtol=0, atol=1e-12)
        yield f"{name}: input kept", torch.equal(x.detach(), kept)
        strided = kept.repeat_interleave(2, -1)[..., ::2].requires_grad_()
        yield f"{name}: of strided memory", torch.equal(call(strided), got)


def _others(rank: int) -> Iterator[tuple[str, bool]]:
    world = tsd.get_group_size()
    x = torch.tensor([rank + 1, 5 - rank, 6])
    everyone = torch.stack([torch.tensor([r + 1, 5 - r, 6]) for r in range(world)])
    expected = {
        Op.PRODUCT: everyone.prod(0),
        Op.MIN: everyone.amin(0),
        Op.MAX: everyone.amax(0),
        Op.BAND: everyone[0].clone(),
        Op.BOR: everyone[0].clone(),
        Op.BXOR: everyone[0].clone(),
    }
    for row in everyone[1:]:
        expected[Op.BAND] &= row
        expected[Op.BOR] |= row
        expected[Op.BXOR] ^= row
    for op, want in expected.items():
        yield f"{op}", torch.equal(tsd.all_reduce(x.clone(), op), want)
        held = tsd.reduce_to(x.clone(), 0, op)
        yield f"{op} to one", torch.equal(held, want if rank == 0 else want * 0)
    needs = torch.ones(2, requires_grad=True)
    yield "no gradient of a maximum", refused_input(lambda: tsd.all_reduce(needs, Op.MAX), "no gradient")
    yield "no mean of integers", refused_input(lambda: tsd.all_reduce(x, Op.AVG), "mean of torch.int64")
    yield "no such rank", refused_input(lambda: tsd.broadcast(x, world), f"no rank {world} in the group")
    yield "not to itself", refused_input(lambda: tsd.send(x, rank), "can't send to itself")
    tsd.barrier()
    if world > 1:
        after, before = (rank + 1) % world, (rank - 1) % world
        sent, got = tsd.isend(x.float()[::2], after), tsd.irecv((2,), before)
        yield "around the ring", torch.equal(got.wait(), everyone[before].float()[::2]) and sent.wait() is not None
        yield "completed", sent.is_completed() and got.is_completed()
        if rank == 0:
            tsd.send(x, 1)
        if rank == 1:
            yield "from one to another", torch.equal(tsd.recv(x, 0), everyone[0])


def _all(rank: int, shape: tuple[int, ...], group_size: int) -> list[str]:
    tsd.init_process_group(group_size)
    own = tsd.get_rank()
    found = [*_others(own)] if group_size != -1 else [*_values_and_gradients(own, shape), *_others(own)]
    return [what for what, holds in found if not holds]


@nightly("3-*")
@pytest.mark.parametrize("world, shape", [(1, (3, 2)), (2, (5, 3)), (3, (2, 4)), (3, (7, 1))])
def test_primitives(world: int, shape: tuple[int, ...]) -> None:
    assert run_ranks(_all, world, shape, -1) == [[]] * world


def test_ranks_count_within_the_group() -> None:
    assert run_ranks(_all, 4, (2, 2), 2) == [[]] * 4


def test_alone() -> None:
    for name, (call, defined) in _primitives(1).items():
        x = torch.randn(3, 2)
        assert torch.equal(call(x), defined([x], 0)), name


def _filled(rank: int) -> dict[str, bool]:
    """Functions that fill a tensor in `torch.distributed` fill it here too, for ported programs."""
    tsd.init_process_group()
    x, found = torch.full((3,), float(rank)), {}
    found["broadcast"] = tsd.broadcast(x, 1) is x and bool((x == 1).all())
    x = torch.full((2, 3), rank + 1.0).t()
    found["all_reduce"] = tsd.all_reduce(x) is x and bool((x == 3).all())
    x = torch.full((3,), rank + 1.0)
    found["maximum"] = tsd.all_reduce(x, Op.MAX) is x and bool((x == 2).all())
    x = torch.full((3,), rank + 1.0)
    handle = tsd.all_reduce(x, async_op=True)
    found["asynchronously"] = handle.wait() is x and bool((x == 3).all())
    x = torch.full((3,), rank + 1.0)
    tsd.reduce_to(x, 0)
    found["reduce_to"] = bool((x == (3 if rank == 0 else 2)).all())
    x = torch.zeros(2, 3).t() if rank else torch.ones(3, 2)
    found["recv"] = tsd.send(x, 1) is None if rank == 0 else tsd.recv(x, 0) is x and bool((x == 1).all())
    needs = torch.full((3,), float(rank), requires_grad=True)
    found["not where a gradient flows"] = bool((tsd.broadcast(needs, 1) == 1).all() and (needs == rank).all())
    with torch.no_grad():
        found["without gradients"] = tsd.broadcast(needs, 1) is needs and bool((needs == 1).all())
    wide = torch.zeros(1).expand(3)
    found["one element in memory"] = refused_input(lambda: tsd.broadcast(wide, 0), "can't be filled")
    for name in ("reduce", "all_reduce", "gather", "copy", "broadcast", "reduce_to", "scatter_from", "isend"):
        call = getattr(tsd, name)
        args = (1 - rank,) if name == "isend" else ()
        found[f"{name} of a list"] = refused_input(lambda: call([1, 2], *args), f"{name} takes a tensor, not a list")  # noqa: B023
        sparse = torch.eye(2).to_sparse()
        found[f"{name}, sparse"] = refused_input(lambda: call(sparse, *args), f"{name} takes a dense tensor")  # noqa: B023
    return found


def test_what_torch_distributed_fills_is_filled() -> None:
    for found in run_ranks(_filled, 2):
        assert all(found.values()), found
