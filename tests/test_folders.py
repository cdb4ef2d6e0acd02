"""Weights in files: each rank reads its slices, converted to the model's names and shapes, and nothing else."""

from __future__ import annotations

import io
import itertools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly, refused
from torchshard.core.layouts import Shard
from torchshard.core.mesh import MODEL, MeshAxis
from torchshard.core.words import word
from torchshard.testing import gradient_error, run_ranks
from torchshard.weights.lazy import LazyTensor, file_tensor
from torchshard.weights.materialize import read_slices
from torchshard.weights.parts import READERS, Parts, Wanted
from torchshard.weights.progress import Progress
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
        words = {"thin": word((MeshAxis(2), Shard(1))), "wide": word((MeshAxis(2), Shard(0)))}
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


def test_every_reader_is_tried(tmp_path: Path) -> None:
    save_file({"a": torch.randn(4, 6), "b": torch.randn(4, 6)}, tmp_path / "model.safetensors")
    tape = Tape()
    lazies = [file_tensor(tape, file) for _, file in sorted(tensors_of(tmp_path).items())]
    for make in OPS.values():
        with torch.no_grad():
            make(*lazies)
    by_dispatch = {"lift_fresh", "_unsafe_view", "view", "clone", "alias", "t"}  # which of these, is PyTorch's choice
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


# --- models ----------------------------------------------------------------------------------------------------------


def _llama(**more: Any) -> Any:
    sizes = SIZES | {"num_key_value_heads": 2, "vocab_size": 50} | more
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "tied": lambda: _llama(tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_key_value_heads=2, vocab_size=50)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SIZES, num_key_value_heads=2, vocab_size=50, pad_token_id=0)
    ),
}


def _saved(kind: str, folder: Path) -> None:
    torch.manual_seed(0)
    MODELS[kind]().save_pretrained(folder, max_shard_size="40KB")


def _loads(rank: int, kind: str, folder: str, way: str) -> list[Any]:
    ts.distributed.init_process_group()
    expected = type(MODELS[kind]()).from_pretrained(folder).eval()
    torch.manual_seed(7)
    if way == "lazy":
        with ts.lazy():
            model = MODELS[kind]().eval()
    else:
        model = MODELS[kind]().eval()
    call = {"input_ids": torch.arange(16).reshape(2, 8), "use_cache": False}
    sharded = ts.shard(model, "auto", (), call, weights=folder)
    whole, weights = sharded.full_state_dict(), sharded.weights
    assert weights is not None
    same = [torch.equal(whole[name], tensor) for name, tensor in expected.state_dict().items()]
    own = sum(p.numel() * p.itemsize for p in sharded.parameters())
    near = torch.allclose(sharded(**call).logits, expected(**call).logits, atol=1e-5)
    untouched = way == "lazy" or not torch.equal(model.lm_head.weight, expected.lm_head.weight)
    return [all(same), near, weights.read.bytes_read / own, weights.missing, weights.unused, untouched, str(weights)]


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "way"), [(2, "real"), (3, "lazy")])
@pytest.mark.parametrize("kind", MODELS)
def test_a_folder_gives_what_from_pretrained_gives(kind: str, world: int, way: str, tmp_path: Path) -> None:
    _saved(kind, tmp_path)
    for same, near, read, missing, unused, untouched, line in run_ranks(_loads, world, kind, str(tmp_path), way):
        assert same and near and untouched, (same, near, untouched)
        assert read == 1 and missing == () and unused == (), (read, missing, unused)
        assert "whole" not in line and "largest buffer 0.0 MiB" in line and "0 missing, 0 unused" in line


def _pretrained(rank: int, folder: str, dtype: str | None) -> list[Any]:
    ts.distributed.init_process_group()
    expected: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    call = {"input_ids": torch.arange(16).reshape(2, 8), "use_cache": False}
    torch.manual_seed(rank)  # what the constructor draws is replaced, and may differ
    sharded = ts.from_pretrained(folder, "auto", example_kwargs=call, dtype=dtype)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    whole = sharded.full_state_dict()
    same = [torch.equal(whole[n], t) and whole[n].dtype == t.dtype for n, t in expected.state_dict().items()]
    buffers = [torch.equal(dict(sharded.named_buffers())[n], t) for n, t in expected.named_buffers()]
    near = torch.allclose(sharded(**call).logits, expected(**call).logits, atol=1e-5 if dtype is None else 3e-2)
    loss, wanted = (m(**call, labels=call["input_ids"]).loss for m in (sharded, expected))
    loss.backward()
    wanted.backward()
    assert any(p.is_split for p in sharded.parameters())
    near = near and gradient_error(sharded, expected) < (1e-5 if dtype is None else 3e-2)
    return [all(same), all(buffers), near, sharded.training, sharded.config.model_type, drawn.shape]


@nightly(but=["tied-None"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("kind", ["tied", "mixtral", "phi3"])
def test_from_pretrained_is_transformers_model(kind: str, dtype: str | None, tmp_path: Path) -> None:
    _saved(kind, tmp_path)
    for same, buffers, near, training, family, _ in run_ranks(_pretrained, 2, str(tmp_path), dtype):
        assert same and buffers and near and not training, (same, buffers, near, training)
        assert family in {"llama", "mixtral", "phi3"}


def _not_pretrained(rank: int, folder: str, dtype: str | None) -> str:
    try:
        ts.from_pretrained(folder, dtype=dtype, example_inputs=(torch.zeros(1, 4).long(),))
    except ts.InputError as error:
        return str(error)
    return "loaded"


def _config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@nightly("*class", "no file", "other sizes")
@pytest.mark.parametrize(
    ("change", "dtype", "expected"),
    [
        (lambda folder: (folder / "config.json").unlink(), None, "config.json can't be used"),
        (_config(architectures=["NoSuchModel"]), None, "has no model 'NoSuchModel'"),
        (_config(architectures=["AutoConfig"]), None, "has no model 'AutoConfig'"),
        (_config(quantization_config={"quant_method": "gptq", "bits": 4}), None, "its weights are quantised"),
        (_config(hidden_size=32), None, "another shape"),
        (lambda folder: None, "int8", "invalid dtype 'int8'"),
        (lambda folder: next(folder.glob("*-00001-*")).unlink(), None, "the index of the weights can't be used"),
    ],
    ids=["no config", "unknown class", "no model class", "quantised", "other sizes", "dtype", "no file"],
)
def test_a_folder_without_a_model_is_refused(change: Any, dtype: str | None, expected: str, tmp_path: Path) -> None:
    _saved("llama", tmp_path)
    change(tmp_path)
    for said in run_ranks(_not_pretrained, 2, str(tmp_path), dtype):
        assert expected in said or "does not fit" in said, said


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu()) * self.scale
        return result


def _loads_plain(rank: int, folder: str, way: str) -> list[Any]:
    ts.distributed.init_process_group()
    with torch.device("meta" if way == "meta" else "cpu"):
        model = _Plain().to(torch.float64 if way == "cast" else torch.float32)
    x = torch.randn(4, 8, dtype=torch.float64 if way == "cast" else torch.float32)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sharded = ts.shard(model, {"up": "column", "down": "row"}, None if way == "later" else (x,), weights=folder)
    whole = sharded.full_state_dict()
    return [{n: t.double() for n, t in whole.items()}, [str(w.message) for w in told], sharded(x).shape]


@nightly("3-*")
@pytest.mark.parametrize("way", ["meta", "cast", "later"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_plain_model_gets_its_weights(way: str, world: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    saved = _Plain()
    save_file(saved.state_dict(), tmp_path / "any.safetensors")
    for whole, told, _ in run_ranks(_loads_plain, world, str(tmp_path), way):
        assert not [line for line in told if "missing" in line]
        assert all(torch.equal(whole[name], tensor.double()) for name, tensor in saved.state_dict().items())


def _refused_by(rank: int, folder: str) -> str:
    ts.distributed.init_process_group()
    try:
        ts.shard(_Plain(), "auto", (torch.randn(4, 8),), weights=f"{folder}/{rank}" if "each" in folder else folder)
    except ts.ShardError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def _written(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    save_file(change(_Plain().state_dict()), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s | {"up.weight": torch.ones(8, 12)}, "'up.weight' has another shape than the model's"),
        (lambda s: s | {"up.bias": torch.ones(12).int()}, "'up.bias' has another dtype than the model's"),
        (lambda s: {f"other.{n}": t for n, t in s.items()}, "the weights are another model's"),
    ],
    ids=["shape", "dtype", "names"],
)
def test_another_models_weights_are_refused(change: Any, expected: str, tmp_path: Path) -> None:
    folder = _written(tmp_path, change)
    for said in run_ranks(_refused_by, 2, str(folder)):
        assert expected in said and str(folder) in said


def test_different_files_on_the_ranks_are_told(tmp_path: Path) -> None:
    _written(tmp_path / "each" / "0")
    _written(tmp_path / "each" / "1", lambda s: s | {"down.bias": s["down.bias"] + 1})
    for said in run_ranks(_refused_by, 2, str(tmp_path / "each")):
        assert "DistributedError: the ranks read different weights" in said and "down.bias" in said


def test_a_file_that_one_rank_lacks_is_told_on_both(tmp_path: Path) -> None:
    _written(tmp_path / "each" / "0")
    here, there = run_ranks(_refused_by, 2, str(tmp_path / "each"))
    assert "no weights were found" in there and "the ranks can't shard this model together" in here


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
