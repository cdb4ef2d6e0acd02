"""Finds the collectives that a split op runs inside its local computation, for the cost model to price.

A rule gives only the replacement that a rank runs. It is recorded as in `passes.localize`, and run on fake tensors of
the first rank's sizes; its collectives are noted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from torchshard.core.choices import local_replacement
from torchshard.core.conversions import ConversionStep, source_and_target
from torchshard.core.layouts import I, Layout, Shard, local_shape, whole_shape, with_parts
from torchshard.core.mesh import Coordinate, MeshAxis, simulated_name
from torchshard.core.rows import Choice, Local, Row
from torchshard.custom_ops.fx_types import Argument
from torchshard.custom_ops.stepwise import Stepwise
from torchshard.ir.editing import record_local
from torchshard.ir.fake_values import faking, hint
from torchshard.ir.graph import fake_mode, operands
from torchshard.ops import COMBINE, DISPATCH, OPS, is_collective


@dataclass(frozen=True)
class InsideCall:
    """A collective inside an op's local computation."""

    step: ConversionStep
    shape: tuple[int, ...]
    """The global shape of the converted value."""
    dtype: torch.dtype
    times: int
    """The number of calls."""

    @property
    def nbytes(self) -> int:
        """The size of the full value in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def calls_inside(node: fx.Node, row: Row, choice: Choice, axis: MeshAxis) -> list[InsideCall]:
    """Returns the collectives that the first rank runs inside an op under a choice, in the order of the calls."""
    replacement = local_replacement(row, choice)
    if replacement is None:
        return []
    coordinate = axis.coordinate(0, simulated_name(0, axis.size))
    graph = fx.Graph()
    inputs = {operand: graph.placeholder(operand.name) for operand in node.all_input_nodes}
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), inputs.__getitem__)
    record_local(graph, node, functools.partial(replacement, Local(row, choice, coordinate)), args, kwargs)
    # most replacements only change sizes; running those too would double the time of planning
    if not any(is_collective(n.target) or isinstance(n.target, Stepwise) for n in graph.nodes):
        return []
    reader = _Reader(graph, axis.size)
    layouts = dict(zip(operands(node), choice.operands, strict=True))
    with faking(fake_mode(node.graph)):
        reader.run(*(_local(operand, layouts, coordinate) for operand in inputs))
    return reader.found


def _local(operand: fx.Node, layouts: Mapping[fx.Node, Layout], coordinate: Coordinate) -> Argument:
    """Returns a rank's slice of an operand as a fake tensor; dynamic sizes are those of the example inputs."""
    value = operand.meta["val"]
    if not isinstance(value, Tensor):
        return hint(value) if isinstance(value, torch.SymInt) else value
    shape = local_shape(tuple(map(hint, value.shape)), layouts[operand], coordinate.rank, coordinate.axis.size)
    return torch.empty(shape, dtype=value.dtype, device=value.device)


class _Reader(fx.Interpreter):
    """Runs a recorded replacement, and notes its collectives."""

    def __init__(self, graph: fx.Graph, world: int) -> None:
        super().__init__(nn.Module(), graph=graph)
        self._world = world
        self.found: list[InsideCall] = []

    def run_node(self, n: fx.Node) -> Argument:
        """Runs one node of the graph."""
        self.found += [
            _described(*call, self._world) for call in _collectives(n.target, self.fetch_args_kwargs_from_env(n)[0])
        ]
        return super().run_node(n)


def _collectives(target: object, args: tuple[Argument, ...]) -> Iterator[tuple[object, tuple[Argument, ...], int]]:
    """Yields the collectives that a node calls, with their arguments and the number of calls."""
    if is_collective(target):
        yield target, args, 1
    elif isinstance(target, Stepwise):
        yield from target.collectives(*args)


def _described(op: object, args: tuple[Argument, ...], times: int, world: int) -> InsideCall:
    x, conversion = args[0], OPS.get(op)
    if op in (DISPATCH, COMBINE):
        step = ConversionStep("dispatch" if op is DISPATCH else "combine", Shard(0), Shard(0))
        return InsideCall(step, (x.shape[0] * world, *x.shape[1:]), x.dtype, times)
    if conversion is None:  # all_reduce_max, which converts no layout
        return InsideCall(ConversionStep("all_reduce_max", I, I), tuple(x.shape), x.dtype, times)
    source, target = with_parts(*source_and_target(conversion.name, args[1:]), x.shape, world)
    shape = tuple(whole_shape(x.shape, source))
    return InsideCall(ConversionStep(conversion.name, source, target), shape, x.dtype, times)
