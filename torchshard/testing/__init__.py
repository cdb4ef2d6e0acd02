"""For tests of rules, passes and models: a planned call without processes, an op whole and in parts, and real ranks.

calls      `capture`: a model's call as a graph, planned for any number of ranks, listed, checked, cut for each rank
rules      `check_rule`: an op whole and in parts, under every choice of its rule
ranks      `on_ranks`, `run_ranks`: a function in several processes
gradients  the gradients of a sharded model beside those of the unsharded one

    call = testing.capture(model, (x,))
    made = call.plan({"up": "column", "down": "row"}, 2)
    print(made.listing())
    assert made.check().ok

    @testing.on_ranks(2)
    def test_gradients(rank):
        ...
"""

from torchshard.checking.check import Report
from torchshard.core.layouts import Layout, Shard, join, split
from torchshard.core.notation import Choice
from torchshard.distributed.ops import OPS as COLLECTIVES
from torchshard.distributed.ops import is_collective
from torchshard.ir.listing import listing
from torchshard.testing.calls import CapturedCall, PlannedCall, capture, kept_graphs
from torchshard.testing.gradients import full_gradient, gradient_error, largest
from torchshard.testing.ranks import PATIENCE, fail_on_bugs, on_ranks, run_ranks, why_not_through_memory
from torchshard.testing.rules import OpCall, check_rule

__all__ = [
    "COLLECTIVES", "CapturedCall", "Choice", "Layout", "OpCall", "PATIENCE", "PlannedCall", "Report", "Shard",
    "capture", "check_rule", "fail_on_bugs", "full_gradient", "gradient_error", "is_collective", "join", "kept_graphs",
    "largest", "listing", "on_ranks", "run_ranks", "split", "why_not_through_memory",
]  # fmt: skip
