"""Parts of the capture in isolation: known calls, watched code, restored attributes, sizes."""

from __future__ import annotations

import importlib.util
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchshard as ts
from tests.models import CASES
from tests.test_attributes import _log, _Up
from tests.visible import HOLDER, Applies, Config, Doubles, Sees, Triples, times
from torchshard.capture import KnownCalls, Leaves, Watch, capture, flatten_call, model_without_storage
from torchshard.capture import known_calls as module
from torchshard.capture.attributes import Snapshot, attributes, changed
from torchshard.capture.visible import visible_to
from torchshard.capture.watch import ObjectNumbers
from torchshard.core.user_files import is_library, is_user_file
from torchshard.ir.editing import mark_needs_grad
from torchshard.testing import run_ranks


class Takes(nn.Module):
    def forward(self, x: Any, past: Any = None, **more: Any) -> Any:
        return x


class Cache:
    """An object that is not registered with pytree."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def _nests() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.integers(0, 2), st.booleans(), st.none(), st.sampled_from(["", "a"]), st.sampled_from([0.0, -0.0, 1.0]),
        st.just(torch.float32), st.builds(lambda: torch.zeros(2)), st.sampled_from([range(2), frozenset({1})]),
    )  # fmt: skip

    def nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        names = st.sampled_from(["a", "b", "c"])
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(names, children, max_size=3),
            st.dictionaries(names, children, max_size=3).map(lambda values: Cache(**values)),
        )

    return st.recursive(leaves, nested, max_leaves=8)


def _same(known: Leaves, own: Leaves) -> None:
    assert len(known.tensors) == len(own.tensors)
    assert all(a is b for a, b in zip(known.tensors, own.tensors, strict=True))
    assert (known.names, known.structure, known.numbers) == (own.names, own.structure, own.numbers)
    assert (known.number_names, list(known.positional)) == (own.number_names, list(own.positional))
    assert known.repeated == own.repeated
    rebuilt = [call.rebuild(call.tensors, numbers=call.numbers) for call in (known, own)]
    assert flatten_call(Takes(), *rebuilt[0]).structure == flatten_call(Takes(), *rebuilt[1]).structure


@settings(max_examples=150, deadline=None)
@given(st.lists(_nests(), min_size=1, max_size=4), st.sampled_from([(), ("past['a']", "past.a", "x")]))
def test_an_answer_is_that_of_flatten_call(nests: list[Any], numbers: tuple[str, ...]) -> None:
    model = Takes()
    known = KnownCalls(model)
    for _ in range(2):
        for nest in nests:
            for args, kwargs in (((torch.ones(1), nest), {}), ((nest,), {"other": nest})):
                _same(known.flatten(args, kwargs, numbers), flatten_call(model, args, kwargs, numbers))


def test_a_call_like_an_earlier_one_is_not_flattened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    own = module.flatten_call
    monkeypatch.setattr(module, "flatten_call", lambda *a: asked.append(1) or own(*a))  # type: ignore[func-returns-value]
    known = KnownCalls(Takes())
    for position in range(5):
        cache = Cache(keys=torch.zeros(position), position=position, kind="full")
        leaves = known.flatten((torch.ones(1), cache), {}, ("past.position",))
        assert leaves.numbers == (position,) and leaves.tensors[1] is cache.keys
        assert leaves.rebuild(leaves.tensors)[0][1].position == position
    assert len(asked) == 1
    known.flatten((torch.ones(1), Cache(keys=torch.zeros(1), position=0, kind="sliding")), {}, ("past.position",))
    assert len(asked) == 2


def test_code_that_an_argument_brings_is_compared() -> None:
    known, scale = KnownCalls(Takes()), 2.0

    class Scaled(Cache):
        def scaled(self, x: Tensor) -> Tensor:
            return x * scale

    first = known.flatten((Scaled(a=1),), {}, ())
    scale = 3.0
    assert known.flatten((Scaled(a=1),), {}, ()).structure != first.structure


def test_an_object_that_holds_itself_is_refused() -> None:
    cache = Cache()
    cache.own = cache
    with pytest.raises(ts.InputError, match="holds itself"):
        KnownCalls(Takes()).flatten((cache,), {}, ())


# --- code and objects that are watched --------------------------------------------------------------------------------


def _states_after_changes(rank: int) -> list[int]:
    watch, numbers = Watch(Applies(lambda x: HOLDER.value(x))), []
    for value in (torch.relu, torch.tanh, torch.relu, times(2.0), times(3.0), times(2.0), Doubles(), Triples()):
        HOLDER.value = value
        numbers.append(watch.state())
    return numbers


def test_all_ranks_number_functions_alike() -> None:
    first, second = run_ranks(_states_after_changes, 2)
    assert first == second == [1, 2, 1, 3, 4, 3, 5, 6]


def test_only_own_code_is_followed() -> None:
    names = {function.__name__ for function in visible_to(Sees(Config())).functions()}
    assert {"forward", "scaled", "scaled_by_global", "__call__"} <= names and "linear" not in names
    assert not [place for place in attributes(Sees(Config())) if "LOGGER" in place and len(place) > 2]


def test_states_are_numbered_as_they_appear() -> None:
    model = Sees(Config())
    watch = Watch(model)
    for scale, number in ((1.0, 0), (2.0, 1), (1.0, 0), (3.0, 2), (3.0, 2), (True, 3)):
        model.config.scale = scale
        assert watch.state() == number
    assert watch.latest_change == "config.scale"


def test_objects_are_numbered_and_not_kept_alive() -> None:
    numbers, first, second = ObjectNumbers(), torch.ones(1), object()
    assert [numbers.of(value) for value in (first, second, first)] == [0, 1, 0]
    gone = weakref.ref(first)
    del first
    assert gone() is None and numbers.of(torch.ones(1)) == 2


# --- which code is the user's ----------------------------------------------------------------------------------------

_LIBRARY = """
import torch
from torch import nn

SETTINGS = {"scale": 1.0}
_FACTOR = [SETTINGS, SETTINGS]

class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x) * SETTINGS["scale"] * _FACTOR[0]["scale"]
"""


def _metadata(folder: Path, name: str, files: str = "", **texts: str) -> None:
    """Writes a distribution's metadata into a folder of `sys.path`, like a package manager."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    for file, text in {"METADATA": f"Name: {name}\n", "RECORD": files, **texts}.items():
        (info / file.replace("_json", ".json")).write_text(text)


def _editable(tmp_path: Path) -> dict[str, str]:
    origin = {"url": (tmp_path / "checkout").as_uri(), "dir_info": {"editable": True}}
    return {"direct_url_json": json.dumps(origin)}


def _in_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _metadata(tmp_path, "A-library", "a_library/__init__.py,,\na_library/deep/layers.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # like PYTHONPATH, or a .pth file in a site folder
    return tmp_path


def _in_another_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tmp_path / "dist-packages"


def _editable_and_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _metadata(tmp_path, "needs-it", METADATA="Name: needs-it\nRequires-Dist: A_Library (>=1) ; extra == 'x'\n")
    return _editable_project(tmp_path, monkeypatch)


def _editable_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _metadata(tmp_path, "A-library", **_editable(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "checkout" / "src"


def _beside_installed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _metadata(tmp_path, "another", "another/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _script_in_a_librarys_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = _editable_and_required(tmp_path, monkeypatch).parent / "examples"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "train.py"), raising=False)
    return folder


@pytest.mark.parametrize(
    ("install", "is_users"),
    [
        (_in_target, False),
        (_in_another_site, False),
        (_editable_and_required, False),
        (_editable_project, True),
        (_beside_installed_ones, True),
        (_script_in_a_librarys_repository, True),
    ],
)
def test_a_library_is_one_wherever_it_is_installed(
    install: Any, is_users: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = install(tmp_path, monkeypatch) / "a_library" / "deep"
    folder.mkdir(parents=True)
    path = folder / "layers.py"
    path.write_text(_LIBRARY)
    spec = importlib.util.spec_from_file_location("a_library.deep.layers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "a_library.deep.layers", module)
    spec.loader.exec_module(module)
    held = [one for one in visible_to(nn.Sequential(module.Layer(2, 2))).namespaces if one.owner is module.SETTINGS]
    assert is_user_file(str(path)) is bool(held) is is_users


def test_a_users_path_may_look_like_a_librarys() -> None:
    package = str(Path(ts.__file__).parent)
    for path in ("/home/me/torchshard/examples/train.py", "/home/me/torch/model.py", f"{package}_train.py"):
        assert is_user_file(path) and not is_library(path)
    for path in (torch.__file__, f"{package}/api.py", "<frozen runpy>", "torch/csrc/autograd/engine.cpp"):
        assert is_library(path), path


# --- attributes -------------------------------------------------------------------------------------------------------


def test_kept_attributes_are_put_back() -> None:
    model = _Up(_log)
    snapshot, before = Snapshot(model), attributes(model)
    model.seen.append(1)
    model.new, model.up.bias, model.holder.n = 1, None, 3
    model.counts["n"] += 1
    model.queue.append(2)
    model.flags.add(1)
    del model.step
    snapshot.restore()
    assert not changed(before, attributes(model)) and model.up.bias is not None


# --- sizes and storage ------------------------------------------------------------------------------------------------


class _Expands(nn.Module):
    """A linear layer as a batch of four equal products, scaled by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(4, -1, -1), self.up.weight.t().expand(4, -1, -1)).sum(1) / x.shape[0]


def _asking(graph: Any, trained: Any) -> None:
    """A pass that compares a dynamic size with a number."""
    mark_needs_grad(graph, trained)
    (x,) = (n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input")
    assert x.shape[0] == 4 or x.shape[0] != 4


@pytest.mark.parametrize("asked", [False, True], ids=["as it is", "a pass asks"])
def test_a_batch_of_as_many_rows_as_there_are_members(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass may compare the example's sizes with numbers; other calls must not rely on the answer."""
    if asked:
        monkeypatch.setattr("torchshard.compiler.prepare.mark_needs_grad", _asking)
    model = _Expands()
    sharded = ts.shard(model, {"up": "replicate"}, example_inputs=(torch.randn(4, 6),))
    for rows in (4, 4, 6, 3, 4):
        x = torch.randn(rows, 6)
        assert torch.allclose(sharded(x), model(x)), rows
    ts.distributed.destroy_process_group()


def test_capture_reads_no_parameter() -> None:
    model = model_without_storage(CASES["gpt"].build())
    assert all(p.untyped_storage().size() == 0 for p in model.parameters())
    assert model.head.weight is model.tok.weight  # type: ignore[union-attr]
    assert capture(model, CASES["gpt"].inputs()).graph is not None
