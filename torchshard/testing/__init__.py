"""Tools for tests of rules, passes and models: planned calls in one process, single ops, and real ranks.

calls      `capture`: a model's call as a graph, which is planned for any number of ranks, listed, checked and run
graphs     the graph of a rank, the collectives in it, and `verify`, which a graph must pass after a pass
rules      `check_rule`: a split op compared with the full op, under every choice; `changed_rule` for one test
ranks      `on_ranks`, `run_ranks`: a function in several processes
gradients  the gradients of a sharded model, compared with the unsharded model's

    call = testing.capture(model, (x,))
    made = call.plan({"up": "column", "down": "row"}, 2)
    print(made.listing())
    assert made.check().ok

    @testing.on_ranks(2)
    def test_gradients(rank):
        ...
"""

from torchshard.checking.report import CheckError, Report
from torchshard.core.conversions import step_args
from torchshard.core.layouts import Layout, Shard, dual, join, split
from torchshard.core.rows import Choice, Row
from torchshard.ir.fake_values import nbytes
from torchshard.ir.listing import listing
from torchshard.passes import Partition, step_graphs, verify
from torchshard.report.explain import rank_graph
from torchshard.rules import Call, TensorType, has_rule, row_of
from torchshard.rules.registry import rule_of
from torchshard.testing.calls import CapturedCall, PlannedCall, capture, kept_graphs
from torchshard.testing.gradients import full_gradient, gradient_error, largest
from torchshard.testing.graphs import awaited, begun, collective, collectives, predicted_memory
from torchshard.testing.one_op import OpCall
from torchshard.testing.ranks import PATIENCE, fail_on_bugs, on_ranks, run_ranks, why_not_through_memory
from torchshard.testing.rules import changed_rule, check_rule, ops_with_rules

__all__ = [
    "Call", "CapturedCall", "CheckError", "Choice", "Layout", "OpCall", "PATIENCE", "Partition", "PlannedCall",
    "Report", "Row", "Shard", "TensorType", "awaited", "begun", "capture", "changed_rule", "check_rule", "collective",
    "collectives", "dual", "fail_on_bugs", "full_gradient", "gradient_error", "has_rule", "join", "kept_graphs",
    "largest", "listing", "nbytes", "on_ranks", "ops_with_rules", "predicted_memory", "rank_graph", "row_of", "rule_of",
    "run_ranks", "split", "step_args", "step_graphs", "verify", "why_not_through_memory",
]  # fmt: skip
