"""Models load the weights of folders: each rank reads its slices; weights that don't fit are refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import nightly
from tests.test_folders import SIZES
from torchshard.testing import gradient_error, run_ranks

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
    torch.manual_seed(rank)  # the constructor's draws are replaced, and may differ
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
