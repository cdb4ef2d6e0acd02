"""The cost of a step: the work and the timeline of its ops; predicted bytes and memory against a real step."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import torchshard as ts
from tests.helpers import allocated, holding, nightly
from tests.models import MLP
from tests.priced import MESHES, PRICED, priced
from tests.test_experts import _model as mixture
from torchshard.checking import lockstep, simulated
from torchshard.checking.exchanges import exchanged
from torchshard.checking.trials import trial_of
from torchshard.compiler.meshes import read_mesh
from torchshard.core.choices import choices
from torchshard.core.layouts import I, P
from torchshard.core.mesh import MeshAxis
from torchshard.custom_ops.stepwise import Stepwise
from torchshard.distributed import convert, experts, kernels, wire
from torchshard.distributed.group import ALONE
from torchshard.distributed.kernels import Exchange
from torchshard.distributed.ranks import Ranks
from torchshard.ir.fake_values import hint, nbytes
from torchshard.ir.graph import is_tensor_op, op_name, placeholders, results_of, whole_choice
from torchshard.planner.costs import CostModel
from torchshard.planner.properties import PRODUCTS, Op
from torchshard.planner.timeline import Messages, Work, course
from torchshard.plans.costs import Collective, Sent
from torchshard.plans.machines import MACHINES
from torchshard.plans.proposals import meshes
from torchshard.runtime.lazy_step import steps_of
from torchshard.testing import PlannedCall, capture, rule_of

aten = torch.ops.aten
NONE = Sent("none", 0.0, 0.0)
SOME = Collective("w", "reduce", P, I, ("op",), "", "", "", "f32[8]", "f32[8]", NONE, NONE, NONE)


def _messages(*seconds: float) -> Messages:
    """One message over each axis with a positive duration."""
    return {axis: [(SOME, Sent("all_reduce", 1.0, each))] for axis, each in enumerate(seconds) if each}


def _work(forward: float, backward: float, gather: float = 0.0, sums: float = 0.0, again: float = 0.0) -> Work:
    return Work([forward, backward], ([], []), (_messages(gather), _messages(again)), _messages(sums))


def step(ops: list[Work]) -> float:
    return course(ops).seconds


def test_a_gather_is_hidden_behind_what_comes_before() -> None:
    assert step([_work(3, 0), _work(1, 0, gather=2)]) == 4
    assert step([_work(3, 0), _work(1, 0, gather=5)]) == 6  # the gather begins with the op before
    assert step([_work(3, 0, gather=2), _work(1, 0)]) == 6  # the first gather can't be hidden
    assert step([_work(1, 0), _work(1, 0, gather=1), _work(1, 0, gather=3)]) == 5


def test_backward_begins_when_forward_has_ended() -> None:
    assert step([_work(1, 2), _work(3, 4, again=5)]) == 4 + 5 + 4 + 2


def test_a_sum_is_hidden_behind_what_comes_later() -> None:
    assert step([_work(0, 3), _work(0, 1, sums=2)]) == 4
    assert step([_work(0, 3, sums=2), _work(0, 1)]) == 6  # the sum of the first op is the last
    assert step([_work(0, 1, sums=4), _work(0, 1, sums=4)]) == 1 + 4 + 4


def test_what_is_needed_next_is_sent_before_a_sum() -> None:
    ops = [_work(0, 1, again=3), _work(0, 4, sums=2)]
    assert step(ops) == 4 + 1 + 1 and step([_work(0, 1, again=5), *ops[1:]]) == 5 + 2
    assert [(message.start, message.sent.seconds) for message in course(ops).messages] == [(0, 3), (4, 2)]


def test_an_inner_axis_sums_before_an_outer_one() -> None:
    both = Work([0, 1], sums=_messages(2, 3))
    assert step([both]) == 1 + 3 + 2
    assert step([both, both]) == 1 + 3 + 3 + 2  # the sums of both axes overlap


SECONDS = st.floats(0, 8, width=16)
OPS = st.lists(st.builds(_work, *[SECONDS] * 5), min_size=1, max_size=6)


@given(OPS)
def test_a_step_takes_as_long_as_each_of_its_parts_and_no_longer_than_all(ops: list[Work]) -> None:
    computes = sum(sum(op.computes) for op in ops)
    messages = itertools.chain.from_iterable(m.values() for op in ops for m in (*op.gathers, op.sums))
    sent = sum(message.seconds for _, message in itertools.chain.from_iterable(messages))
    assert max(computes, sent) - 1e-9 <= step(ops) <= computes + sent + 1e-9


PLANNED = [
    ({"dp": 4}, "replicate"),
    ({"dp": 4}, "shard"),
    ({"dp": 2, "tp": 2}, "shard"),
    ({"a": 2, "b": 2, "tp": 2}, {"a": "replicate", "b": "shard"}),
]


@nightly(but=["{'dp': 2, 'tp': 2}-shard"])
@pytest.mark.parametrize(("mesh", "data"), PLANNED, ids=str)
def test_of_a_plan(mesh: dict[str, int], data: Any) -> None:
    """With a free link a step takes its computation's time; else computation hides a part of the communication."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(4)])
        part = torch.ones(4096, 2048)
    free = dataclasses.replace(
        MACHINES["h100x8"], launch=0.0, latency=0.0, link_bandwidth=1e30, network_bandwidth=1e30, network_latency=0.0,
        transfers=(),
    )  # fmt: skip
    for machine in ("h100x8", free):
        plan = ts.plan(model, example_inputs=(part,), mesh=holding(mesh, data), objective={"machine": machine})
        assert plan.costs.step is not None
        sent = sum(c.seconds for each in plan.axes if each.data for c in each.costs.collectives)
        assert plan.costs.step == pytest.approx(sum(plan.step_seconds.values()) - sum(plan.costs.beside.values()))
        assert -1e-12 <= plan.hidden_seconds <= sent + 1e-12
        if machine is free:
            assert plan.costs.step == pytest.approx(sum(plan.costs.compute.values()), rel=0.01)
        else:
            assert plan.hidden_seconds > sent / 4
        assert ts.Plan.from_json(plan.to_json()).step_seconds == plan.step_seconds


# --- ops --------------------------------------------------------------------------------------------------------------


def test_each_op_costs_its_overhead_and_elementwise_ones_their_bytes() -> None:
    """An MLP of two products, two biases and an activation, forward and backward: views cost only their overhead."""
    plain = ts.Machine("m", 1e12, 1e12)
    slow = dataclasses.replace(plain, op_overhead=1e-3)
    unfused = dataclasses.replace(plain, elementwise_bandwidth=1e9)
    model, x = MLP(8, 16, 8), torch.randn(4, 8)
    base, late, read = (
        sum(ts.plan(model, example_inputs=(x,), mesh=1, objective={"machine": m}).costs.compute.values())
        for m in (plain, slow, unfused)
    )
    ops = [n for n in capture(model, (x,)).graph.graph.nodes if is_tensor_op(n)]
    assert [op_name(n) for n in ops] == ["linear", "add", "relu", "linear", "add"]
    # forward; of the first product the weight's gradient, of the second both; of the sums the biases', of relu its own
    assert late - base == pytest.approx(1e-3 * (5 + 1 + 2 + 2 + 1))
    wide, narrow, bias = 4 * 16 * 4, 4 * 8 * 4, (16 + 8) * 4
    forward = (2 * wide + 2 * wide + 2 * narrow) + bias
    backward = (wide + narrow + bias) + 3 * wide
    assert read - base == pytest.approx((forward + backward) / 1e9, rel=1e-2)


def test_every_op_that_pytorch_counts_flops_of_has_a_price() -> None:
    packets = [packet for packet in flop_registry if hasattr(packet, "overloads")]
    ruled = {op for packet in packets for name in packet.overloads() if rule_of(op := getattr(packet, name))}
    assert aten.convolution.default in ruled and ruled <= PRODUCTS.keys()


def _flops(module: fx.GraphModule, op: Any, axis: str) -> tuple[float, float]:
    """The FLOPs of the first node of an op: unsharded, and on one of two ranks with `axis` split."""
    costs = CostModel(MACHINES["cpu-gloo"], MeshAxis(2))
    costed = Op.of(next(n for n in module.graph.nodes if n.target is op))
    assert costed.row is not None
    split = next(c for c in choices(costed.row, 2) if c.name == f"split {axis}")
    return costs.flops(costed, whole_choice(costed.node)), costs.flops(costed, split)


def test_a_transposed_convolution_costs_what_pytorch_counts() -> None:
    model, x = nn.ConvTranspose2d(8, 6, 3, stride=2), torch.randn(2, 8, 5, 5)
    whole, part = _flops(capture(model, (x,)).graph, aten.convolution.default, "o")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert whole == counter.get_total_flops() == 2 * part


@pytest.mark.parametrize("axis", ["e", "n"])
def test_the_price_of_experts(axis: str) -> None:
    """Each row is multiplied by one expert's matrix; with experts split, each rank computes its part of the rows."""
    model, inputs = mixture(inner=64, dtype=torch.bfloat16)
    whole, part = _flops(capture(model, inputs).graph, aten._grouped_mm.default, axis)
    assert whole == 2 * (2 * 10) * 16 * 64 == 2 * part


def test_each_mesh_of_so_many_ranks_is_there_once() -> None:
    for ranks in (1, 6, 8):
        found = [*meshes(ranks, math.inf)]
        assert all(read_mesh(mesh).size == ranks for mesh in found)
        ways = 2 * sum(ranks % n == 0 for n in range(1, ranks)) + 1  # each divisor in both ways, and no data axis
        assert len(found) == len({str(each) for each in found}) == ways
    assert all(mesh.get("tp", 1) <= 2 for mesh in meshes(8, 2))


# --- messages ---------------------------------------------------------------------------------------------------------


NAMES = ["mlp", *(pytest.param(name, marks=pytest.mark.nightly) for name in (*PRICED, "fused_gqa", "conv_columns"))]


def _sent(parts: Sequence[Exchange]) -> float:
    """The bytes that the first rank sends in a ring algorithm."""
    (first, *others), nbytes = parts, parts[0].sent.nbytes
    if first.lengths is not None:
        return float(sum(first.lengths[1][1:]) * first.sent.itemsize)
    times = {"all_reduce": 2 / len(parts), "all_gather_single": 1.0, "reduce_scatter_single": 1 / len(parts)}
    return nbytes * len(others) * times[first.collective]


def _counted(made: PlannedCall, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bytes of each message of the first rank in a step."""
    graphs, found = made.rank_graphs(), list[float]()
    nodes = graphs[0].graph.nodes
    firsts = {str(n.args[-1]) for n in nodes if n.args and str(n.args[-1]).startswith("simulated")}
    firsts |= {n.target.group for n in nodes if isinstance(n.target, Stepwise)}
    run = lockstep.run_collective

    def watched(requests: Any, **how: Any) -> Any:
        def noted(parts: Sequence[Any]) -> list[Tensor]:
            if isinstance(parts[0], Exchange) and requests[0].args[-1] in firsts:
                found.append(_sent(parts))
            return exchanged(parts)

        with monkeypatch.context() as patch:
            patch.setattr(simulated, "exchanged", noted)
            return run(requests, **how)

    with monkeypatch.context() as patch:
        patch.setattr(lockstep, "run_collective", watched)
        assert (
            trial_of(made.model, made.program.captured, made.args, made.kwargs).by_graphs(graphs, made.program)
            is not None
        )
    return found


OF_SEQUENCE = [{"cp": "sequence", "tp": ""}, {"dp": "replicate", "cp": "sequence"}]
"""Meshes with an axis that splits the sequence."""
SEQUENCES = ("llama", "gpt", "dense_moe", "soft_mixture", "decoder", "residual")
"""Models of sequences of any length; the examples are even."""
_TWO_LENGTHS = pytest.mark.xfail(strict=True, reason="of two lengths, on dp x cp, one of 13 messages is not predicted")


@nightly("mlp-{'dp': 'replicate', 'fs': 'shard', 'tp': ''}")
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_predicts_what_is_sent(name: str, axes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _compare_sent(name, axes, monkeypatch)


@nightly(but=["residual-{'cp': 'sequence', 'tp': ''}"])
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        *(pytest.param(name, axes, id=f"{name}-{axes}") for name in SEQUENCES for axes in OF_SEQUENCE),
        pytest.param("encoder_decoder", OF_SEQUENCE[0], id="encoder_decoder-tp"),
        pytest.param("encoder_decoder", OF_SEQUENCE[1], marks=_TWO_LENGTHS, id="encoder_decoder-dp"),
    ],
)
def test_a_plan_of_a_split_sequence_predicts_what_is_sent(
    name: str, axes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _compare_sent(name, axes, monkeypatch)


def _compare_sent(name: str, axes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = priced(name, axes)
    plans = made.program.priced(with_memory=False).axes
    found = _counted(made, monkeypatch)
    assert found
    assert sum(plan.costs.nbytes for plan in plans) == pytest.approx(sum(found))
    assert sum(sum(plan.costs.calls) for plan in plans) == len(found)


# --- memory -----------------------------------------------------------------------------------------------------------


BY_DAY = [("decoder", {"dp": "shard"})]
CALLS = [(name, axes) for name in PRICED for axes in MESHES]


@dataclass(frozen=True)
class _Ended:
    """A finished message of zeros; like a Work of gloo or NCCL, it keeps its tensors alive."""

    tensors: tuple[Any, ...]

    def wait(self) -> None: ...


def _without_processes(group: object, call: str, fn: object, /, *tensors: Any, **how: Any) -> _Ended:
    if call != "all_reduce":
        tensors[0].zero_()
    return _Ended(tensors)


def _value(node: fx.Node) -> Tensor:
    value, shape = node.meta["val"], [hint(size) for size in node.meta["val"].shape]
    made = torch.full(shape, 0.1 if value.is_floating_point() else 1, dtype=value.dtype)
    return made.requires_grad_(bool(node.meta["needs_grad"]))


def _step(local: fx.GraphModule) -> Callable[[], None]:
    """Returns a function that runs a rank's forward and backward."""
    nodes, by_path = placeholders(local.graph), dict[str, Tensor]()
    values = [by_path.setdefault(node.meta["path"], _value(node)) for node in nodes]
    sources, steps = [node.name for node in nodes], steps_of(local, Ranks(ALONE))
    results = [r.name for r in results_of(local.graph) if isinstance(r, fx.Node)]

    def step() -> None:
        made = dict(zip(sources, values, strict=True))
        for segment, run in steps:
            made.update(zip(segment.results, run(*(made[name] for name in segment.arguments)), strict=True))
        wanted = [made[name] for name in results if made[name].requires_grad]
        losses = [result for result in wanted if result.numel() == 1][:1] or wanted
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
        for value in values:
            value.grad = None

    return step


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        pytest.param(*call, id=f"{call[0]}-{call[1]}", marks=[] if call in BY_DAY else pytest.mark.nightly)
        for call in CALLS
    ],
)
def test_predicted_memory_is_the_allocators(name: str, axes: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "begin", _without_processes)
    monkeypatch.setattr(wire, "finish", lambda *_: None)
    for module in (convert, experts):
        monkeypatch.setattr(module, "refuse_simulated", lambda _: None)
    monkeypatch.setattr(kernels, "verify_following_call", lambda *_, **__: None)
    made = priced(name, axes).program
    local = made.local_graph_of(0)
    step = _step(local)
    step()
    stored = {n.meta["path"]: n for n in placeholders(local.graph) if n.meta["kind"] != "input"}.values()
    held = sum(nbytes(n.meta["val"]) * (3 if n.meta["needs_grad"] else 1) for n in stored)  # float32, with two moments
    gc.collect()
    measured = held + min(allocated(step) for _ in range(2))
    assert made.memory_of(0)["peak"] == pytest.approx(measured, rel=0.04)


# --- meshes -----------------------------------------------------------------------------------------------------------


def test_a_mesh_of_one_axis_is_that_axis() -> None:
    (axis,) = read_mesh({"tp": 4}).axes
    assert axis == MeshAxis(4) and (str(axis), axis.data) == ("tp", None)
    assert read_mesh({"dp": (1, "shard"), "tp": 4}) == read_mesh({"tp": 4}) == read_mesh({"tp": 4}, 4)
    assert read_mesh({"dpo": 4}).last.data is None  # not a usual name of a data axis
    assert read_mesh({"dp": (4, "shard")}).last.data == "shard" and not read_mesh({"dp": (4, "shard")}).across
