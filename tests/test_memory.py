"""The predicted memory of a step on a mesh is the memory that the allocator gives to the first rank's graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.helpers import allocated
from tests.priced import MESHES, PRICED, priced
from torchshard.compiler.memory import OPTIMIZER_STATES
from torchshard.distributed import kernels, wire
from torchshard.distributed.group import ALONE
from torchshard.distributed.ranks import Ranks
from torchshard.ir.graph import hint, nbytes, placeholders, results_of
from torchshard.runtime.step import steps_of

BY_DAY = [("decoder", {"dp": "shard"})]
CALLS = [(name, axes) for name in PRICED for axes in MESHES]


@dataclass(frozen=True)
class _Ended:
    """A message that has arrived, of zeros; as a Work of gloo and of NCCL, it holds its tensors while it is held."""

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
    """Runs forward and backward of a rank, as ranks do."""
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
    monkeypatch.setattr(kernels, "refuse_simulated", lambda _: None)
    monkeypatch.setattr(kernels, "verify_following_call", lambda *_, **__: None)
    _, made, _ = priced(name, axes)
    local = made.local_graph_of(0)
    step = _step(local)
    step()
    stored = {n.meta["path"]: n for n in placeholders(local.graph) if n.meta["kind"] != "input"}.values()
    held = sum(nbytes(n.meta["val"]) * (1 + OPTIMIZER_STATES * bool(n.meta["needs_grad"])) for n in stored)
    gc.collect()
    measured = held + min(allocated(step) for _ in range(2))
    assert made.memory_of(0)["peak"] == pytest.approx(measured, rel=0.04)
