"""The command `check`: runs `torchshard.check` on a command line's model, on simulated ranks or on processes."""

from __future__ import annotations

from typing import Protocol

from torchshard.checking.check import check
from torchshard.checking.processes import check_processes
from torchshard.checking.report import Report
from torchshard.cli.configurations import Example, ExampleOptions
from torchshard.cli.sources import real_source
from torchshard.compiler.constraints import PlanLike
from torchshard.compiler.meshes import MeshLike, read_mesh
from torchshard.core.errors import InputError
from torchshard.core.layouts import BATCH
from torchshard.plans.objective import ObjectiveLike, read_aim


class CheckOptions(ExampleOptions, Protocol):
    """The arguments of the command `check`, apart from the plan, the mesh and the objective."""

    model: str
    weights: str | None
    processes: bool


def check_source(options: CheckOptions, plan: PlanLike, mesh: MeshLike, objective: ObjectiveLike) -> Report:
    """Runs `torchshard.check` on simulated ranks, or on processes that communicate.

    Args:
        plan, mesh, objective: see `torchshard.check`.

    Raises:
        InputError: processes can't run the requested check.
    """
    ranks = read_mesh(mesh)
    example = Example.of(options)._replace(batch=options.batch * ranks.parts_of_dims.get(BATCH, 1))
    place = (options.model, example, options.weights)
    if not options.processes:
        model, args, kwargs = real_source(*place)
        return check(model, plan, args, kwargs, mesh=mesh, objective=objective)
    if ranks.parts > 1:
        raise InputError(
            "ranks that divide the batch are checked in one process",
            where="--processes with --mesh",
            why="processes are compared with the unsharded model for one batch that all of them have",
            attempt="without --processes",
        )
    return check_processes(real_source, place, plan, ranks.size, read_aim(objective, "cpu"))
