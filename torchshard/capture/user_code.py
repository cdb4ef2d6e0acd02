"""Reads functions without running them: names and closures, and the user's lines for errors."""

from __future__ import annotations

import dis
import functools
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType

from torchshard.core.user_files import is_library, is_of_python


@dataclass(frozen=True)
class Mentions:
    """The names that code and its inner functions use; sorted, so that all ranks agree."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]
    """The names after a dot, and some more: globals and imported names are among them."""
    imports: tuple[str, ...]
    """The modules that the code itself imports."""


@functools.lru_cache(maxsize=4096)
def mentions(code: CodeType) -> Mentions:
    """Reads the names from bytecode."""
    instructions = list(dis.get_instructions(code))
    inner = [mentions(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    of_globals = {i.argval for i in instructions if i.opname in _GLOBAL_OPS}
    imports = {i.argval for i in instructions if i.opname == "IMPORT_NAME"}
    return Mentions(
        tuple(sorted(of_globals.union(*(m.globals for m in inner)))),
        tuple(sorted(set(code.co_names).union(*(m.attributes for m in inner)))),
        tuple(sorted(imports.union(*(m.imports for m in inner)))),
    )


_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


def cells_of(function: FunctionType) -> dict[str, object]:
    """The closure of a function: name -> current value."""
    return {name: cell.cell_contents for name, cell in closure_of(function).items() if _has_value(cell)}


def closure_of(function: FunctionType) -> dict[str, CellType]:
    """The cells of a function's closure by name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _has_value(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


# --- lines for errors ------------------------------------------------------------------------------------------------


def user_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of a stack outside PyTorch, TorchShard and Python's own files, or ''."""
    frames = [frame for frame in stack if not is_library(frame.filename) and not is_of_python(frame.filename)]
    return _innermost([frame for frame in frames if frame.name not in ("<module>", "main")] or frames)


def calling_line() -> str:
    """The user's line that is running in this thread."""
    return user_line(traceback.extract_stack())


def layer_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line in PyTorch's own layers, for models without a forward of their own."""
    return _innermost([frame for frame in stack if "/torch/nn/modules/" in frame.filename])


def _innermost(frames: Sequence[traceback.FrameSummary]) -> str:
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else ""


def line_in(text: str) -> str:
    """The user's innermost line of a traceback in a text: '/home/me/model.py:12', or ''."""
    lines = [(path, line) for path, line in re.findall(r'File "([^"]+)", line (\d+)', text) if not is_library(path)]
    return ":".join(lines[-1]) if lines else ""
