"""A training step of one segment of a rank's graph: forward and backward graphs, run as one autograd Function.

Where a backward graph does not suffice, as for gradients of gradients, the forward runs again and
PyTorch's autograd computes the backward.

AOTAutograd runs its graphs in such a Function too, but refuses gradients of gradients (PyTorch 2.13;
pytorch/pytorch#91469). This module could go together with `passes.differentiate`, if AOTAutograd
computed them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node

# Code that frees its arguments early, without a public name (PyTorch 2.13.0; the reason: pytorch/pytorch#83137).
from torch.fx.graph import _BoxedCodeGen

from torchshard.core.autocast import autocasting
from torchshard.core.errors import InputError
from torchshard.core.rng_states import RngStates, keeping_rng_states, rng_states, set_rng_states
from torchshard.core.types import Context
from torchshard.custom_ops.carry import CARRY
from torchshard.custom_ops.fx_types import Argument
from torchshard.custom_ops.stepwise import Stepwise
from torchshard.distributed.consistency import note_unverified, running, running_call
from torchshard.distributed.ops import PLAIN
from torchshard.distributed.ops import direct as under_autograd
from torchshard.distributed.ranks import Ranks
from torchshard.ir.editing import duplicate
from torchshard.ir.effects import uses_rng
from torchshard.ir.graph import placeholders
from torchshard.ops import OPS, hashable
from torchshard.passes import Gradients, Part, Partition, step_graphs
from torchshard.runtime.later_sums import Due, keep, sum_kept, summed, with_kept
from torchshard.runtime.sent import Sent, on_all_ranks, sent_by
from torchshard.weights.local_slice import unwatched
from torchshard.weights.parameter import ShardedParameter

log = logging.getLogger("torchshard.runtime.step")
RunGraph = Callable[..., Sequence[Argument]]
"""Runs a graph of a rank on the values of its placeholders; returns its results."""
Runnable = Callable[[fx.GraphModule], RunGraph]
"""Makes a callable from a scheduled graph."""


class _Backward(NamedTuple):
    """A backward graph, ready to run."""

    run: Callable[[list[Argument]], Sequence[Tensor | None]]
    """Takes a list of the saved values and the gradients, and empties it to free their memory early."""
    saved: tuple[int, ...]
    """The indices of the values it takes, among those that forward saves."""
    sends: bool
    """Whether it communicates."""
    parts: tuple[Part, ...]
    """The partial gradients that it returns after the gradients of the arguments."""


class Step:
    """The forward and backward of a segment of a rank's graph; called like the segment's graph."""

    def __init__(
        self,
        local: fx.GraphModule,
        ranks: Ranks,
        written: Collection[str],
        runnable: Runnable,
        unsummed: Collection[str] = (),
    ) -> None:
        """Makes the forward and backward graphs of a segment.

        Args:
            written: the names of buffers and parameters that any segment of the rank's graph writes to.
            unsummed: the groups over which the backward does not sum gradients of parameters.
        """
        self.ranks, self._local, self._runnable = ranks, local, runnable
        self._graphs = partial(step_graphs, local, unsummed=unsummed)
        self.parts = self._graphs()
        self.forward = runnable(self.parts.forward)
        self.draws = any(map(uses_rng, local.graph.nodes))
        self.written = [i for i, source in enumerate(placeholders(local.graph)) if source.name in written]
        """The indices of the arguments that forward writes to."""
        self._backwards: dict[Gradients, _Backward | None] = {self.parts.given: self._backward(self.parts)}

    def __call__(self, *tensors: Tensor, keeps: bool = False) -> tuple[Argument, ...]:
        """Returns the segment's results.

        Args:
            keeps: whether parameters keep the partial gradients that the backward has not summed.
        """
        results: tuple[Tensor, ...] = _Function.apply(self, keeps, *tensors)
        if sum(self.parts.given) > 1:
            # one autograd node per result: hooks on results without a gradient must not be called
            return tuple(r.view_as(r) if given else r for r, given in zip(results, self.parts.given, strict=True))
        return results

    @cached_property
    def under_autograd(self) -> fx.GraphModule:
        """The segment's graph, for PyTorch's autograd."""
        return with_direct_collectives(self._local)

    @property
    def sent(self) -> list[Sent]:
        """The collectives of forward and backward, in order; they must match on all ranks."""
        return sent_by(self.parts.forward) + sent_by(self.parts.backward)

    def backward_for(self, given: Gradients) -> _Backward | None:
        """Returns the backward for the results that received gradients; None if forward saves too little for it.

        Arguments of other results only get None, not zeros: optimizers distinguish the two.
        """
        if given not in self._backwards:
            make = partial(self._graphs, given, kept=self.parts.saved)
            parts = on_all_ranks(self.ranks, make, lambda parts: sent_by(parts.backward))
            self._backwards[given] = None if parts is None else self._backward(parts)
        return self._backwards[given]

    def _backward(self, parts: Partition) -> _Backward | None:
        if not set(parts.saved) <= set(self.parts.saved):
            return None
        return _Backward(
            _boxed(self._runnable(parts.backward)),
            tuple(map(self.parts.saved.index, parts.saved)),
            bool(sent_by(parts.backward)),
            parts.parts,
        )


def _boxed(run: RunGraph) -> Callable[[list[Argument]], Sequence[Tensor | None]]:
    """Returns a graph as a callable that takes its arguments in a list, and empties the list."""
    if isinstance(run, fx.GraphModule):
        run.graph.set_codegen(_BoxedCodeGen())
        run.recompile()
        return run

    def boxed(arguments: list[Argument]) -> Sequence[Tensor | None]:
        taken = tuple(arguments)
        arguments.clear()
        return run(*taken)

    return boxed


def with_direct_collectives(graph: fx.GraphModule) -> fx.GraphModule:
    """Copies a rank's graph, with collectives that bypass PyTorch's dispatcher.

    The dispatcher takes as long as sending a few bytes.
    """
    copied = duplicate(graph)
    for node in list(copied.graph.nodes):
        if node.target is CARRY:
            node.replace_all_uses_with(node.args[0])
            copied.graph.erase_node(node)
        elif node.target in OPS:
            node.target, node.args = under_autograd(node.target), (node.args[0], *hashable(node.args[1:]))
        elif isinstance(node.target, Stepwise):
            node.target = dataclasses.replace(node.target, collective=under_autograd)
    copied.recompile()
    return copied


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, step: Step, keeps: bool, *tensors: Tensor) -> tuple[Argument, ...]:
        parts = step.parts
        ctx.step, ctx.keeps, ctx.call = step, keeps, running_call()
        ctx.arguments, ctx.versions = tensors, _versions(step, tensors)
        ctx.before = {i: tensors[i].clone() for i in step.written}
        ctx.rng_states = rng_states(tensors) if step.draws else {}
        made = step.forward(*tensors)
        results, tensors_end = list(made[: len(parts.given)]), len(parts.given) + parts.saved_tensors
        ctx.save_for_backward(*made[len(parts.given) : tensors_end])
        ctx.sizes = made[tensors_end:]
        ctx.set_materialize_grads(False)
        others = zip(results, parts.given, strict=True)
        ctx.mark_non_differentiable(*(r for r, given in others if isinstance(r, Tensor) and not given))
        return tuple(results)

    @staticmethod
    # `_disable_dynamo` is `torch.compiler.disable`, without its import of Dynamo (PyTorch 2.13.0).
    @torch._disable_dynamo
    def backward(ctx: Context, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = tuple(gradient is not None for gradient in gradients)
        plain = all(type(gradient) in PLAIN for gradient in gradients if gradient is not None)
        backward = None if torch.is_grad_enabled() or not plain else ctx.step.backward_for(given)
        if backward is None:
            return (None, None, *_by_autograd(ctx, gradients))
        saved = [*ctx.saved_tensors, *ctx.sizes]
        arguments = [*(saved[i] for i in backward.saved), *(g for g in gradients if g is not None)]
        del saved, gradients
        ctx.maybe_clear_saved_tensors()
        if backward.sends:
            for group in (ctx.step.ranks.group, ctx.step.ranks.replicas):
                note_unverified(group, f"backward of {ctx.call}")
        with unwatched(), autocasting(()):
            found = list(backward.run(arguments))
            if backward.parts:
                found = _with_parts(ctx, found, backward.parts)
            return (None, None, *found)


def _with_parts(ctx: Context, found: list[Tensor | None], parts: Sequence[Part]) -> list[Tensor | None]:
    """Returns the gradients of a step's arguments, including partial ones, which are summed or kept.

    A parameter keeps its partial gradients if `ctx.keeps`, and if autograd is about to add to its
    `grad`.
    """
    gradients, given = found[: len(ctx.arguments)], found[len(ctx.arguments) :]
    edges = iter(ctx.next_functions)
    nodes = [next(edges)[0] if isinstance(argument, Tensor) else None for argument in ctx.arguments]
    of_argument: dict[int, list[Due]] = {}
    for part, value in zip(parts, given, strict=True):
        assert value is not None
        of_argument.setdefault(part.argument, []).append(Due(value, part.sums))
    due: list[tuple[int, Due]] = []
    for i, own in of_argument.items():
        parameter = _accumulated(nodes[i])
        if parameter is not None and ctx.keeps:
            for each in own:
                keep(parameter, each)
        else:
            due += [(i, each) for each in (own if parameter is None else with_kept(parameter, own))]
    for (i, _), gradient in zip(due, summed([each for _, each in due]), strict=True):
        before = gradients[i]
        gradients[i] = gradient if before is None else before + gradient
    return gradients


def _accumulated(node: Node | None) -> ShardedParameter | None:
    """Returns the parameter if an autograd node is about to accumulate into its `grad`, else None."""
    parameter = getattr(node, "variable", None)
    if node is None or not isinstance(parameter, ShardedParameter):
        return None
    try:
        # `_will_engine_execute_node` has no public name (PyTorch 2.13.0; added by pytorch/pytorch#84773).
        return parameter if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad requested a gradient
        return None


def _by_autograd(ctx: Context, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Computes the gradients of a step's arguments by PyTorch's autograd; the forward runs again.

    Raises:
        InputError: a parameter or an input was changed in place since the call.
    """
    step: Step = ctx.step
    if _versions(step, ctx.arguments) != ctx.versions:
        raise InputError(
            "a parameter or an input was changed in place between forward and backward",
            where=f"backward of {ctx.call}",
            why="a backward that is differentiated itself runs the forward again",
            attempt="optimizer.step() and other changes after the last backward",
        )
    log.info("backward of %s: by autograd, of a forward that runs again", ctx.call)
    if not ctx.keeps:
        sum_kept(t for t in ctx.arguments if isinstance(t, ShardedParameter))
    before = [ctx.before.get(i, tensor) for i, tensor in enumerate(ctx.arguments)]
    with torch.enable_grad(), running(ctx.call), unwatched(), autocasting(()), _drawing(ctx.rng_states, before):
        # a tied parameter is several arguments, each with its own gradient
        arguments = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in before]
        results = step.under_autograd(*arguments)
    chosen = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None]
    wanted = [t for t, needed in zip(arguments, ctx.needs_input_grad[2:], strict=True) if needed]
    made, given = [r for r, _ in chosen], [g for _, g in chosen]
    found = torch.autograd.grad(made, wanted, given, create_graph=torch.is_grad_enabled(), allow_unused=True)
    rest = iter(found)
    return [next(rest) if needed else None for needed in ctx.needs_input_grad[2:]]


def _versions(step: Step, arguments: Sequence[Tensor]) -> list[int]:
    """Returns each argument's count of in-place changes; 0 if forward writes to it and keeps a copy."""
    return [0 if i in step.written or t.is_inference() else t._version for i, t in enumerate(arguments)]


@contextlib.contextmanager
def _drawing(states: RngStates, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Draws random numbers from these states within the block, then restores the generators."""
    with keeping_rng_states(tensors if states else ()):
        set_rng_states(states)
        yield
