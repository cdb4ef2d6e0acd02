"""The command line: its output and files, its exit codes, and errors in four lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import torchshard as ts
from tests.helpers import command, nightly
from tests.models import MLP

CONFIG: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}


def factory() -> tuple[nn.Module, tuple[Any, ...]]:
    return MLP(), (torch.randn(3, 12),)


def bare() -> nn.Module:
    return MLP()


def one_tensor() -> tuple[nn.Module, Any]:
    return MLP(), torch.randn(3, 12)


def named() -> tuple[nn.Module, dict[str, Any]]:
    return MLP(), {"x": torch.randn(3, 12)}


def failing() -> nn.Module:
    raise ZeroDivisionError("no such luck")


def reading() -> nn.Module:
    return nn.Linear(4, int(torch.ones(()).item()))


def nothing_at_all() -> tuple[()]:
    return ()


@pytest.fixture
def llama(tmp_path: Path) -> str:
    config = transformers.LlamaConfig(**CONFIG, num_key_value_heads=2, vocab_size=99)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


@pytest.mark.nightly
def test_dtype_labels_and_a_machine_from_a_file(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With labels, the plan has the loss; a machine from a file prices the plan; stderr reports the stages."""
    ts.Machine("mine", flops=1e9).save(tmp_path / "mine.json")
    assert ts.Machine.load(tmp_path / "mine.json") == ts.Machine("mine", flops=1e9)
    common = ["plan", llama, "--ranks", "2", "--sequence", "8", "--machine", str(tmp_path / "mine.json"), "--json"]
    plans = []
    for i, more in enumerate(([], ["--dtype", "bfloat16"], ["--labels"])):
        assert command(*common, str(tmp_path / f"{i}.json"), *more) == 0
        plans.append(ts.Plan.load(tmp_path / f"{i}.json"))
    assert "on mine" in (told := capsys.readouterr()).out and "capture: " in told.err
    assert 1.9 < plans[0].parameter_bytes()[1] / plans[1].parameter_bytes()[1] <= 2
    assert not any("cross_entropy" in name for name in plans[0].choices)
    assert any("cross_entropy" in name for name in plans[2].choices)


@pytest.mark.nightly
def test_measure_writes_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "torchshard"]
    done = subprocess.run([sys.executable, *launched, "measure", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    machine = ts.Machine.load(file)
    assert machine.name == "a machine measured with 2 ranks" and 0 < machine.link_bandwidth < 1e12
    rows = re.findall(
        r"^an? .*, (split|whole) +[\d.]+ .s +[\d.]+ .s +([\d.]+)$|^conv.* ([\d.]+)$", done.stdout, re.MULTILINE
    )
    ratios = [float(a or b) for _, a, b in rows]
    assert len(ratios) >= 6 and 0 < machine.error < float("inf") and f"{machine.error:.0%} on average" in done.stdout


def test_help_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['torchshard', '--help']\n" \
           "import runpy\ntry: runpy.run_module('torchshard')\nexcept SystemExit: pass\n" \
           "assert 'torch' not in sys.modules and 'networkx' not in sys.modules"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "plan" in done.stdout, done.stderr


def test_plan_prints_a_table_and_writes_files(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "plan.json", tmp_path / "plan.html"
    given = ["plan", llama, "--ranks", "2", "--machine", "h100x8", "--json", str(files[0])]
    assert command(*given, "--html", str(files[1]), "--sequence", "16") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("plan for 2 ranks") and "layers.* ×2" in shown and "up_proj" in shown and "h100x8" in shown
    plan = ts.Plan.load(files[0])
    assert plan.world_size == 2 and str(plan) in shown and files[1].read_text().startswith("<!doctype html>")
    assert command("show", str(files[0])) == 0
    assert "why: each rank" in capsys.readouterr().out


@pytest.mark.nightly
def test_meshes(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    given = [llama, "--mesh", "dp=2:shard,tp=2", "--sequence", "16"]
    assert command("plan", *given, "--machine", "h100x8", "--json", str(file)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("plan for 2 × 2 ranks") and "over dp, 2 parts of the batch (shard)" in shown
    plan = ts.Plan.load(file)
    assert str(plan) in shown and plan.axes[0].data == "shard"
    assert command("check", *given) == 0
    assert "exact: 4 ranks" in capsys.readouterr().out
    assert command("check", *given, "--processes") == 3
    assert "are checked in one process" in capsys.readouterr().err
    assert command("check", *given, "--ranks", "8") == 2
    assert "argument --ranks: not allowed with argument --mesh" in capsys.readouterr().err
    assert command("plan", llama, "--mesh", "3x2") == 2
    assert "'3x2' is no mesh such as dp=8,tp=4" in capsys.readouterr().err
    assert command("plan", llama, "--mesh", "dp=2,dp=2") == 2
    assert "'dp=2,dp=2' says two things of one axis" in capsys.readouterr().err


def test_show_a_model_at_both_levels(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("show", "tests.test_cli:factory", "--ranks", "3") == 0
    assert "without it: a step takes" in capsys.readouterr().out
    assert command("show", "tests.test_cli:named", "--level", "node") == 0
    assert "* down_linear_reduce" in capsys.readouterr().out


def test_a_model_that_needs_more_than_token_ids_is_told_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.CLIPConfig(architectures=["CLIPModel"])
    config.save_pretrained(tmp_path)
    assert command("plan", str(tmp_path), "--ranks", "2") == 3
    assert "a model that needs others or both: module:factory" in capsys.readouterr().err


FORMATTED: list[str] = []


def warning() -> tuple[nn.Module, tuple[Any, ...]]:
    """A factory that records how warnings are printed."""
    for path, text in ((str(ts.__file__), "too slow"), (__file__, "old")):
        FORMATTED.append(warnings.formatwarning(UserWarning(text), UserWarning, path, 3))
    return factory()


def test_warnings_have_the_users_place_or_none() -> None:
    before = warnings.formatwarning
    FORMATTED.clear()
    assert command("plan", "tests.test_cli:warning") == 0
    assert FORMATTED[0] == "warning: too slow\n" and FORMATTED[1].startswith(f"{__file__}:3: ")
    assert warnings.formatwarning is before


def test_draw(tmp_path: Path) -> None:
    assert command("draw", "tests.test_cli:factory", "-o", str(tmp_path / "x.svg")) == 0
    assert command("draw", "tests.test_cli:factory", "--layer", "auto", "-o", str(tmp_path / "layer.svg")) == 0
    assert "l-lane" in (tmp_path / "layer.svg").read_text()
    assert (tmp_path / "x.svg").read_text().count("<polygon") == 1


def test_check_says_exact_or_where_it_differs(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", llama, "--ranks", "3", "--sequence", "5") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("exact: 3 ranks") and "random weights:" in shown.err


@pytest.mark.nightly
def test_check_on_real_ranks(tmp_path: Path) -> None:
    """Runs in its own process, as from a shell, since ranks import the main module. Ranks print no line on weights."""
    save_file(MLP().state_dict(), tmp_path / "any.safetensors")
    command = [sys.executable, "-m", "torchshard", "check", "tests.test_cli:factory", "--ranks", "2", "--processes"]
    done = subprocess.run([*command, "--weights", str(tmp_path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout.startswith("exact: 2 ranks, 1 output,"), done.stderr
    assert done.stderr.count(f"weights of {tmp_path}: 4 tensors used\n") == 1


# --- logs and errors -------------------------------------------------------------------------------------------------


def test_what_takes_long_is_logged_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line per stage, with its seconds."""
    with caplog.at_level("INFO", "torchshard.compiler"):
        assert command("plan", "tests.test_cli:factory") == 0
    lines = [r.getMessage() for r in caplog.records if r.name == "torchshard.compiler"]
    assert [line.partition(":")[0] for line in lines] == ["capture", "plan", "rewrite"]
    assert all(line.endswith(" s") for line in lines)


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("env") == 0
    assert f"torch        {torch.__version__}" in capsys.readouterr().out


@nightly(but=["ViTForImageClassification"])
@pytest.mark.parametrize("kind", ["BertForMaskedLM", "T5ForConditionalGeneration", "ViTForImageClassification"])
def test_configurations_of_other_kinds(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "BertForMaskedLM": (transformers.BertConfig, {**CONFIG, "vocab_size": 99}),
        "T5ForConditionalGeneration": (
            transformers.T5Config,
            {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": 2, "vocab_size": 99},
        ),
        "ViTForImageClassification": (transformers.ViTConfig, {**CONFIG, "image_size": 32, "patch_size": 8}),
    }
    made, given = sizes[kind]
    config = made(**given)
    config.architectures = [kind]
    config.save_pretrained(tmp_path)
    assert command("plan", str(tmp_path / "config.json"), "--sequence", "16") == 0
    assert capsys.readouterr().out.startswith("plan for 2 ranks")


MILLIONS = {"bert-base": 110, "gpt2": 124, "gpt2-xl": 1558, "llama-3-405b": 405853, "llama-3-70b": 70554,
            "llama-3-8b": 8030, "llama-tiny": 0, "mixtral-8x7b": 46703, "qwen3-8b": 8191,
            "t5-base": 223, "vit-base": 86}  # fmt: skip
"""Configuration of the package -> its parameters in millions."""


CONFIGS = {path.stem: path for path in sorted((Path(ts.__file__).parent / "cli" / "configs").glob("*.json"))}


@pytest.mark.parametrize("name", [n if n == "gpt2" else pytest.param(n, marks=pytest.mark.nightly) for n in CONFIGS])
def test_a_configuration_of_the_package_is_the_models(name: str) -> None:
    given = json.loads(CONFIGS[name].read_text())
    config = transformers.AutoConfig.for_model(**given)
    assert given.keys() <= config.to_dict().keys()
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == MILLIONS[name]


def test_a_file_is_meant_before_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert command("plan", "gpt2") == 3
    assert "gpt2/config.json" in capsys.readouterr().err


ERRORS = {
    "nothing there": (["plan", "nowhere"], "'nowhere' is not a model"),
    "no such name": (["plan", "lama-3-8b"], "try:   'llama-3-8b' or"),
    "no such module": (["plan", "no.such:factory"], "returns no model: ModuleNotFoundError"),
    "no such function": (["plan", "tests.test_cli:nothing"], "returns no model: AttributeError"),
    "a factory that fails": (["plan", "tests.test_cli:failing"], "returns no model: ZeroDivisionError"),
    "a factory that looks at numbers": (["plan", "tests.test_cli:reading"], "returns no model: RuntimeError"),
    "a factory of nothing": (["plan", "tests.test_cli:nothing_at_all"], "returns a tuple"),
    "too small to check": (["check", "tests.test_cli:factory", "--memory", "10B"], "fits 10 B"),
    "too many ranks": (["plan", "tests.test_cli:factory", "--ranks", "100000"], "more than any dim"),
    "no inputs": (["plan", "tests.test_cli:bare"], "a function that returns `model, (x,)`"),
    "a class": (["plan", "tests.models:MLP"], "'tests.models:MLP': the model's forward does not take these arguments"),
    "an input that is no tuple": (["plan", "tests.test_cli:one_tensor"], "returns a tuple of MLP, Tensor"),
    "two pins": (
        ["plan", "tests.test_cli:factory", "--pin", "up=row", "--pin", "up=column"],
        "'up' is pinned as row and as column",
    ),
    "no ranks": (["plan", "tests.test_cli:factory", "--ranks", "0"], "0 is no number of ranks"),
    "no ranks of meshes": (["meshes", "tests.test_cli:factory", "--ranks", "0"], "try:   --ranks 2\n"),
    "no size": (["plan", "tests.test_cli:factory", "--memory", "much"], "'much' is no size"),
    "too small": (["plan", "tests.test_cli:factory", "--memory", "10B"], "fits 10 B"),
    "no machine": (["plan", "tests.test_cli:factory", "--machine", "abacus"], "'abacus' is no machine"),
    "a mesh of two axes for the weights": (
        ["plan", "tests.test_cli:factory", "--mesh", "pp=2,dp=2:shard,tp=4"],
        "  where: --mesh\n",
    ),
    "an axis of the batch without a word": (
        ["plan", "tests.test_cli:factory", "--mesh", "dp=4"],
        "try:   the axis of the weights last; or say what divides the batch: --mesh dp=4:replicate\n",
    ),
    "an axis that holds slices": (
        ["plan", "tests.test_cli:factory", "--mesh", "dp=2:slices,tp=4"],
        "'slices' is no use of a mesh's axis\n  where: --mesh\n",
    ),
    "a batch that is split twice": (
        ["plan", "tests.test_cli:factory", "--mesh", "dp=2:shard", "--split", "all"],
        "try:   without --split\n",
    ),
    "a length that is trained": (
        ["plan", "tests.test_cli:factory", "--length", "64"],
        "where: --batch, --length\n  why:   the objective's mode is 'train'\n  try:   --mode infer\n",
    ),
    "no batch": (["plan", "tests.test_cli:factory", "--batch", "0"], "invalid size '0': expected 1 or more"),
    "no machine's file": (["plan", "tests.test_cli:factory", "--machine", "no.json"], "'no.json' holds no machine"),
    "labels of a factory": (["plan", "tests.test_cli:factory", "--labels"], "a factory decides on dtypes and labels"),
    "no dtype": (["plan", "tests.test_cli:factory", "--dtype", "float7"], "'float7' is no dtype"),
    "nowhere to measure to": (["measure", "no/such/file.json"], "can't be written"),
    "no plan": (["show", "no.json"], "can't be read"),
    "no folder": (["plan", "tests.test_cli:factory", "--json", "no/such/plan.json"], "can't be written"),
    "no page": (["plan", "tests.test_cli:factory", "--html", "x.svg"], "can't be written as '.svg'"),
    "no format": (["draw", "tests.test_cli:factory", "-o", "x.png"], "can't be written as '.png'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_four_lines_on_stderr(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, text = ERRORS[name]
    assert command(*arguments) == 3
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 4 and "Traceback" not in said
    with pytest.raises(ts.ShardError):
        command(*arguments, "--debug")


def test_a_configuration_that_is_no_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content, text in (
        ("{", "can't be read"),
        ("{}", "it has no model_type"),
        (json.dumps({"model_type": "nonsense"}), "not a configuration that transformers knows"),
        (json.dumps({"model_type": "llama", "architectures": ["Nonsense"]}), "transformers has no model 'Nonsense'"),
        (json.dumps({"model_type": "llama", "architectures": [5]}), "transformers has no model 5"),
        (json.dumps({"model_type": "llama", "architectures": ["logging"]}), "transformers has no model 'logging'"),
        (json.dumps({"model_type": "llama", "num_attention_heads": 0}), "ZeroDivisionError"),
        (json.dumps({"model_type": "bert", "hidden_size": 32, "num_attention_heads": 5}), "ValueError"),
        (json.dumps({"model_type": "llama", "dtype": "nonsense"}), "has no attribute 'nonsense'"),
        (json.dumps({"model_type": "llama", "dtype": "int8"}), "not a floating-point dtype"),
        (json.dumps({"model_type": "wav2vec2"}), "whose size its configuration does not have"),
    ):
        (tmp_path / "config.json").write_text(content)
        assert command("plan", str(tmp_path)) == 3
        assert text in capsys.readouterr().err


def test_a_plan_file_is_shown_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command("plan", "tests.test_cli:factory", "--json", str(tmp_path / "plan.txt"))
    assert command("show", str(tmp_path / "plan.txt")) == 0
    assert command("show", str(tmp_path / "plan.txt"), "--ranks", "3", "--weights", "llama") == 3
    assert "--weights and --ranks can't change a finished plan" in capsys.readouterr().err
    for option in (["--mode", "infer"], ["--batch", "8"], ["--sequence", "64"], ["--mode", "infer", "--length", "9"]):
        assert command("show", str(tmp_path / "plan.txt"), *option) == 3
        assert f"{option[0]}" in capsys.readouterr().err
    for name in ("plan", "meshes"):
        (tmp_path / "plan.json").write_bytes((tmp_path / "plan.txt").read_bytes())
        assert command(name, str(tmp_path / "plan.json"), "--ranks", "2") == 3
        assert "is a plan\n" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_configuration_of_any_name_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 99, **CONFIG}))
    assert command("show", str(tmp_path / "tiny.json"), "--sequence", "8") == 0
    assert capsys.readouterr().out.startswith("plan for 2 ranks")


def test_other_libraries_errors_are_shown_in_short_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ts, "plan", lambda *_, **__: 1 / 0)
    assert command("plan", "tests.test_cli:factory") == 3
    assert capsys.readouterr().err == "ZeroDivisionError: division by zero\n  try:    --debug, for the traceback\n"
    with pytest.raises(ZeroDivisionError):
        command("plan", "tests.test_cli:factory", "--debug")


def test_a_reader_that_goes_is_no_traceback() -> None:
    command = f"{sys.executable} -m torchshard env | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_an_unknown_command_is_2() -> None:
    assert command("shrad") == 2
