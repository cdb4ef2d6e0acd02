"""Sharded models exported for other libraries: the folders equal the ones that these libraries write."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load, load_file
from torch import Tensor, nn

import torchshard as ts
from tests.helpers import refused
from tests.resumed import Small, small
from tests.test_folder_models import MODELS
from tests.test_folders import SIZES
from torchshard.testing import gradient_error, largest, run_ranks

CALL = {"input_ids": torch.arange(16).reshape(2, 8), "use_cache": False}


def _contents(folder: Path) -> dict[str, Any]:
    """The content of each file of a folder; JSON as values, because the order of its sets differs between processes."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name, data = str(path.relative_to(folder)), path.read_bytes()
            found[name] = json.loads(data) if path.suffix == ".json" else data
    return found


def _exports(rank: int, kind: str, folder: str, built: bool) -> None:
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    if built:
        torch.manual_seed(0)
        sharded = ts.shard(MODELS[kind](), "auto", (), CALL)
    else:
        torch.manual_seed(rank)  # the constructor's draws aren't used, and may differ
        sharded = ts.from_pretrained(f"{folder}/original", "auto", example_kwargs=CALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a full gather would warn
        ts.save_pretrained(sharded, f"{folder}/ours", max_shard_size="40KB")


@pytest.mark.nightly
@pytest.mark.parametrize(("built", "world"), [(True, 2), (False, 3)], ids=["built", "loaded"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_folder_is_what_transformers_writes(kind: str, built: bool, world: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    model.save_pretrained(tmp_path / "original", max_shard_size="40KB")
    if not built:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    run_ranks(_exports, world, kind, str(tmp_path), built)
    ours, theirs = _contents(tmp_path / "ours"), _contents(tmp_path / "theirs")
    if kind == "mixtral":  # its experts share memory there, so transformers keeps them in one file
        ours, theirs = ({**_tensors(folder), "config": folder["config.json"]} for folder in (ours, theirs))
    assert len(theirs) > 5 and ours.keys() == theirs.keys()
    assert not [name for name in ours if ours[name] != theirs[name]]


def _tensors(folder: dict[str, Any]) -> dict[str, Any]:
    """The tensors of all files, by name."""
    return {
        name: (tensor.dtype, tensor.tolist())
        for file, data in folder.items()
        if file.endswith(".safetensors")
        for name, tensor in load(data).items()
    }


def _exports_plain(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    ts.save_pretrained(small("columns"), folder)


@pytest.mark.nightly
def test_a_model_of_nobodys_is_one_file(tmp_path: Path) -> None:
    run_ranks(_exports_plain, 3, str(tmp_path))
    torch.manual_seed(0)
    expected = {name: tensor for name, tensor in Small().state_dict().items() if name != "head.weight"}
    written = load_file(tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"] and written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


# --- adapters --------------------------------------------------------------------------------------------------------

LORAS: dict[str, Any] = {
    "plain": {"target_modules": ["q_proj", "o_proj", "up_proj"]},
    "head": {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"], "use_rslora": True},
}


def _lora(kind: str) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, init_lora_weights=False, **LORAS[kind])
    return peft.get_peft_model(MODELS["llama"](), config)


def _exports_adapter(rank: int, kind: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    ts.save_pretrained(ts.shard(_lora(kind), "auto", (), CALL), folder)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", LORAS)
def test_an_adapter_is_what_peft_writes(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _lora(kind).save_pretrained(tmp_path / "theirs")
    run_ranks(_exports_adapter, 2, kind, str(tmp_path / "ours"))
    ours, theirs = _contents(tmp_path / "ours"), _contents(tmp_path / "theirs")
    theirs.pop("README.md")
    for folder in (ours, theirs):  # a set, so its order differs between processes
        modules = folder["adapter_config.json"]["target_modules"]
        folder["adapter_config.json"]["target_modules"] = sorted(modules)
    assert ours == theirs


def _loads_adapter(rank: int, folder: str) -> list[Any]:
    """Loads a base model with an adapter, on ranks with different seeds; trains the adapter and writes it."""
    warnings.simplefilter("ignore")
    ts.distributed.init_process_group()
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    expected = peft.PeftModel.from_pretrained(base, f"{folder}/adapter", is_trainable=True).train()
    torch.manual_seed(rank)
    call = CALL | {"labels": CALL["input_ids"]}
    sharded = ts.from_pretrained(f"{folder}/base", adapter=f"{folder}/adapter", train=True, example_kwargs=call)
    whole = sharded.full_state_dict()
    same = [torch.equal(whole[name], tensor) for name, tensor in expected.state_dict().items()]
    trained = [name for name, p in sharded.named_parameters() if p.requires_grad]
    losses = []
    for model in (expected, sharded):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
        for _ in range(3):
            loss = model(**call).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    ts.save_pretrained(sharded, f"{folder}/trained")
    return [all(same), trained == [n for n, p in expected.named_parameters() if p.requires_grad], losses]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["plain", "head"])
def test_an_adapter_comes_in_trains_and_goes_out(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    MODELS["llama"]().save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _lora(kind).save_pretrained(tmp_path / "adapter")
    found = run_ranks(_loads_adapter, 2, str(tmp_path))
    for same, trained, (expected, loss) in found:
        assert same and trained and loss == pytest.approx(expected, rel=1e-5)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, str(tmp_path / "trained"))
    with torch.no_grad():
        loss = again(**CALL, labels=CALL["input_ids"]).loss.item()
    assert loss != pytest.approx(found[0][2][0], rel=1e-3) and loss < found[0][2][0]


def test_another_models_adapter_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    MODELS["llama"]().save_pretrained(tmp_path / "base")
    (tmp_path / "none").mkdir()
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 1}, vocab_size=50))
    peft.get_peft_model(other, peft.LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "other")
    for adapter, text in (("none", "it has no adapter_config.json"), ("other", "the file has no")):
        call = functools.partial(ts.from_pretrained, tmp_path / "base", adapter=tmp_path / adapter)
        assert refused(functools.partial(call, example_kwargs=CALL), text, ts.InputError)
    ts.distributed.destroy_process_group()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(x))))


def _two_adapters() -> Any:
    torch.manual_seed(0)
    first, other = (
        peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False) for names in (["up", "down"], ["up"])
    )
    model = peft.get_peft_model(_Net(), first)
    model.add_adapter("other", other)
    model.set_adapter("default")
    return model.double()


def _preferred(model: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
    """DPO's loss; its reference is the model without the adapter."""

    def gap() -> Tensor:
        scores: list[Tensor] = [model(x).log_softmax(-1)[:, 0].sum() for x in (chosen, rejected)]
        return scores[0] - scores[1]

    with torch.no_grad(), model.disable_adapter():
        reference = gap()
    return -nn.functional.logsigmoid(gap() - reference)


def _switched(model: Any, x: Tensor) -> list[Tensor]:
    """A model's results with its adapters trained, switched, merged and unmerged."""
    found, optimizer = [], torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for adapter in ("default", "other", "default"):
        model.set_adapter(adapter)
        loss = _preferred(model, x, -x)
        loss.backward()
        optimizer.step()
        found += [loss, torch.tensor([float(p.requires_grad) for p in model.parameters()])]
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        found.append(model(x))
    return [tensor.detach() for tensor in found]


def _switches(rank: int, folder: str) -> tuple[float, bool, list[str]]:
    ts.distributed.init_process_group()
    torch.manual_seed(1)
    model, x = _two_adapters(), torch.randn(4, 6, dtype=torch.float64)
    plan = {"base_model.model.up.base_layer": "column", "base_model.model.down.base_layer": "row"}
    sharded: Any = ts.shard(copy.deepcopy(model), plan, (x,))
    pairs = [*zip(_switched(model, x), _switched(sharded, x), strict=True)]
    error = largest(gradient_error(sharded, model), *((a - b).abs().max() for a, b in pairs))
    whole = sharded.full_state_dict()
    error = largest(error, *((whole[name] - tensor).abs().max() for name, tensor in model.state_dict().items()))
    with pytest.raises(AttributeError) as refusal:
        sharded.merge_and_unload()
    texts = [str(refusal.value)]
    with pytest.raises(ts.InputError) as refusal:
        sharded.save_pretrained(folder)
    torch.testing.assert_close(model(x), sharded(x))
    model.load_state_dict(whole)
    ts.save_pretrained(sharded, folder, merge=True)
    expected, written = model.merge_and_unload().state_dict(), load_file(f"{folder}/model.safetensors")
    same = expected.keys() == written.keys() and all(torch.equal(written[n], t) for n, t in expected.items())
    return error, same, [*texts, str(refusal.value)]


def test_adapters_are_switched_and_merged(tmp_path: Path) -> None:
    """DPO with the disabled adapter as reference, another adapter, merged weights: equal to the unsharded model's."""
    for error, same, (unload, save) in run_ranks(_switches, 2, str(tmp_path)):
        assert error < 1e-10 and same
        assert "merge=True" in unload and "ts.save_pretrained(model, folder)" in save
