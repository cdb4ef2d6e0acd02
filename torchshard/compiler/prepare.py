"""One call of a model as a captured, normalized graph, ready to be planned."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from torch import nn

from torchshard.capture import Captured, capture
from torchshard.core.errors import InputError
from torchshard.core.garbage import without_garbage_collection
from torchshard.core.layouts import Layout, Shard
from torchshard.ir.editing import mark_needs_grad
from torchshard.ir.graph import is_tensor, placeholders
from torchshard.ir.sizes import name_sizes
from torchshard.passes import carry, normalize

log = logging.getLogger("torchshard.compiler")
STAGES = ("capture", "plan", "rewrite")
"""The stages that are logged at INFO, one line at the end of each."""


@contextlib.contextmanager
def timed(stage: str) -> Iterator[None]:
    """Logs the duration of one of `STAGES`."""
    start = time.perf_counter()
    yield
    log.info("%s: %.1f s", stage, time.perf_counter() - start)


def prepared(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic: bool = True,
    repeating: bool = False,
    inputs: Mapping[str, Layout] = MappingProxyType({}),
    numbers: Collection[str] = (),
    replaced: Collection[str] = (),
    trains: bool = True,
    divided: Mapping[int, int] = MappingProxyType({}),
) -> Captured:
    """Captures a call of a model, in the caller's grad mode, as a normalized graph ready for planning.

    Args:
        divided: as in `capture`.
        trains: whether values may have gradients.
    """
    with without_garbage_collection(), timed("capture"):
        left = dict.fromkeys(replaced) | _unsplit(inputs)
        options = partial(capture, dynamic=dynamic, repeating=repeating, numbers=numbers, divided=divided)
        captured = _captured(partial(options, model, args, kwargs), left, dynamic)
        normalize(captured.graph)
        carry(captured.graph, captured.changes)
        name_sizes(captured.graph)
        mark_needs_grad(captured.graph, _trainable(captured, model) if trains else [])
    return captured


def _captured(capture: Callable[..., Captured], left: dict[str, int | None], dynamic: bool) -> Captured:
    """Captures a call; sizes of carried values may vary, whether it replaces them or got them."""
    captured = capture(left=left)
    changed = captured.changes.names if dynamic else ()
    more = {name: None for name in changed if name in captured.inputs and name not in left}
    if not more:
        return captured
    return capture(left=left | more)


def _unsplit(inputs: Mapping[str, Layout]) -> dict[str, int | None]:
    """Name -> the dim that is split, if any."""
    return {name: layout.dim if isinstance(layout, Shard) else None for name, layout in inputs.items()}


def check_examples(example_inputs: object, example_kwargs: object) -> None:
    """Checks that example inputs are a tuple or list, and example keyword arguments a dict.

    Raises:
        InputError: they are something else.
    """
    for name, given, kinds in (
        ("example_inputs", example_inputs, (tuple, list)),
        ("example_kwargs", example_kwargs, (Mapping,)),
    ):
        if given is not None and not isinstance(given, kinds):
            raise InputError(
                f"{name} is a {type(given).__name__}",
                where=f"{name}=",
                why="example_inputs holds forward's positional arguments, example_kwargs its keyword arguments by name",
                attempt='example_inputs=(x,), example_kwargs={"mask": mask}',
            )


def _trainable(captured: Captured, model: nn.Module) -> list[str]:
    """The names of the parameters and inputs that may have gradients."""
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    inputs = [n for n in placeholders(captured.graph.graph) if n.meta["kind"] == "input" and is_tensor(n)]
    return trainable + [n.meta["path"] for n in inputs if n.meta["val"].requires_grad]
