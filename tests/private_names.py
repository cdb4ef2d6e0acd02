"""Finds the private names of a library that a file uses: imported, read from a module or an object, or in a string."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass

_NAMES = re.compile(r"(?<![\w./])\w+(?:\.\w+)*\.?(?![\w/])")
_Method = ast.FunctionDef | ast.AsyncFunctionDef


def is_private(name: str) -> bool:
    """Whether a name is private by its first letter: `_C`, not `__init__` or `_`."""
    return re.match(r"_[A-Za-z]", name) is not None


@dataclass(frozen=True)
class Use:
    """A use of a private name."""

    name: str
    """Dotted if the file says which library it is from (`torch._C._nn`), otherwise the name only (`_version`)."""
    line: int


def uses(tree: ast.Module, *, docstrings: bool = False) -> Iterator[Use]:
    """All private names in a file: of modules that it imports, of objects, and in strings."""
    bound = _bound(tree)
    skipped: set[ast.AST] = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if not docstrings:
        alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
        skipped |= {value for value in alone if isinstance(value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Use(alias.name, node.lineno) for alias in node.names if _has_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = ((f"{node.module}.{alias.name}", alias.lineno) for alias in node.names)
            yield from (Use(name, line) for name, line in names if _has_private(name))
        elif isinstance(node, ast.Attribute):
            yield from _of_attribute(node, bound, is_whole=node not in skipped)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield from _in_string(node.value, node.lineno)


def _of_attribute(node: ast.Attribute, bound: dict[str, str], *, is_whole: bool) -> Iterator[Use]:
    """The name that `a.b.c` reads: dotted if `a` is bound to a library's name. Imports are found where they are."""
    line = node.end_lineno or node.lineno
    dotted = _dotted(node, bound)
    if dotted is None:
        yield from [Use(node.attr, line)] * is_private(node.attr)
    elif is_whole and _has_private(ast.unparse(node).partition(".")[2]):
        yield Use(dotted, line)


def _in_string(text: str, line: int) -> Iterator[Use]:
    """The private names in a string: a string that is a name, or the dotted names of prose and programs."""
    found = (name.rstrip(".") for name in _NAMES.findall(text))
    is_prose = re.search(r"\s", text) is not None
    yield from (Use(name, line) for name in found if _has_private(name) and ("." in name or not is_prose))


def own_attributes(tree: ast.Module) -> set[str]:
    """The attributes that a file's classes define: methods, fields, and what they assign to `self` or `cls`."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= {name for statement in node.body for name in _defined(statement)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
    return found


def overrides(tree: ast.Module, theirs: Set[str]) -> Iterator[Use]:
    """The private methods of a library's classes that a file's classes define anew."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.bases:
            methods = (each for each in node.body if isinstance(each, _Method))
            yield from (
                Use(each.name, each.lineno) for each in methods if is_private(each.name) and each.name in theirs
            )


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, _Method | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
    elif isinstance(statement, ast.Assign):
        yield from (target.id for target in statement.targets if isinstance(target, ast.Name))


def _bound(tree: ast.Module) -> dict[str, str]:
    """Name -> the dotted name that it stands for, by an import or a plain assignment at the top of the file."""
    found = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                      for a in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            dotted = _dotted(statement.value, found)
            if dotted is not None:
                found[statement.targets[0].id] = dotted
    return found


def _dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        value = _dotted(node.value, bound)
        return value and f"{value}.{node.attr}"
    return None


def _has_private(dotted: str) -> bool:
    return any(is_private(part) for part in dotted.split("."))
