"""Runs one training step, forward and backward, of the unsharded model, or of all ranks in lockstep.

The outputs of both get the same random gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from torchshard.capture import Leaves, copy_model
from torchshard.capture.carried import Arguments
from torchshard.checking import lockstep
from torchshard.checking.compare import Results, gradients
from torchshard.checking.rounding import Nudges, nudged
from torchshard.checking.running import Execute
from torchshard.core.autocast import autocasting
from torchshard.core.layouts import Shard
from torchshard.core.mesh import Mesh, Place
from torchshard.core.sharding import UNSHARDED, Sharding

T = TypeVar("T")
ALONE = Mesh(())
"""One process, without axes."""
COTANGENT_SEED = 7919
"""The seed of the first output's gradient; each further output adds one."""


def cotangent(output: Tensor, index: int) -> Tensor:
    """A fixed random gradient of an output.

    Its seed is unlikely to be the user's: with a gradient equal to the input, a normalization layer
    returns zero and hides errors.
    """
    dtype = torch.complex128 if output.is_complex() else torch.float64
    generator = torch.Generator().manual_seed(COTANGENT_SEED + index)
    return torch.randn(output.shape, generator=generator, dtype=dtype, device="cpu").to(output)


def leaf(value: T) -> T:
    """A copy of a tensor as a leaf with its own gradient, if required; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return cast(T, value.detach().clone().requires_grad_(value.requires_grad))


def backward(outputs: Sequence[Sequence[object]], mesh: Mesh = ALONE, shardings: Sequence[Sharding] = ()) -> None:
    """Runs backward from the outputs of all ranks; each gets the same gradients, or slices of them.

    Args:
        shardings: the shardings of a rank's outputs, in equal slices; by default all are full.
    """
    roots, grads = [], []
    for place, of_rank in zip(mesh.places(), outputs, strict=True):
        for number, output in enumerate(of_rank):
            if isinstance(output, Tensor) and output.requires_grad:
                roots.append(output)
                grads.append(_own_cotangent(output, number, shardings, place))
    if roots:
        torch.autograd.backward(roots, grads)


def _own_cotangent(output: Tensor, number: int, shardings: Sequence[Sharding], place: Place) -> Tensor:
    """A rank's slice of the gradient of an output, given its slice of the output."""
    sharding, shape = shardings[number] if shardings else UNSHARDED, list(output.shape)
    for axis, layout in sharding:
        assert isinstance(layout, Shard), sharding
        shape[layout.dim] *= axis.size
    return sharding.local(cotangent(output.new_empty(shape), number), place)


def unsharded(model: nn.Module, call: Leaves, *, left: bool = True) -> Results:
    """Runs a copy of the model, so that the user's gradients and buffers stay as they are.

    Args:
        left: whether tensors that the call writes into its arguments count as outputs.
    """
    original, model = model, copy_model(model)
    model.zero_grad()
    inputs = {name: leaf(t) for name, t in zip(call.names, call.tensors, strict=True)}
    call_args, call_kwargs = call.rebuild(list(inputs.values()))
    arguments = Arguments(call_args, call_kwargs)
    with torch.enable_grad():
        flat, changes = arguments.with_changes(model(*call_args, **call_kwargs), call.positional)
        outputs = flat.tensors if left else flat.tensors[: changes.results]
        backward([outputs])
    before = dict(original.named_parameters())
    written = {name: p.detach() for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    buffers = dict(model.named_buffers()) | written
    return Results(
        outputs, flat.names[: len(outputs)], gradients(inputs), gradients(dict(model.named_parameters())), buffers
    )


class Run:
    """A step of the ranks' graphs in lockstep, with each rank's tensors after it."""

    def __init__(
        self,
        graphs: Sequence[fx.GraphModule],
        states: Sequence[Mapping[str, Tensor]],
        call: Leaves,
        nudges: Nudges | None = None,
        *,
        mesh: Mesh,
        shardings: Mapping[str, Sharding] = MappingProxyType({}),
        of_results: Sequence[Sharding] = (),
        watched: bool = False,
        execute: Execute | None = None,
    ) -> None:
        """Runs the step.

        Args:
            graphs: one per rank.
            states: per rank, parameters, buffers and constants by all their names.
            mesh: the mesh of the ranks.
            shardings: the shardings of the call's tensors.
            of_results: the shardings of the tensors among the results; by default all are full.
            nudges: which values, and gradients, are moved by a unit in their last place.
            watched: whether to keep every node's value and gradient.
            execute: runs the step; by default, `graphs` run in lockstep under PyTorch's autograd.
        """
        ranks = range(len(graphs))
        self.mesh, self.states, self._nudges, self._watched = mesh, states, nudges, watched
        self.inputs = [
            {n: leaf(shardings.get(n, UNSHARDED).local(t, place)) for n, t in call.named_tensors}
            for place in mesh.places()
        ]
        self.output_shardings = of_results
        self.values: list[dict[str, Argument]] = [{} for _ in ranks]
        self.grads: list[dict[str, Tensor]] = [{} for _ in ranks]
        placeholder_values = []
        for graph, state, inputs in zip(graphs, states, self.inputs, strict=True):
            by_path = {**state, **inputs}
            placeholder_values.append([by_path[n.meta["path"]] for n in graph.graph.nodes if n.op == "placeholder"])
        with torch.enable_grad(), autocasting(()):
            records = [self._recorder(rank) for rank in ranks]
            made = execute(placeholder_values) if execute else lockstep.run(graphs, placeholder_values, records)
            self.outputs = [[output for output in outputs if isinstance(output, Tensor)] for outputs in made]
            backward(self.outputs, mesh, self.output_shardings)

    def _recorder(self, rank: int) -> lockstep.Record:
        def record(node: fx.Node, value: Argument, args: list[Argument]) -> Argument:
            if self._nudges is not None:
                value = nudged(node, value, pytree.tree_leaves(args), self._nudges)
            if self._watched:
                self.values[rank][node.name] = value
                if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                    value.register_hook(lambda g: self.grads[rank].__setitem__(node.name, g))
            return value

        return record
