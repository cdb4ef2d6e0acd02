"""One call of a model, captured once and planned in many ways, without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx, nn

from torchshard.capture import Captured, copy_model, flatten_call
from torchshard.capture.facts import ModelFacts, device_type
from torchshard.checking import lockstep
from torchshard.checking.check import check_program, in_dtype
from torchshard.checking.report import Report
from torchshard.compiler.batches import divided_batch
from torchshard.compiler.constraints import Constraints, PlanLike, read_constraints
from torchshard.compiler.meshes import MeshLike, read_mesh
from torchshard.compiler.prepare import prepared
from torchshard.compiler.program import Program, answered, program
from torchshard.compiler.question import Question
from torchshard.core.choices import choices
from torchshard.core.layouts import Layout
from torchshard.core.rows import Choice
from torchshard.core.sharding import UNSHARDED
from torchshard.ir.editing import duplicate
from torchshard.ir.graph import is_tensor_op, node_row, op_name
from torchshard.ir.listing import listing
from torchshard.ir.sizes import equal_sizes
from torchshard.passes import Partition, rewrite, step_graphs
from torchshard.plans.objective import ObjectiveLike, read_aim
from torchshard.plans.plan import Plan
from torchshard.runtime.compiled import Compiled
from torchshard.runtime.module import ShardedModule
from torchshard.testing.graphs import collectives
from torchshard.testing.random_plans import random_plan
from torchshard.weights.materialize import local_state


@dataclass(frozen=True)
class CapturedCall:
    """A call of a model as a flat graph of ATen ops with global shapes; made by `capture`."""

    model: nn.Module
    args: Sequence[object]
    kwargs: Mapping[str, object]
    captured: Captured

    @property
    def graph(self) -> fx.GraphModule:
        """The normalized, unsharded graph that plans are made for."""
        return self.captured.graph

    def listing(self) -> str:
        """Returns the text of the graph, without source lines."""
        return listing(self.graph, sources=False)

    def plan(
        self,
        plan: PlanLike = "auto",
        mesh: MeshLike = None,
        objective: ObjectiveLike | None = None,
        *,
        layouts: Mapping[str, Layout] | None = None,
    ) -> PlannedCall:
        """Plans the call and inserts the collectives. Plans leave the capture unchanged, so it can be planned again.

        Args:
            plan: as in `torchshard.shard`.
            mesh: as in `torchshard.plan`, except that the call has the batch of all ranks.
            objective: as in `torchshard.plan`. Some objectives, and a split batch or sequence, require a separate
                capture.
            layouts: fixed layouts of parameters and buffers, by name.

        Raises:
            PlanError, CaptureError, InputError: as `torchshard.plan`.
        """
        aim = read_aim(objective, device_type(self.model))
        constraints = read_constraints(ModelFacts.of(self.model), plan, read_mesh(mesh), aim)
        made = self._planned(constraints.with_layouts(layouts or {}))
        return PlannedCall(self.model, self.args, self.kwargs, made)

    def plan_at_random(self, ranks: int, seed: int) -> PlannedCall:
        """Plans the call with a random legal plan that stores some parameters in uneven slices.

        The plan may also split the batch of a call captured with `dynamic=False`.
        """
        plan = random_plan(self.graph, self.model, ranks, seed)
        made = Program(self.captured, plan, rewrite(self.graph, plan.last))
        return PlannedCall(self.model, self.args, self.kwargs, made)

    def nodes(self, *names: str) -> list[fx.Node]:
        """Returns the nodes of ops with these names: 'linear', 'cross_entropy_loss'."""
        return [node for node in self.graph.graph.nodes if op_name(node) in names]

    def choices(self, node: fx.Node, ranks: int) -> list[Choice]:
        """Returns the legal choices of an op of the graph; [] without a rule."""
        row = node_row(node)
        return [] if row is None else choices(row, ranks)

    def ops_without_rule(self) -> list[fx.Node]:
        """Returns the ops that run on full operands, because no rule splits them with these arguments."""
        return [node for node in self.graph.graph.nodes if is_tensor_op(node) and node_row(node) is None]

    def _planned(self, constraints: Constraints) -> Program:
        if constraints.batch_parts:
            inputs = divided_batch(self.model, self.args, self.kwargs, constraints.mesh)
            return program(self.model, constraints, self.args, self.kwargs, batches=inputs)
        if constraints.is_static or constraints.divided or not constraints.aim.trains:
            return program(self.model, constraints, self.args, self.kwargs)
        graph, facts = self.graph, ModelFacts.of(self.model)
        question = Question(graph, facts, constraints, graph.meta["multiples"], equal=equal_sizes(graph))
        return answered(self.captured, question)


@dataclass(frozen=True)
class PlannedCall:
    """A captured call with a plan, and with the plan's collectives in its graph."""

    model: nn.Module
    args: Sequence[object]
    kwargs: Mapping[str, object]
    program: Program

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.program.plan

    @property
    def graph(self) -> fx.GraphModule:
        """The graph with global sizes and the collectives over the weights' axis."""
        return self.program.graph

    def listing(self) -> str:
        """Returns the text of `graph`, without source lines."""
        return listing(self.graph, sources=False)

    def collectives(self) -> list[str]:
        """Returns the names of the collectives in `graph`, in order: 'copy', 'reduce', 'gather', ..."""
        return collectives(self.graph)

    def graph_copy(self) -> fx.GraphModule:
        """Returns a copy of `graph` that can be changed, for `check` and `rank_graphs`."""
        return duplicate(self.graph)

    @property
    def shardings(self) -> dict[str, str]:
        """The shardings of parameters, buffers and inputs as text, by name: 'model: S(0) . data: S(0)', or 'I'."""
        return {name: sharding.text for name, sharding in self.program.held.items()}

    def state(self, rank: int) -> dict[str, Tensor]:
        """Returns the slices of parameters and buffers that a rank stores, by name."""
        return local_state(self.model, self.program.held, self.program.mesh.place(rank))

    def rank_graphs(self, graph: fx.GraphModule | None = None) -> list[fx.GraphModule]:
        """Returns the graph of each rank, with local sizes and the collectives of all axes of the mesh.

        Args:
            graph: a changed copy to use instead of `graph`.
        """
        return lockstep.rank_graphs(graph or self.graph, self.program.axis, self.program.batches)

    def run(self) -> list[list[object]]:
        """Returns the results of each rank's graph without gradients; it gets the rank's part of the call's tensors."""
        call, held = flatten_call(self.model, self.args, self.kwargs), self.program.held
        graphs, fed = self.rank_graphs(), list[list[Tensor]]()
        for rank, graph in enumerate(graphs):
            place = self.program.mesh.place(rank)
            own = {name: held.get(name, UNSHARDED).local(tensor, place) for name, tensor in call.named_tensors}
            known = {**self.program.captured.constants, **own, **self.state(rank)}
            fed.append([known[node.meta["path"]] for node in graph.graph.find_nodes(op="placeholder")])
        with torch.no_grad():
            return lockstep.run(graphs, fed, [lambda node, value, args: value] * len(graphs))

    def step_graphs(self, rank: int = 0) -> Partition:
        """Returns the forward and backward graphs of a rank."""
        return step_graphs(self.rank_graphs()[rank])

    def call(self, *args: object, **kwargs: object) -> PlannedCall:
        """Returns a call of this program with other arguments, with sizes that its graph allows."""
        return replace(self, args=args, kwargs=kwargs)

    def check(self, graph: fx.GraphModule | None = None, *, by_graphs: bool = False) -> Report:
        """Compares outputs, written buffers and all gradients with the unsharded model's, as `torchshard.check` does.

        Args:
            graph: a changed copy to use instead of `graph`; if it lacks a collective, the check must fail.
            by_graphs: whether to run the separate forward and backward graphs too.
        """
        return check_program(self.model, self.program, graph or self.graph, self.args, self.kwargs, by_graphs=by_graphs)


def capture(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    dtype: torch.dtype | None = None,
    dynamic: bool = True,
) -> CapturedCall:
    """Captures a call and normalizes its graph.

    Args:
        dtype: the dtype that a copy of the model, and the floating-point arguments, are cast to before the capture.
        dynamic: whether batch and sequence sizes stay symbolic.

    Raises:
        CaptureError, InputError: as `torchshard.shard`.
    """
    arguments, keywords = list(args), dict(kwargs or {})
    if dtype is not None:
        model, arguments, keywords = in_dtype(copy_model(model), arguments, keywords, dtype)
    return CapturedCall(model, arguments, keywords, prepared(model, arguments, keywords, dynamic=dynamic))


def kept_graphs(model: ShardedModule) -> list[Compiled]:
    """Returns the graphs that a sharded model keeps for later calls, the latest call's last."""
    return list(model._ts_runner.graphs)
