"""Refuses hooks on a result where other results depend on it in the unsharded model, but not in the sharded one.

    return self.down(h), h        tp: h is gathered for the caller, and `down` goes on with the slices
                                  dp: each result leaves through a function of its own

Such a result only gets the gradient of the loss's direct use of it; the gradient through the other results bypasses it.
Autograd does not report this, so a hook or `retain_grad()` would see part of the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, fx

from torchshard.core.errors import InputError
from torchshard.ir.graph import before_collectives, results_of
from torchshard.passes.nodes import upstream


def results_beside(graph: fx.Graph, count: int, *, all_leave: bool) -> dict[int, tuple[int, ...]]:
    """Maps a result to the results computed from its value, but not from the tensor that the caller gets.

    Args:
        count: the number of results that forward returns; the rest stay in the call's arguments.
        all_leave: whether every result is transformed after the graph, before the caller gets it.
    """
    results = [r if isinstance(r, fx.Node) and r.meta.get("needs_grad") else None for r in results_of(graph)[:count]]
    found = {}
    for number, result in enumerate(results):
        if result is None:
            continue
        value = before_collectives(result)
        if value is result and not all_leave:
            continue
        behind = upstream(value, partial(_users, but=result))
        others = tuple(i for i, other in enumerate(results) if other in behind and other is not result)
        if others:
            found[number] = others
    return found


def _users(node: fx.Node, but: fx.Node) -> set[fx.Node]:
    return node.users.keys() - {but}


def refuse_hooks(results: Sequence[object], beside: Mapping[int, Sequence[int]], call: str) -> None:
    """Makes a backward through a result raise if a result that this backward bypasses has a hook."""
    for number, others in beside.items():
        result = results[number]
        for other in (results[i] for i in others):
            if isinstance(result, Tensor) and isinstance(other, Tensor) and other.grad_fn is not None:
                other.register_hook(_Refusal(result, number, call))


class _Refusal:
    """A hook on a result; raises if another result, which this backward bypasses, has a hook."""

    __torch_unserializable__ = True  # without it torch.save warns that it leaves this hook out

    def __init__(self, beside: Tensor, number: int, call: str) -> None:
        self._beside, self._number, self._call = weakref.ref(beside), number, call

    def __call__(self, gradient: Tensor | None) -> None:
        beside = self._beside()
        if beside is None:
            return
        # `_backward_hooks`: no public way to list a tensor's hooks (PyTorch 2.13.0).
        hooks = [hook for hook in (beside._backward_hooks or {}).values() if not _is_ours(hook)]
        if hooks or beside.retains_grad:
            raise InputError(
                f"result {self._number} has a hook or retain_grad(), and another result depends on it",
                where=self._call,
                why="the caller's is computed beside what the other is computed of: its gradient would be a part",
                attempt="the hook within forward, on the value itself: hidden.register_hook(f) before it is returned",
            )


def _is_ours(hook: object) -> bool:
    return type(hook).__module__.partition(".")[0] == __name__.partition(".")[0]
