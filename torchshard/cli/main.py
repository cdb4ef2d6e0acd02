"""The command line: plan, show, draw and check a model, without a line of Python.

    torchshard plan llama --ranks 8 --memory 80GiB --json plan.json
    torchshard show plan.json
    torchshard check mymodel:factory --ranks 4

Exit codes: 0 done; 1 a check found a difference; 2 invalid arguments; 3 an error; 130 interrupted.
Functions import the modules that import torch, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

from torchshard.cli import arguments
from torchshard.cli.commands import COMMANDS

MADE_INPUTS = (
    "  inputs: made here, from the configuration: token ids or images alone; a model that needs others or both: "
    "module:factory, which returns the model and its inputs"
)
FAILED = 3
"""The exit code of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = _parser().parse_args(argv)
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    from torchshard.core.errors import InputError, PlanError, ShardError

    try:
        with _plain_warnings():
            code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone, as with `| head`; without this, Python's flush at exit fails too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if options.debug:
            raise
        what = f"{error}{_about_inputs(options, error)}"
        if isinstance(error, (InputError, PlanError)):
            what = arguments.as_options(what)
        if not isinstance(error, ShardError):
            what = f"{(what.splitlines() or [''])[0]}\n  try:    --debug, for the traceback"
        print(f"{type(error).__name__}: {what}", file=sys.stderr)
        return FAILED


def _about_inputs(options: argparse.Namespace, error: Exception) -> str:
    """Returns a line about the example inputs, if capture fails on inputs that were made here."""
    from torchshard.cli.sources import is_factory
    from torchshard.core.errors import CaptureError

    is_made = hasattr(options, "model") and not is_factory(options.model)
    return f"\n{MADE_INPUTS}" if is_made and isinstance(error, CaptureError) else ""


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Prints warnings without file and line if these are a library's and not the user's."""
    with_place = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        from torchshard.core.columns import paragraph
        from torchshard.core.user_files import is_library

        if is_library(filename) or filename == sys.argv[0]:  # pip's script is not the user's either
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
    for name, text, run, parts in COMMANDS:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, command=command)
        for add in parts:
            add(command)
        command.add_argument("--debug", action="store_true", help="show a traceback where something fails")
        command.add_argument("--verbose", action="store_true", help="log what is done, and how long it takes")
    return parser
