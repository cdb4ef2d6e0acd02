"""Tests the GPU and NCCL code paths on ranks without a GPU."""

from __future__ import annotations

import copy
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses import fake_tensor as fake_tensors
from torch._subclasses.fake_tensor import FakeTensor

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import refused
from tests.models import MLP
from torchshard.capture import flatten_call
from torchshard.capture.facts import ModelFacts
from torchshard.capture.models import check_devices
from torchshard.compiler.constraints import read_constraints
from torchshard.compiler.planning import plan_graph
from torchshard.compiler.prepare import prepared
from torchshard.compiler.program import program
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.distributed import grouping, wire, world
from torchshard.distributed.group import CheckLevel, Group, HandshakeState, Timeouts, register_groups, registered_groups
from torchshard.ir.graph import fake_mode
from torchshard.passes import annotate, localized
from torchshard.plans.objective import read_aim
from torchshard.runtime import compilation
from torchshard.testing import run_ranks

# --- the backend of each device ---------------------------------------------------------------------------------------


def test_with_a_gpu_tensors_there_travel_by_nccl_and_others_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(world, "own_gpu", lambda backend: torch.device("cuda", 1))
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: asked.append(given | {"backend": backend}))
    monkeypatch.setattr(world, "stores", {})
    monkeypatch.setenv("TORCH_NCCL_PROPAGATE_ERROR", "")
    monkeypatch.delenv("TORCH_NCCL_PROPAGATE_ERROR")
    world.begin_world(None, Timeouts(), world.World(True))
    assert asked[0]["backend"] == "cpu:gloo,cuda:nccl" and asked[0]["device_id"] == torch.device("cuda", 1)
    assert os.environ["TORCH_NCCL_PROPAGATE_ERROR"] == "1"


@pytest.mark.parametrize(
    ("config", "devices"),
    [("cpu:gloo,cuda:nccl", {"cpu"}), ("cpu:gloo,cuda:gloo", {"cpu", "cuda"}), ("cuda:nccl", set())],
)
def test_only_tensors_that_travel_by_gloo_abort(
    config: str, devices: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    group = Group(0, 2, gloo_devices=grouping.gloo_devices(None))
    assert {kind for kind in ("cpu", "cuda") if group.aborts_on_mismatch(torch.device(kind))} == devices


# --- backends that don't abort or block -------------------------------------------------------------------------------


def _as_by_nccl() -> None:
    """Makes this rank's groups behave as if no tensor travelled by gloo."""
    register_groups({group.name: replace(group, gloo_devices=frozenset()) for group in registered_groups()})


def _messages(rank: int) -> dict[str, Any]:
    tsd.init_process_group()
    _as_by_nccl()
    posted: list[str] = []
    irecv = dist.irecv

    def noting(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is tsd.get_group():
            posted.append(threading.current_thread().name)
        return irecv(*args, **kwargs)

    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "irecv", noting)
        sent = [tsd.isend(torch.full((3,), 10.0 * rank + i), 1 - rank) for i in range(3)]
        got = [tsd.irecv((3,), 1 - rank) for _ in range(3)]
        found["values"] = [float(handle.wait()[0]) - 10 * (1 - rank) for handle in got]
        for handle in sent:
            handle.wait()
    found["threads"] = set(posted) == {"MainThread"}
    return found


def test_receives_are_posted_by_the_thread_that_calls() -> None:
    for found in run_ranks(_messages, 2, backend="gloo"):
        assert found == {"values": [0, 1, 2], "threads": True}


def _compared_at_the_end(rank: int) -> dict[str, Any]:
    tsd.init_process_group()
    _as_by_nccl()
    torch.manual_seed(0)
    model = MLP().double()
    sharded = ts.shard(copy.deepcopy(model), {"up": "column", "down": "row"})
    x = torch.randn(4, 12, dtype=torch.float64)
    for _ in range(3):
        sharded(x).sum().backward()
    events: list[str] = []
    settle, all_reduce = wire.settle, dist.all_reduce

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        events.append("all-reduce" if tensor.is_floating_point() else "compare")
        return all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "settle", lambda: events.append("settle") or settle() if wire.has_comparison() else None)
        patch.setattr(dist, "all_reduce", noting)
        got = sharded(x)
    told = refused(lambda: sharded(x + rank), "the same shape but different values", ts.InputError)
    right = torch.allclose(sharded(x), model(x), rtol=0, atol=1e-12) and torch.allclose(
        got, model(x), rtol=0, atol=1e-12
    )
    return {"events": events, "told": told, "right": right}


def test_a_call_is_compared_while_its_collectives_are_on_their_way() -> None:
    for found in run_ranks(_compared_at_the_end, 2, backend="gloo"):
        assert found == {"events": ["compare", "all-reduce", "settle"], "told": True, "right": True}


class _Work:
    """A fake device collective: `wait` returns at once, and `is_completed` is true after `polls` calls."""

    def __init__(self, polls: int) -> None:
        self.polls = polls

    def wait(self) -> None:
        """Returns at once, as on a device."""

    def is_completed(self) -> bool:
        self.polls -= 1
        return self.polls <= 0


def test_debug_waits_for_the_device_and_no_longer_than_the_time_out() -> None:
    group = Group(0, 2, timeouts=Timeouts(collective=0.2))
    group.handshake.level = CheckLevel.ALL
    works, gpu = (_Work(5), _Work(10**9)), [torch.device("cuda")]
    wire.finish(group, "all_reduce", works[0], gpu)
    assert works[0].polls == 0
    with pytest.raises(
        ts.DistributedError, match=r"all_reduce failed on rank 0 of 2\n(.*\n)*.*did not end within 0.2 s"
    ):
        wire.finish(group, "all_reduce", works[1], gpu)
    quick = _Work(10**9)
    wire.finish(replace(group, handshake=HandshakeState()), "all_reduce", quick, gpu)
    wire.finish(replace(group, gloo_devices=frozenset({"cuda"})), "all_reduce", quick, gpu)
    assert quick.polls == 10**9


# --- dropout ---------------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, dropout_p=self.p).transpose(1, 2).flatten(2))


COLUMNS = {"q": "column", "k": "column", "v": "column", "o": "row"}


def _annotated_on(device: str, p: float, plan: dict[str, str]) -> bool:
    model = _Attention(p)
    captured = prepared(model, (torch.randn(2, 3, 8),))
    facts = ModelFacts.of(model)
    made = plan_graph(captured.graph, facts, read_constraints(facts, plan, Mesh((MeshAxis(2),)), read_aim())).plan
    (node,) = captured.graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    )
    there = torch.empty(node.meta["val"].shape, device="meta")
    node.meta["val"] = FakeTensor(fake_mode(captured.graph.graph), there, torch.device(device))
    return annotate(captured.graph, made)


@pytest.mark.nightly
def test_split_attention_does_not_draw_what_a_fused_kernel_would() -> None:
    with pytest.raises(ts.PlanError, match="split attention can't draw the dropout of a GPU's fused kernel"):
        _annotated_on("cuda", 0.1, COLUMNS)
    assert _annotated_on("cpu", 0.1, COLUMNS)
    assert _annotated_on("cuda", 0.0, COLUMNS)
    assert _annotated_on("cuda", 0.1, dict.fromkeys(COLUMNS, "replicate"))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert _annotated_on("cuda", 0.1, COLUMNS)


# --- compilation ------------------------------------------------------------------------------------------------------


COLUMN = {"up": "column", "down": "replicate"}


def _localized_on(device: str, plan: dict[str, str]) -> fx.GraphModule:
    """Returns rank 0's local graph on two ranks, with its fake tensors moved to `device`."""
    model = MLP()
    facts = ModelFacts.of(model)
    made = program(model, read_constraints(facts, plan, Mesh((MeshAxis(2),)), read_aim()), (torch.randn(4, 12),))
    local = localized(made.graph, MeshAxis(2).simulated()[0])
    for node in local.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor):
            there = torch.empty(node.meta["val"].shape, device="meta")
            node.meta["val"] = FakeTensor(fake_mode(local.graph), there, torch.device(device))
    return local


@pytest.mark.parametrize(
    ("device", "by_gloo", "plan", "compiled"),
    [
        ("cuda", {"cpu", "cuda"}, COLUMN, False),
        ("cuda", {"cpu"}, COLUMN, True),
        ("cpu", {"cpu", "cuda"}, COLUMN, True),
        ("cuda", {"cpu", "cuda"}, {"up": "column", "down": "row"}, True),
    ],
)
def test_what_gloo_gathers_on_gpus_is_not_compiled(
    device: str, by_gloo: set[str], plan: dict[str, str], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = _localized_on(device, plan)
    monkeypatch.setattr(compilation, "lookup", lambda name: Group(0, 2, name, gloo_devices=frozenset(by_gloo)))
    assert compilation.can_compile(local) == compiled


GRAPHS: list[dict[str, Any]] = [
    {"mode": "reduce-overhead"},
    {"options": {"triton.cudagraphs": True}},
    {"backend": torch._TorchCompileInductorWrapper("reduce-overhead", None, None)},
]


@pytest.mark.parametrize("options", GRAPHS)
def test_cuda_graphs_use_the_memory_of_the_call_before_and_hold_nothing_that_gloo_sends(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append("a call"))
    compiler, gpu = compilation.Compiler(options, where="objective="), {torch.device("cuda", 0)}
    shares = Group(0, 2, gloo_devices=frozenset({"cpu", "cuda"}))
    with pytest.raises(ts.InputError, match="a CUDA graph can't capture gloo's collectives"):
        compiler.begin_call(shares, gpu)
    compiler.begin_call(shares, {torch.device("cpu")})
    compilation.Compiler({}, where="objective=").begin_call(shares, gpu)
    assert not marked
    compiler.begin_call(replace(shares, gloo_devices=frozenset({"cpu"})), gpu)
    compiler.begin_call(replace(shares, size=1), gpu)
    assert marked == ["a call"] * 2


# --- devices ----------------------------------------------------------------------------------------------------------


def _elsewhere_by_default(rank: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = MLP().double(), torch.randn(4, 12, dtype=torch.float64)
    torch.set_default_device("meta")
    tsd.init_process_group()
    sharded = ts.shard(copy.deepcopy(model), {"up": "column", "down": "row"})
    optimizer = torch.optim.AdamW(sharded.parameters())
    for each in (model, sharded, sharded):  # the second sharded call has step graphs
        each.zero_grad()
        each(x).square().sum().backward()
    gradients = {}
    for name, parameter in sharded.named_parameters():
        layout = sharded.layouts[name]
        gradients[name] = parameter.grad if layout == ts.I else tsd.gather(parameter.grad, layout.dim)
    expected = {name: p.grad for name, p in model.named_parameters()}
    for each in (torch.optim.AdamW(model.parameters()), optimizer):
        each.step()
    ts.save(folder, sharded, optimizer)
    ts.load(folder, sharded, optimizer)
    report = ts.check(model, {"up": "column", "down": "row"}, example_inputs=(x,), mesh=2)
    tsd.debug(True)
    received = tsd.recv(x, 0) if rank else tsd.send(x, 1)
    return {
        "gradients": all(torch.allclose(gradients[n], expected[n], rtol=0, atol=1e-12) for n in expected),
        "report": report.ok,
        "objects": tsd.all_gather_object(rank),
        "received": received is None or torch.equal(received, x),
        "result": torch.allclose(sharded(x), model(x), rtol=0, atol=1e-10),
    }


def test_the_default_device_is_the_users_alone(tmp_path: Path) -> None:
    """`torch.set_default_device` (here to meta) doesn't move the library's own tensors."""
    for found in run_ranks(_elsewhere_by_default, 2, str(tmp_path)):
        assert found == {"gradients": True, "report": True, "objects": [0, 1], "received": True, "result": True}


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="cuda"))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        return x * self.weight * number


def test_a_number_may_be_on_the_cpu() -> None:
    with fake_tensors.FakeTensorMode():
        model = _Scaled()
        x, number = torch.empty(2, 4, device="cuda"), torch.tensor(3)
        check_devices(model, flatten_call(model, (x, number), {}))
        with pytest.raises(ts.InputError, match="is on cpu, the model on cuda:0"):
            check_devices(model, flatten_call(model, (x.cpu(), number), {}))


# --- process groups ---------------------------------------------------------------------------------------------------


def test_two_processes_with_nccl_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for local, backend, device in (("1", "nccl", 1), ("0", "cpu:gloo,cuda:nccl", 0), ("3", "gloo", 1)):
        monkeypatch.setenv("LOCAL_RANK", local)
        own = world.own_gpu(backend)
        assert chosen.pop() == torch.device("cuda", device)
        assert own == (None if backend == "gloo" else torch.device("cuda", device))
    with pytest.raises(ts.DistributedError, match="this machine has 2 GPUs"):
        world.own_gpu("nccl")
    assert not chosen


def test_ranks_that_come_again_to_one_store_agree_on_a_new_name() -> None:
    """After an elastic restart, the store still has keys of some of the earlier ranks."""
    store = dist.HashStore()
    store.set("torchshard/there/1", "one that is gone")
    names = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as threads:
            of_ranks = set(threads.map(lambda rank: world.common_name(store, rank, 3, 10.0), range(3)))
        names += of_ranks
    assert len(names) == len(set(names)) == 3
    with pytest.raises(RuntimeError, match=r"no word from ranks \[1\]"):
        world.common_name(store, 0, 2, 0.05)
