"""Plans again under different constraints, from the plan only or from its file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from torchshard.compiler.constraints import Constraints, check_memory, loaded
from torchshard.compiler.program import Program, asked_again
from torchshard.compiler.question import Question, of_a_file, question_from
from torchshard.core.errors import InputError, PlanError
from torchshard.core.units import read_size
from torchshard.planner.pins import read_pins
from torchshard.planner.problem import PlannedAxis
from torchshard.planner.styles import StyleWord
from torchshard.plans.machines import MachineLike, read_machine
from torchshard.plans.plan import Plan


def what_if(
    plan: Plan | str | os.PathLike[str],
    pins: Mapping[str, StyleWord] = MappingProxyType({}),
    *,
    machine: MachineLike | None = None,
    memory: str | float | None = None,
) -> Plan:
    """The best plan with other styles for some layers, on another machine, or in less memory.

        other = ts.what_if("plan.json", {"*.experts": "replicate"})     # no model is needed
        print(ts.diff(ts.Plan.load("plan.json"), other))                # what changes, and what a step then takes

    The plan is for the same call, mesh and mode as the given one. All ops are planned again.

    Args:
        plan: a plan, or the path of a file that `Plan.save` wrote.
        pins: globs of modules and styles, as in `shard`; other modules keep the given plan's
            styles.
        machine: as in `torchshard.plan`; by default the given plan's.
        memory: bytes that a step may take on a rank; by default the given plan's limit.

    Raises:
        PlanError: the plan's file can't be read or lacks its graph, a key matches no module, or
            every plan exceeds the memory.
        InputError: `machine` or `memory` is invalid.
    """
    found = plan if isinstance(plan, Plan) else loaded(plan)
    question = question_of(found)
    with of_a_file("planned", PlanError, InputError):
        return _answer(replace(question, constraints=_constraints(question, pins, machine, memory)))


def program_of(plan: Plan) -> Program | None:
    """The program that a plan was made with; for a loaded plan, the program is made again.

    Returns:
        None for a plan without a question: the plan of a further axis, or one from a file without
            its graph.

    Raises:
        PlanError: the file can't be read here.
    """
    source = plan.source
    if source is None or isinstance(source, Program):
        return source
    if "unwritten" in source.question():
        return None
    question = question_of(plan)
    with of_a_file("planned", PlanError, InputError):
        made = _answer(replace(question, constraints=replace(question.constraints, plan=plan.last)))
    return program_of(made)


def solutions_of(plan: Plan) -> list[PlannedAxis]:
    """Each mesh axis' plan with the problem that it solves; empty for a plan without a question."""
    program = program_of(plan)
    return [] if program is None else list(map(PlannedAxis, plan.in_order, program.problems))


def question_of(plan: Plan) -> Question:
    """The question that a plan answers, read from the data in its file, which is made if needed.

    Raises:
        PlanError: the question can't be written, or read.
    """
    return question_from(None if plan.source is None else json.loads(json.dumps(plan.source.question())))


def _constraints(
    question: Question, pins: Mapping[str, StyleWord], machine: MachineLike | None, memory: str | float | None
) -> Constraints:
    if not isinstance(pins, Mapping):
        raise InputError(
            f"a {type(pins).__name__} is no pins",
            where="what_if(plan, pins)",
            why="pins are a dict of module globs and styles",
            attempt='{"*.experts": "replicate"}',
        )
    facts, constraints = question.facts, question.constraints
    aim = constraints.aim
    if machine is not None:
        aim = replace(aim, machine=read_machine(machine), any_machine=False)
    if memory is not None:
        aim = replace(aim, memory=read_size(memory))
    wanted = replace(constraints, aim=aim, pins={**constraints.pins, **read_pins(pins, facts.modules)})
    check_memory(facts, wanted)
    return wanted


def _answer(question: Question) -> Plan:
    return asked_again(question).priced(with_memory=question.constraints.batch_parts > 1)
