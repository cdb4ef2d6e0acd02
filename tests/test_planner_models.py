"""Tests the planner on blocks of real architectures: against an integer program, and folded against unfolded."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, fx, nn

from tests.helpers import nightly
from torchshard.capture import capture
from torchshard.core.layouts import Shard
from torchshard.core.mesh import MeshAxis
from torchshard.ir.editing import mark_needs_grad
from torchshard.passes import normalize
from torchshard.planner import states as states_of
from torchshard.planner.build import build
from torchshard.planner.conversions import conversions_of
from torchshard.planner.costs import CostModel
from torchshard.planner.network import Network
from torchshard.planner.predict import predict
from torchshard.planner.prune import keep_shared_whole, prune
from torchshard.planner.search import SearchResult, search
from torchshard.planner.solver import Solver
from torchshard.planner.states import GraphConstraints
from torchshard.plans.costs import Costs
from torchshard.plans.machine import Machine

scipy_optimize = pytest.importorskip("scipy.optimize", reason="the integer program is solved by HiGHS, in scipy")
scipy_sparse = pytest.importorskip("scipy.sparse", reason="the integer program is solved by HiGHS, in scipy")

_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
_GPT = {"n_embd": 64, "n_head": 4, "vocab_size": 99, "n_positions": 64}
_BERT = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 99}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": 99}
_VIT = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
_DISTIL = {"dim": 64, "n_heads": 4, "hidden_dim": 96, "vocab_size": 99}
_BART = {"d_model": 64, "vocab_size": 99, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}  # fmt: skip

_MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA, "num_hidden_layers"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT, "n_layer"),
    "bert": ("BertConfig", "BertForMaskedLM", _BERT, "num_hidden_layers"),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5, "num_layers"),
    "vit": ("ViTConfig", "ViTForImageClassification", _VIT, "num_hidden_layers"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}, "num_hidden_layers"),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**_GPT, "rotary_dim": 8}, "n_layer"),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _BERT, "num_hidden_layers"),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_BERT, "ffn_dim": 96, "word_embed_proj_dim": 64}, "num_hidden_layers"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _LLAMA, "num_hidden_layers"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 16}, "num_hidden_layers"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_LLAMA, "head_dim": 16}, "num_hidden_layers"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**_LLAMA, "pad_token_id": 0}, "num_hidden_layers"),
    "phi": ("PhiConfig", "PhiForCausalLM", _BERT, "num_hidden_layers"),
    "falcon": ("FalconConfig", "FalconForCausalLM", _BERT, "num_hidden_layers"),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", _LLAMA, "num_hidden_layers"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _LLAMA, "num_hidden_layers"),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**_BERT, "pad_token_id": 0}, "num_hidden_layers"),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", _DISTIL, "n_layers"),
    "dinov2": ("Dinov2Config", "Dinov2Model", {**_VIT, "mlp_ratio": 2}, "num_hidden_layers"),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART, "encoder_layers"),
}  # fmt: skip
"""Name -> (configuration, model, its sizes, the option for the number of layers)."""


def _predicted(graph: fx.Graph, found: SearchResult) -> Costs:
    decided = found.choices, found.parameters
    return predict(graph, MODEL, *decided, conversions_of(graph, MODEL, *decided))


@functools.cache
def graph_of(name: str, layers: int) -> fx.Graph:
    """Returns a model's normalized graph on the meta device, ready to be planned."""
    config_class, model_class, sizes, count = _MODELS[name]
    config = getattr(transformers, config_class)(**{**sizes, count: layers})
    if name == "t5":
        config.num_decoder_layers = layers
    if name == "bart":
        config.decoder_layers = layers
    config.use_cache = False
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, model_class)(config)
    ids: Tensor = torch.zeros(2, 16, dtype=torch.long, device="meta")
    if "image_size" in sizes:
        kwargs: dict[str, Any] = {"pixel_values": torch.zeros(2, 3, 32, 32, device="meta")}
    elif name in ("t5", "bart"):
        kwargs = {"input_ids": ids, "decoder_input_ids": ids}
    else:
        kwargs = {"input_ids": ids}
    captured = capture(model, (), kwargs, dynamic=False)  # several times faster, and the planner only needs sizes
    normalize(captured.graph)
    mark_needs_grad(captured.graph, [n for n, _ in model.named_parameters()])
    return captured.graph.graph


MODEL = CostModel(Machine("test", 1e9, 1e8, 1e8, 1e-5, 2e-5), MeshAxis(4))
"""Slow enough that computation and communication of small tensors cost about the same."""


def _integer_program(network: Network, price: float) -> float:
    """Returns the least cost by HiGHS: a binary per state, a share per finite entry of a table of two variables."""
    sizes = network.sizes
    offsets = dict(zip(sizes, np.cumsum([0, *sizes.values()]), strict=False))
    count, rows, columns, entries, right = sum(sizes.values()), [], [], [], []
    cost = list(np.zeros(count))

    def equation(terms: list[tuple[int, float]], value: float) -> None:
        for column, entry in terms:
            rows.append(len(right))
            columns.append(column)
            entries.append(entry)
        right.append(value)

    upper = list(np.ones(count))
    for v, size in sizes.items():
        equation([(int(offsets[v]) + s, 1.0) for s in range(size)], 1.0)
    for factor in network.factors:
        table = factor.seconds + (0.0 if factor.nbytes is None else price * factor.nbytes)
        if len(factor.scope) == 1:
            for s, value in enumerate(table):
                at = int(offsets[factor.scope[0]]) + s
                cost[at], upper[at] = (cost[at] + value, upper[at]) if np.isfinite(value) else (cost[at], 0.0)
            continue
        a, b = factor.scope
        by_row: dict[int, list[tuple[int, float]]] = {i: [(int(offsets[a]) + i, -1.0)] for i in range(table.shape[0])}
        by_column: dict[int, list[tuple[int, float]]] = {
            j: [(int(offsets[b]) + j, -1.0)] for j in range(table.shape[1])
        }
        for i, j in zip(*np.nonzero(np.isfinite(table)), strict=True):
            by_row[int(i)].append((len(cost), 1.0))
            by_column[int(j)].append((len(cost), 1.0))
            cost.append(float(table[i, j]))
            upper.append(1.0)
        for terms in (*by_row.values(), *by_column.values()):
            equation(terms, 0.0)
    matrix = scipy_sparse.csr_matrix((entries, (rows, columns)), shape=(len(right), len(cost)))
    scale = 1.0 / max(c for c in cost if np.isfinite(c))
    solved = scipy_optimize.milp(
        np.array(cost) * scale * 1e3,
        constraints=scipy_optimize.LinearConstraint(matrix, right, right),
        integrality=np.array([1] * count + [0] * (len(cost) - count)),
        bounds=scipy_optimize.Bounds(0, upper),
        options={"mip_rel_gap": 0.0},
    )
    assert solved.status == 0, solved.message
    return float(solved.fun) / scale / 1e3


@nightly(but=["dinov2", "distilbert"])
@pytest.mark.parametrize("name", _MODELS)
def test_a_block_is_planned_as_well_as_by_an_integer_program(name: str) -> None:
    network = build(graph_of(name, 1), MODEL, GraphConstraints(), fold=False)
    prices = (0.0, 1e-8)
    expected = [_integer_program(network, price) for price in prices]
    prune(network)
    for price, least in zip(prices, expected, strict=True):
        found = Solver(network).best(price)
        assert found.seconds + price * found.nbytes == pytest.approx(least, rel=1e-6)


LAYERS = {"llama": 6, "t5": 6, "vit": 6, "gptj": 6, "gemma2": 12}
"""Model -> number of layers. gemma2 repeats pairs, and folds at six of them."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYERS)
def test_repeated_blocks_are_planned_once_for_all(name: str) -> None:
    """Folded and unfolded plans have equal costs and equally many collectives."""
    graph = graph_of(name, LAYERS[name])
    folded, whole = (build(graph, MODEL, GraphConstraints(), fold=fold) for fold in (True, False))
    assert folded.chains and len(folded.states) < len(whole.states)
    for network in (folded, whole):
        prune(network)
    for price in (0.0, 1e-8, 1e-4):
        a, b = (Solver(network).best(price) for network in (folded, whole))
        assert a.seconds + price * a.nbytes == pytest.approx(b.seconds + price * b.nbytes, rel=1e-9)
    found = [search(graph, MODEL, GraphConstraints(), fold=fold) for fold in (True, False)]
    costs = [_predicted(graph, f) for f in found]
    totals = [each.seconds for each in costs]
    assert totals[0] == pytest.approx(totals[1], rel=1e-9)
    assert len(costs[0].collectives) == len(costs[1].collectives)


@pytest.mark.nightly
def test_blocks_whose_states_differ_are_planned_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A hint for one block makes its states differ; the plan then costs the same as unfolded."""
    graph = graph_of("gptj", LAYERS["gptj"])
    whole = search(graph, MODEL, GraphConstraints(), fold=False)
    learnt = states_of.wanted_parts

    def lopsided(ops: Any, tensors: Any, world: int) -> Any:
        found = learnt(ops, tensors, world)
        block = next(op.node for op in ops if op.node.name == "transformer_h_2_add_1")
        return found | {block: [Shard(2, ((16, 1), (48, 1)))]}

    monkeypatch.setattr(states_of, "wanted_parts", lopsided)
    with caplog.at_level("INFO", "torchshard.planner"):
        uneven = search(graph, MODEL, GraphConstraints())
    assert "planned one by one" in caplog.text
    costs = [_predicted(graph, f) for f in (whole, uneven)]
    totals = [each.seconds for each in costs]
    assert totals[1] == pytest.approx(totals[0], rel=1e-9)


@pytest.mark.nightly
def test_what_all_blocks_share_may_stay_whole_at_next_to_no_cost() -> None:
    """Masks and rotary tables: with one state each, tables are smaller and the optimum is at most 1 % worse."""
    graph = graph_of("llama", LAYERS["llama"])
    full, whole = (build(graph, MODEL, GraphConstraints()) for _ in range(2))
    prune(full)
    keep_shared_whole(whole)
    prune(whole)
    shared = [v for chain in whole.chains for v in chain.shared]
    assert shared and all(len(whole.states[v]) == 1 for v in shared)
    assert any(len(full.states[v]) > 1 for chain in full.chains for v in chain.shared)
    best, found = (Solver(network).best() for network in (full, whole))
    assert best.seconds <= found.seconds <= 1.01 * best.seconds


@pytest.mark.nightly
def test_blocks_whose_tables_are_too_large_are_planned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search goes from neighbourhood to neighbourhood: the plan is valid, near the best, and has a gap."""
    graph = graph_of("llama", LAYERS["llama"])
    exact = search(graph, MODEL, GraphConstraints())
    monkeypatch.setattr("torchshard.planner.search.Solver", functools.partial(Solver, limit=1000))
    near = search(graph, MODEL, GraphConstraints())
    costs = [_predicted(graph, f) for f in (exact, near)]
    totals = [each.seconds for each in costs]
    assert exact.gap == 0 < near.gap < float("inf")
    assert totals[1] < 1.1 * totals[0]
