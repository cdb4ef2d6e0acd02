"""Pictures of a plan's graph: modules as nested boxes, ops as rows, collectives as hexagons; a file's suffix says how.

    draw(model, "model.html")      a page of its own: modules open and close, rows tell what they are; search
    draw(plan, "model.svg")        for papers and READMEs
    draw(plan, "model.dot")        for Graphviz

Layers that repeat are drawn once, as "12 × blocks.*". A collective says what travels and when: ▼ in the forward pass,
▲ in the backward.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchshard.core.errors import InputError
from torchshard.core.files import write_text
from torchshard.plans.plan import Plan
from torchshard.report.drawing.dot import dot
from torchshard.report.drawing.html import Shown, page
from torchshard.report.drawing.svg import picture
from torchshard.report.explain import Planned, graph_of, plan_in, step_of

FORMATS = (".html", ".svg", ".dot")


def draw(
    model: Planned | Plan | Sequence[Planned | Plan],
    path: str | os.PathLike[str],
    *,
    step: bool = False,
    rank: int = 0,
) -> None:
    """Writes a picture of a plan's graph, or of a sharded model's latest, with its collectives.

    Args:
        model: what is drawn; several, in a list, lie side by side on a page.
        path: the file; its suffix is .html, .svg or .dot.
        step: draws a training step of a rank, forward and backward as they run: where collectives begin, and where they
            are waited for.
        rank: whose graph or step, by its number among all ranks.

    Raises:
        InputError: the suffix is another, the file can't be written, there is no graph to draw, or no such rank.
    """
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    check_suffix(path, FORMATS if len(models) == 1 else (".html",))
    if not models:
        raise InputError("there is nothing to draw", where="draw", why="the list is empty", attempt="a plan")
    of_plan = step_of if step else graph_of
    plans = map(plan_in, models)
    write_text(path, _text(Path(path).suffix, [Shown(plan, of_plan(plan, rank).graph) for plan in plans]))


def check_suffix(path: str | os.PathLike[str], formats: Sequence[str] = FORMATS) -> None:
    """Raises InputError where a file's suffix is none of these."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(
            f"a picture is written to a file, not to a {type(path).__name__}",
            where="draw(model, path)",
            attempt=f"'model{formats[0]}'",
        )
    if Path(path).suffix not in formats:
        raise InputError(
            f"a picture can't be written as {Path(path).suffix or 'a file without a suffix'!r}",
            where=os.fspath(path),
            why=f"the suffix says the format, here {', '.join(formats)}; several plans are shown by .html alone",
            attempt=repr(f"{Path(path).stem or 'model'}{formats[0]}"),
        )


def _text(suffix: str, shown: Sequence[Any]) -> str:
    if suffix == ".html":
        return page(shown)
    (one,) = shown
    if suffix == ".dot":
        return dot(one.graph)
    return picture(one.graph, sum(each.costs.nbytes for each in one.plan.over_all))
