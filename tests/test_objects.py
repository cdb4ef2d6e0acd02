"""Any data between the ranks: what goes in comes out, with and without pickle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchshard as ts
import torchshard.distributed as tsd
from torchshard.distributed.objects import decode, encode
from torchshard.testing import run_ranks

_plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_hashable = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
_any = st.recursive(
    _plain,
    lambda inner: st.lists(inner) | st.dictionaries(_hashable, inner) | st.sets(_hashable) | st.tuples(inner, inner),
)


def _spelt(data: Any) -> Any:
    """Equal for equal data of equal types: True is not 1, and a list no tuple."""
    if isinstance(data, dict):
        return "dict", [(_spelt(k), _spelt(v)) for k, v in data.items()]
    if isinstance(data, (list, tuple, set)):
        items = [_spelt(item) for item in data]
        return type(data).__name__, sorted(items, key=repr) if isinstance(data, set) else items
    return type(data).__name__, repr(data)


@pytest.mark.nightly
@given(_any)
@settings(max_examples=300, deadline=None)
def test_objects_arrive_as_they_were_sent(data: Any) -> None:
    assert _spelt(decode(encode(data, allow_pickle=False), allow_pickle=False)) == _spelt(data)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool,
          torch.complex64, torch.float8_e4m3fn]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)], ids=str)
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    conjugate = x.conj() if dtype.is_complex else x
    for value in (x, conjugate, x.mT if x.ndim > 1 else x, x[::2] if x.ndim else x):
        got = decode(encode({"x": [value]}, allow_pickle=False), allow_pickle=False)["x"][0]
        assert got.dtype == dtype and got.shape == value.shape
        assert torch.equal(
            got.float() if dtype.is_floating_point else got, value.float() if dtype.is_floating_point else value
        )


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3), np.array(["a", "bc"]), np.float32(2.5), np.zeros((0, 2))]
)
def test_arrays(array: Any) -> None:
    got = decode(encode(array, allow_pickle=False), allow_pickle=False)
    assert np.array_equal(got, array) and got.dtype == array.dtype and got.shape == array.shape
    assert type(got) is type(array)


@dataclass
class _Point:
    x: int


@pytest.mark.parametrize("data", [_Point(1), np.array([None]), [1, {"a": _Point(2)}], torch.nn.Linear(1, 1), print])
def test_what_would_be_pickled_is_refused_both_ways(data: Any) -> None:
    with pytest.raises(ts.InputError, match="as a pickle"):
        encode(data, allow_pickle=False)
    with pytest.raises(ts.InputError, match="as a pickle"):
        decode(encode(data, allow_pickle=True), allow_pickle=False)


def test_alone() -> None:
    data = [_Point(1)]
    assert tsd.all_gather_object(data) == tsd.gather_object(data) == [data] and tsd.broadcast_object(data) is data
    assert torch.equal(tsd.all_gather_uneven(torch.ones(2))[0], torch.ones(2))


def _objects(rank: int) -> dict[str, Any]:
    tsd.init_process_group()
    data = {
        "rank": rank,
        "text": "x" * rank * 1000,
        "tensor": torch.full((rank, 2), float(rank)),
        "point": _Point(rank),
    }
    found: dict[str, Any] = {}
    with torch.inference_mode(bool(rank % 2)):
        found["all"] = tsd.all_gather_object(data)
        found["one"] = tsd.gather_object(data, dst=1)
        found["from"] = tsd.broadcast_object(data if rank == 1 else None, src=1)
        found["plain"] = tsd.all_gather_object((rank, [None]), allow_pickle=False)
        found["uneven"] = tsd.all_gather_uneven(torch.full((rank, 2 + rank), rank, dtype=torch.int32))
    try:
        tsd.all_gather_uneven(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    except ts.InputError as error:
        found["dtypes"] = str(error)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_between_ranks(world: int) -> None:
    for rank, found in enumerate(run_ranks(_objects, world)):
        for held in (found["all"], found["one"] if rank == 1 else found["all"]):
            assert [d["rank"] for d in held] == list(range(world))
            assert [d["point"] for d in held] == [_Point(r) for r in range(world)]
            assert all(torch.equal(d["tensor"], torch.full((r, 2), float(r))) for r, d in enumerate(held))
        assert (found["one"] is None) == (rank != 1) and found["from"]["text"] == "x" * 1000
        assert found["plain"] == [(r, [None]) for r in range(world)]
        assert [u.tolist() for u in found["uneven"]] == [[[r] * (2 + r)] * r for r in range(world)]
        assert "rank 0: torch.float32; rank 1: torch.float64" in found["dtypes"]


def test_no_gradient_is_lost_silently() -> None:
    with pytest.raises(ts.InputError, match="has no gradient"):
        tsd.all_gather_uneven(torch.ones(2, requires_grad=True))
