"""Notes the modes in which forward calls each op: grad mode, autocast's dtypes, checkpoint.

`torch.export` marks `no_grad` and autocast blocks as regions of its graph, and loses a `no_grad`
block inside an autocast block (in PyTorch 2.13). It does not mark checkpoints. So the modes are
read as each node is recorded, and `regions` uses these instead of export's marks. They are needed
as long as export loses inner blocks or checkpoints.
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
    """The number of the activation checkpoint (`torch.utils.checkpoint`) around the op."""


def current_modes() -> Modes:
    """The current modes of this thread."""
    return Modes(torch.is_grad_enabled(), current_autocast(), _current_checkpoint())


def _current_checkpoint() -> int | None:
    """The running checkpoint: found by its hook on saved tensors, or, if reentrant, noted in the recording."""
    recording = current_recording()
    if recording is None:
        return None
    # The only trace of `torch.utils.checkpoint` is its hook on saved tensors, without a public reader (PyTorch 2.13.0).
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__:
        return recording.checkpoints.setdefault(hooks[0], len(recording.checkpoints))
    return recording.checkpoint


def modes_of(node: fx.Node) -> Modes:
    """The modes in which a node was recorded; the current ones for a node that export has added."""
    modes: Modes | None = node.meta.get(_KEY)
    return current_modes() if modes is None else modes


def modes_in(node: fx.Node, other: fx.Node) -> dict[str, Modes]:
    """The meta entry with a node's modes, but with the checkpoint of another node."""
    return {_KEY: modes_of(node)._replace(checkpoint=modes_of(other).checkpoint)}


@contextmanager
def note_modes() -> Iterator[None]:
    """Stores the current modes in each node that export records inside the block."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    graph = proxy_mode.tracer.graph
    # Replaced in this graph object only, so that other threads record as usual.
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
