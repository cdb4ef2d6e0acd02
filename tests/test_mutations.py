"""The comparison would fail: collectives dropped or changed, slices taken wrongly: verify or the check sees each."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import torchshard as ts
from tests.models import CASES
from torchshard.checking import check_program
from torchshard.distributed.ops import OPS
from torchshard.errors import InternalError
from torchshard.graph import duplicate
from torchshard.passes import verify
from torchshard.program import Program, program

ROOT = Path(__file__).parents[1]
NAMES = ["attention", "gqa_1_kv_head", "fused_by_split", "gpt", "encoder_decoder", "dense_moe"]


def _made(name: str, world_size: int = 2) -> tuple[Any, Program, tuple[Any, ...]]:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().double()
    inputs = tuple(
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in case.inputs()
    )
    return model, program(model, case.plan, world_size, inputs), inputs


def _collectives(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.target in OPS]


def _named(graph: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.name == name)


def _caught(model: Any, made: Program, graph: fx.GraphModule, inputs: tuple[Any, ...]) -> str:
    """How a tampered graph is seen: 'verify', 'check', 'crash', or '' if it is not."""
    try:
        verify(graph, "inserted", after="a mutation")
    except InternalError:
        verified = "verify"
    else:
        verified = ""
    try:
        report = check_program(model, made, graph, inputs, {})
    except Exception:
        return verified or "crash"
    return "both" if verified and not report.ok else "check" if not report.ok else ""


@pytest.mark.parametrize("name", NAMES)
def test_every_dropped_collective_is_caught(name: str) -> None:
    model, made, inputs = _made(name)
    assert check_program(model, made, made.graph, inputs, {}).ok
    found = _collectives(made.graph)
    assert found
    for node in found:
        graph = duplicate(made.graph)
        gone = _named(graph, node.name)
        gone.replace_all_uses_with(gone.args[0])  # type: ignore[arg-type]
        graph.graph.erase_node(gone)
        how = _caught(model, made, graph, inputs)
        kind = OPS[node.target].name
        assert how in (("both",) if kind in ("copy", "reduce") else ("both", "verify")), f"{node.name}: {how!r}"


def test_a_dropped_copy_leaves_outputs_exact_and_is_named() -> None:
    model, made, inputs = _made("gpt")
    graph = duplicate(made.graph)
    gone = _named(graph, "blocks_0_norm2_copy")
    gone.replace_all_uses_with(gone.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(gone)
    report = check_program(model, made, graph, inputs, {})
    wrong = {c.kind for c in report.comparisons if c.error > report.tolerance}
    assert wrong == {"parameter gradient"}
    assert "blocks_0_norm2" in report.diverges_at and "gradient" in report.diverges_at, report.diverges_at
    with pytest.raises(ts.ShardError, match="is off by"):
        report.raise_on_error()


def test_a_reduce_in_place_of_a_copy_and_the_other_way_round() -> None:
    model, made, inputs = _made("gpt")
    for node in _collectives(made.graph):
        kind = OPS[node.target].name
        if kind not in ("copy", "reduce"):
            continue
        graph = duplicate(made.graph)
        _named(graph, node.name).target = getattr(torch.ops.torchshard, OPS[node.target].dual).default
        assert _caught(model, made, graph, inputs) == "both", node.name


@pytest.mark.parametrize("name", ["fused_by_split", "fused_by_view", "fused_gqa"])
def test_a_fused_weight_cut_across_its_blocks(name: str) -> None:
    """The classic: shapes are right, values are scrambled."""
    model, made, inputs = _made(name)
    weight = "qkv.weight"
    layout = made.plan.parameters[weight]
    assert isinstance(layout, ts.S) and layout.parts is not None
    plain = {**made.plan.parameters, weight: ts.S(0)}
    wrong = dataclasses.replace(made, plan=dataclasses.replace(made.plan, parameters=plain))
    assert not check_program(model, wrong, made.graph, inputs, {}).ok


@pytest.mark.parametrize("name", ["gqa_1_kv_head", "gpt_vocab_unsplit", "conv", "encoder_decoder"])
def test_a_wrong_dim(name: str) -> None:
    model, made, inputs = _made(name, world_size=4)
    mutated = 0
    for node in _collectives(made.graph):
        if OPS[node.target].name not in ("scatter", "gather", "all_gather", "narrow", "reduce_scatter"):
            continue
        shape = node.meta["val"].shape
        for dim in range(len(shape)):
            if dim == node.args[1] or not str(shape[dim]).isdigit():
                continue
            graph = duplicate(made.graph)
            changed = _named(graph, node.name)
            changed.args = (changed.args[0], dim, [int(shape[dim]), 1], changed.args[-1])
            assert _caught(model, made, graph, inputs) in ("verify", "both"), node.name
            mutated += 1
    assert mutated


def test_verify_names_the_node_and_says_that_it_is_our_defect() -> None:
    _, made, _ = _made("attention")
    graph = duplicate(made.graph)
    node = next(n for n in graph.graph.nodes if n.meta.get("choice") is not None)
    node.meta["layouts"] = (ts.P,)
    with pytest.raises(InternalError, match="after a mutation") as caught:
        verify(graph, "inserted", after="a mutation")
    assert node.name in str(caught.value) and "defect of torchshard" in str(caught.value)


def test_the_check_leaves_the_model_alone() -> None:
    model, made, inputs = _made("gpt")
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    check_program(model, made, made.graph, inputs, {})
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())


def test_every_seeded_fault_has_its_place() -> None:
    """The bench of faults changes lines of the library: each is there, once."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "benchmarks" / "mutants.py")
    assert spec is not None and spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = mutants  # its dataclass looks itself up there
    spec.loader.exec_module(mutants)
    texts = {fault.file: (ROOT / "torchshard" / fault.file).read_text() for fault in mutants.FAULTS}
    assert len(mutants.FAULTS) >= 30
    assert [fault.name for fault in mutants.FAULTS if texts[fault.file].count(fault.right) != 1] == []
