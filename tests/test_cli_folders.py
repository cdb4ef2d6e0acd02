"""The command line reads folders of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import torchshard as ts
from tests.helpers import command
from tests.models import MLP
from tests.test_cli import CONFIG

# --- folders of weights ----------------------------------------------------------------------------------------------


def _saved(folder: Path, **more: Any) -> Path:
    """A folder with a Llama in bfloat16, in several files."""
    sizes = CONFIG | {"num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 99}
    config = transformers.LlamaConfig(**sizes, **more)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    return folder


def _configured(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.nightly
def test_a_folder_is_planned_in_the_dtype_of_from_pretrained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dtype is the config's, else the files' dtype. A config.json alone has the same plan."""
    folder, shown = _saved(tmp_path), []
    for model, dtype in ((folder / "config.json", "bfloat16"), (folder, "bfloat16"), (folder, None)):
        _configured(folder, dtype=dtype)
        assert command("plan", str(model), "--sequence", "8") == 0
        shown.append(capsys.readouterr())
    assert shown[0].out == shown[1].out == shown[2].out and "of 85.2 KiB on each rank" in shown[0].out
    assert "weights of" not in shown[0].err and f"weights of {folder}: 12 tensors used\n" in shown[1].err
    assert command("plan", str(_configured(folder, dtype="float32")), "--sequence", "8") == 0
    said = capsys.readouterr()
    assert "of 170.3 KiB on each rank" in said.out
    assert "12 tensors used, bfloat16 in the files, cast to the model's float32\n" in said.err


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that the command line checks."""
    models = list[nn.Module]()

    def noted(model: nn.Module, *args: Any, **kwargs: Any) -> ts.Report:
        models.append(model)
        return ts.check(model, *args, **kwargs)

    monkeypatch.setattr("torchshard.cli.checks.check", noted)
    return models


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [True, False])
def test_check_takes_the_weights_of_a_folder(
    tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], checked: list[nn.Module]
) -> None:
    folder = str(_saved(tmp_path, tie_word_embeddings=tied))
    assert command("check", folder, "--sequence", "5") == 0
    said = capsys.readouterr()
    assert said.out.startswith("exact: 2 ranks") and f"{11 if tied else 12} tensors used\n" in said.err
    (model,), expected = checked, transformers.LlamaForCausalLM.from_pretrained(folder)
    values = model.state_dict()
    assert not model.training and values.keys() == expected.state_dict().keys()
    assert all(values[name].dtype == tensor.dtype for name, tensor in expected.state_dict().items())
    assert all(torch.equal(values[name], tensor) for name, tensor in expected.state_dict().items())


FOLDER_ERRORS: dict[str, tuple[Any, str]] = {
    "other sizes": (lambda folder: _configured(folder, hidden_size=32), "does not fit the model"),
    "another model": (
        lambda folder: _configured(folder, model_type="bert", architectures=["BertForMaskedLM"]),
        "the weights are another model's",
    ),
    "torn file": (
        lambda folder: next(folder.glob("*-00001-*")).write_bytes(b"torn"),
        "is not a safetensors file that can be read",
    ),
    "no file": (lambda folder: next(folder.glob("*-00001-*")).unlink(), "the index of the weights can't be used"),
    "a dtype of integers": (lambda folder: _configured(folder, dtype="int8"), "invalid dtype"),
}


@pytest.mark.parametrize("name", FOLDER_ERRORS)
def test_a_folder_that_does_not_fit_is_refused_before_it_is_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, text = FOLDER_ERRORS[name]
    change(_saved(tmp_path))
    monkeypatch.setattr(ts, "plan", None)
    monkeypatch.setattr("torchshard.cli.checks.check", None)
    for which in ("plan", "check"):
        assert command(which, str(tmp_path)) == 3
        said = capsys.readouterr().err
        assert text in said and said.count("\n  ") == 3 and "Traceback" not in said


def test_weights_for_a_factory(tmp_path: Path, capsys: pytest.CaptureFixture[str], checked: list[nn.Module]) -> None:
    state = {name: tensor.bfloat16() for name, tensor in MLP().state_dict().items() if name != "down.bias"}
    given = ["tests.test_cli:factory", "--weights", str(tmp_path)]
    save_file(state | {"other": torch.ones(2)}, tmp_path / "any.safetensors")
    line = f"weights of {tmp_path}: 3 tensors used, 1 missing (down.bias), 1 unused (other), " \
           "bfloat16 in the files, cast to the model's float32\n"  # fmt: skip
    for name in ("plan", "check"):
        assert command(name, *given) == 0
        assert line in capsys.readouterr().err
    weight = dict(checked[0].named_parameters())["up.weight"]
    assert torch.equal(weight, state["up.weight"].float()) and weight.requires_grad
    save_file(state | {"up.bias": torch.ones(3)}, tmp_path / "any.safetensors")
    assert command("plan", *given) == 3
    assert "'up.bias' has another shape than the model's" in capsys.readouterr().err
