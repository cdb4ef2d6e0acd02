"""Pins: the styles of a dict plan, found by globs, as constraints on a graph's ops."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from torchshard.core.errors import PlanError
from torchshard.core.paths import enclosing, module_around, star_numbers
from torchshard.custom_ops.whole import op_of
from torchshard.ir.graph import before_casts, is_tensor_op, multiples_of, node_row, operands, where
from torchshard.planner.styles import SPLITS, Style, parse_style


@dataclass(frozen=True)
class Pin:
    """The user's constraint on one op."""

    key: str
    """The plan's key, for messages."""
    style: Style
    axes: tuple[str, ...]
    """Factors, one of which must be split; empty: the op runs replicated."""


def matching(key: str, modules: Iterable[str]) -> list[str]:
    """Returns the paths that match a glob; only the glob '' matches the model itself, the path ''."""
    return [path for path in modules if (fnmatch.fnmatchcase(path, key) if path else not key)]


def read_pins(plan: Mapping[str, object], modules: Iterable[str]) -> dict[str, tuple[str, Style]]:
    """Returns module path -> (plan key, style), from a dict of globs and words.

    Raises:
        PlanError: a key matches no module, a word is not a style, or two keys disagree about a module.
    """
    modules = list(modules)
    chosen: dict[str, tuple[str, Style]] = {}
    for key, word in plan.items():
        if not isinstance(key, str):
            raise PlanError(
                f"the plan's key {key!r} is no glob",
                where="the plan",
                why=f"it is a {type(key).__name__}; keys are module paths, with * for any",
                attempt='"blocks.*.attn.q"',
            )
        style, found = parse_style(key, word), matching(key, modules)
        if not found:
            raise _no_match(f"the plan's key {key!r}", f"plan key {key!r}", key, modules)
        for path in found:
            before = chosen.setdefault(path, (key, style))
            if before[1] != style:
                raise PlanError(
                    f"the plan's keys {before[0]!r} and {key!r} disagree about module {path}",
                    where=f"plan key {key!r}",
                    why=f"{before[0]!r} wants {before[1].name}, {key!r} wants {style.name}",
                    attempt="globs that do not overlap, or the same style in both",
                )
    return chosen


def named_modules(globs: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Returns the modules that globs name for `recompute`, in the model's order.

    Raises:
        PlanError: a glob matches no module.
    """
    modules = list(modules)
    found: set[str] = set()
    for glob in globs:
        named = matching(glob, modules)
        if not named:
            raise _no_match(f"recompute: {glob!r}", "recompute=", glob, modules)
        found.update(named)
    return [path for path in modules if path in found]


def _no_match(what: str, place: str, key: str, modules: Iterable[str]) -> PlanError:
    modules = [path for path in modules if path]
    shapes = sorted(set(map(star_numbers, modules)))
    starred = star_numbers(key)
    near = difflib.get_close_matches(starred, shapes, n=3, cutoff=0.4)
    near = near or [s for s in shapes if s.rpartition(".")[2] == key.rpartition(".")[2]][:3]
    return PlanError(
        f"{what} matches no module",
        where=place,
        why=f"globs are paths of modules ('' is the model itself), and it matches none of {len(modules)} submodules",
        attempt=" or ".join(map(repr, near)) if near else f"a path of a module, as {modules[0]!r}" if modules else "''",
    )


def pins_of(graph: fx.Graph, chosen: Mapping[str, tuple[str, Style]]) -> dict[fx.Node, Pin]:
    """Returns the pins of ops that read a named module's own weight; 'sequence' pins ops inside the module.

    Raises:
        PlanError: a module does not support its style.
    """
    pins: dict[fx.Node, Pin] = {}
    ops = [n for n in graph.nodes if n.op == "call_function"]
    for path, (key, style) in chosen.items():
        if style.name == "sequence":
            # a key for a module inside this one takes precedence
            inner = [other for other in chosen if path in enclosing(other)]
            outside = [n for n in ops if module_around(n.meta.get("module", ""), inner) is None]
            pins |= _along_sequence(outside, path, key, style)
            continue
        fed = [n for n in ops if any(_is_own(before_casts(p), path) for p in operands(n))]
        within = [n for n in fed if n.meta.get("module") == path]
        fed = within or fed  # a parent may use the weight of a module that it never calls
        able = {n: SPLITS[op_of(n.target)] for n in fed if op_of(n.target) in SPLITS}
        if style.name == "replicate":
            pins.update({n: Pin(key, style, ()) for n in fed})
        elif not fed and any(_is_own(n, path) for n in graph.nodes):
            continue  # this call does not use the module
        elif not able or any(style.name not in splits for splits in able.values()):
            own = {str(n.target) for n in ops if n.meta.get("module") == path}
            why = f"its ops are {', '.join(sorted(own))}" if own else "no op takes a weight of its own"
            words = next(iter(able.values()), {})
            others = [word for word in words if all(word in splits for splits in able.values())]
            raise cannot_have(key, path, style.name, why, others if able else None)
        else:
            pins.update({n: Pin(key, style, splits[style.name].axes) for n, splits in able.items()})
    return pins


def _along_sequence(ops: Sequence[fx.Node], path: str, key: str, style: Style) -> dict[fx.Node, Pin]:
    """Returns pins of a module's ops with a sequence factor; {} if the ranks can't split the call's length.

    Raises:
        PlanError: the length can be split, but the module's ops lack a sequence factor.
    """
    own = [n for n in ops if module_around(n.meta.get("module", ""), (path,)) is not None and is_tensor_op(n)]
    pins = {}
    for node in own:
        row = node_row(node)
        axes = () if row is None else sorted(axis for axis in row.equal if row.sizes[axis] in multiples_of(node.graph))
        if axes:
            pins[node] = Pin(key, style, tuple(axes))
    if own and multiples_of(own[0].graph) and not pins:
        why = f"its ops have no sequence: {', '.join(sorted({str(n.target) for n in own}))}"
        raise cannot_have(key, path, style.name, why, ())
    return pins


def cannot_have(key: str, path: str, style: str, why: str, others: Sequence[str] | None = None) -> PlanError:
    """Returns the error for a style that a module does not support.

    Args:
        others: the styles that it supports; None if only a layer inside it supports any.
    """
    inside = "name the linear, embedding, convolution or recurrent layer inside it, or 'replicate'"
    return PlanError(
        f"{f'module {path}' if path else 'the model'} can't be split by {style}",
        where=f"plan key {key!r}",
        why=why,
        attempt=inside if others is None else " or ".join(map(repr, (*others, "replicate"))),
    )


def _is_own(node: fx.Node, path: str) -> bool:
    is_parameter = node.op == "placeholder" and node.meta["kind"] == "parameter"
    names = node.meta["names"] if is_parameter else node.meta.get("holds", ())
    return any(name.rpartition(".")[0] == path for name in names)


def pinned_layout_conflict(name: str, first: str, second: str, node: fx.Node) -> PlanError:
    """Returns the error for a parameter that two pins lay out differently."""
    return PlanError(
        f"parameter {name} would have to lie in two ways",
        where=where(node),
        why=f"{first} and {second} are both asked of it; it is shared by several ops",
        attempt="give the modules that share it styles that split it alike ('vocab' embedding, 'column' head)",
    )
