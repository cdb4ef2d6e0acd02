"""Splits a call's batch across ranks: this rank's shard of the arguments and of the results.

inputs="local"     each rank passes its shard, and gets its shard of results with the batch
inputs="global"    each passes the full batch, and gets full results

With local inputs, gradients have two scales. A graph computes gradients of L, the loss of the full
batch. Outside of graphs each rank has its own loss, and L is the mean of these, as with
DistributedDataParallel. So on n ranks, the gradient of a shard is n times as large outside: in
results, in inputs, and between two models of a chain:

    x        -> model ->  z        -> model ->  y        -> loss
    n dL/dx  <- * n   <-  n dL/dz  <- / n, * n <- n dL/dy <- its gradient

A replicated value has one scale: a loss that forward itself computes is L.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from torchshard.capture import describe
from torchshard.capture.visible import visible_to
from torchshard.compiler.batches import SplitDims
from torchshard.core.conversions import step_args
from torchshard.core.errors import CaptureError
from torchshard.core.layouts import I, Shard
from torchshard.core.modules import named_tensors, storage_id
from torchshard.core.sharding import Sharding
from torchshard.core.types import Context
from torchshard.core.user_files import warn
from torchshard.custom_ops.fx_types import Argument
from torchshard.distributed.ops import direct
from torchshard.distributed.ranks import Ranks
from torchshard.ops import hashable

_OPS = torch.ops.torchshard


def advised_of_parts(
    error: CaptureError, model: nn.Module, tensors: Sequence[Tensor], batches: SplitDims
) -> CaptureError:
    """Returns a capture's error; its advice names a tensor of forward's with this rank's number of rows."""
    rows = next((tensor.shape[0] for tensor in tensors if tensor.ndim), None) if batches else None
    held = {describe(place): value for place, value in visible_to(model).values() if isinstance(value, Tensor)}
    parts = [name for name, t in (held | named_tensors(model)).items() if t.ndim and t.shape[0] == rows]
    if not parts:
        return error
    attempt = f"if {parts[0]} is this rank's part of a batch, pass it as an argument: forward runs on the whole batch"
    return CaptureError(error.what, where=error.where, why=error.why, attempt=f"{attempt}. Otherwise {error.attempt}")


def own_parts(whole: Mapping[str, Tensor], shardings: Mapping[str, Sharding], ranks: Ranks) -> list[Tensor]:
    """Returns a call's tensors, split ones cut to this rank's shard; gradients are gathered to the full inputs."""
    found = []
    for name, tensor in whole.items():
        for axis, layout in shardings.get(name, ()):
            args = hashable(step_args(I, layout, tensor.shape))
            tensor = direct(_OPS.scatter.default)(tensor, *args, ranks.groups[axis.name].name)
        found.append(tensor)
    return found


def entering(tensors: Mapping[str, Tensor], parts: Mapping[str, int]) -> list[Tensor]:
    """Returns a call's tensors; gradients of shards leave the graph as gradients of the rank's own loss.

    The `.grad` of an input that is a leaf is an exception: `backward()` accumulates the gradient of
    the full batch's loss there, like the unsharded model.

    Args:
        parts: name of a split tensor -> the number of its parts.
    """
    found = []
    for name, tensor in tensors.items():
        ranks = parts.get(name, 1)
        if ranks > 1 and tensor.requires_grad:
            if tensor.is_leaf:
                edge = torch.autograd.graph.get_gradient_edge(tensor)  # keeps the node with the hook alive
                _divide_grad(tensor, edge.node, ranks)
            tensor = _Crossing.apply(tensor, 1, ranks, True)
        found.append(tensor)
    return found


def leaving(results: Sequence[Argument], parts: Sequence[int]) -> list[Argument]:
    """Returns a graph's results; gradients of shards enter as gradients of the rank's own loss.

    Args:
        parts: the number of parts of each result.
    """
    found = []
    for result, ranks in zip(results, parts, strict=True):
        if ranks > 1 and isinstance(result, Tensor):
            if result.requires_grad:
                result = _Crossing.apply(result, 1, ranks, False)
                # `_current_graph_task_id` is -1 outside of a backward; it has no public name (PyTorch 2.13.0).
                if torch._C._current_graph_task_id() == -1:  # otherwise a checkpoint recomputes it
                    _WAITING[result.grad_fn] = storage_id(result)
            _RESULTS.add(result)
        found.append(result)
    return found


def joined(results: Sequence[Argument], shardings: Sequence[Sharding], ranks: Ranks) -> list[Argument]:
    """Returns a graph's results with the full batch and sequence: a collective call."""
    return [
        _joined(result, of, ranks) if of.is_split and isinstance(result, Tensor) else result
        for result, of in zip(results, shardings, strict=True)
    ]


def _joined(part: Tensor, of: Sharding, ranks: Ranks) -> Tensor:
    for axis, layout in reversed(of):
        assert isinstance(layout, Shard)  # a result of a graph is a part or replicated
        whole = [size * (axis.size if dim == layout.dim else 1) for dim, size in enumerate(part.shape)]
        args = hashable(step_args(layout, I, whole))
        part = direct(_OPS.gather.default)(part, *args, ranks.groups[axis.name].name)
    return part


class _Crossing(torch.autograd.Function):
    """A shard of the batch that enters or leaves a graph; its gradient crosses in the other direction.

    The gradient of a value that leaves is divided by the number of ranks; the gradient of a value
    that enters is multiplied by it. A gradient may have a gradient too (of a penalty), so its
    crossing is another `_Crossing`.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, factor: float, ranks: int, enters: bool) -> Tensor:
        ctx.factor, ctx.ranks, ctx.enters = factor * ranks if enters else factor / ranks, ranks, enters
        return x.view_as(x) if factor == 1 else x * factor

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _WAITING.pop(ctx, None)
        if not ctx.enters and gradient in _DIVIDED:
            return gradient, None, None, None
        return _Crossing.apply(gradient, ctx.factor, ctx.ranks, not ctx.enters), None, None, None


class _Memories:
    """A set of tensors, identified by their memory until it is freed."""

    def __init__(self) -> None:
        self._held = dict[int, StorageWeakRef]()
        self._most = 64

    def add(self, x: Tensor) -> None:
        """Adds a tensor, and all tensors that share its memory."""
        if len(self._held) >= self._most:
            self._held = {memory: held for memory, held in self._held.items() if not held.expired()}
            self._most = max(64, 2 * len(self._held))
        if x.layout == torch.strided:
            self._held[storage_id(x)] = StorageWeakRef(x.untyped_storage())

    def discard(self, x: Tensor) -> None:
        """Removes a tensor, and all tensors that share its memory."""
        if x in self:
            del self._held[storage_id(x)]

    def __contains__(self, x: Tensor) -> bool:
        if not self._held or x.layout != torch.strided:
            return False
        held = self._held.get(storage_id(x))
        return held is not None and not held.expired()


_WAITING = weakref.WeakKeyDictionary[Node, int]()
"""The nodes of results that await their backward -> the memory of each result."""
_RESULTS = _Memories()
"""Results with the batch, including results of calls without gradients."""
_DIVIDED = _Memories()
"""Gradients of the whole batch's loss, in the `.grad` of inputs."""
_DIVIDES = "torchshard: divides"
"""Marks a node of autograd, in its metadata."""


def _divide_grad(x: Tensor, node: Any, ranks: int) -> None:
    """Makes `node`, which accumulates into `x.grad`, accumulate the gradient of the full batch's loss.

    It accumulates the gradient of the rank's own loss if `x` may be a copy of a result: users pass
    `c.grad` of `c = z.detach().requires_grad_()` on to `z`, or to code that recomputes `z`, and
    outside of models that is the gradient of the rank's own loss. A reentrant checkpoint does the
    same in a backward. `torch.autograd.grad` does not run the hook.
    """
    if _DIVIDES in node.metadata or torch._C._current_graph_task_id() != -1:
        return
    node.metadata[_DIVIDES], origins, memory = True, weakref.WeakKeyDictionary(_WAITING), storage_id(x)
    is_result, is_divided = x in _RESULTS, _watched_gradient(x)

    def divided(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        waiting = [of for result, of in origins.items() if result in _WAITING and not _is_reached(result)]
        if not waiting and not is_result:
            is_divided[:] = [True]
            return tuple(None if gradient is None else gradient / ranks for gradient in gradients)
        if memory not in waiting:
            warn(_OWN_GRADIENT.format(ranks=ranks, why=_IS_RESULT if is_result else _IS_WAITING))
        return None

    node.register_prehook(divided)


def _watched_gradient(x: Tensor) -> list[bool]:
    """Returns [whether the gradient about to be added to `x.grad` was divided]; each tensor has one hook for it."""
    is_divided: list[bool] | None = _WATCHED.get(x)
    if is_divided is None:
        is_divided = _WATCHED[x] = [False]

        def remember(of: Tensor, flag: list[bool] = is_divided) -> None:
            was_divided, flag[:] = flag[0], [False]
            if of.grad is not None and was_divided:
                _DIVIDED.add(of.grad)
            elif of.grad is not None:  # of a loss outside of models
                _DIVIDED.discard(of.grad)

        x.register_post_accumulate_grad_hook(remember)
    return is_divided


_WATCHED = WeakIdKeyDictionary()
# `_will_engine_execute_node` has no public name (PyTorch 2.13.0; added by pytorch/pytorch#84773).
_is_reached = torch._C._will_engine_execute_node
"""Returns whether the current backward has reached a node, or will."""
_OWN_GRADIENT = (
    "the .grad of an input is the gradient of this rank's own loss, {ranks} times the unsharded model's, because {why}"
)
_IS_WAITING = (
    "an earlier result still waits for its backward. That is right for result.backward(input.grad). For any other "
    "input, drop results that need no backward: del result, or torch.no_grad() around their calls"
)
_IS_RESULT = (
    "the input has the memory of a model's result. That is right to go on with: model(x).backward(input.grad), or "
    "(model(x) * input.grad).sum(). For anything else take result.detach().clone().requires_grad_() as the input"
)
