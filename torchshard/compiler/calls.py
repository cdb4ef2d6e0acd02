"""Plans a call of a model without ranks: on one mesh, or on each mesh of a number of ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from torchshard.capture import flatten_call
from torchshard.capture.assumptions import divided_sizes, multiples
from torchshard.capture.facts import ModelFacts, device_type
from torchshard.compiler import batches
from torchshard.compiler.constraints import Constraints, PlanLike, read_constraints, read_plan
from torchshard.compiler.meshes import read_mesh
from torchshard.compiler.prepare import prepared
from torchshard.compiler.program import Program, asked_again, program
from torchshard.compiler.question import Question
from torchshard.core.errors import InputError, PlanError
from torchshard.core.mesh import Holds, Mesh
from torchshard.ir.data import graph_data, graph_from
from torchshard.ir.sizes import equal_sizes
from torchshard.plans.objective import Aim, ObjectiveLike, read_aim
from torchshard.plans.plan import Plan
from torchshard.plans.proposals import Proposal, Proposals, meshes

log = logging.getLogger("torchshard.compiler")


def plan_call(
    model: nn.Module,
    plan: PlanLike,
    ranks: Mesh,
    aim: Aim,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    *,
    whole_batch: bool,
    replaced: Sequence[str] = (),
    with_memory: bool = False,
) -> Plan:
    """Plans one call of a model.

    Args:
        whole_batch: whether the arguments are the batch of all ranks, and not of one.
        replaced: the names of the call's tensors that the call is known to replace by others.
        with_memory: whether to estimate the memory of a step too.

    Raises:
        PlanError, CaptureError, InputError: see `program`.
    """
    constraints = read_constraints(ModelFacts.of(model), plan, ranks, aim)
    constraints = replace(constraints, steady=not aim.trains)
    with torch.set_grad_enabled(torch.is_grad_enabled() and aim.trains):
        dims: batches.SplitDims = {}
        if constraints.batch_parts:
            call = flatten_call(model, args, kwargs or {})
            if whole_batch:
                dims = batches.dims_of_parts(call, constraints.mesh)
            else:
                call, dims = batches.whole_batch(call, constraints.mesh)
                args, kwargs = call.rebuild(call.tensors)
        made = program(model, constraints, args, kwargs, batches=dims, replaced=replaced, repeating=True)
        return made.priced(with_memory=with_memory)


def plan_meshes(
    model: nn.Module, plan: PlanLike, args: Sequence[object], kwargs: Mapping[str, object] | None, size: int, aim: Aim
) -> Proposals:
    """Plans a call with the batch of all ranks on each mesh of a number of ranks; logs each as soon as it is planned.

    Of the meshes whose fastest plan exceeds the memory limit, those that could be the fastest get a plan within it: a
    limit makes no plan faster.
    """
    call, found, of_weights = _Call(model, args, kwargs, aim), dict[str, Proposal](), dict[int, Plan]()
    for axes in meshes(size, aim.machine.domain):
        ranks = read_mesh(axes)
        # how weights are stored does not change how they are split
        given = of_weights.get(ranks.last.size, plan) if ranks.across else plan
        made = call.proposed(axes, given, replace(aim, memory=None))
        if made.plan is not None and ranks.across:
            of_weights[ranks.last.size] = made.plan
        found[made.name] = made
    too_much = (made for made in found.values() if made.plan is not None and not made.fits)
    for made in sorted(too_much, key=lambda each: each.step):
        fastest = min(found.values(), key=lambda each: each.seconds)
        if made.step >= fastest.seconds:
            found[made.name] = replace(made, why=f"slower than {fastest.name}, even without the limit")
            continue
        within = call.proposed(made.mesh, plan, aim)
        found[made.name] = within if within.plan is not None else replace(made, why=within.why)
    return Proposals(found.values())


class _Call:
    """A call that is captured once, and planned on several meshes, to be compared by an aim.

    Each plan gets a graph with sizes of its own, because planning divides them by the mesh's ranks.
    """

    def __init__(self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object] | None, aim: Aim) -> None:
        self._call, self._limit = (model, args, kwargs), aim.memory
        self._facts, self._leaves = ModelFacts.of(model), flatten_call(model, args, kwargs or {})
        graph = prepared(model, args, kwargs, dynamic=aim.split != "all", repeating=True).graph
        self._graph = ""
        try:
            self._graph = json.dumps(graph_data(graph, equal_sizes(graph)))
        except ValueError as error:
            log.info("the model is captured for each mesh: %s", error)

    def proposed(self, mesh: Mapping[str, int | tuple[int, Holds]], plan: PlanLike, aim: Aim) -> Proposal:
        """Plans the call on a mesh, and logs the plan."""
        try:
            constraints = read_constraints(self._facts, plan, read_mesh(mesh), aim)
            made = Proposal(mesh, self._planned(constraints).priced(with_memory=True), self._limit)
        except (InputError, PlanError) as error:
            made = Proposal(mesh, None, self._limit, f"{error.what}; try: {error.attempt}")
        log.info("%s", made, extra={"is_result": True})
        return made

    def _planned(self, constraints: Constraints) -> Program:
        """Plans the call.

        Raises:
            InputError, PlanError: the batch can't be divided, or no plan fits.
        """
        dims = batches.dims_of_parts(self._leaves, constraints.mesh)
        if not self._graph:
            model, args, kwargs = self._call
            return program(model, constraints, args, kwargs, batches=dims, repeating=True)
        graph, _ = graph_from(json.loads(self._graph))
        graph.meta["multiples"] = known = multiples(divided_sizes(graph.graph, constraints.divided))
        return asked_again(Question(graph, self._facts, constraints, known, batches=dims))


def aim_of_meshes(model: nn.Module, plan: PlanLike, mesh: int, objective: ObjectiveLike | None) -> Aim:
    """Returns the aim by which `meshes` compares.

    Raises:
        InputError: the plan is for one mesh, calls without gradients were requested, or `mesh` names axes.
    """
    if isinstance(read_plan(plan), Plan):
        raise InputError(
            "a finished plan is for one mesh",
            where="meshes(model, plan)",
            why="each mesh gets a plan of its own",
            attempt='a dict of module globs and styles, or "auto"',
        )
    aim = read_aim(objective, device_type(model))
    if not aim.trains:
        raise InputError(
            "meshes are compared by their training steps",
            where="objective=",
            why="calls without gradients need no mesh for the batch: each group of ranks serves calls of its own",
            attempt='the objective without mode; or plan(..., objective={"mode": "infer"}) for each number of ranks',
        )
    if not isinstance(mesh, int):
        raise InputError(
            f"{mesh!r} is no number of ranks", where="mesh=", why="meshes finds the axes itself", attempt="mesh=64"
        )
    return aim
