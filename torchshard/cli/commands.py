"""The commands of the command line: each is a function of its options, and returns an exit code.

Functions import the modules that import torch, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchshard.cli import arguments
from torchshard.cli.progress import progress

if TYPE_CHECKING:
    from torchshard.cli.sources import Source
    from torchshard.compiler.constraints import PlanLike
    from torchshard.compiler.meshes import MeshLike
    from torchshard.planner.styles import StyleWord
    from torchshard.plans.plan import Plan

DIFFERENT = 1
"""The exit code of a check that found a difference."""


def _source(options: argparse.Namespace, mesh: MeshLike = None) -> Source:
    """Returns the model of a command; its example inputs have a rank's part of the sequence."""
    from torchshard.cli.configurations import Example
    from torchshard.cli.sources import read_source

    return read_source(options.model, Example.of(options).of_rank(mesh), options.weights)


def _planned(options: argparse.Namespace) -> Plan:
    import torchshard as ts

    mesh, objective = arguments.mesh_of(options), arguments.objective_of(options)
    source = _source(options, mesh)
    step = None if options.length is None else ts.DecodeStep(options.batch, options.length)
    with progress(is_logged=options.verbose):
        return ts.plan(
            source.model,
            _wanted(options),
            step or source.args,
            source.kwargs if step is None else None,
            mesh=mesh,
            objective=objective,
        )


def _wanted(options: argparse.Namespace) -> PlanLike:
    """Returns the pins, or a plan's file, or "auto"."""
    from torchshard.core.errors import InputError

    if options.pin and options.plan != "auto":
        raise InputError(
            "a finished plan can't be pinned",
            where="--pin with --plan",
            why=f"{options.plan!r} says all layouts",
            attempt="torchshard whatif, which plans again; or --pin alone",
        )
    pins: PlanLike = _by_glob(options.pin)
    return pins or str(options.plan)


def _by_glob(pins: Sequence[tuple[str, StyleWord]]) -> dict[str, StyleWord]:
    """Returns {glob: style}.

    Raises:
        InputError: a glob has two styles.
    """
    styles: dict[str, StyleWord] = {}
    for glob, style in pins:
        if styles.setdefault(glob, style) != style:
            from torchshard.core.errors import InputError

            raise InputError(
                f"{glob!r} is pinned as {styles[glob]} and as {style}",
                where="--pin",
                why="a plan gives each module one style",
                attempt="one of the two",
            )
    return styles


def _plan(options: argparse.Namespace) -> int:
    import torchshard as ts

    _check_plan_files(options)
    plan = _planned(options)
    print(plan)
    if options.json:
        plan.save(options.json)
    if options.html:
        ts.draw(plan, options.html)
    return 0


def _check_plan_files(options: argparse.Namespace) -> None:
    from torchshard.core.files import check_writable
    from torchshard.report.drawing import check_suffix

    if options.html:
        check_suffix(options.html, (".html",))
    for path in filter(None, (options.json, options.html)):
        check_writable(path)  # fail before planning, which may take minutes


def _what_if(options: argparse.Namespace) -> int:
    import torchshard as ts

    _check_plan_files(options)
    plan = ts.Plan.load(options.file)
    with progress(is_logged=options.verbose):
        other = ts.what_if(plan, _by_glob(options.pin), machine=options.machine, memory=options.memory)
    print(ts.diff(plan, other))
    if options.json:
        other.save(options.json)
    if options.html:
        ts.draw({"the plan": plan, "what if": other}, options.html)
    return 0


def _meshes(options: argparse.Namespace) -> int:
    import torchshard as ts

    source = _source(options)
    with progress(is_logged=options.verbose, several=True):
        found = ts.meshes(
            source.model,
            "auto",
            source.args,
            source.kwargs,
            mesh=options.ranks,
            objective=arguments.objective_of(options),
        )
    print(found)
    return 0


def _show(options: argparse.Namespace) -> int:
    import torchshard as ts

    print(ts.explain(_loaded_or_planned(options), level=options.level))
    return 0


def _is_plan(path: str) -> bool:
    """Returns whether a file contains a plan: JSON that is not the configuration of a model.

    A .json file that can't be read counts as a plan, unless its name is config.json.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return path.endswith(".json") and os.path.basename(path) != "config.json"
    return not (isinstance(content, dict) and "model_type" in content)


def _loaded_or_planned(options: argparse.Namespace) -> Plan:
    return _loaded(options) if _is_plan(options.model) else _planned(options)


def _loaded(options: argparse.Namespace) -> Plan:
    """Loads a plan's file.

    Raises:
        InputError: an option would change the plan.
    """
    import torchshard as ts
    from torchshard.core.errors import InputError

    names = (
        "weights", "dtype", "labels", "ranks", "mesh", "plan", "pin", "memory", "machine", "split", "recompute",
        "mode", "batch", "sequence", "length",
    )  # fmt: skip
    changed = [f"--{name}" for name in names if getattr(options, name) != options.command.get_default(name)]
    if changed:
        raise InputError(
            f"{' and '.join(changed)} can't change a finished plan",
            where=options.model,
            why="it is a plan's file",
            attempt="torchshard whatif, which plans again; or the model in its place",
        )
    return ts.Plan.load(options.model)


def _draw(options: argparse.Namespace) -> int:
    import torchshard as ts
    from torchshard.core.files import check_writable
    from torchshard.report.drawing import FORMATS, OF_LAYER, check_suffix

    check_suffix(options.output, FORMATS if options.layer is None else OF_LAYER)
    check_writable(options.output)
    ts.draw(_loaded_or_planned(options), options.output, step=options.step, layer=options.layer)
    return 0


def _check(options: argparse.Namespace) -> int:
    from torchshard.cli.checks import check_source

    report = check_source(options, _wanted(options), arguments.mesh_of(options), arguments.objective_of(options))
    print(report)
    return 0 if report.ok else DIFFERENT


def _measure(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    import torchshard as ts
    from torchshard.cli.measured_steps import measured_steps, told
    from torchshard.core.files import check_writable

    check_writable(options.output)
    ts.distributed.init_process_group()
    machine = ts.measure_machine()
    steps = list(measured_steps(machine))
    machine = replace(machine, error=statistics.mean(step.error for step in steps))
    if dist.get_rank() == 0:
        machine.save(options.output)
        print(*told(machine, steps), sep="\n")
    ts.distributed.destroy_process_group()
    return 0


def _env(options: argparse.Namespace) -> int:
    from torchshard.cli.environment import environment

    print(environment())
    return 0


_PLANNED = (arguments.model, arguments.planning, arguments.aim, arguments.mode)
"""The options of a command that plans a model."""


COMMANDS = (
    ("plan", "find the best layout, print it as a table, write it as JSON", _plan, (*_PLANNED, arguments.plan_files)),
    (
        "show",
        "print a plan, or a model's plan, with the reason for each collective",
        _show,
        (*_PLANNED, arguments.level),
    ),
    ("draw", "write a picture of a model's graph with its collectives", _draw, (*_PLANNED, arguments.picture)),
    (
        "whatif",
        "plan again from a plan's file, without the model: other pins, machine or memory; print what changes",
        _what_if,
        (arguments.plan_file, arguments.pins, arguments.where, arguments.plan_files),
    ),
    (
        "check",
        "compare the sharded model with the unsharded one, all gradients",
        _check,
        (arguments.model, arguments.planning, arguments.aim, arguments.processes),
    ),
    (
        "meshes",
        "compare the meshes of a number of ranks by what a step takes; --batch is that of all ranks",
        _meshes,
        (arguments.model, arguments.world, arguments.aim),
    ),
    (
        "measure",
        "measure this machine, under torchrun with as many ranks as plans are for",
        _measure,
        (arguments.output,),
    ),
    ("env", "print versions, backends and devices", _env, ()),
)
"""For each command: its name, its help, the function that runs it, and the functions that add its options."""
