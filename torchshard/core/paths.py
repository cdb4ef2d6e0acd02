"""Star names: one path for many similar modules or nodes, in listings, tables and tp_plans."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Sequence


def star_numbers(path: str) -> str:
    """Returns 'blocks.*.mlp.*' for 'blocks.3.mlp.0': equal for the same place in all layers."""
    return ".".join("*" if step.isdigit() else step for step in path.split("."))


def star_differences(*paths: str) -> str:
    """Returns 'blocks.*.mlp.0' for 'blocks.3.mlp.0' and 'blocks.4.mlp.0': stars where paths differ.

    The paths have equal length. Steps that differ only in their numbers keep the rest: 'h_*' for
    'h_3' and 'h_4'.
    """
    return ".".join(map(_star_step, zip(*(path.split(".") for path in paths), strict=True)))


def _star_step(steps: tuple[str, ...]) -> str:
    """Returns the common form of steps, with a star where they differ."""
    if len(set(steps)) == 1:
        return steps[0]
    stars = {*map(star_node, steps)}
    return stars.pop() if len(stars) == 1 else "*"


def number_ranges(paths: Iterable[str]) -> list[str]:
    """Returns 'blocks.0-2' for consecutive 'blocks.0', 'blocks.1', 'blocks.2'; others unchanged."""
    found: list[tuple[str, str, str]] = []
    for path in paths:
        number = path[len(path.rstrip("0123456789")) :]
        stem = path.removesuffix(number)
        if number and found and found[-1][0] == stem and found[-1][2] == str(int(number) - 1):
            found[-1] = (stem, found[-1][1], number)
        else:
            found.append((stem, number, number))
    return [f"{stem}{first}-{last}" if first != last else f"{stem}{first}" for stem, first, last in found]


def star_node(name: str) -> str:
    """Returns 'blocks_*_mlp_*' for 'blocks_3_mlp_1': node names have no dots, and number copies."""
    return re.sub(r"\d+", "*", name)


def outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """Returns the modules that are not inside another of these modules."""
    inner = {path for path in paths if any(other in paths for other in enclosing(path))}
    return tuple(dict.fromkeys(path for path in paths if path not in inner))


def module_around(path: str, modules: Container[str]) -> str | None:
    """Returns the outermost of these modules that contains, or is, the module at `path`."""
    return next((around for around in (*enclosing(path), path) if around in modules), None)


def is_part(path: str, module: str) -> bool:
    """Returns whether `path` is `module` or inside it; '' is the model."""
    return not module or f"{path}.".startswith(f"{module}.")


def layer_of(path: str) -> str | None:
    """Returns the outermost numbered module around one, a layer: 'blocks.0' for 'blocks.0.mlp.2'."""
    names = path.split(".")
    return next((".".join(names[: i + 1]) for i, name in enumerate(names) if name.isdigit()), None)


def enclosing(path: str) -> Iterator[str]:
    """Returns the modules around one, outermost first: '', 'blocks', 'blocks.0' for 'blocks.0.attn'."""
    names = path.split(".") if path else []
    return (".".join(names[:count]) for count in range(len(names)))
