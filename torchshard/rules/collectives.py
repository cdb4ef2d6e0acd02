"""Collectives over another mesh axis, which are linear ops for the axis that is planned.

A collective over one axis acts equally on each slice along another axis, as long as the two axes
split different dims.
"""

from __future__ import annotations

from torchshard.core.conversions import TABLE
from torchshard.core.rows import Row
from torchshard.rules.registry import Call, letters, rule, spaced, unsplittable


def _row(call: Call) -> Row:
    """`all_to_all(f32[2,8,16], 1, ..., 2, ...)     a !b !c -> a !d !e`: changed dims are unsplittable."""
    ndim = len(call.tensors[0].shape)
    dims = [call.args[name] for name in ("dim", "to_dim") if name in call.args]
    names = letters(2 * ndim)
    before, after = names[:ndim], [names[ndim + i] if i in dims else names[i] for i in range(ndim)]
    return call.row(f"{spaced(unsplittable(before, dims))} -> {spaced(unsplittable(after, dims))}", linear=({0},))


for _conversion in TABLE.values():
    rule(f"torchshard.{_conversion.name}.default")(_row)

rule("torchshard.all_reduce_max.default", row="... -> ...")
