"""Draws a plan's graph: modules as nested boxes, ops as rows, collectives as hexagons.

The file's suffix selects the format.

    draw(model, "model.html")      a page of its own: where time and memory go, a layer on each rank, all modules
    draw(plan, "model.svg")        for papers and READMEs
    draw(plan, "layer.svg", layer="blocks.0")    that layer with a lane for each rank, for a talk
    draw(plan, "model.dot")        for Graphviz
    draw(network_of(plan), "network.svg")        the decisions that the planner had, or .dot, or .graphml

Layers that repeat are drawn once, as "12 × blocks.*". A collective shows its messages in the
forward pass (▼) and in the backward (▲).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from torchshard.core.errors import InputError
from torchshard.core.files import write_text
from torchshard.plans.plan import Plan
from torchshard.report.drawing.dot import dot
from torchshard.report.drawing.html import Shown, page
from torchshard.report.drawing.lanes import lanes
from torchshard.report.drawing.network import network_text
from torchshard.report.drawing.stations import MOST_STATIONS, busiest_layer
from torchshard.report.drawing.svg import picture
from torchshard.report.explain import Planned, graph_of, plan_in, step_of

FORMATS = (".html", ".svg", ".dot")
OF_LAYER, OF_SEVERAL, OF_NETWORK = (".svg",), (".html",), (".svg", ".dot", ".graphml")
"""Suffixes for one layer, for several plans, and for a network of decisions."""
MOST_PLANS = 8
"""The number of plans that fit side by side on a page."""


def draw(
    model: Planned | Plan | nx.Graph | Sequence[Planned | Plan] | Mapping[str, Planned | Plan],
    path: str | os.PathLike[str],
    *,
    step: bool = False,
    layer: str | None = None,
    rank: int = 0,
) -> None:
    """Writes a picture of a plan's graph, or of a sharded model's latest, with its collectives.

    Args:
        model: a plan or model; several, in a list or by their names in a dict, are drawn side by
            side on a page, which marks where they differ. Or the network of a plan's decisions, as
            .svg, .dot or .graphml.
        path: the file; its suffix is .html, .svg or .dot.
        step: draws a training step of a rank, forward and backward in execution order: where each
            collective begins, and where it is waited for.
        layer: the path of a module, for an .svg with a lane for each rank: its slices of weights
            and values, with collectives as joins of the lanes, as in figure 3 of Shoeybi et al.,
            "Megatron-LM" (2019). "auto" is the layer in which a step spends the most time, as on
            pages.
        rank: the rank with the graph or step to draw, by its number among all ranks.

    Raises:
        InputError: the suffix is unknown, the file can't be written, the graph, rank or layer does
            not exist, or the layer has too many ops for a figure.
    """
    if isinstance(model, nx.Graph):
        check_suffix(path, OF_NETWORK)
        write_text(path, network_text(Path(path).suffix, model))
        return
    named = model if isinstance(model, Mapping) else {}
    models: list[Any] = [*named.values()] if isinstance(model, Mapping) else [model]
    if isinstance(model, (list, tuple)):
        models = [*model]
    check_suffix(path, OF_LAYER if layer is not None else FORMATS if len(models) == 1 else OF_SEVERAL)
    if not 0 < len(models) <= MOST_PLANS:
        what = "there is nothing to draw" if not models else f"{len(models)} plans are too many for a page"
        raise InputError(what, where="draw", why=f"one to {MOST_PLANS} are drawn", attempt="a plan, or a list of them")
    if layer is not None and (not isinstance(layer, str) or len(models) > 1 or step):
        raise InputError(
            f"no figure is made of layer={layer!r}{', step=True' if step else ''}, {len(models)} plans",
            where="layer=",
            why="a figure shows a module, by its path, of the graph of one plan",
            attempt="draw(plan, 'layer.svg', layer='auto')",
        )
    of_plan = step_of if step else graph_of
    plans = [plan_in(each) for each in models]
    names = [*map(str, named)] or [""] * len(plans)
    shown = [Shown(plan, of_plan(plan, rank).graph, name) for plan, name in zip(plans, names, strict=True)]
    write_text(path, _text(Path(path).suffix, shown) if layer is None else _figure(plans[0], layer))


def check_suffix(path: str | os.PathLike[str], formats: Sequence[str] = FORMATS) -> None:
    """Raises InputError if a file's suffix is not one of these."""
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
            why=f"the suffix says the format, here {', '.join(formats)}; "
            "several plans are shown by .html alone, and one layer by .svg",
            attempt=repr(f"{Path(path).stem or 'model'}{formats[0]}"),
        )


def _text(suffix: str, shown: Sequence[Shown]) -> str:
    if suffix == ".html":
        return page(shown)
    (one,) = shown
    return dot(one.graph) if suffix == ".dot" else picture(one.graph, one.plan)


def _figure(plan: Plan, layer: str) -> str:
    """Draws one layer with a lane for each rank."""
    path = busiest_layer(plan) if layer == "auto" else layer
    drawn = lanes(plan, path)
    if not drawn:
        raise InputError(
            f"there is no figure of {path or 'the whole model'!r}",
            where="layer=",
            why=f"a figure shows a module that the graph has, of up to {MOST_STATIONS} products, collectives, others",
            attempt=f"a layer's path, as {busiest_layer(plan) or 'blocks.0'!r}",
        )
    return drawn
