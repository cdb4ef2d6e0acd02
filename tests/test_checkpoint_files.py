"""The files of a checkpoint: broken files are refused, slices are read and written, objects are encoded."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import struct
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchshard as ts
from tests.helpers import refused
from tests.resumed import Holds, adam, one_cycle, same, trained
from tests.test_objects import _Point
from torchshard.checkpoints.copies import Copies
from torchshard.core.layouts import I, canonical, split
from torchshard.core.mesh import MeshAxis
from torchshard.core.sharding import Sharding
from torchshard.distributed.objects import decode, encode
from torchshard.weights.boxes import place_of, whole_box
from torchshard.weights.checkpoint_files import MANIFEST, SlicedTensor, digest, read_checkpoint
from torchshard.weights.local_slice import LocalSlice
from torchshard.weights.place import PLACE, is_same_slice
from torchshard.weights.restored import mark_copies
from torchshard.weights.safetensors_files import tensors_in
from torchshard.weights.safetensors_writer import FilePlan, TensorType


def _file(folder: Path, name: str = "0-of-1.safetensors") -> Path:
    return next(folder.glob(f"data-*/{name}"))


def _edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        body = json.loads((folder / MANIFEST).read_text())
        change(body)
        (folder / MANIFEST).write_text(json.dumps(body))

    return edit


def _other_save(folder: Path) -> None:
    """Replaces a file by another checkpoint's file of the same size and name."""
    model = Holds()
    optimizer = adam(model)
    trained(model, optimizer)
    ts.save(folder / "other", model, optimizer, scheduler=one_cycle(optimizer))
    shutil.copy(_file(folder / "other"), _file(folder))


def _other_objects(folder: Path) -> None:
    """Replaces the objects by another save's, and updates their size in the manifest."""
    model = Holds()
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    trained(model, optimizer)
    ts.save(folder / "other", model, optimizer, scheduler=one_cycle(optimizer))
    shutil.copy(_file(folder / "other", "objects.bin"), _file(folder, "objects.bin"))
    size = _file(folder, "objects.bin").stat().st_size
    _edited(lambda body: body["files"].update({"objects.bin": size}))(folder)


def _objects(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Changes the objects, and updates the manifest to match."""

    def edit(folder: Path) -> None:
        path = _file(folder, "objects.bin")
        data = change(path.read_bytes())
        path.write_bytes(data)
        fits = {"objects": digest(data)}
        _edited(lambda b: (b["files"].update({"objects.bin": len(data)}), b.update(fits)))(folder)

    return edit


def _decoded(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = decode(data, allow_pickle=False)
    return found


def _changed(data: bytes, change: Callable[[Any], object]) -> bytes:
    both = _decoded(data)
    objects = {name: decode(part, allow_pickle=False) for name, part in both["objects"].items()}
    change(objects)
    parts = {name: encode(value, allow_pickle=False) for name, value in objects.items()}
    return encode(both | {"objects": parts}, allow_pickle=False)


_PICKLE = b"".join(
    len(part).to_bytes(8, "little") + part for part in (b'["pickle", 0]', b"cos\nsystem\n(S'touch /tmp/opened'\ntR.")
)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "a save into it has not ended"),
    "torn": (lambda f: os.truncate(_file(f), _file(f).stat().st_size - 1), "and had"),
    "missing": (lambda f: _file(f).unlink(), "it is missing"),
    "objects missing": (lambda f: _file(f, "objects.bin").unlink(), "it is missing"),
    "of another save": (_other_save, "its checkpoint is"),
    "no JSON": (lambda f: (f / MANIFEST).write_bytes(b"\x80\x04K"), "it is not what ts.save writes"),
    "a list": (lambda f: (f / MANIFEST).write_text("[" * 9000), "it is not what ts.save writes"),
    "outside": (_edited(lambda b: b["files"].update({"../x.safetensors": 1})), "not a file of a checkpoint"),
    "an id": (_edited(lambda b: b.update(id="../../etc")), "it is not what ts.save writes"),
    "another layout": (_edited(lambda b: b["tensors"].update({"model/a.weight": "S(0; 7x8) 4,4"})), "is no layout of"),
    "another shape": (_edited(lambda b: b["tensors"].update({"model/a.weight": "I 4,5"})), "it is (4, 5)"),
    "one too few": (_edited(lambda b: b["tensors"].pop("model/a.bias")), "which a file holds"),
    "one too many": (_edited(lambda b: b["tensors"].update({"model/c": "I 4"})), "the slices of ranks []"),
    "names": (_edited(lambda b: b["aliases"].update({"model/c": "model/d"})), "for which it has other names"),
    "objects of another save": (_other_objects, "its hash differs"),
    "a pickle": (_objects(lambda o: _PICKLE), "would have to travel as a pickle"),
    "no bytes of ours": (_objects(lambda o: struct.pack("<q", -8) * 3), "a part of -8 bytes"),
    "no settings": (_objects(lambda o: _changed(o, lambda x: x["optimizers"][0].pop("settings"))), "'settings'"),
    "no extra": (_objects(lambda o: _changed(o, lambda x: x.pop("extra"))), "extra states"),
    "RNG states": (
        _objects(lambda o: encode(decode(o, allow_pickle=False) | {"rng": [b"x"]}, allow_pickle=False)),
        "objects",
    ),
    "files exchanged": (lambda f: _file(f).rename(_file(f).with_name("1-of-1.safetensors")), "it is missing"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_changes_nothing(kind: str, saved: Path) -> None:
    change, text = BROKEN[kind]
    change(saved)
    model = Holds()
    optimizer, before = adam(model), copy.deepcopy(model.state_dict())
    assert refused(lambda: ts.load(saved, model, optimizer), text, ts.InputError)
    assert same(before, model.state_dict()) and not optimizer.state and not Path("/tmp/opened").exists()


def _half() -> Tensor:
    return LocalSlice.stored(torch.ones(2), ("w", "S(0)", 0, 2, (4,)))


UNSAVED: dict[str, tuple[Callable[[], Any], str]] = {
    "an object": (lambda: {"extra": object()}, "a checkpoint can't hold what extra has"),
    "a function": (lambda: {"extra": {"f": [print]}}, "a checkpoint can't hold what extra has"),
    "slices": (lambda: {"extra": {"ema": [_half()]}}, "extra['ema'][0]"),
    "a stranger": (lambda: {"optimizer": adam(Holds())}, "a parameter that is not the model's"),
    "a size": (lambda: {"copies": "4 potatoes"}, "'4 potatoes' is no size"),
}


@pytest.mark.parametrize("kind", UNSAVED)
def test_what_cannot_be_saved_leaves_the_folder_as_it_was(kind: str, saved: Path) -> None:
    make, text = UNSAVED[kind]
    before = read_checkpoint(saved).id
    assert refused(lambda: ts.save(saved, Holds(), **make()), text, ts.InputError)
    assert read_checkpoint(saved).id == before and len([*saved.glob("data-*")]) == 1


def test_data_that_an_unreadable_manifest_may_name_stay(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = (saved / MANIFEST).read_text()
    (saved / MANIFEST).write_text("{")
    with monkeypatch.context() as patch:
        patch.setattr(FilePlan, "create", lambda self: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert refused(lambda: ts.save(saved, Holds()), "No space left", ts.InputError)
    (saved / MANIFEST).write_text(manifest)
    ts.load(saved, Holds())


def test_links_are_not_followed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (saved / f"{MANIFEST}.part").symlink_to(tmp_path / "mine")
    ts.save(saved, Holds())
    assert (tmp_path / "mine").read_text() == "mine" and not (saved / MANIFEST).is_symlink()


# --- slices -----------------------------------------------------------------------------------------------------------


def _slice() -> LocalSlice:
    return LocalSlice.stored(torch.arange(6.0).reshape(3, 2), ("w", "S(0; 2+4)", 1, 2, (6, 2)))


def test_a_slice_says_where_its_pieces_lie() -> None:
    local = _slice()
    chunks = local.__create_chunk_list__()
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in chunks] == [((1, 0), (1, 2)), ((4, 0), (2, 2))]
    items = local.__create_write_items__("w", local)
    shards = [local.__get_tensor_shard__(item.index) for item in items]
    assert torch.equal(torch.cat(shards), torch.arange(6.0).reshape(3, 2)) and shards[0].data_ptr() == local.data_ptr()
    assert all(item.tensor_data is not None and item.tensor_data.size == (6, 2) for item in items)
    assert local.size() == (3, 2) and local.size(0) == 3


def test_an_empty_slice_has_no_pieces() -> None:
    local = LocalSlice.stored(torch.empty(0, 2), ("w", "S(0)", 3, 4, (2, 2)))
    assert local.__create_chunk_list__() == [] == local.__create_write_items__("w", local)


def test_a_slice_stays_one_in_another_process_and_in_files_where_there_are_sharded_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = ForkingPickler.loads(ForkingPickler.dumps(_slice()))
    assert isinstance(sent, LocalSlice) and sent.place == _slice().place and torch.equal(sent, _slice())
    held = io.BytesIO()
    torch.save(_slice(), held)
    for with_models in (False, True):
        monkeypatch.delattr(Tensor, PLACE, raising=False)
        if with_models:
            mark_copies()
        held.seek(0)
        assert type(torch.load(held)) is (LocalSlice if with_models else Tensor)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), ranks=st.integers(1, 4), parts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), max_size=3)
)
def test_any_part_of_a_tensor_in_slices(
    data: st.DataObject, ranks: int, parts: list[tuple[int, int]], tmp_path_factory: Any
) -> None:
    size = sum(count * unit for count, unit in parts) or 3
    dim = data.draw(st.integers(0, 1))
    shape = (size, 3) if dim == 0 else (3, size)
    layout = canonical(dim, parts, ranks) if parts else I
    whole = torch.randn(shape, dtype=torch.float64)
    folder, files = tmp_path_factory.mktemp("slices"), []
    for rank in range(ranks if parts else 1):
        local = split(whole, layout, rank, ranks)
        plan = FilePlan.of(folder / f"{rank}", {"w": TensorType(local.dtype, tuple(local.shape))}, {})
        plan.create()
        with plan.path.open("r+b") as file:
            plan.write(file.fileno(), "w", local if data.draw(st.booleans()) else local.t().contiguous().t())
        files.append(tensors_in(plan.path)["w"])
    stored = SlicedTensor("w", whole.dtype, shape, Sharding.of((MeshAxis(ranks), layout)), tuple(files))
    ends = [data.draw(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)) for n in shape]
    box = tuple((a, b) for a, b in ends)
    into = torch.empty([b - a for a, b in box], dtype=whole.dtype)
    assert stored.read(box, into) == into.numel() * 8
    assert torch.equal(into, whole[tuple(slice(*bounds) for bounds in box)]) and torch.equal(stored(), whole)
    assert whole_box(shape) == tuple((0, n) for n in shape)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_part_is_written_where_its_place_says(data: st.DataObject, tmp_path_factory: Any) -> None:
    """For conversions that transpose: the dims of the part are in another order than the file's."""
    shape = (3, 4, 5)
    order = data.draw(st.permutations(range(3)))
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = tuple((a, b) for a, b in bounds)
    plan = FilePlan.of(tmp_path_factory.mktemp("file") / "f", {"w": TensorType(torch.float32, shape)}, {})
    plan.create()
    expected = torch.zeros(shape)
    region = expected[tuple(slice(*ends) for ends in box)]
    part = torch.randn(region.shape).permute(order)
    region.permute(order).copy_(part)
    with plan.path.open("r+b") as file:
        plan.write(file.fileno(), "w", part, place_of(shape, box).permute(order))
    assert torch.equal(tensors_in(plan.path)["w"](), expected)


def test_copies_are_bounded() -> None:
    import threading

    copies, held, taken = Copies(100), [], []
    tensors = {str(i): torch.full((10,), i, dtype=torch.float32) for i in range(8)}  # 40 bytes each

    def put() -> None:
        with copies.filling():
            for name, tensor in tensors.items():
                copies.put(name, tensor)
                held.append(copies.held_bytes)
                tensor.zero_()

    thread = threading.Thread(target=put)
    thread.start()
    for _, tensor in copies:
        with copies.changed:  # until the copies are full, or all tensors are put
            assert copies.changed.wait_for(lambda: copies.held_bytes == 80 or len(taken) == 7, timeout=60)
        taken.append(int(tensor[0]))
    thread.join()
    assert max(held) == 80 and taken == [*range(8)]


def test_a_tensor_that_cannot_be_copied_is_told() -> None:
    copies = Copies(100)
    with pytest.raises(RuntimeError, match="boom"), copies.filling():
        raise RuntimeError("boom")
    assert refused(lambda: [*copies], "a tensor can't be copied", ts.InputError)


# --- objects ----------------------------------------------------------------------------------------------------------


_plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_hashable = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
_any = st.recursive(
    _plain,
    lambda inner: st.lists(inner) | st.dictionaries(_hashable, inner) | st.sets(_hashable) | st.tuples(inner, inner),
)


def _spelt(data: Any) -> Any:
    """A form that is equal only for equal data of equal types: True differs from 1, a list from a tuple."""
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


@pytest.mark.parametrize("data", [_Point(1), np.array([None]), [1, {"a": _Point(2)}], torch.nn.Linear(1, 1), print])
def test_what_would_be_pickled_is_refused_both_ways(data: Any) -> None:
    with pytest.raises(ts.InputError, match="as a pickle"):
        encode(data, allow_pickle=False)
    with pytest.raises(ts.InputError, match="as a pickle"):
        decode(encode(data, allow_pickle=True), allow_pickle=False)


def test_a_copy_of_a_slices_attributes_has_its_place() -> None:
    """Stagers of async saves copy `__dict__` to a plain tensor."""
    for own in (_slice(), _slice().clone(), _slice() * 2):
        plain = torch.empty(own.shape)
        plain.__dict__.update(vars(own))
        assert getattr(plain, PLACE) == _slice().place


@pytest.mark.parametrize("place", [("w", "Z(9)", 0, 2, (6, 2)), "w", None], ids=str)
def test_a_place_that_cannot_be_read_does_not_keep_a_file_from_being_read(place: Any) -> None:
    """Loading it into a model is what refuses it: a tool may look at the values."""
    given = LocalSlice.stored(torch.ones(3, 2), place)
    assert torch.equal(given.plain, torch.ones(3, 2)) and getattr(given, PLACE) == place
    assert not is_same_slice(given.place, _slice().place)
