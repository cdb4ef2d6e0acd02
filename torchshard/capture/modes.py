"""Notes the modes in which a forward calls each op: gradients recorded or not, autocast's dtypes, the checkpoint.

`torch.export` marks `no_grad` and autocast blocks as regions of its graph, and loses a `no_grad` block inside an
autocast block. So the modes are read as each node is recorded, and `regions` uses these in place of export's marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec

import torch
import torch.utils.checkpoint
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchshard.capture.recording import current_recording
from torchshard.core.autocast import Autocast, current_autocast

P = ParamSpec("P")
_KEY = "modes"
"""The meta key of an op's modes."""


class Modes(NamedTuple):
    """The modes in which an op was called."""

    grad: bool
    autocast: Autocast
    checkpoint: int | None
    """The number of the activation checkpoint (`torch.utils.checkpoint`) that the op is in."""


def current_modes() -> Modes:
    """The modes of this thread."""
    return Modes(torch.is_grad_enabled(), current_autocast(), _current_checkpoint())


def _current_checkpoint() -> int | None:
    """A checkpoint pushes hooks on saved tensors, or calls a Function that the recording notes."""
    recording = current_recording()
    if recording is None:
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__:
        return recording.checkpoints.setdefault(hooks[0], len(recording.checkpoints))
    return recording.checkpoint


def modes_of(node: fx.Node) -> Modes:
    """The modes in which a node was recorded; this thread's for a node that export has added."""
    modes: Modes | None = node.meta.get(_KEY)
    return current_modes() if modes is None else modes


def modes_in(node: fx.Node, other: fx.Node) -> dict[str, Modes]:
    """The meta with a node's modes, but in the checkpoint that another node was recorded in."""
    return {_KEY: modes_of(node)._replace(checkpoint=modes_of(other).checkpoint)}


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
