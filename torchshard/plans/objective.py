"""What a plan is optimised for: the memory, the machine, training or inference, and what may be split."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torchshard.core.errors import InputError
from torchshard.core.units import read_size
from torchshard.ops import kernels
from torchshard.plans.machine import Machine
from torchshard.plans.machines import MACHINES, MachineLike, read_machine
from torchshard.plans.optimizers import OptimizerName

Split = Literal["weights", "sequence", "all"]
"""Dims that may be split. "weights": those that come from weights. "sequence": also the sequence,
if its length is a multiple of the number of ranks. "all": also batch and sequence, for inputs of
one size."""
Mode = Literal["train", "infer"]
"""Whether to plan training steps, or calls without gradients."""
CompileOptions: TypeAlias = bool | Mapping[str, object] | None
"""True for torch.compile's defaults, or its keyword arguments; False or None: nothing is compiled."""


@dataclass(frozen=True)
class Objective:
    """What a plan is optimised for; a dict of these fields does as well.

        ts.shard(model, "auto", (x,), objective={"memory": "24GiB", "recompute": "blocks.*"})

    All options are checked where the objective is used.
    """

    memory: str | float | None = None
    """The limit of a step's bytes on a rank, as a number or a text such as "24GiB". A step takes parameters and
    activations, and in training gradients and the optimizer's state. The plan is the fastest found within the limit.
    None: the weights are split as far as they can be without sending more than that is worth, and the plan is the
    fastest of those."""
    machine: MachineLike | None = None
    """A `Machine`, the path of a file that `Machine.save` wrote, or a name of `MACHINES`: "h100x8" (the default for
    models that are not on a CPU), "cpu-memory" and "cpu-gloo" (the defaults on one, by how its ranks communicate),
    "h200x8", "b200x8", "a100x8", "mi300x8", ..."""
    mode: Mode = "train"
    """"train": steps with a backward. "infer": calls without gradients, a decode step if the example inputs have a
    cache, otherwise a prompt. With `memory` the plan then has the longest context and the largest batch that fit
    (`plan.costs`). A model that is sharded for one mode runs calls of the other too."""
    split: Split = "weights"
    """"weights": splits dims that weights bring into the model. "sequence": also the sequence, for lengths divisible by
    the number of ranks. "all": also batch and sequence, for inputs of exactly these sizes."""
    recompute: str | Sequence[str] = ()
    """Globs of modules whose activations the backward recomputes instead of keeping them: "blocks.*". Values that were
    sent or drawn at random are kept, so no collective is sent twice and dropout masks are the same. Calls through
    `torch.utils.checkpoint` in the model are recomputed in the same way."""
    optimizer: OptimizerName = "adamw"
    """What updates the parameters, for the estimates of a step's memory and time: "adamw" keeps float32 moments and a
    float32 copy of 16-bit weights; "adamw-plain" keeps moments in the weights' dtype, as torch.optim.AdamW on them;
    "adamw-8bit", "muon" (on full matrices), "sgd-momentum", "sgd"."""
    compile: CompileOptions = False
    """True, or a dict of keyword arguments of `torch.compile`: each rank's forward and backward graphs are compiled at
    the first call. `model.compile()` compiles those of later calls."""


ObjectiveLike: TypeAlias = Objective | Mapping[str, Any]
"""An Objective, or a dict of its fields."""


@dataclass(frozen=True)
class Aim:
    """An objective that was read for a device: the criteria by which plans are compared."""

    machine: Machine
    memory: float | None = None
    """Limit of a step's bytes on a rank; None: the weights are split as far as is worth it."""
    split: Split = "weights"
    """Which dims may be split."""
    any_machine: bool = False
    """Whether the user named no machine; a given plan is then priced for its own machine."""
    recompute: tuple[str, ...] = ()
    """Globs of the modules with values that backward recomputes."""
    trains: bool = True
    """Whether steps have a backward and parameters an optimizer; otherwise calls without gradients."""
    optimizer: OptimizerName = "adamw"
    """What updates the parameters."""
    compiles: bool = False
    """Whether a rank's graphs will be compiled, so all sizes must be functions of the input sizes."""


def read_objective(objective: ObjectiveLike | None) -> Objective:
    """Returns an Objective from itself or a dict of its fields; None: the fastest training step.

    Raises:
        InputError: it is something else, or has an unknown field.
    """
    if isinstance(objective, Objective):
        return objective
    known = [each.name for each in dataclasses.fields(Objective)]
    if objective is not None and not isinstance(objective, Mapping):
        raise InputError(
            f"a {type(objective).__name__} is no objective",
            where="objective=",
            why=f"it is a torchshard.Objective, or a dict with some of its fields: {', '.join(known)}",
            attempt='objective={"memory": "24GiB"}',
        )
    strangers = [name for name in objective or () if name not in known]
    if strangers:
        near = difflib.get_close_matches(str(strangers[0]), known, n=1)
        raise InputError(
            f"an objective has no {strangers[0]!r}",
            where="objective=",
            why=f"its fields are {', '.join(known)}",
            attempt=repr(near[0]) if near else "one of these",
        )
    return Objective(**(objective or {}))


def read_aim(objective: ObjectiveLike | None = None, device: str = "cuda") -> Aim:
    """Reads and checks an objective.

    Args:
        device: the type of the model's device. On CPUs the default machine is the one for this
            process's backend.

    Raises:
        InputError: an option is invalid, such as an unknown machine's name or a `memory` that is
            not a size.
    """
    given = read_objective(objective)
    split_is = "dims of weights; 'sequence': that too; 'all': batch and sequence too"
    check_option("split", given.split, Split, "choice of what may be split", split_is)
    check_option("mode", given.mode, Mode, "mode", "steps with a backward; 'infer': calls without gradients")
    if given.mode == "infer" and given.recompute:
        raise InputError(
            "nothing is computed again without a backward",
            where="recompute of an objective with mode 'infer'",
            why="only values that a backward needs are kept, or computed again",
            attempt="the objective without recompute",
        )
    updates = "moments and a copy of 16-bit weights in float32; 'adamw-plain': moments in the weights' dtype"
    check_option("optimizer", given.optimizer, OptimizerName, "optimizer", updates)
    default = MACHINES[f"cpu-{kernels().cpu_backend()}" if device == "cpu" else "h100x8"]
    machine = default if given.machine is None else read_machine(given.machine)
    options = given.compile
    compiles = not options.get("disable") if isinstance(options, Mapping) else bool(options)
    trains, globs = given.mode == "train", _globs(given.recompute)
    memory, any_machine = read_size(given.memory), given.machine is None
    return Aim(machine, memory, given.split, any_machine, globs, trains, given.optimizer, compiles)


def _globs(recompute: object) -> tuple[str, ...]:
    """Reads `recompute`, a glob or several.

    Raises:
        InputError: one is not a text.
    """
    given = () if recompute is None else recompute
    globs = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    wrong = next((glob for glob in globs if not isinstance(glob, str)), None)
    if wrong is not None:
        raise InputError(
            f"{wrong!r} names no modules",
            where="recompute=",
            why="modules are named by globs of their paths",
            attempt='objective={"recompute": "layers.*"}, or several: ["layers.0", "layers.1"]',
        )
    return globs


def check_option(option: str, value: object, kinds: object, what: str, why: str) -> None:
    """Checks that an option has one of the values of a Literal.

    Raises:
        InputError: it has another.
    """
    known = get_args(kinds)
    if value not in known:
        raise InputError(
            f"{value!r} is no {what}",
            where=f"{option}=",
            why=f"{known[0]!r}: {why}",
            attempt=" or ".join(map(repr, known)),
        )
