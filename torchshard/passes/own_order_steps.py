"""The ops that keep rows apart between a sort and the end, with the kinds of values that they take and give."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from torchshard.core.notation import RowKeywords
from torchshard.core.rows import Local
from torchshard.custom_ops.fx_types import Argument, Traced
from torchshard.custom_ops.whole import OpKey
from torchshard.rules.linear_algebra import GROUPED

aten = torch.ops.aten

Kind = Literal[
    "given", "sorted", "keys", "order", "sorted order", "inverse", "tokens", "rows", "counts", "ends", "plain",
    "put back",
]  # fmt: skip
"""The role of a value between a sort and the end: the sort's operand ("given"), its result, the sorted
keys, the order of rows, the result of sorting that order, its inverse, the token of each ordered
row, rows in order, the number of rows per key, the ends of these groups, memory with values
independent of the order ("plain"), or rows in their first order ("put back")."""
OUTSIDE: Collection[Kind] = ("plain", "put back")
"""Kinds that any op may take."""
PARTS: Mapping[Kind, Mapping[object, Kind]] = {"sorted": {0: "keys", 1: "order"}, "sorted order": {1: "inverse"}}
"""The kinds of a sort's results, by number; results of other ops share the kind of their list."""
SORTS: Mapping[OpKey, Kind] = {
    aten.sort.default: "sorted",
    aten.sort.stable: "sorted",
    aten.argsort.default: "order",
    aten.argsort.stable: "order",
}
"""Sort -> the kind of its result."""


@dataclass(frozen=True)
class Step:
    """An op that treats rows differently, with the kinds that it takes and gives."""

    takes: Mapping[str, Kind]
    """Argument name -> kind."""
    gives: Kind
    row: str
    """The op's row: n are rows, t tokens of k rows each."""
    options: RowKeywords = field(default_factory=lambda: RowKeywords())


def by_sorting(dtype: torch.dtype) -> RowKeywords:
    """Row options that compute an inverse by sorting the order.

    The sort gives the place of each row among this rank's rows, not among all.
    """

    def local(ctx: Local, memory: Traced, indices: list[Traced], *rest: Argument) -> Traced:
        return aten._to_copy.default(aten.argsort.default(indices[0]), dtype=dtype)

    return RowKeywords(local={"n": local}, any_size="n")


_PUT = "n ..., n, n ... -> n ..."


_ADD = "t ..., (t k), (t k) ... -> t ..."


_GROUPED = "n !k, !e !k !m, !o -> n !m"


STEPS: Mapping[OpKey, tuple[Step, ...]] = {
    aten.index.Tensor: (
        Step({"indices": "order"}, "rows", "n ..., n -> n ..."),
        Step({"indices": "tokens"}, "rows", "t ..., (t k) -> (t k) ..."),
        Step({"self": "rows", "indices": "inverse"}, "put back", "n ..., n -> n ..."),
    ),
    aten.index_put.default: (
        Step({"indices": "order"}, "inverse", "n, n, !m -> n"),
        Step({"indices": "order", "values": "rows"}, "put back", _PUT),
        Step({"indices": "tokens", "values": "rows"}, "put back", _ADD),
    ),
    aten.index_add.default: (
        Step({"index": "order", "source": "rows"}, "put back", _PUT),
        Step({"index": "tokens", "source": "rows"}, "put back", _ADD),
    ),
    aten.gather.default: (
        Step({"index": "order"}, "rows", "n d, n d -> n d"),
        Step({"index": "tokens"}, "rows", "t d, (t k) d -> (t k) d"),
        Step({"self": "rows", "index": "inverse"}, "put back", "n d, n d -> n d"),
    ),
    aten.scatter_add.default: (
        Step({"index": "order", "src": "rows"}, "put back", "n d, n d, n d -> n d"),
        Step({"index": "tokens", "src": "rows"}, "put back", "t d, (t k) d, (t k) d -> t d"),
    ),
    aten.histc.default: tuple(
        Step({"self": kind}, "counts", "n -> !e", RowKeywords(reduced="n")) for kind in ("given", "keys")
    ),
    aten.cumsum.default: (Step({"self": "counts"}, "ends", "!e -> !e"),),
    aten.searchsorted.Tensor: (Step({"sorted_sequence": "keys"}, "ends", "n, !e -> !e", RowKeywords(reduced="n")),),
    **dict.fromkeys(GROUPED, tuple(Step({x: "rows", "offs": "ends"}, "rows", _GROUPED) for x in ("self", "input"))),
}
