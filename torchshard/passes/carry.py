"""Marks carried values, which a call stores for the next one, so that they may stay split.

    before    keys = cat([keys_in, k], 2); att = attention(q, keys, ...); output ((att,), (keys,))
    after     keys = cat([keys_in, k], 2); keys_carry = carry(keys); att = attention(q, keys_carry, ...); ...

All consumers take the carried value. Otherwise the cheapest layout to store could be one that no op
accepts, and each later call would convert it.
"""

from __future__ import annotations

import torch
from torch import fx

from torchshard.capture.carried import Changes
from torchshard.core.conversions import step_args
from torchshard.core.layouts import I
from torchshard.custom_ops.carry import CARRY
from torchshard.ir.editing import duplicate, name_after
from torchshard.ir.effects import is_kept_split
from torchshard.ir.graph import ORIGIN, global_shape, is_tensor, layout_of


def carry(module: fx.GraphModule, changes: Changes) -> bool:
    """Rewrites the graph; returns whether anything changed."""
    output, made = module.graph.output_node(), dict[fx.Node, fx.Node]()
    (values,) = output.args
    assert isinstance(values, tuple)
    first_op = next(node for node in module.graph.nodes if node.op != "placeholder")
    for value, place in zip(values[changes.results :], changes.names, strict=True):
        if not isinstance(value, fx.Node) or not is_tensor(value) or value in made or place in changes.whole:
            continue
        before = first_op if value.op == "placeholder" else value.next
        with module.graph.inserting_before(before):
            node = made[value] = module.graph.call_function(CARRY, (value,))
        name_after(node, f"{value.name}_carry")
        node.meta = {key: value.meta[key] for key in ORIGIN if key in value.meta} | {
            "val": value.meta["val"],
            "place": place,
        }
        value.replace_all_uses_with(node, lambda user, node=node: user not in (node, output))  # type: ignore[misc]
    left = [made.get(v, v) if isinstance(v, fx.Node) else v for v in values[changes.results :]]
    output.args = ((*values[: changes.results], *left),)  # results of forward stay full, carried or not
    return bool(made)


def with_whole_results(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a rewritten graph that gathers the carried results, as in the unsharded model."""
    copied = duplicate(module)
    output = copied.graph.output_node()
    for value in filter(is_kept_split, output.all_input_nodes):
        layout = layout_of(value)
        args = step_args(layout, I, global_shape(value))
        with copied.graph.inserting_before(output):
            whole = copied.graph.call_function(
                torch.ops.torchshard.gather.default, (value, *args, copied.meta["axis"].name)
            )
        name_after(whole, f"{value.name}_gather")
        whole.meta = {key: value.meta[key] for key in ("val", *ORIGIN) if key in value.meta} | {"layouts": (I,)}
        output.replace_input_with(value, whole)
    return copied
