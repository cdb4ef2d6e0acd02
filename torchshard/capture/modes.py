"""The modes in which a forward calls each op: whether gradients are recorded, and what autocast casts to.

`torch.export` marks `no_grad` and autocast blocks as regions of its graph, and loses the former where they are nested
in the latter. So the modes are read as each node is recorded, and the regions are only made flat.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchshard.core.autocast import Autocast, current_autocast

_KEY = "modes"
"""The meta key of an op's modes."""


class Modes(NamedTuple):
    """What was on when an op was called."""

    grad: bool
    autocast: Autocast


def current_modes() -> Modes:
    """Those of this thread."""
    return Modes(torch.is_grad_enabled(), current_autocast())


def modes_of(node: fx.Node) -> Modes:
    """Those in which a node was recorded; of one that export has added, this thread's."""
    found: Modes | None = node.meta.get(_KEY)
    return current_modes() if found is None else found


@contextmanager
def noting_modes() -> Iterator[None]:
    """While it is open, each node that export records holds its modes."""
    graph: Any = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
    record = graph.create_node

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = record(*args, **kwargs)
        node.meta[_KEY] = current_modes()
        return node

    graph.create_node = create_node  # of this graph alone: other threads may trace theirs
    try:
        yield
    finally:
        del graph.create_node
