"""Groups of ranks, and the functions of torchshard.distributed: on real ranks, alone, compiled and exported."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import in_groups_of, nightly
from torchshard import S
from torchshard.testing import run_ranks, split

_ops = torch.ops.torchshard
UNSENT = (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn)
"""Dtypes that gloo does not send."""


def _public(rank: int, world: int) -> dict[str, bool]:
    """The public functions: negative dims, sizes that are inferred, and sizes that are given for uneven splits."""
    whole, even = torch.arange(10.0).reshape(2, 5), torch.arange(24.0).reshape(2, 12)
    mine, slice_ = split(whole, S(1), rank, world), split(even, S(1), rank, world)
    addend = whole * (rank + 1)
    total = whole * sum(range(1, world + 1))
    return {
        "scatter": torch.equal(tsd.scatter(whole), mine),
        "narrow": torch.equal(tsd.narrow(whole, 1), mine),
        "gather": torch.equal(tsd.gather(slice_), even),
        "gather uneven": torch.equal(tsd.gather(mine, -1, size=5), whole),
        "all_gather": torch.equal(tsd.all_gather(slice_, 1), even),
        "all_gather uneven": torch.equal(tsd.all_gather(mine, size=5), whole),
        "reduce": torch.equal(tsd.reduce(addend.clone()), total),  # in place, since no gradient is needed
        "all_reduce": torch.equal(tsd.all_reduce(addend.clone()), total),  # in place too
        "copy": torch.equal(tsd.copy(whole), whole),
        "reduce_scatter": torch.equal(tsd.reduce_scatter(addend), split(total, S(1), rank, world)),
        "all_to_all": torch.equal(tsd.all_to_all(mine, -1, 0, size=5), split(whole, S(0), rank, world)),
        "dim=None": tsd.gather(whole, None) is whole and tsd.scatter(whole, None) is whole,
        "place": (tsd.get_rank(), tsd.get_group_size(), tsd.get_world_size()) == (rank, world, world),
        "group": dist.get_rank(tsd.get_group()) == rank,
    }


def _dtypes(rank: int, world: int) -> dict[str, bool]:
    """Gathers, sums and broadcasts values of other dtypes than floats, too."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, *UNSENT):
        whole = (torch.arange(10).reshape(5, 2) % 3).to(dtype)
        mine = split(whole, S(0), rank, world)
        plain, total = whole.double(), whole.double() * world
        found[f"gather {dtype}"] = torch.equal(tsd.gather(mine, 0, size=5).double(), plain)
        found[f"broadcast {dtype}"] = torch.equal(
            tsd.broadcast(whole.clone() if rank == 0 else torch.zeros_like(whole)).double(), plain
        )
        found[f"scatter_from {dtype}"] = torch.equal(tsd.scatter_from(whole, 0, 0).double(), mine.double())
        if dtype is not torch.bool:
            found[f"reduce {dtype}"] = torch.equal(tsd.reduce(whole.clone()).double(), total)
            own = split(total, S(0), rank, world)
            found[f"reduce_scatter {dtype}"] = torch.equal(tsd.reduce_scatter(whole, 0).double(), own)
            to_one = tsd.reduce_to(whole.clone(), 0).double()
            found[f"reduce_to {dtype}"] = torch.equal(to_one, total if rank == 0 else total * 0)
    return found


def _bits(rank: int) -> dict[str, bool]:
    """Sends values of dtypes that backends don't send, and uint64 values beyond int64."""
    tsd.init_process_group()
    own = torch.tensor([2**63 + rank, 5 - rank], dtype=torch.uint64)
    most, least = (tsd.all_reduce(own.clone(), op).tolist() for op in (tsd.ReduceOp.MAX, tsd.ReduceOp.MIN))
    found = {"MAX of uint64": most == [2**63 + 1, 5], "MIN of uint64": least == [2**63, 4]}
    for dtype in UNSENT:
        pieces = tsd.all_gather_uneven(torch.full((1 + rank,), 3, dtype=torch.int32).to(dtype))
        found[f"all_gather_uneven {dtype}"] = [p.double().tolist() for p in pieces] == [[3.0], [3.0, 3.0]]
    return found


def test_bits_of_dtypes_that_backends_do_not_send() -> None:
    for found in run_ranks(_bits, 2):
        assert all(found.values()), found


class Block(nn.Module):
    """Hand-written column- and row-parallel layers, and a gather of a scattered value."""

    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(tsd.copy(x) @ self.up.T)
        return tsd.reduce(hidden @ self.down.T) + tsd.gather(tsd.scatter(x, -1) * 2, -1, size=x.shape[-1])


def _weights() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 5), (5, 12), (3, 5)]
    up, down, x = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return up, down, x


def _grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    (model(x) ** 2).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def _exported(rank: int) -> bool:
    """Whether the reloaded program's gradients equal the unsharded layer's, computed by plain ops."""
    world, (up, down, x) = tsd.get_group_size(), _weights()
    block = Block(split(up, S(0), rank, world).clone(), split(down, S(1), rank, world).clone())
    held = io.BytesIO()
    torch.export.save(torch.export.export(block, (x,)), held)
    held.seek(0)
    got = _grads(torch.export.load(held).module(), x)
    wholes = [t.clone().requires_grad_() for t in (x, up, down)]
    out = torch.relu(wholes[0] @ wholes[1].T) @ wholes[2].T + 2 * wholes[0]
    dx, dup, ddown = torch.autograd.grad((out**2).sum(), wholes)
    expected = [dx, split(dup, S(0), rank, world), split(ddown, S(1), rank, world)]
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(got, expected, strict=True))


def _in_all_groups(rank: int, sizes: tuple[int, ...]) -> dict[Any, Any]:
    """Runs the functions in groups of each size; four ranks also test the groups themselves."""
    return in_groups_of(rank, _functions, sizes) | (_groups(rank) if 2 in sizes else {})


def _functions(rank: int, size: int) -> dict[str, Any]:
    return {"public": _public(rank, size), "dtypes": _dtypes(rank, size), "exported": _exported(rank)}


@pytest.fixture(scope="module")
def four() -> list[dict[Any, Any]]:
    """The results of four ranks, in pairs and all together."""
    return run_ranks(_in_all_groups, 4, (2, 4))


@pytest.fixture(scope="module")
def three() -> list[dict[Any, Any]]:
    """The results of three ranks."""
    return run_ranks(_in_all_groups, 3, (3,))


@nightly("four-*")
@pytest.mark.parametrize(("ranks", "world"), [("four", 2), ("three", 3), ("four", 4)])
def test_functions_on_real_ranks(ranks: str, world: int, request: pytest.FixtureRequest) -> None:
    for found in request.getfixturevalue(ranks):
        result = found[world]
        assert all(result["public"].values()), result["public"]
        assert all(result["dtypes"].values()), result["dtypes"]
        assert result["exported"]


def _groups(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        tsd.init_process_group(group_size=3)
    except ts.DistributedError as error:
        found["does not divide"] = str(error)
    found["after the error"] = tsd.is_initialized()
    tsd.init_process_group(group_size=2)
    found["pair"] = (tsd.get_rank(), tsd.get_group_size(), dist.get_process_group_ranks(tsd.get_group()))
    found["sum"] = tsd.reduce(torch.tensor(float(rank))).item()
    found["gathered"] = tsd.gather(torch.tensor([rank])).tolist()
    tsd.destroy_process_group()
    found["torch.distributed is left alone"] = dist.is_initialized() and not tsd.is_initialized()
    tsd.init_process_group(group_size=1)
    found["alone"] = tsd.reduce(torch.tensor(float(rank))).item()
    tsd.destroy_process_group()
    tsd.init_process_group()
    found["all"] = tsd.reduce(torch.tensor(float(rank))).item()
    return found


@pytest.mark.nightly
def test_groups_of_two_of_four_ranks(four: list[dict[Any, Any]]) -> None:
    for rank, found in enumerate(four):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["does not divide"] == (
            "a world of 4 ranks does not divide into groups of 3\n"
            "  where: init_process_group(group_size=...)\n"
            "  why:   4 / 3 is not whole\n"
            "  try:   a group_size among [1, 2, 4], or -1 for all"
        )
        assert not found["after the error"]
        assert found["pair"] == (rank % 2, 2, pair)
        assert (found["sum"], found["gathered"]) == (sum(pair), pair)
        assert found["torch.distributed is left alone"]
        assert (found["alone"], found["all"]) == (rank, 6.0)


def _fails(rank: int) -> int:
    if rank == 1:
        raise ValueError("a rank of two")
    return rank


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1:\n[\s\S]*ValueError: a rank of two"):
        run_ranks(_fails, 2)


def test_without_a_group_everything_is_its_input() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    calls = [tsd.copy, tsd.reduce, tsd.all_reduce, tsd.gather, tsd.scatter, tsd.all_gather, tsd.narrow]
    assert all(call(x) is x for call in [*calls, tsd.reduce_scatter, lambda t: tsd.all_to_all(t, 0, 1)])
    assert (tsd.get_rank(), tsd.get_group_size(), tsd.get_world_size(), tsd.is_initialized()) == (0, 1, 1, False)
    with pytest.raises(ts.DistributedError, match="there is no model-parallel group in this process") as caught:
        tsd.get_group()
    assert "try:   call torchshard.distributed.init_process_group() first" in str(caught.value)
    with pytest.raises(ts.DistributedError, match="group 'model'"):
        _ops.copy(x, "model")


def test_a_single_process_is_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for _ in range(2):
        tsd.init_process_group()
        assert (tsd.get_rank(), tsd.get_group_size(), tsd.get_group()) == (0, 1, None)
        assert not dist.is_initialized()
        tsd.destroy_process_group()
        assert not tsd.is_initialized()


def test_initialising_twice_is_an_error_and_after_a_destroy_it_is_not() -> None:
    tsd.init_process_group()
    with pytest.raises(ts.DistributedError, match="is initialised already") as caught:
        tsd.init_process_group()
    assert "why:   this process is rank 0 of 1" in str(caught.value)
    tsd.destroy_process_group()
    tsd.init_process_group()
    tsd.destroy_process_group()
    tsd.destroy_process_group()


@pytest.mark.parametrize(("size", "why"), [(2, "1 / 2 is not whole"), (0, "at least one rank"), (-2, "at least one")])
def test_a_group_size_that_does_not_divide(size: int, why: str) -> None:
    with pytest.raises(
        ts.DistributedError, match=f"a world of 1 ranks does not divide into groups of {size}"
    ) as caught:
        tsd.init_process_group(group_size=size)
    assert why in str(caught.value) and not tsd.is_initialized()
    tsd.init_process_group(group_size=1)


def test_under_a_launcher_it_begins_and_ends_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ts.DistributedError, match="does not divide"):
        tsd.init_process_group(group_size=2, backend="gloo")
    assert not dist.is_initialized()
    tsd.init_process_group(backend="gloo")
    assert dist.is_initialized() and tsd.get_group() is dist.group.WORLD
    tsd.destroy_process_group()
    assert not dist.is_initialized()


def test_compile_sees_one_graph_with_the_right_gradients() -> None:
    """The compiled block's results and gradients equal the block's."""
    tsd.init_process_group()
    up, down, x = _weights()
    block, compiled = (Block(up.clone(), down.clone()) for _ in range(2))
    fn = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    assert torch.allclose(fn(x), block(x))
    for got, expected in zip(_grads_through(fn, compiled, x), _grads(block, x), strict=True):
        assert torch.allclose(got, expected)


def _grads_through(fn: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    (fn(x) ** 2).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def test_an_exported_program_shows_its_collectives_by_name() -> None:
    tsd.init_process_group()
    up, down, x = _weights()
    program = torch.export.export(Block(up, down), (x,))
    names = [str(n.target) for n in program.graph.nodes if str(n.target).startswith("torchshard")]
    assert names == [f"torchshard.{n}.default" for n in ("copy", "reduce", "scatter", "gather")]
    assert _exported(0)
