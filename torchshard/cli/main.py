"""The command line: plan, show, draw and check a model, without a line of Python.

    torchshard plan llama --ranks 8 --memory 80GiB --json plan.json
    torchshard show plan.json
    torchshard check mymodel:factory --ranks 4

Exit codes: 0 done; 1 a check found a difference; 2 invalid arguments; 3 an error, printed in four lines. Modules that
import torch are imported within functions, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torchshard.compiler.constraints import PlanLike
    from torchshard.plans.plan import Plan

MODEL_HELP = (
    "module:factory, a Hugging Face config.json, or a folder with one and, if it has them, safetensors files; or the "
    "name of a model in the cache of Hugging Face's hub: meta-llama/Llama-3.1-8B"
)
WEIGHTS_HELP = "safetensors files that must fit the model (MODEL's, if it is a folder with some); cast to its dtype"
MADE_INPUTS = (
    "  inputs: made here, from the configuration: token ids or images alone; a model that needs others or both: "
    "module:factory, which returns the model and its inputs"
)
DIFFERENT, FAILED = 1, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, and returns its exit code."""
    options = _parser().parse_args(arguments)
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    from torchshard.core.errors import CaptureError, ShardError

    try:
        with _plain_warnings():
            code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone, as with `| head`: Python would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if options.debug:
            raise
        what = str(error)
        if isinstance(error, CaptureError) and ":" not in getattr(options, "model", ":"):
            what += f"\n{MADE_INPUTS}"
        if not isinstance(error, ShardError):
            what = f"{(what.splitlines() or [''])[0]}\n  try:    --debug, for the traceback"
        print(f"{type(error).__name__}: {what}", file=sys.stderr)
        return FAILED


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Prints warnings without a place, where that is a line of a library and none of the user's."""
    with_place = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        from torchshard.core.columns import paragraph
        from torchshard.core.user_files import is_library

        if is_library(filename):
            return paragraph(f"warning: {message}") + "\n"
        return with_place(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = with_place


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("torchshard", description="Tensor parallelism for an ordinary PyTorch model.")
    parser.set_defaults(debug=False, verbose=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    shown = (_model, _planning, _aim, _mode)
    for name, text, run, parts in (
        ("plan", "find the best layout, print it as a table, write it as JSON", _plan, (*shown, _plan_files)),
        ("show", "print a plan, or a model's plan, with the reason for each collective", _show, (*shown, _level)),
        ("draw", "write a picture of a model's graph with its collectives", _draw, (*shown, _picture)),
        (
            "whatif",
            "plan again from a plan's file, without the model: other pins, machine or memory; print what changes",
            _what_if,
            (_plan_file, _pins, _where, _plan_files),
        ),
        (
            "check",
            "compare the sharded model with the unsharded one, all gradients",
            _check,
            (_model, _planning, _aim, _processes),
        ),
        (
            "meshes",
            "compare the meshes of a number of ranks by what a step takes; --batch is that of all ranks",
            _meshes,
            (_model, _world, _aim),
        ),
        ("measure", "measure this machine, under torchrun with as many ranks as plans are for", _measure, (_output,)),
        ("env", "print versions, backends and devices", _env, ()),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        for add in parts:
            add(command)
        command.add_argument("--debug", action="store_true", help="show a traceback where something fails")
        command.add_argument("--verbose", action="store_true", help="log what is done, and how long it takes")
    return parser


# --- arguments -------------------------------------------------------------------------------------------------------


def _model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument("--weights", metavar="FOLDER", help=WEIGHTS_HELP)
    command.add_argument("--batch", type=int, default=2, metavar="N", help="of the example inputs, on each part (2)")
    command.add_argument("--sequence", type=int, default=128, metavar="N", help="tokens of the example inputs (128)")
    command.add_argument("--dtype", metavar="DTYPE", help="of the parameters: bfloat16 (that of the configuration)")
    text = "call it with labels, as training does: the results have a loss"
    command.add_argument("--labels", action="store_true", help=text)


def _plan_file(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="a plan's JSON, as plan --json wrote it")


def _pins(command: argparse.ArgumentParser) -> None:
    text = "a style of the modules that a glob names: '*.mlp.up=column', '*.experts=replicate'"
    command.add_argument("--pin", type=_pin, default=[], action="append", metavar="GLOB=STYLE", help=text)


def _pin(text: str) -> tuple[str, str]:
    """A glob of modules and a style: '*.up=column'."""
    glob, sign, style = text.rpartition("=")
    if not sign or not style:
        raise argparse.ArgumentTypeError(f"{text!r} is no pin such as '*.up=column'")
    return glob, style


def _planning(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=int, metavar="N", help="number of ranks (2, or the mesh's)")
    command.add_argument("--mesh", type=_mesh, metavar="AXES", help="parts of the batch and of the weights: dp=8,tp=4")
    text = "the ranks, or those of all axes of the mesh but the last, divide the batch; shard: and hold slices of the "
    text += "weights; or by axis: dp=replicate,fsdp=shard"
    command.add_argument("--data", type=_data, metavar="WAY", help=text)
    command.add_argument("--plan", default="auto", metavar="FILE", help="a plan's JSON instead of the best plan")
    _pins(command)


def _world(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=int, required=True, metavar="N", help="number of ranks")


def _where(command: argparse.ArgumentParser) -> None:
    command.add_argument("--memory", metavar="SIZE", help="the most that a step may take on a rank: 80GiB")
    from torchshard.plans.machine import MACHINES

    text = f"{', '.join(MACHINES)}; or what measure wrote: x.json"
    command.add_argument("--machine", default=None, metavar="NAME", help=text)


def _aim(command: argparse.ArgumentParser) -> None:
    _where(command)
    command.add_argument(
        "--axes", default="weights", choices=("weights", "sequence", "all"), help="all: batch and sequence"
    )
    command.add_argument(
        "--recompute",
        default=[],
        action="append",
        metavar="GLOB",
        help="what backward computes again: blocks.*",
    )


def _mesh(text: str) -> dict[str, int]:
    """The axes of a mesh: 'dp=8,tp=4'."""
    sizes = _by_name(text)
    if not all(name and size.isdecimal() for name, size in sizes.items()):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh such as dp=8,tp=4")
    return {name: int(size) for name, size in sizes.items()}


def _data(text: str) -> str | dict[str, str]:
    """A way to divide the batch, or one for each axis: 'shard', 'dp=replicate,fsdp=shard'."""
    ways = _by_name(text)
    return text if list(ways) == [""] else ways


def _by_name(text: str) -> dict[str, str]:
    """What is said of each axis: 'dp=8,tp=4'."""
    pairs = [part.rpartition("=")[::2] for part in text.split(",")]
    if len(pairs) > len(dict(pairs)):
        raise argparse.ArgumentTypeError(f"{text!r} says two things of one axis")
    return dict(pairs)


def _world_size(options: argparse.Namespace) -> int | None:
    """The number of ranks that is asked for; None: the mesh's."""
    ranks: int | None = options.ranks
    return 2 if ranks is None and options.mesh is None else ranks


def _mode(command: argparse.ArgumentParser) -> None:
    text = "infer: calls without gradients; with --length a decode step, else a prompt"
    command.add_argument("--mode", default="train", choices=("train", "infer"), help=text)
    command.add_argument("--length", type=int, metavar="N", help="tokens in the cache of a decode step")


def _plan_files(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="write the plan")
    command.add_argument("--html", metavar="FILE", help="write a page with the graph and its collectives")


def _picture(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", required=True, metavar="FILE", help="x.html, x.svg or x.dot")
    command.add_argument("--step", action="store_true", help="rank 0's forward and backward, as they run")
    text = "an .svg of this module alone, with a lane for each rank; auto: the layer that takes the most time"
    command.add_argument("--layer", metavar="PATH", help=text)


def _output(command: argparse.ArgumentParser) -> None:
    command.add_argument("output", metavar="FILE", help="x.json, for --machine")


def _level(command: argparse.ArgumentParser) -> None:
    text = "node: a line per op of the graph; step: rank 0's forward and backward, as they run"
    command.add_argument("--level", default="table", choices=("table", "node", "step"), help=text)


def _processes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--processes", action="store_true", help="real ranks, through gloo, instead of simulated ones")


# --- commands --------------------------------------------------------------------------------------------------------


def _planned(options: argparse.Namespace) -> Plan:
    import torchshard as ts
    from torchshard.cli.sources import Example, read_source

    source = read_source(options.model, Example.of(options), options.weights)
    sizes = {} if options.length is None else {"batch": options.batch, "length": options.length}
    with _progress(is_logged=options.verbose):
        return ts.plan(
            source.model,
            _wanted(options),
            world_size=_world_size(options),
            mesh=options.mesh,
            data=options.data,
            example_inputs=() if sizes else source.args,
            example_kwargs=None if sizes else source.kwargs,
            mode=options.mode,
            **sizes,
            memory=options.memory,
            machine=options.machine,
            axes=options.axes,
            recompute=options.recompute,
        )


def _wanted(options: argparse.Namespace) -> PlanLike:
    """The pins, or the file of a plan, or "auto"."""
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


def _by_glob(pins: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Style by glob.

    Raises:
        InputError: a glob has two styles.
    """
    styles: dict[str, Any] = {}
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


@contextlib.contextmanager
def _progress(*, is_logged: bool, several: bool = False) -> Iterator[None]:
    """Follows the log of what is done, if it is not shown: a bar on a terminal, with tqdm; else a line on stderr.

    Args:
        several: whether several plans are made, of which nobody knows how many need all stages.
    """
    if is_logged:
        yield
        return
    from torchshard.compiler.program import STAGES

    logger = logging.getLogger("torchshard.compiler.program")
    with contextlib.ExitStack() as stack:
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                bar = tqdm(total=None if several else len(STAGES), desc=STAGES[0], delay=2, leave=False, bar_format=BAR)
                handler = _Follow(stack.enter_context(bar))
        stack.callback(logger.setLevel, logger.level)
        stack.callback(logger.removeHandler, handler)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        yield


BAR = "{desc} {bar:20} {n_fmt}/{total_fmt} {elapsed}"


class _ProgressBar(Protocol):
    """The part of `tqdm.tqdm` that is used here."""

    def set_description_str(self, desc: str) -> None:
        """Sets the text before the bar."""

    def update(self) -> object:
        """Advances the bar by one stage."""


class _Follow(logging.Handler):
    """Advances a bar with each stage that is logged."""

    def __init__(self, bar: _ProgressBar) -> None:
        super().__init__()
        self.bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        self.bar.set_description_str(record.getMessage())
        self.bar.update()


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
        check_writable(path)  # planning may take minutes


def _what_if(options: argparse.Namespace) -> int:
    import torchshard as ts
    from torchshard.compiler.what_if import with_graph

    _check_plan_files(options)
    plan = ts.Plan.load(options.file)
    with _progress(is_logged=options.verbose):
        other = ts.what_if(plan, _by_glob(options.pin), machine=options.machine, memory=options.memory)
    print(ts.diff(plan, other))
    if options.json:
        other.save(options.json)
    if options.html:
        ts.draw({"the plan": with_graph(plan), "what if": other}, options.html)
    return 0


def _meshes(options: argparse.Namespace) -> int:
    import torchshard as ts
    from torchshard.cli.sources import Example, read_source

    source = read_source(options.model, Example.of(options), options.weights)
    with _progress(is_logged=options.verbose, several=True):
        found = ts.meshes(
            source.model,
            world_size=options.ranks,
            example_inputs=source.args,
            example_kwargs=source.kwargs,
            memory=options.memory,
            machine=options.machine,
            axes=options.axes,
            recompute=options.recompute,
        )
    print(found)
    return 0


def _show(options: argparse.Namespace) -> int:
    import torchshard as ts

    print(ts.explain(_loaded_or_planned(options), level=options.level))
    return 0


def _is_plan(path: str) -> bool:
    """Whether a file holds a plan: it is JSON, but not the configuration of a model."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return path.endswith(".json") and os.path.basename(path) != "config.json"
    return not (isinstance(content, dict) and "model_type" in content)


def _loaded_or_planned(options: argparse.Namespace) -> Plan:
    return _loaded(options) if _is_plan(options.model) else _planned(options)


def _loaded(options: argparse.Namespace) -> Plan:
    """A plan's file, with its graph."""
    import torchshard as ts
    from torchshard.compiler.what_if import with_graph
    from torchshard.core.errors import InputError

    defaults = _parser().parse_args(["show", options.model])
    names = (
        "weights", "dtype", "labels", "ranks", "mesh", "data", "plan", "pin", "memory", "machine", "axes", "recompute",
        "mode", "batch", "sequence", "length",
    )  # fmt: skip
    changed = [f"--{name}" for name in names if getattr(options, name) != getattr(defaults, name)]
    if changed:
        raise InputError(
            f"{' and '.join(changed)} can't change a finished plan",
            where=options.model,
            why="it is a plan's file",
            attempt="torchshard whatif, which plans again; or the model in its place",
        )
    plan = ts.Plan.load(options.model)
    return with_graph(plan) if plan.question else plan


def _draw(options: argparse.Namespace) -> int:
    import torchshard as ts
    from torchshard.core.files import check_writable
    from torchshard.report.drawing import FORMATS, OF_LAYER, check_suffix

    check_suffix(options.output, FORMATS if options.layer is None else OF_LAYER)
    check_writable(options.output)
    ts.draw(_loaded_or_planned(options), options.output, step=options.step, layer=options.layer)
    return 0


def _check(options: argparse.Namespace) -> int:
    from torchshard.cli.sources import check_source

    report = check_source(options, _wanted(options), _world_size(options))
    print(report)
    return 0 if report.ok else DIFFERENT


def _measure(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    import torchshard as ts
    from torchshard.core.files import check_writable

    check_writable(options.output)
    ts.distributed.init_process_group()
    machine = ts.measure_machine()
    if dist.get_rank() == 0:
        machine.save(options.output)
        print(*(f"{name:22} {value}" for name, value in machine.fields.items()), sep="\n")
    ts.distributed.destroy_process_group()
    return 0


def _env(options: argparse.Namespace) -> int:
    from torchshard.cli.sources import environment

    print(environment())
    return 0
