"""The pipeline, from a captured graph to the graph that one rank runs. Each pass is a file, and `verify` checks each.

normalize   -> fewer kinds of nodes
annotate    -> the plan's layouts and choices on the nodes
insert      -> collectives where producer and consumer disagree
simplify    -> fewer collectives
localize    -> this rank's sizes
materialize -> this rank's slices of the parameters (of the tensors, not of the graph)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import fx

from torchshard.core.mesh import Coordinate
from torchshard.ir.graph import duplicate
from torchshard.passes.annotate import annotate
from torchshard.passes.insert import insert
from torchshard.passes.localize import localize
from torchshard.passes.normalize import normalize
from torchshard.passes.propagate import Seen
from torchshard.passes.simplify import simplify
from torchshard.passes.verify import verify
from torchshard.plans.plan import Plan

__all__ = ["annotate", "insert", "localize", "localized", "normalize", "rewrite", "simplify", "verify"]


def rewrite(module: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """The normalized graph with the plan's collectives, for any rank; the argument is left as it was."""
    held = duplicate(module)
    held.meta["axis"] = plan.axis
    passes: tuple[tuple[str, Callable[[fx.GraphModule], bool], str], ...] = (
        ("annotate", partial(annotate, plan=plan), "annotated"),
        ("insert", partial(insert, planned=plan.conversions), "inserted"),
        ("simplify", simplify, "inserted"),
    )
    for name, run, stage in passes:
        run(held)
        verify(held, stage, after=name)
    held.recompile()
    return held


def localized(module: fx.GraphModule, coordinate: Coordinate, seen: Seen | None = None) -> fx.GraphModule:
    """The rewritten graph with one rank's sizes; the argument is left as it was.

    Args:
        seen: what ops gave on the fake values of other ranks, and will have given on this one's.
    """
    held, seen = duplicate(module), {} if seen is None else seen
    localize(held, coordinate, seen)
    verify(held, "localized", after="localize", seen=seen)
    held.recompile()
    return held
