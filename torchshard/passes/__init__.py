"""The pipeline from a captured graph to the graph that one rank runs.

Each pass is a file; `verify` checks its result.

normalize   -> fewer kinds of nodes
carry       -> values that stay split between two calls
own_order   -> sorted rows (mixtures of experts): data-parallel ranks sort their own
to_experts  -> or rows sent to the ranks that own their experts
annotate    -> the plan's layouts and choices on the nodes
insert      -> collectives between producers and consumers that disagree
simplify    -> biases back in their ops where no collective came between
localize    -> this rank's sizes; with several mesh axes, `for_next_axis` prepares the next split
segments    -> segments that end where a result feeds another one
record      -> forward and backward of each layer; equal layers are recorded once
differentiate -> forward and backward in one graph
widen       -> gradients of casts summed in the parameters' dtype
unsummed    -> or, if the sums come later, this rank's own partial gradients
bucket      -> small gradients of a layer in one message
partition   -> a graph of each
schedule    -> collectives in flight while other ops run
direct      -> the functions that are cheapest to call
lower       -> or, for compilers, PyTorch's functional collectives
materialize -> this rank's slices of the parameters; in `weights`: it changes tensors, not graphs
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from torch import fx

from torchshard.core.mesh import Coordinate
from torchshard.ir.editing import duplicate
from torchshard.passes.annotate import annotate
from torchshard.passes.bucket import bucket
from torchshard.passes.carry import carry, with_whole_results
from torchshard.passes.differentiate import differentiate, has_backward
from torchshard.passes.direct import direct
from torchshard.passes.insert import insert
from torchshard.passes.localize import localize
from torchshard.passes.lower import lower
from torchshard.passes.next_axis import for_next_axis
from torchshard.passes.normalize import normalize
from torchshard.passes.own_order import keep_own_order, own_order_choice
from torchshard.passes.partition import Partition, partition
from torchshard.passes.propagate import Seen
from torchshard.passes.record import Gradients
from torchshard.passes.schedule import schedule
from torchshard.passes.segments import Segment, segments
from torchshard.passes.simplify import simplify
from torchshard.passes.to_experts import send_to_experts, sends_to_experts
from torchshard.passes.unsummed import Call, Part, leave_unsummed
from torchshard.passes.verify import Stage, verify
from torchshard.passes.widen import sums_wider, widen
from torchshard.plans.data import AxisPlan

__all__ = [
    "Call", "Gradients", "Part", "Partition", "Segment", "annotate", "carry", "differentiate", "direct",
    "for_next_axis", "has_backward", "insert", "keep_own_order", "localize", "localized", "lower", "normalize",
    "own_order_choice", "partition", "rewrite", "schedule", "segments", "send_to_experts", "sends_to_experts",
    "simplify", "step_graphs", "sums_wider", "verify", "with_whole_results",
]  # fmt: skip


def rewrite(module: fx.GraphModule, plan: AxisPlan) -> fx.GraphModule:
    """Inserts the plan's collectives into a copy of the normalized graph, for any rank."""
    module.meta.setdefault("recordings", {})  # one for all plans of a captured graph, freed with it
    rewritten = duplicate(module)
    rewritten.meta["axis"] = plan.axis
    passes: tuple[tuple[str, Callable[[fx.GraphModule], bool], Stage], ...] = (
        ("annotate", partial(annotate, plan=plan), "annotated"),
        ("insert", partial(insert, planned=plan.conversions), "inserted"),
        ("simplify", simplify, "inserted"),
    )
    for name, run, stage in passes:
        run(rewritten)
        verify(rewritten, stage, after=name)
    return rewritten


def localized(module: fx.GraphModule, coordinate: Coordinate, seen: Seen | None = None) -> fx.GraphModule:
    """Gives a copy of the rewritten graph one rank's sizes.

    Args:
        seen: cached results of ops on fake values; new ones are added. The ranks share one cache,
            because most of their shapes are equal.
    """
    local, seen = duplicate(module), Seen() if seen is None else seen
    localize(local, coordinate, seen)
    verify(local, "localized", after="localize", seen=seen)
    return local


def step_graphs(
    local: fx.GraphModule,
    given: Gradients | None = None,
    *,
    unsummed: Collection[str] = (),
    kept: Collection[str] = (),
) -> Partition:
    """The forward and the backward graph of one rank, from a segment of its localized graph.

    Args:
        given: for each result, whether backward receives its gradient; by default every result that
            has one.
        unsummed: the groups over which gradients of parameters are not summed.
        kept: names of the values that the forward saves for the backward of all results.
    """
    joint = differentiate(local, given)
    verify(joint, "joint", after="differentiate")
    widen(joint)
    if unsummed:
        leave_unsummed(joint, unsummed)
    bucket(joint)
    parts = partition(joint, kept)
    schedule(parts.forward)
    schedule(parts.backward)
    return parts
