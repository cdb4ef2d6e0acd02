"""A rank's forward and backward graphs compute the gradients of autograd on the rank's graph.

The graphs of all ranks run in lockstep, once under autograd and once as steps, on the same numbers.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn

import torchshard as ts
from tests.captured import captured_case
from tests.helpers import holding, nightly
from tests.models import CASES, GPT
from torchshard.capture import flatten_call
from torchshard.checking import lockstep
from torchshard.checking.lockstep import rank_graphs
from torchshard.checking.steps import Run, cotangent, leaf
from torchshard.compiler.program import Program
from torchshard.core.mesh import MeshAxis
from torchshard.ir.effects import is_view
from torchshard.ir.graph import placeholders
from torchshard.ops import Begin, wait
from torchshard.passes import Partition, direct, schedule, segments, step_graphs
from torchshard.testing import capture, largest
from torchshard.weights.materialize import local_state


def _states(made: Program, model: nn.Module) -> list[dict[str, Tensor]]:
    """Returns each rank's parameters, buffers and constants, by their paths in the graph, as new leaves."""
    states = []
    for place in made.mesh.places():
        state = local_state(model, made.held, place)
        named = {}
        for node in placeholders(made.graph.graph):
            path = node.meta["path"]
            if node.meta["kind"] != "input":
                named[path] = leaf(state[path] if path in state else made.captured.constants[path])
        states.append(named)
    return states


def _step(
    parts: Sequence[Partition], values: Sequence[Sequence[Any]]
) -> tuple[list[list[Any]], list[list[Tensor | None]]]:
    """Returns each rank's results, and the gradients of its placeholders."""
    record = [lambda node, value, args: value] * len(parts)
    with torch.no_grad():
        made = lockstep.run([p.forward for p in parts], values, record)
        count = len(parts[0].given)
        arguments = [
            [*results[count:], *(cotangent(r, i) for i, r in enumerate(results[:count]) if parts[0].given[i])]
            for results in made
        ]
        gradients: Any = lockstep.run([p.backward for p in parts], arguments, record)
    return [results[:count] for results in made], gradients


def sent(module: fx.GraphModule) -> list[str]:
    """Returns the collectives that a graph begins, with their dims, in order."""
    return [f"{n.target} {n.args[1:-1]}" for n in module.graph.nodes if isinstance(n.target, Begin)]


def compared(name: str, world: int, recompute: Sequence[str] = ()) -> tuple[float, list[Partition]]:
    """Returns the largest difference of results and gradients between autograd and step graphs, and the step graphs."""
    case = captured_case(name)
    made = case.plan(CASES[name].plan, world).program
    if recompute:
        made = case.plan(made.plan, world, objective={"recompute": recompute}).program
    graphs, call = rank_graphs(made.graph, MeshAxis(world)), flatten_call(case.model, case.args, case.kwargs)
    torch.manual_seed(3)
    run = Run(graphs, _states(made, case.model), call, mesh=made.mesh)
    parts = [step_graphs(graph) for graph in graphs]
    for each in parts:
        assert (len(sent(each.forward)), len(sent(each.backward))) == made.plan.costs.calls
    states, values = _states(made, case.model), []
    for graph, state in zip(graphs, states, strict=True):
        by_path = {**state, **dict(zip(call.names, call.tensors, strict=True))}
        values.append([by_path[n.meta["path"]].detach().clone() for n in placeholders(graph.graph)])
    torch.manual_seed(3)
    results, gradients = _step(parts, values)
    worst = 0.0
    for rank, graph in enumerate(graphs):
        found = [*results[rank]]
        wanted = [*run.outputs[rank]]
        leaves = {**run.states[rank], **run.inputs[rank]}
        sums: dict[str, Tensor] = {}
        for node, gradient in zip(placeholders(graph.graph), gradients[rank], strict=True):
            if gradient is not None:
                path = node.meta["path"]
                sums[path] = sums[path] + gradient if path in sums else gradient
        expected = {path: t.grad for path, t in leaves.items() if t.grad is not None}
        assert sums.keys() == expected.keys()
        pairs = [*zip(found, wanted, strict=True), *((sums[path], expected[path]) for path in sums)]
        for ours, theirs in pairs:
            if isinstance(theirs, Tensor) and theirs.numel():
                assert ours.shape == theirs.shape
                difference = (ours - theirs.detach()).abs().max() / theirs.detach().abs().max().clamp(min=1e-30)
                worst = largest(worst, float(difference))
    return worst, parts


SOME = ["mlp_uneven", "attention_7_heads", "fused_by_split", "gpt", "conv", "dense_moe", "writes"]
"""Models to compare on three ranks; `make nightly` compares all."""
WITHOUT = {"recurrent": "steps of a layer"}
"""Models without a backward graph -> the reason."""


@nightly("conv", "dense_moe", "fused_by_split", "gpt")
@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.nightly) for n in CASES if n not in WITHOUT]
)
def test_gradients_are_those_of_autograd(name: str) -> None:
    worst, parts = compared(name, 3)
    assert worst < 1e-12
    assert all(sent(each.backward) == sent(parts[0].backward) for each in parts)


@pytest.mark.nightly
def test_a_model_without_values_takes_the_same_memory() -> None:
    """On meta, PyTorch records no gradient for some ops, such as losses; the estimate must not change."""
    held = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model, ids = GPT(), torch.zeros(2, 8, dtype=torch.long)
        plan = ts.plan(
            model, "auto", example_inputs=(ids, ids), mesh=2, objective={"memory": "1GiB", "machine": "cpu-gloo"}
        )
        held.append(plan.costs.memory)
    assert held[0] == held[1] and held[0]["activations"] > 0


@pytest.mark.nightly
def test_recordings_are_freed_with_their_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    plan = ts.plan(model, example_inputs=(torch.randn(2, 4),), mesh=2, objective={"memory": "1GiB"})
    recordings = [weakref.ref(recording) for recording in plan.graph.meta["recordings"].values()]
    assert recordings and all(ref() is not None for ref in recordings)
    del plan
    gc.collect()
    assert all(ref() is None for ref in recordings)


# --- the order of a step ----------------------------------------------------------------------------------------------


def _order(module: fx.GraphModule) -> list[str]:
    """Returns the products and collectives of a graph, in the order in which they run."""
    names = {torch.ops.aten.mm.default: "product", wait: "wait"}
    targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
    return ["begin" if isinstance(t, Begin) else names[t] for t in targets if isinstance(t, Begin) or t in names]


def test_collectives_of_a_backward_run_behind_the_weights_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
    made = capture(model, (x.requires_grad_(),)).plan({"0": "column", "1": "row", "2": "column"}, 2).program
    backward = step_graphs(rank_graphs(made.graph, MeshAxis(2))[0]).backward
    # The sum for 2's input gradient overlaps with the product for 2's weight; the sum for x with those for 1 and 0.
    assert _order(backward) == [
        *("product", "begin", "product", "wait"), *("product", "product", "begin", "product", "product", "wait"),
    ]  # fmt: skip


def test_a_value_is_not_kept_for_its_size() -> None:
    """A mean's backward needs the number of elements; it is saved as a number instead of the tensor."""
    model = nn.Sequential(nn.Linear(8, 8), Mean())
    made = capture(model, (torch.randn(4, 8),)).plan({"0": "column"}, 2).program
    saved = step_graphs(rank_graphs(made.graph, MeshAxis(2))[0])
    assert saved.saved[: saved.saved_tensors] == ("input_1",) and saved.saved_tensors < len(saved.saved)


class Mean(nn.Module):
    """The mean of all elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class _Ordered(nn.Module):
    """A model with an independent random draw after one that depends on a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(self.up(x)), 0.5) + torch.rand(8)


def _ordered() -> Partition:
    made = capture(_Ordered(), (torch.randn(3, 8),)).plan({"up": "column", "down": "row"}, 2).program
    return step_graphs(rank_graphs(made.graph, MeshAxis(2))[0])


def test_draws_keep_their_order() -> None:
    places = {str(node.target): i for i, node in enumerate(_ordered().forward.graph.nodes)}
    assert places["aten.native_dropout.default"] < places["aten.rand.default"]


def test_a_read_stays_before_a_write() -> None:
    graph = fx.Graph()
    x, buffer = graph.placeholder("x"), graph.placeholder("buffer")
    reduce = graph.call_function(torch.ops.torchshard.reduce.default, (x, "simulated/0/2"))
    read = graph.call_function(torch.ops.aten.mul.Tensor, (reduce, buffer))
    write = graph.call_function(torch.ops.aten.copy_.default, (buffer, x))
    graph.output((read,))
    schedule(fx.GraphModule(nn.Module(), graph))
    order = list(graph.nodes)
    assert order.index(read) < order.index(write)


def test_draws_are_in_the_order_of_the_recorded_memory() -> None:
    made = capture(nn.Dropout(0.5), (torch.randn(3, 5, requires_grad=True),)).plan({}, 1).program
    run = direct(step_graphs(rank_graphs(made.graph, MeshAxis(1))[0]).forward)
    x, results = torch.randn(3, 5), []
    for given in (x, x.mT.contiguous().mT):
        torch.manual_seed(0)
        results.append(run(given)[0])
    assert torch.equal(*results)


def _keeps_memory(begin: fx.Node) -> bool:
    """Whether a collective's operand has other readers, or shares memory with a placeholder."""
    value = begin
    while value is begin or is_view(value):
        value = value.all_input_nodes[0]
        if len(value.users) > 1 or value.op == "placeholder":
            return True
    return False


@nightly("gpt")
@pytest.mark.parametrize("name", ["gpt", "attention"])
def test_only_memory_that_nobody_else_reads_is_taken(name: str) -> None:
    case = captured_case(name)
    made = case.plan(CASES[name].plan, 2).program
    parts = step_graphs(rank_graphs(made.graph, MeshAxis(2))[0])
    begun = [n for part in (parts.forward, parts.backward) for n in part.graph.nodes if isinstance(n.target, Begin)]
    taking = [n for n in begun if n.target.in_place]
    assert taking and not any(map(_keeps_memory, taking))


def test_memory_that_others_read_is_not_taken() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    view = graph.call_function(torch.ops.aten.view.default, (product, [8]))
    reduce = graph.call_function(torch.ops.torchshard.reduce.default, (view, "simulated/0/2"))
    given = graph.call_function(torch.ops.torchshard.reduce.default, (x, "simulated/0/2"))
    graph.output((reduce, given, graph.call_function(torch.ops.aten.neg.default, (product,))))
    module = fx.GraphModule(nn.Module(), graph)
    schedule(module)
    assert [n.target.in_place for n in graph.nodes if isinstance(n.target, Begin)] == [False, False]


@pytest.mark.nightly
def test_a_size_that_a_layer_gives_is_of_the_forward() -> None:
    """A size that is a result is recorded last, when it is requested, and still belongs to the forward."""
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    ids = torch.randint(48, (2, 5))
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **heads))
    made = ts.plan(model, example_kwargs={"input_ids": ids, "labels": ids}, mesh=2, objective={"memory": "1GiB"})
    assert "backward:" in ts.explain(made, level="step") and made.costs.memory["peak"] > 0


def test_a_small_batch_of_a_rank_keeps_the_graph_of_a_convolution(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch's choice of a float32 convolution kernel depends on whether the batch has 16 items."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(16, 3, 6, 6)
    mesh, data = {"dp": 2, "fs": 2, "tp": 2}, {"dp": "replicate", "fs": "shard"}
    ts.check(model, {}, mesh=holding(mesh, data), example_inputs=(x,), dtype=torch.float32).raise_on_error()
    assert "no graph of the backward" not in caplog.text


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(4096, 8), nn.Linear(8, 4096, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.tok(ids)).view(-1, 4096), labels.view(-1))


def test_a_loss_split_by_vocabulary_has_a_graph_on_a_mesh(caplog: pytest.LogCaptureFixture) -> None:
    """Labels have sizes of their own: that they equal the logits' is known from forward, in a rank's sizes too."""
    torch.manual_seed(0)
    calls = [torch.randint(4096, (8, 64)) for _ in range(2)]
    made = capture(_Language(), calls).plan({"head": "column"}, {"dp": 2, "tp": 2})
    assert made.plan.costs.kinds["all_reduce_max"]
    ts.check(_Language(), made.plan, calls, mesh={"dp": 2, "tp": 2}).raise_on_error()
    assert "no graph of the backward" not in caplog.text


class _TwoUses(nn.Module):
    """A model with two results; one gradient needs a view of a value that the other gradient needs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 20)
        self.one, self.other = nn.Parameter(torch.rand(20, 1)), nn.Parameter(torch.rand(20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        return (h.transpose(-1, -2) * self.one).sum(), (h * self.other).sum()


def test_a_backward_of_some_results_takes_what_the_forward_keeps() -> None:
    """By itself, a backward of one result would save the view; given the full step's values, it recomputes the view."""
    local = capture(_TwoUses(), (torch.randn(3, 12),)).plan({"up": "column"}, 2).program.local_graph_of(0)
    (segment,) = (part for part in segments(local) if len(part.results) == 2)
    whole, given = step_graphs(segment.graph), (True, False)
    assert not set(step_graphs(segment.graph, given).saved) <= set(whole.saved)
    assert set(step_graphs(segment.graph, given, kept=whole.saved).saved) <= set(whole.saved)
