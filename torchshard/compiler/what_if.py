"""Asks again what a plan was the answer to, under other constraints: from the plan alone, or its file."""

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
from torchshard.planner.problem import PlannedAxis
from torchshard.planner.styles import StyleWord, read_pins
from torchshard.plans.machine import MachineLike, read_machine, read_size
from torchshard.plans.plan import Plan


def what_if(
    plan: Plan | str | os.PathLike[str],
    pins: Mapping[str, StyleWord] = MappingProxyType({}),
    *,
    machine: MachineLike | None = None,
    memory: str | float | None = None,
) -> Plan:
    """What the best plan would be with some layers held otherwise, on another machine, or in less memory.

        other = ts.what_if("plan.json", {"*.experts": "replicate"})     # no model is needed
        print(ts.diff(ts.Plan.load("plan.json"), other))                # what changes, and what a step then takes

    It is for the same call, mesh and mode as the plan. All ops are planned again.

    Args:
        plan: a plan, or the path of a file that `Plan.save` wrote.
        pins: globs of modules and styles, as in `shard`; other modules keep the styles that the plan was made with.
        machine: as in `torchshard.plan`; by default that of the plan.
        memory: bytes that a step may take on a rank; by default what the plan was made with.

    Raises:
        PlanError: the plan's file can't be read or does not hold its graph, a key matches no module, or nothing fits.
        InputError: machine or memory is none.
    """
    found = plan if isinstance(plan, Plan) else loaded(plan)
    question = question_of(found)
    with of_a_file("planned", PlanError, InputError):
        return _answer(replace(question, constraints=_constraints(question, pins, machine, memory)))


def program_of(plan: Plan) -> Program | None:
    """The program that a plan was made with. That of a loaded plan is made again, as it was when the plan was made.

    Returns:
        None for a plan without a question: that of a further axis, or one whose file does not hold the graph.

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
    """The plan of each mesh axis with the problem that it solves; none for a plan without a question."""
    program = program_of(plan)
    return [] if program is None else program.solutions


def question_of(plan: Plan) -> Question:
    """What a plan is the answer to, read from the data that its file has or would have.

    Raises:
        PlanError: it can't be written, or read.
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
    aim = constraints.objective
    if machine is not None:
        aim = replace(aim, machine=read_machine(machine), any_machine=False)
    if memory is not None:
        aim = replace(aim, memory=read_size(memory))
    wanted = replace(constraints, objective=aim, pins={**constraints.pins, **read_pins(pins, facts.modules)})
    check_memory(facts, wanted)
    return wanted


def _answer(question: Question) -> Plan:
    return asked_again(question).priced(with_memory=question.constraints.batch_parts > 1)
