"""The arguments of the commands: each function adds one group of them to a command's parser."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchshard.compiler.meshes import MeshLike

_MODEL = (
    "a built-in name such as llama-3-8b (any other lists all); module:factory; a Hugging Face config.json, or a folder "
    "with one and, if it has them, safetensors files; the name of a model in the cache of Hugging Face's hub: "
    "meta-llama/Llama-3.1-8B; show and draw also take a plan's JSON"
)
_WEIGHTS = "safetensors files that must fit the model (MODEL's, if it is a folder with some); cast to its dtype"


_OBJECTIVE = ("machine", "memory", "mode", "optimizer", "recompute", "split")
_OPTIONS = ("batch", "length", "mesh", *_OBJECTIVE)
"""The arguments of the library's functions, and the fields of their objective, that options set."""
_ARGUMENT = re.compile(rf"\b({'|'.join(_OPTIONS)})=(\{{[^{{}}]*\}}|\"[^\"]*\"|\w+|(?=[\s,;]|$))")
_FIELDS = re.compile(r"\bobjective=\{([^{}]*)\}")
_FIELD = re.compile(rf"\bthe objective without ({'|'.join(_OBJECTIVE)})\b")
_STEP = re.compile(r"(\bexample_inputs=)?\bDecodeStep\(\.\.\.\)")


def as_options(text: str) -> str:
    """Rewrites arguments of functions in a text as options: 'mesh={"dp": (2, "shard")}' as '--mesh dp=2:shard'."""

    def option(found: re.Match[str]) -> str:
        name, value = found.groups()
        if name == "mesh" and value.isdigit():
            name = "ranks"
        axes = re.sub(r"""['"](\w+)['"]: *""", r"\1=", value)
        axes = re.sub(r"""\((\d+), *['"](\w+)['"]\)""", r"\1:\2", axes)
        plain = re.sub(r"""[{}'" ]""", "", axes)
        return f"--{name} {plain}".rstrip()

    def fields(found: re.Match[str]) -> str:
        return re.sub(r'"(\w+)": "?([^",]*)"?,?', r"--\1 \2", found[1])

    text = _FIELD.sub(r"without --\1", _STEP.sub("--batch, --length", text))
    return _ARGUMENT.sub(option, _FIELDS.sub(fields, text))


def mesh_of(options: argparse.Namespace) -> MeshLike:
    """Returns the requested mesh, or number of ranks; two ranks by default."""
    given: MeshLike = options.ranks if options.mesh is None else options.mesh
    return 2 if given is None else given


def objective_of(options: argparse.Namespace) -> dict[str, object]:
    """Returns the requested objective: those of its fields that the command has options for."""
    return {name: getattr(options, name) for name in _OBJECTIVE if hasattr(options, name)}


def model(command: argparse.ArgumentParser) -> None:
    """Adds the model and options for its example inputs."""
    command.add_argument("model", metavar="MODEL", help=_MODEL)
    command.add_argument("--weights", metavar="FOLDER", help=_WEIGHTS)
    text = "of the example inputs, on each part of the batch; of `meshes`, of all ranks (2)"
    command.add_argument("--batch", type=int, default=2, metavar="N", help=text)
    command.add_argument(
        "--sequence", type=int, default=128, metavar="N", help="tokens of the inputs, on all ranks (128)"
    )
    command.add_argument("--dtype", metavar="DTYPE", help="of the parameters: bfloat16 (that of the configuration)")
    text = "call it with labels, as training does: the results have a loss"
    command.add_argument("--labels", action="store_true", help=text)


def plan_file(command: argparse.ArgumentParser) -> None:
    """Adds the file of a plan to plan again."""
    command.add_argument("file", metavar="FILE", help="a plan's JSON, as plan --json wrote it")


def pins(command: argparse.ArgumentParser) -> None:
    """Adds pins: styles of modules, selected by globs."""
    text = "a style of the modules that a glob names: '*.mlp.up=column', '*.experts=replicate'"
    command.add_argument("--pin", type=_pin, default=[], action="append", metavar="GLOB=STYLE", help=text)


def _pin(text: str) -> tuple[str, str]:
    """Parses a glob of modules and a style: '*.up=column'."""
    glob, sign, style = text.rpartition("=")
    if not sign or not style:
        raise argparse.ArgumentTypeError(f"{text!r} is no pin such as '*.up=column'")
    return glob, style


def planning(command: argparse.ArgumentParser) -> None:
    """Adds the ranks, their mesh, and the constraints on a plan."""
    ranks = command.add_mutually_exclusive_group()
    ranks.add_argument("--ranks", type=int, metavar="N", help="number of ranks that split the weights (2)")
    text = "the axes of the ranks, outermost first: all but the last split the batch, dp=8,tp=4; or by axis, with "
    text += "copies of the weights, slices of them, or both: dp=2:replicate,fsdp=4:shard"
    ranks.add_argument("--mesh", type=_mesh, metavar="AXES", help=text)
    command.add_argument("--plan", default="auto", metavar="FILE", help="a plan's JSON instead of the best plan")
    pins(command)


def world(command: argparse.ArgumentParser) -> None:
    """Adds the number of ranks, without a mesh."""
    command.add_argument("--ranks", type=int, required=True, metavar="N", help="number of ranks")


def where(command: argparse.ArgumentParser) -> None:
    """Adds the machine, and the memory of a rank."""
    command.add_argument("--memory", metavar="SIZE", help="the most that a step may take on a rank: 80GiB")
    from torchshard.plans.machines import MACHINES

    text = f"{', '.join(MACHINES)}; or what measure wrote: x.json"
    command.add_argument("--machine", default=None, metavar="NAME", help=text)


def aim(command: argparse.ArgumentParser) -> None:
    """Adds the objective of the planner."""
    where(command)
    command.add_argument(
        "--split", default="weights", choices=("weights", "sequence", "all"), help="all: batch and sequence"
    )
    command.add_argument(
        "--recompute", default=[], action="append", metavar="GLOB", help="what backward computes again: blocks.*"
    )
    from torchshard.plans.optimizers import OPTIMIZERS

    text = "adamw (float32 moments and master weights), or as torch.optim's on the weights: adamw-plain, ..."
    command.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS, metavar="NAME", help=text)


def _mesh(text: str) -> dict[str, int | tuple[int, str]]:
    """Parses the axes of a mesh: 'dp=8:shard,tp=4'."""
    found = dict[str, int | tuple[int, str]]()
    for part in text.split(","):
        axis = re.fullmatch(r"([^=:]+)=(\d+)(?::(\w+))?", part)
        if axis is None:
            raise argparse.ArgumentTypeError(f"{text!r} is no mesh such as dp=8,tp=4 or dp=8:shard,tp=4")
        name, size, holds = axis.groups()
        if name in found:
            raise argparse.ArgumentTypeError(f"{text!r} says two things of one axis")
        found[name] = int(size) if holds is None else (int(size), holds)
    return found


def mode(command: argparse.ArgumentParser) -> None:
    """Adds the choice between training and inference."""
    text = "infer: calls without gradients; with --length a decode step, else a prompt"
    command.add_argument("--mode", default="train", choices=("train", "infer"), help=text)
    command.add_argument("--length", type=int, metavar="N", help="tokens in the cache of a decode step")


def plan_files(command: argparse.ArgumentParser) -> None:
    """Adds the files that a plan is written to."""
    command.add_argument("--json", metavar="FILE", help="write the plan")
    command.add_argument("--html", metavar="FILE", help="write a page with the graph and its collectives")


def picture(command: argparse.ArgumentParser) -> None:
    """Adds the content and the file of a picture."""
    command.add_argument("-o", "--output", required=True, metavar="FILE", help="x.html, x.svg or x.dot")
    command.add_argument("--step", action="store_true", help="rank 0's forward and backward, as they run")
    text = "an .svg of this module alone, with a lane for each rank; auto: the layer that takes the most time"
    command.add_argument("--layer", metavar="PATH", help=text)


def output(command: argparse.ArgumentParser) -> None:
    """Adds the file that a machine is written to."""
    command.add_argument("output", metavar="FILE", help="x.json, for --machine")


def level(command: argparse.ArgumentParser) -> None:
    """Adds the level of detail of a printed graph."""
    text = "node: a line per op of the graph; step: rank 0's forward and backward, as they run"
    command.add_argument("--level", default="table", choices=("table", "node", "step"), help=text)


def processes(command: argparse.ArgumentParser) -> None:
    """Adds the choice between simulated ranks and processes."""
    command.add_argument("--processes", action="store_true", help="real ranks instead of simulated ones")
