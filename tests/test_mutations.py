"""`verify` or the check detects collectives that are dropped or changed, and wrong slices."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import fx

import torchshard as ts
from tests.captured import captured_case
from tests.helpers import nightly
from tests.models import CASES
from torchshard.testing import PlannedCall, collective, verify

NAMES = ["attention", "gqa_1_kv_head", "fused_by_split", "gpt", "encoder_decoder", "dense_moe"]
SPLITTING = ts.Machine("test", 40e9, 8e9, 0.8e9, 8e-5, 1.5e-4)
"""A machine on which plans of these tiny models have a collective of each kind that the tests change."""


def _made(name: str, ranks: int = 2, dtype: torch.dtype = torch.float64) -> PlannedCall:
    return captured_case(name, dtype).plan(CASES[name].plan, ranks, objective={"machine": SPLITTING})


def _collectives(graph: fx.GraphModule) -> dict[fx.Node, str]:
    """Returns the collectives of a graph, with their names."""
    found = ((node, collective(node)) for node in graph.graph.nodes)
    return {node: row.name for node, row in found if row is not None}


def _named(graph: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.name == name)


def _caught(made: PlannedCall, graph: fx.GraphModule) -> str:
    """Returns the detector of a tampered graph: 'verify', 'check', 'both', 'crash', or '' if it goes undetected."""
    try:
        verify(graph, "inserted", after="a mutation")
    except ts.InternalError:
        verified = "verify"
    else:
        verified = ""
    try:
        report = made.check(graph)
    except Exception:
        return verified or "crash"
    return "both" if verified and not report.ok else "check" if not report.ok else ""


@nightly(but=["attention-torch.float64", "gqa_1_kv_head-torch.float64"])
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, dtype) for name in NAMES for dtype in (torch.float64, torch.bfloat16)),
        *(("gqa_1_kv_head", dtype) for dtype in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_every_dropped_collective_is_caught(name: str, dtype: torch.dtype) -> None:
    made = _made(name, dtype=dtype)
    assert made.check().ok
    found = _collectives(made.graph)
    assert found
    for node, kind in found.items():
        graph = made.graph_copy()
        gone = _named(graph, node.name)
        gone.replace_all_uses_with(gone.args[0])  # type: ignore[arg-type]
        graph.graph.erase_node(gone)
        how = _caught(made, graph)
        assert how in (("both",) if kind in ("copy", "reduce") else ("both", "verify")), f"{node.name}: {how!r}"


@pytest.mark.nightly
def test_copy_and_reduce_swapped() -> None:
    made = _made("gpt")
    swapped = {"copy": "reduce", "reduce": "copy"}
    for node, kind in _collectives(made.graph).items():
        if kind not in swapped:
            continue
        graph = made.graph_copy()
        _named(graph, node.name).target = getattr(torch.ops.torchshard, swapped[kind]).default
        assert _caught(made, graph) == "both", node.name


@nightly(but=["conv"])
@pytest.mark.parametrize("name", ["gpt_vocab_unsplit", "conv", "encoder_decoder"])
def test_a_wrong_dim(name: str) -> None:
    made = _made(name, ranks=4)
    mutated = 0
    for node, kind in _collectives(made.graph).items():
        if kind not in ("scatter", "gather", "all_gather", "narrow", "reduce_scatter"):
            continue
        shape = node.meta["val"].shape
        for dim in range(len(shape)):
            if dim == node.args[1] or not str(shape[dim]).isdigit():
                continue
            graph = made.graph_copy()
            changed = _named(graph, node.name)
            changed.args = (changed.args[0], dim, [int(shape[dim]), 1], changed.args[-1])
            assert _caught(made, graph) in ("verify", "both"), node.name
            mutated += 1
    assert mutated


@pytest.mark.parametrize("name", ["fused_by_split", "fused_by_view", "fused_gqa"])
def test_a_fused_weight_cut_across_its_blocks(name: str) -> None:
    """The classic mistake: shapes are right, values are scrambled."""
    made = _made(name)
    weight = "qkv.weight"
    layout = made.plan.parameters[weight]
    assert isinstance(layout, ts.S) and layout.parts is not None
    plain = {**made.plan.parameters, weight: ts.S(0)}
    program = dataclasses.replace(made.program, plan=made.plan.with_last(parameters=plain))
    assert not dataclasses.replace(made, program=program).check(made.graph).ok


def test_a_dropped_copy_leaves_outputs_exact_and_is_named() -> None:
    made = _made("gpt")
    graph = made.graph_copy()
    gone = _named(graph, "blocks_0_norm2_copy")
    gone.replace_all_uses_with(gone.args[0])  # type: ignore[arg-type]
    graph.graph.erase_node(gone)
    report = made.check(graph)
    wrong = {c.kind for c in report.comparisons if c.error > report.tolerance}
    assert wrong == {"parameter gradient"}
    assert "blocks_0_norm2" in report.diverges_at and "gradient" in report.diverges_at, report.diverges_at
    with pytest.raises(ts.ShardError, match="is off by"):
        report.raise_on_error()


def test_verify_names_the_node_and_says_that_it_is_our_defect() -> None:
    made = _made("attention")
    graph = made.graph_copy()
    node = next(n for n in graph.graph.nodes if n.meta.get("choice") is not None)
    node.meta["layouts"] = (ts.P,)
    with pytest.raises(ts.InternalError, match="after a mutation") as caught:
        verify(graph, "inserted", after="a mutation")
    assert node.name in str(caught.value) and "defect of torchshard" in str(caught.value)


def test_the_check_leaves_the_model_alone() -> None:
    made = _made("gpt")
    model = made.model
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    made.check()
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
