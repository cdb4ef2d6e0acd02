"""Weights in files: each rank reads only its slices, converted to the model's names and shapes."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import refused
from torchshard.core.layouts import Shard
from torchshard.core.mesh import MODEL, MeshAxis
from torchshard.core.sharding import Sharding
from torchshard.weights.lazy import LazyTensor
from torchshard.weights.materialize import read_slices
from torchshard.weights.parts import READERS, Parts, Wanted
from torchshard.weights.progress import Progress
from torchshard.weights.recording import file_tensor
from torchshard.weights.safetensors_files import INDEX, tensors_in, tensors_of
from torchshard.weights.tape import Tape

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


# --- parts of tensors ------------------------------------------------------------------------------------------------


def _boxes(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    ends = [st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda pair: (min(pair), max(pair))) for n in shape]
    return st.tuples(*ends)


def _cut(tensor: Tensor, box: tuple[tuple[int, int], ...]) -> Tensor:
    return tensor[tuple(slice(*ends) for ends in box)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_a_part_of_a_file_is_that_part_of_the_tensor(
    data: st.DataObject, shape: tuple[int, ...], tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    whole = torch.randn(shape, dtype=torch.float64)
    save_file({"first": torch.ones(3), "w": whole}, path)
    box, spare = data.draw(_boxes(shape)), data.draw(st.sampled_from([0, 100, 10_000]))
    for dtype in (torch.float64, torch.float16):
        into = torch.empty(_cut(whole, box).shape, dtype=dtype)
        tensors_in(path)["w"].prefetch(box)
        assert 0 <= tensors_in(path)["w"].read(box, into, (), spare) - into.numel() * 8 <= spare
        assert torch.equal(into, _cut(whole, box).to(dtype))


def test_short_runs_are_read_together_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"thin": torch.randn(3000, 4), "wide": torch.randn(3000, 512)}
    save_file(held, tmp_path / "model.safetensors")
    tape, calls, preadv = Tape(), list[int](), os.preadv

    def counted(*args: Any) -> int:
        calls.append(preadv(*args))
        return calls[-1]

    monkeypatch.setattr(os, "preadv", counted)
    lazies = {name: file_tensor(tape, file) for name, file in tensors_of(tmp_path).items()}
    for names, few in ((("thin",), False), (("thin", "wide"), True)):
        calls.clear()
        found = dict[str, Tensor]()
        wanted = {name: lazies[name] for name in names}
        words = {"thin": Sharding.of((MeshAxis(2), Shard(1))), "wide": Sharding.of((MeshAxis(2), Shard(0)))}
        read = read_slices(wanted, words, {MODEL: 1}, found.__setitem__)
        assert torch.equal(found["thin"], held["thin"][:, 2:]) and (len(calls) < 10) is few
        assert sum(calls) == read.bytes_read == read.bytes_kept + read.bytes_over <= read.bytes_kept * 1.02
        assert (read.bytes_over > 0) is few


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cat": lambda a, b: torch.cat([a, b, a], 1),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "cast": lambda a, b: a.to(torch.float16).to(torch.float32),
    "slice": lambda a, b: a[1:, -3:],
    "select": lambda a, b: a[-1],
    "split": lambda a, b: torch.cat([a.split([1, 3])[1], b.chunk(2)[1]]),
    "unbind": lambda a, b: a.unbind(1)[2],
    "unsqueeze": lambda a, b: a.unsqueeze(1),
    "squeeze": lambda a, b: torch.cat([b[1:2].squeeze(0), a[2:3].squeeze(1).squeeze(0)]),
    "transposed": lambda a, b: torch.cat([a.t(), b.transpose(0, 1), a.permute(1, 0)]),
    "experts": lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], 1).transpose(1, 2).contiguous(),
    "parameter": lambda a, b: nn.Parameter(a).data.detach().clone(),
    "copied": lambda a, b: torch.empty(4, 6).copy_(b)[1:3],
    "copied twice": lambda a, b: torch.zeros(4, 6).copy_(a).copy_(b.half()),
}


@pytest.mark.parametrize("kind", OPS)
def test_a_part_of_an_op_is_that_part_of_its_result(kind: str, tmp_path: Path) -> None:
    held = {"a": torch.randn(4, 6), "b": torch.randn(4, 6)}
    save_file(held, tmp_path / "model.safetensors")
    expected, tape = OPS[kind](**held), Tape()
    lazies = [file_tensor(tape, file) for _, file in sorted(tensors_of(tmp_path).items())]
    with torch.no_grad(), ts.lazy():
        made = OPS[kind](*lazies) if not kind.startswith("copied") else None
    if made is None:
        with torch.no_grad():
            empty = lazies[0].clone().zero_()
            made = empty.copy_(lazies[1])[1:3] if kind == "copied" else empty.copy_(lazies[0]).copy_(lazies[1].half())
    assert isinstance(made, LazyTensor) and made.shape == expected.shape
    for box in itertools.product(*([(0, n), (n // 2, n), (0, 1), (1, 1)] for n in made.shape)):
        into = torch.full(_cut(expected, box).shape, torch.nan)
        reads = Parts(tape).reads(Wanted(made.slot, box, into))
        assert reads is not None
        read = sum(part.run() for part in reads)
        assert read == into.numel() * 4 and torch.equal(into, _cut(expected, box)), box


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_tensor_with_constants_is_computed(join: Any, is_first: bool, tmp_path: Path) -> None:
    save_file({"a": torch.randn(4, 6)}, tmp_path / "model.safetensors")
    tape = Tape()
    (a,) = (file_tensor(tape, file) for _, file in tensors_of(tmp_path).items())
    constant = torch.ones(4, 6)
    made = join([constant, a] if is_first else [a, constant])
    box = tuple((0, n) for n in made.shape)
    assert Parts(tape).reads(Wanted(made.slot, box, torch.empty(made.shape))) is None
    assert torch.equal(made.value(), join([constant, a.value()] if is_first else [a.value(), constant]))


def test_every_reader_is_tried(tmp_path: Path) -> None:
    save_file({"a": torch.randn(4, 6), "b": torch.randn(4, 6)}, tmp_path / "model.safetensors")
    tape = Tape()
    lazies = [file_tensor(tape, file) for _, file in sorted(tensors_of(tmp_path).items())]
    for make in OPS.values():
        with torch.no_grad():
            make(*lazies)
    by_dispatch = {"lift_fresh", "_unsafe_view", "view", "clone", "alias", "t"}  # PyTorch chooses among these
    seen = {entry.op for entry in tape.entries}
    assert {op.overloadpacket.__name__ for op in READERS if op not in seen} <= by_dispatch


def test_memory_that_was_changed_in_place_is_computed_whole(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    tape = Tape()
    lazy = file_tensor(tape, tensors_of(tmp_path)["a"])
    doubled, view = lazy.clone(), lazy.clone()
    doubled.mul_(2)
    view[1:].copy_(lazy[1:])
    for changed in (doubled, view):
        assert Parts(tape).reads(Wanted(changed.slot, ((0, 2),), torch.empty(2))) is None


def _torn(path: Path, header: Any, data: int = 0) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def _entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


BROKEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda p: p.write_bytes(b""),
    "length": lambda p: p.write_bytes((10**18).to_bytes(8, "little") + b"{}"),
    "no json": lambda p: _torn(p, b"\x80pickle"),
    "deep": lambda p: _torn(p, b"[" * 100_000),
    "list": lambda p: _torn(p, [1]),
    "twice": lambda p: _torn(p, b'{"w": {}, "w": {}}'),
    "fields": lambda p: _torn(p, {"w": {"dtype": "F32"}}, 8),
    "dtype": lambda p: _torn(p, _entry(dtype="F31"), 8),
    "negative": lambda p: _torn(p, _entry(shape=[-2]), 8),
    "offsets": lambda p: _torn(p, _entry(data_offsets=[0, 12]), 8),
    "torn": lambda p: _torn(p, _entry(), 4),
    "longer": lambda p: _torn(p, _entry(), 12),
    "overlap": lambda p: _torn(p, _entry() | {"v": _entry()["w"]}, 8),
    "huge": lambda p: _torn(p, _entry(shape=[2**62, 4]), 8),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused(kind: str, tmp_path: Path) -> None:
    BROKEN[kind](tmp_path / "model.safetensors")
    said = "model.safetensors is not a safetensors file that can be read"
    assert refused(lambda: tensors_of(tmp_path), said, ts.InputError)


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors")
    tensor = tensors_of(tmp_path)["w"]
    os.truncate(tmp_path / "model.safetensors", 90)
    assert refused(lambda: tensor(), "model.safetensors was changed while it was read", ts.InputError)


def test_a_file_that_is_replaced_by_one_of_its_size(tmp_path: Path) -> None:
    save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors")
    tensor = tensors_of(tmp_path)["w"]
    save_file({"w": torch.zeros(8)}, tmp_path / "other.safetensors")
    os.replace(tmp_path / "other.safetensors", tmp_path / "model.safetensors")
    assert refused(lambda: tensor(), "model.safetensors was changed while it was read", ts.InputError)


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "none.safetensors"])
def test_an_index_that_points_elsewhere_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    assert refused(lambda: tensors_of(tmp_path), "the index of the weights can't be used", ts.InputError)


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    assert refused(lambda: tensors_of(tmp_path), "pytorch_model.bin may run code", ts.InputError)


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, rank, shown in ((True, 0, True), (False, 0, False), (True, 1, False)):
        written = io.StringIO()
        written.isatty = lambda terminal=terminal: terminal  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stderr", written)
        monkeypatch.setattr("time.monotonic", lambda: 0.0)
        bar = Progress("reading weights", rank, 4 << 30)
        bar.show(1 << 30)  # too early
        monkeypatch.setattr("time.monotonic", lambda: 9.0)
        bar.show(1 << 30)
        bar.show(2 << 30)  # too soon after it
        bar.end()
        assert written.getvalue() == shown * "\rreading weights  #####---------------  1.00 of 4.00 GiB\n"
