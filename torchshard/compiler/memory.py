"""Estimates the memory of a step on the first rank, which stores the most.

It counts parameters, their gradients and optimizer states and, at the peak of the step, saved and
temporary values, read off the graphs of forward and backward (see `step_memory`). Without a
backward graph, the rank's graph runs under autograd on fake tensors, and live storages are counted.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torchshard.compiler.shortened import Shortened, shortened
from torchshard.compiler.step_memory import call_peak, step_peak
from torchshard.core.errors import CaptureError
from torchshard.core.fakes import new_fake_mode
from torchshard.ir.editing import in_example_sizes
from torchshard.ir.effects import carried_inputs
from torchshard.ir.fake_values import hint, nbytes
from torchshard.ir.graph import is_weight, placeholders
from torchshard.passes import has_backward
from torchshard.plans.optimizers import Optimizer

Tree = TypeVar("Tree")
UNITS = 2
"""The number of sliced weights that are full at a time: one is gathered while another is used."""


class _StorageTracker(TorchDispatchMode):
    """Counts the bytes of live storages that ops create; storages in `known` count elsewhere."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet(t.untyped_storage() for t in known)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError:  # the CPU may lack a kernel that the model's own device has
            result = _shaped(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.alive -= size


def _shaped(func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The result of an op in shape only, computed on the meta device."""

    def moved(tree: Tree, device: str) -> Tree:
        return tree_map_only(Tensor, lambda t: torch.empty_like(t, device=device), tree)

    return moved(func(*moved(args, "meta"), **moved(kwargs, "meta")), "cpu")


def memory_of_rank(local: fx.GraphModule, optimizer: Optimizer) -> dict[str, float]:
    """Bytes of one step on a rank, by kind, read off its graph; see `memory_of`."""
    return memory_of(shortened(local, {node: _place(node) for node in local.graph.nodes}), optimizer)


def _place(node: fx.Node) -> tuple[object, ...]:
    """Everything that an op's memory on a rank depends on, except its target, arguments and types."""
    return (node.meta.get("layouts"), "recompute" in node.meta, node.meta.get("gathered_again"))


def memory_of(
    local: Shortened, optimizer: Optimizer, slices: int = 1, *, keeps_gathered: bool = False
) -> dict[str, float]:
    """Bytes of one step of a rank's graph, by kind.

    The step is a training step, or a call if no value needs a gradient.

    Args:
        slices: number of slices that later axes, which split the batch, cut each weight's local
            shard into.
        keeps_gathered: whether a weight gathered from these slices is kept until backward has used
            it.

    Returns:
        'parameters' (and buffers), 'gradients', 'optimizer', 'caches' (carried values from earlier
        calls, if any), 'activations' (all other memory at the step's peak, including the values it
        leaves for later calls), and 'peak', their sum.
    """
    local = replace(local, module=in_example_sizes(local.module))
    graph = local.module.graph
    stored, held = [n for n in placeholders(graph) if n.meta["kind"] != "input"], dict[str, Held]()
    trained = {node.meta["path"] for node in stored if node.meta["needs_grad"]}
    for node in stored:  # tied ones once
        path, value = node.meta["path"], node.meta["val"]
        size = local.times.get(node.name, 1) * nbytes(value) / (slices if is_weight(node) else 1)
        held[path] = Held(size, value.dtype.itemsize, path in trained)
    total = memory_of_weights(held.values(), optimizer)
    carried = carried_inputs(graph)
    if carried:
        total["caches"] = float(sum(local.times.get(n.name, 1) * nbytes(n.meta["val"]) for n in carried))
    total["activations"] = max(_peak(local, slices) - total["gradients"], 0.0)
    if slices > 1:
        whole = sorted(
            size for n in stored if is_weight(n) for size in local.times.get(n.name, 1) * [nbytes(n.meta["val"])]
        )
        total["activations"] += sum(whole if keeps_gathered else whole[-UNITS:])
    return total | {"peak": sum(total.values())}


class Held(NamedTuple):
    """A parameter or buffer on a rank."""

    nbytes: float
    itemsize: int
    is_trained: bool


def memory_of_weights(held: Iterable[Held], optimizer: Optimizer) -> dict[str, float]:
    """Bytes of parameters and buffers, gradients and optimizer state."""
    total = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for size, itemsize, is_trained in held:
        total["parameters"] += size
        if is_trained:
            total["gradients"] += size
            total["optimizer"] += size / itemsize * optimizer.held(itemsize)
    return total


def _peak(local: Shortened, slices: int) -> float:
    """Peak bytes without parameters, buffers and inputs, but with gradients."""
    if not any(node.meta.get("needs_grad") for node in local.module.graph.nodes):
        return call_peak(local)
    if has_backward(local.module):
        with contextlib.suppress(NotImplementedError, CaptureError):
            return step_peak(local, slices)
    return _peak_under_autograd(local.full())


def _peak_under_autograd(local: fx.GraphModule) -> float:
    mode = new_fake_mode()
    with mode:
        tensors = [_example(node) for node in placeholders(local.graph)]
    watch = _StorageTracker(tensors)
    with mode, torch.enable_grad(), watch:
        _step(_off_meta(local), tensors)
    return watch.peak


def _off_meta(local: fx.GraphModule) -> fx.GraphModule:
    """Moves a graph from the meta device to the CPU: attention on meta lacks a fused kernel."""
    meta, cpu = torch.device("meta"), torch.device("cpu")
    for node in local.graph.nodes:
        node.args = tree_map_only(torch.device, lambda d: cpu if d == meta else d, node.args)
        if node.kwargs.get("device") == meta:
            node.kwargs = {**node.kwargs, "device": cpu}
    local.recompile()
    return local


def _step(local: fx.GraphModule, tensors: list[Tensor]) -> None:
    """Runs forward, and backward from the loss: the first scalar result, or all results."""
    results = [r for r in local(*tensors) if isinstance(r, Tensor) and r.requires_grad]
    losses = [r for r in results if r.numel() == 1][:1] or results
    if losses:
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])


def _example(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    device = "cpu" if value.device.type == "meta" else value.device
    made = torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device=device)
    return made.requires_grad_(bool(node.meta["needs_grad"]))
