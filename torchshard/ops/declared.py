"""Declares the operators of collectives: names, schemas, and the shapes of their results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from torchshard.core.conversions import ROUNDS, TABLE, Conversion, source_and_target
from torchshard.core.layouts import Layout, Shard, local_shape, local_size, whole_shape, with_parts
from torchshard.ops.kernels import kernels

_ARGS = {0: "", 1: "int dim, int[] parts, ", 2: "int dim, int[] parts, int to_dim, int[] to_parts, "}
_EXPERTS = "(Tensor x, Tensor sent, Tensor received, SymInt? rows, str group) -> Tensor"
Size = int | torch.SymInt
OpArgs = tuple[int | str | tuple[int, ...], ...]
"""An operator's arguments after the tensor: dims, parts, and finally the group's name."""
Op = OpOverload[..., Tensor]
LIBRARY = torch.library.Library("torchshard", "FRAGMENT")
"""The operators live as long as it does."""
OPS: dict[object, Conversion] = {}
"""Operator -> its row of the table."""
SENDING = frozenset(ROUNDS)
"""The kernels that communicate."""


def _declare(name: str, schema: str, *tags: torch.Tag) -> Op:
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
    op: Op = getattr(torch.ops.torchshard, name).default
    return op


def _declare_row(row: Conversion) -> None:
    def fake(x: Tensor, *args: int | str | list[int]) -> Tensor:
        if row.kernel == "none":
            return torch.empty_like(x)
        group = kernels().lookup(cast(str, args[-1]))
        source, target = with_parts(*source_and_target(row.name, args), x.shape, group.size)
        return x.new_empty(local_shape(whole_shape(x.shape, source), target, group.rank, group.size))

    shards = [row.source, row.target].count(Shard)
    OPS[_declare(row.name, f"(Tensor x, {_ARGS[shards]}str group) -> Tensor")] = row
    torch.library.register_fake(f"torchshard::{row.name}", fake, lib=LIBRARY)


for _row in TABLE.values():
    _declare_row(_row)

ALL_REDUCE_MAX = _declare("all_reduce_max", "(Tensor x, str group) -> Tensor")
"""The elementwise maximum over the ranks, on every rank; it has no gradient."""
DISPATCH = _declare("dispatch", _EXPERTS, torch.Tag.dynamic_output_shape)
"""Sends rows to the ranks of their experts; see `distributed.experts`."""
COMBINE = _declare("combine", _EXPERTS)
"""Sends rows back; the gradient of `dispatch`, as that is of it."""
COLLECTIVES = frozenset([*OPS, ALL_REDUCE_MAX, DISPATCH, COMBINE])
"""The operators of the table, `all_reduce_max`, `dispatch` and `combine`.

Some operators of the table send nothing, but their backward does.
"""


@torch.library.register_fake("torchshard::all_reduce_max", lib=LIBRARY)
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("torchshard::dispatch", lib=LIBRARY)
@torch.library.register_fake("torchshard::combine", lib=LIBRARY)
def _(x: Tensor, sent: Tensor, received: Tensor, rows: Size | None, group: str) -> Tensor:
    return x.new_empty(_some_rows(x) if rows is None else rows, *x.shape[1:])


def _some_rows(x: Tensor) -> Size:
    """Returns a new dynamic size, equal to no other; its example value is `x`'s number of rows."""
    # `_shape_env`: `get_ctx()` offers `new_dynamic_size()` only, for a size without an example value (PyTorch 2.13.0).
    shapes = getattr(torch.library.get_ctx(), "_shape_env", None)
    size = x.shape[0]
    if shapes is None or isinstance(size, int):
        return size
    # these imports take seconds; the capture has done them before
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    number, source = size.node.hint, ConstantSource(f"rows of experts {len(shapes.var_to_range)}")
    symbol = shapes.create_symbol(number, source, DimDynamic.DYNAMIC)
    found: torch.SymInt = shapes.create_symintnode(symbol, hint=number)
    return found


def experts_of_ranks(experts: int, ranks: int) -> list[int]:
    """Returns each rank's number of experts, by `torch.chunk`'s rule."""
    return [local_size(((experts, 1),), rank, ranks) for rank in range(ranks)]


def hashable(args: Sequence[int | str | Sequence[int]]) -> OpArgs:
    """Returns an operator's arguments after the tensor, with tuples instead of lists."""
    return tuple(tuple(a) if isinstance(a, (list, tuple)) else cast(int | str, a) for a in args)


@functools.lru_cache(maxsize=4096)
def layouts_of(name: str, args: OpArgs) -> tuple[Layout, Layout]:
    """Returns the source and target layouts of a row's call, for its arguments after the tensor."""
    return source_and_target(name, args)


def communicates(target: object) -> bool:
    """Returns whether a node's target is a collective that sends data."""
    return target in OPS and OPS[target].kernel in SENDING


def is_collective(target: object) -> bool:
    """Returns whether a node's target is one of `COLLECTIVES`."""
    return target in COLLECTIVES
