"""Finds the user's own functions that a forward may call, and the user's lines that errors point to.

A forward reads globals (`SCALE`), closures and class attributes, and so do the functions that it calls. They are found
by the names in the bytecode, because running the code could change the state that is being looked for. Code of
installed packages and of Python itself is not searched: its globals are not settings that a user changes.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Collection, Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

from torch import nn

from torchshard.core.user_files import is_library, is_user_file

MOST_FUNCTIONS = 2000
"""The search stops after this many functions, so that it ends soon in a model with very much code."""


def names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes that code mentions, inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))


def classes_of(model: nn.Module) -> list[type]:
    """The classes of a model's modules and their bases, without PyTorch's own."""
    classes = dict.fromkeys(cls for module in model.modules() for cls in type(module).__mro__)
    return [cls for cls in classes if cls is not object and not cls.__module__.startswith("torch.")]


def user_functions(model: nn.Module) -> list[FunctionType]:
    """The user's functions that the model's modules may call, judged by the names in their code."""
    classes = classes_of(model)
    pending = [function for module in model.modules() for function in _entry_functions(module)]
    functions: dict[FunctionType, None] = {}
    while pending and len(functions) < MOST_FUNCTIONS:
        function = pending.pop()
        if function in functions or not is_user_file(function.__code__.co_filename):
            continue
        functions[function] = None
        names = names_in(function.__code__)
        for value in _mentioned_values(function, names, classes):
            pending += _functions_in(value, names)
    return list(functions)


def _mentioned_values(function: FunctionType, names: Collection[str], classes: Sequence[type]) -> Iterator[object]:
    """The globals, class attributes and closure cells that a function's code may mean by its names."""
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
    for cls in classes:
        yield from (vars(cls)[name] for name in names if name in vars(cls))
    yield from cells_of(function).values()


def _entry_functions(module: nn.Module) -> Iterator[FunctionType]:
    """The functions that a call of a module enters: its forward, its hooks, and functions among its attributes."""
    yield from _functions_in(module.forward, ())
    for name, value in module.__dict__.items():
        callables = value.values() if name.endswith("_hooks") and isinstance(value, dict) else [value]
        for one in callables:
            yield from _functions_in(one, ())


def _functions_in(value: object, names: Collection[str]) -> Iterator[FunctionType]:
    """The Python functions behind a value; of a class or a package, only those with one of the names."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, (MethodType, staticmethod, classmethod)):
        yield from _functions_in(value.__func__, names)
    elif isinstance(value, property) and value.fget is not None:
        yield from _functions_in(value.fget, names)
    elif isinstance(value, functools.partial):
        yield from _functions_in(value.func, names)
    elif isinstance(value, type):
        mentioned = {*names, *_IMPLICIT_METHODS}
        yield from (v for name, v in vars(value).items() if isinstance(v, FunctionType) and name in mentioned)
    elif isinstance(value, ModuleType):
        attributes_by_name = (vars(value).get(name) for name in names)
        yield from (v for v in attributes_by_name if isinstance(v, FunctionType))
    elif callable(value) and not isinstance(value, nn.Module):
        method = getattr(type(value), "__call__")  # noqa: B004, B009 - of the class, where Python looks it up too
        yield from (method,) if isinstance(method, FunctionType) else ()


_IMPLICIT_METHODS = ("__init__", "__call__", "forward")
"""Methods that run although the calling code does not mention their names."""


def cells_of(function: FunctionType) -> dict[str, object]:
    """The closure of a function: name -> its current value."""
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
    """The innermost line of a stack that is neither PyTorch's nor TorchShard's; '' if there is none."""
    frames = [frame for frame in stack if not is_library(frame.filename)]
    return _innermost([frame for frame in frames if frame.name not in ("<module>", "main")] or frames)


def calling_line() -> str:
    """The user's line that is running in this thread."""
    return user_line(traceback.extract_stack())


def layer_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of a stack inside PyTorch's own layers, for models that have no forward of their own."""
    return _innermost([frame for frame in stack if "/torch/nn/modules/" in frame.filename])


def _innermost(frames: Sequence[traceback.FrameSummary]) -> str:
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else ""


def line_in(text: str) -> str:
    """The innermost user's line of a traceback that is written in a text: '/home/me/model.py:12'; '' if none."""
    lines = [(path, line) for path, line in re.findall(r'File "([^"]+)", line (\d+)', text) if not is_library(path)]
    return ":".join(lines[-1]) if lines else ""
