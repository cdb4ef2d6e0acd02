"""Notes the modes in which a forward calls each op: whether gradients are recorded, and the dtypes of autocast.

`torch.export` marks `no_grad` and autocast blocks as regions of its graph, and loses a `no_grad` block inside an
autocast block. So the modes are read as each node is recorded, and `regions` uses these in place of export's marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchshard.core.autocast import Autocast, current_autocast

P = ParamSpec("P")
_KEY = "modes"
"""The meta key of an op's modes."""


class Modes(NamedTuple):
    """The modes in which an op was called."""

    grad: bool
    autocast: Autocast


def current_modes() -> Modes:
    """The modes of this thread."""
    return Modes(torch.is_grad_enabled(), current_autocast())


def modes_of(node: fx.Node) -> Modes:
    """The modes in which a node was recorded; this thread's for a node that export has added."""
    modes: Modes | None = node.meta.get(_KEY)
    return current_modes() if modes is None else modes


@contextmanager
def note_modes() -> Iterator[None]:
    """Stores the current modes in each node that export records inside the block."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    graph = proxy_mode.tracer.graph
    # Replaced in this graph object alone, so that other threads record theirs as ever.
    setattr(graph, "create_node", _noting(graph.create_node))  # noqa: B010
    try:
        yield
    finally:
        del graph.create_node


def _noting(create: Callable[P, fx.Node]) -> Callable[P, fx.Node]:
    def create_node(*args: P.args, **kwargs: P.kwargs) -> fx.Node:
        node = create(*args, **kwargs)
        node.meta[_KEY] = current_modes()
        return node

    return create_node
