"""The user's own functions that a model's forward may run, found by name from the code: no line of it runs here.

A forward reads globals (`SCALE`), closures and attributes of classes, and so do the functions that it calls. Code of
installed packages and of Python itself is not followed: its globals are its own affair.
"""

from __future__ import annotations

import functools
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_LIBRARIES = tuple(
    {str(Path(torch.__file__).parent), str(Path(__file__).parents[1])}
    | {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
MOST_FUNCTIONS = 2000
"""So many functions are followed at most."""


def is_own_file(name: str | None) -> bool:
    """Whether a file is the user's: a script, a notebook's cell or a package that is not installed."""
    return name is not None and not name.startswith(("<frozen", "<eval_with_key>", "<torch", *_LIBRARIES))


def names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes that code mentions, inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))


def classes_of(model: nn.Module) -> list[type]:
    """The classes of a model's modules and their bases, without PyTorch's own."""
    found = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    return [cls for cls in found if cls is not object and not cls.__module__.startswith("torch.")]


def own_functions(model: nn.Module) -> list[FunctionType]:
    """The user's functions that the model's modules may call, by what their code mentions."""
    classes = classes_of(model)
    pending = [function for module in model.modules() for function in _entries(module)]
    found: dict[FunctionType, None] = {}
    while pending and len(found) < MOST_FUNCTIONS:
        function = pending.pop()
        if function in found or not is_own_file(function.__code__.co_filename):
            continue
        found[function] = None
        names = names_in(function.__code__)
        mentioned = [function.__globals__[name] for name in names if name in function.__globals__]
        mentioned += [vars(cls)[name] for cls in classes for name in names if name in vars(cls)]
        mentioned += cells_of(function).values()
        pending += [one for value in mentioned for one in _functions_in(value, names)]
    return list(found)


def _entries(module: nn.Module) -> Iterator[FunctionType]:
    """What a call of a module runs: its forward, its hooks, and functions that it holds."""
    yield from _functions_in(module.forward, frozenset())
    for name, value in module.__dict__.items():
        held = value.values() if name.endswith("_hooks") and isinstance(value, dict) else [value]
        for one in held:
            yield from _functions_in(one, frozenset())


def _functions_in(value: Any, names: frozenset[str]) -> Iterator[FunctionType]:
    """The Python functions behind a value; of a class or a package, those that the names mention."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, (MethodType, staticmethod, classmethod)):
        yield from _functions_in(value.__func__, names)
    elif isinstance(value, property) and value.fget is not None:
        yield from _functions_in(value.fget, names)
    elif isinstance(value, functools.partial):
        yield from _functions_in(value.func, names)
    elif isinstance(value, type):
        yield from (v for n, v in vars(value).items() if isinstance(v, FunctionType) and (n in names or n in _CALLED))
    elif isinstance(value, ModuleType):
        held = vars(value)
        yield from (held[name] for name in names if isinstance(held.get(name), FunctionType))
    elif callable(value) and not isinstance(value, nn.Module):
        yield from (f for f in (type(value).__call__,) if isinstance(f, FunctionType))


_CALLED = ("__init__", "__call__", "forward")


def cells_of(function: FunctionType) -> dict[str, Any]:
    """The closure of a function: name -> what it holds now."""
    return {name: cell.cell_contents for name, cell in closure_of(function).items() if _is_filled(cell)}


def closure_of(function: FunctionType) -> dict[str, CellType]:
    """The cells of a function's closure by name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


# --- lines for errors ------------------------------------------------------------------------------------------------


def is_library(path: str) -> bool:
    """Whether a file is PyTorch's or ours: no line of it tells a user where to look."""
    return "/torch/" in path or "/torchshard/" in path or path.startswith(("<", "torch/"))


def user_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of a stack that is neither PyTorch's nor ours."""
    frames = [f for f in stack if not is_library(f.filename)]
    return _innermost([f for f in frames if f.name not in ("<module>", "main")] or frames)


def layer_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of a stack within PyTorch's own layers, for models that have no forward of their own."""
    return _innermost([f for f in stack if "/torch/nn/modules/" in f.filename])


def _innermost(frames: Sequence[traceback.FrameSummary]) -> str:
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else ""


def line_in(text: str) -> str:
    """The same of a text that holds a traceback: 'model.py:12'."""
    found = [m for m in re.findall(r'File "([^"]+)", line (\d+)', text) if not is_library(m[0])]
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""
