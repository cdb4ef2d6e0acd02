"""Compiles a rank's graphs with `torch.compile`.

It compiles the graphs of forward and backward, not `forward` itself, which also verifies the call
across ranks and can't be traced. A captured graph has no branches, so it compiles with
`fullgraph=True`, unless `can_compile` is false. Users request it by
`ts.shard(..., objective={"compile": True})`, `model.compile()` or `torch.compile(model)`.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from torchshard.core.conversions import kernels
from torchshard.core.errors import CaptureError, InputError
from torchshard.custom_ops.stepwise import Stepwise
from torchshard.custom_ops.whole import WholeCall
from torchshard.distributed.group import Group, lookup
from torchshard.distributed.handshake import collective_failed
from torchshard.ir.editing import duplicate
from torchshard.ir.effects import uses_rng
from torchshard.ir.graph import placeholders, results_of
from torchshard.ops import DISPATCH, OPS, SENDING, Begin
from torchshard.passes import lower, verify
from torchshard.passes.nodes import node_arg
from torchshard.plans.objective import CompileOptions
from torchshard.weights.local_slice import LocalSlice

log = logging.getLogger("torchshard.runtime.compilation")


class Compiler:
    """torch.compile with fixed options, for the graphs of a rank; `fullgraph` is always True."""

    def __init__(self, options: Mapping[str, Any], *, where: str) -> None:
        """Checks the options.

        Raises:
            InputError: torch.compile rejects them.
        """
        self._options = {key: value for key, value in options.items() if key != "fullgraph"}
        try:
            torch.compile(_nothing, **self._options)
            # `list_mode_options`: the documentation of `torch.compile` names it by this path (PyTorch 2.13.0).
            config = torch._inductor.list_mode_options(self._options.get("mode") or "default")
        except Exception as error:
            # torch.compile raises errors of any class
            raise InputError(
                "torch.compile does not take these options",
                where=where,
                why=textwrap.shorten(f"{type(error).__name__}: {error}", 200),
                attempt='True, or keyword arguments of torch.compile: {"backend": "inductor", "dynamic": True}',
            ) from error
        config |= getattr(self._options.get("backend"), "config", {}) | dict(self._options.get("options") or {})
        self._records_cuda_graphs, self._where = bool(config.get("triton.cudagraphs")), where

    def begin_call(self, group: Group, devices: Iterable[torch.device]) -> None:
        """Starts a call of the model: CUDA graphs may reuse the memory of the previous call and its backward.

        Args:
            devices: the devices of the model's tensors.

        Raises:
            InputError: collectives would not run over NCCL, which a CUDA graph requires.
        """
        gpus = [device for device in devices if device.type == "cuda"] if self._records_cuda_graphs else []
        if not gpus:
            return
        if group.size > 1 and any(map(group.aborts_on_mismatch, gpus)):
            raise InputError(
                "a CUDA graph can't capture gloo's collectives",
                where=self._where,
                why=f"these options record CUDA graphs: {self}",
                attempt="use a GPU for each rank, for collectives over NCCL; or pass options without CUDA graphs",
            )
        torch.compiler.cudagraph_mark_step_begin()

    def __str__(self) -> str:
        """Returns the options as text, for the ranks to compare."""
        return ", ".join(f"{key}={_text(value)}" for key, value in sorted(self._options.items())) or "defaults"

    def __call__(self, scheduled: fx.GraphModule) -> Callable[..., Sequence[object]]:
        """Returns the graph as a compiled callable; its first call compiles it."""
        lowered = duplicate(scheduled)
        lower(lowered)
        verify(lowered, "lowered", after="lower")
        sources, results = placeholders(lowered.graph), results_of(lowered.graph)
        computed = list(dict.fromkeys(r for r in results if isinstance(r, fx.Node) and r.op != "placeholder"))
        lowered.graph.output_node().args = (tuple(computed),)
        lowered.recompile()
        # the compiled graph returns only the values that it computes; results that are arguments are added after it
        places = {node: place for place, node in enumerate([*computed, *sources])}
        ends = [(r, places[r] if isinstance(r, fx.Node) else None) for r in results]
        drawing = _eager_rng if any(map(uses_rng, lowered.graph.nodes)) else nullcontext
        run = torch.compile(lowered.forward, fullgraph=True, **self._options)
        groups = [lookup(node.args[-1]) for node in scheduled.graph.nodes if isinstance(node.target, Begin)]

        def compiled(*arguments: object) -> tuple[object, ...]:
            # tracers do not know the classes of sharded parameters and split buffers
            plain = [Tensor.detach(a) if isinstance(a, (nn.Parameter, LocalSlice)) else a for a in arguments]
            # `_len_torch_dispatch_stack`: no public way to count the active modes (PyTorch 2.13.0).
            if torch._C._len_torch_dispatch_stack():
                # modes such as CommDebugMode observe the ops, and torch.compile refuses to run under them
                made = lowered.forward(*plain)
            else:
                try:
                    with drawing():
                        made = run(*plain)
                except RuntimeError as error:
                    explained = _explained(error, groups)
                    if explained is None:
                        raise
                    raise explained from error
            values = (*made, *arguments)
            return tuple(constant if place is None else values[place] for constant, place in ends)

        return compiled


def compiler_of(options: CompileOptions, *, where: str) -> Compiler | None:
    """Returns the compiler for a user's options; None if they disable compilation.

    Raises:
        InputError: they are not options of torch.compile.
    """
    if options is None or isinstance(options, bool):
        return Compiler({}, where=where) if options else None
    if isinstance(options, Mapping):
        return None if options.get("disable") else Compiler(options, where=where)
    raise InputError(
        f"invalid compile {options!r}",
        where=where,
        why="expected True, False or a dict of torch.compile's keyword arguments",
        attempt='objective={"compile": True}, or {"compile": {"backend": "aot_eager"}}',
    )


def can_compile(local: fx.GraphModule) -> bool:
    """Returns whether `torch.compile` supports every op and every collective of a rank's graph.

    The graph must not contain calls that are kept unsplit, and its sizes must follow from the
    inputs' sizes.

    PyTorch's functional collectives, which compilers can trace, gather GPU tensors over NCCL only: over
    gloo, the process crashes (last checked with PyTorch 2.11).
    """
    whole = [node for node in local.graph.nodes if isinstance(node.target, (WholeCall, Stepwise))]
    if whole:
        log.warning("a graph is not compiled: %s runs Python code", whole[0].name)
        return False
    sending = local.graph.find_nodes(op="call_function", target=DISPATCH)
    if sending:
        log.warning("a graph is not compiled: %s computes how many rows a rank's experts receive", sending[0].name)
        return False
    by_gloo = [node for node in local.graph.nodes if node.target in OPS and _is_gathered_by_gloo(node)]
    if by_gloo:
        log.warning("a graph is not compiled: %s gathers GPU tensors over gloo", by_gloo[0].name)
    return not by_gloo


def _is_gathered_by_gloo(node: fx.Node) -> bool:
    """Returns whether a conversion sends GPU tensors over gloo, forward or backward, except by all-reduce."""
    device = node_arg(node).meta["val"].device
    if device.type != "cuda" or not lookup(str(node.args[-1])).aborts_on_mismatch(device):
        return False
    both = kernels(OPS[node.target].name, needs_grad=True)
    return any(kernel in SENDING and kernel != "all_reduce" for kernel in both)


def _explained(error: RuntimeError, groups: Sequence[Group]) -> Exception | None:
    """Returns a clearer error for a failed compiler or compiled collective; None for other errors."""
    # `TorchDynamoException`, the base class of Dynamo's errors, has no public name (PyTorch 2.13.0).
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return CaptureError(
            "torch.compile can't compile this rank's graph",
            where="torch.compile",
            why=textwrap.shorten(f"{type(error).__name__}: {error}", 400),
            attempt='objective={"compile": {"backend": "aot_eager"}} to see whether it is the backend; or no compile',
        )
    if groups and (isinstance(error, dist.DistError) or "gloo" in str(error)):
        return collective_failed(groups[0], "a collective of a compiled graph", error)
    return None


def _eager_rng() -> AbstractContextManager[None]:
    """A context in which Inductor draws the same random numbers as PyTorch's ops; by default it does not."""
    # `_inductor.config`: torch.compile takes no options beside a mode, and any mode needs this one (PyTorch 2.13.0).
    patched: AbstractContextManager[None] = torch._inductor.config.patch(fallback_random=True)
    return patched


def _nothing() -> None:
    """The function on which options are tried."""


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float, dict)):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__name__)  # functions print with an address
