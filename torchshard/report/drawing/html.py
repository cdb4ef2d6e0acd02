"""A self-contained page: charts of a step, a layer as a figure, all modules; also for several plans.

Every module is a `<details>`; the facts about rows are in one JSON block, and a short script shows
them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import NamedTuple

from torch import fx

from torchshard.core.paths import star_differences
from torchshard.core.units import size_text, time_text
from torchshard.ir.axes import is_local
from torchshard.plans.costs import Collective
from torchshard.plans.plan import Plan
from torchshard.plans.table import ABSENT, held_otherwise, mesh_text
from torchshard.report.drawing.charts import Charts, Scales, bounds_table, course, memory_chart, time_chart
from torchshard.report.drawing.lanes import lanes
from torchshard.report.drawing.outline import Frame, frame_of
from torchshard.report.drawing.tree import TOLD, Side, Texts, tree
from torchshard.report.why import MAX_ALTERNATIVES, REASONS, kinds_of

PREFIXES = "abcdefghijklmnopqrstuvwxyz"
MEANINGS = {
    "S": "split: each rank holds a slice along this dim",
    "P": "partial sums: the value is the sum of what the ranks have",
    "R": "whole on each rank, which uses it for its own part; its gradient is in partial sums",
    "I": "whole and equal on each rank, as is its gradient",
}
"""The letter of a layout -> its meaning."""
OF_STEP = MEANINGS | {"I": "what this rank holds: its part, or the whole"}
"""Meanings on the page of a rank's step, which shows the types of local shards."""


@dataclass(frozen=True)
class Shown:
    """One plan and its graph."""

    plan: Plan
    graph: fx.Graph
    name: str = ""
    """The plan's name on a page with several plans."""


def page(shown: Sequence[Shown]) -> str:
    """The text of the whole file."""
    texts = Texts({"": 0})
    frame = frame_of([one.graph for one in shown]) if len(shown) > 1 else Frame()
    sides = [Side(one.plan, one.graph, prefix, texts, frame) for one, prefix in zip(shown, PREFIXES, strict=False)]
    names = _names(shown)
    facts = {
        "told": TOLD,
        "sides": {side.prefix: side.facts() for side in sides},
        "meanings": OF_STEP if is_local(shown[0].graph) else MEANINGS,
        "texts": [*texts],
    }
    data = json.dumps(facts, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    several = len(shown) > 1
    heads = [f"<h2>{escape(name)}</h2>" if several else "" for name in names]
    charts = [Charts.of(side.plan, side.layer) for side in sides]
    scales = Scales.of(charts)
    columns = "".join(
        f"<section>{head}{''.join(_summary(side, chart, scales))}</section>"
        for head, side, chart in zip(heads, sides, charts, strict=True)
    )
    figures = "".join(_figure(side, name if several else "") for side, name in zip(sides, names, strict=True))
    return FRAME.format(
        title=escape(_title(shown, names)),
        css=_asset("page.css"),
        js=_asset("page.js"),
        differences=_differences(shown, names) if several else "",
        columns=columns,
        figures=figures,
        tree=tree(sides),
        names="".join(f"<span>{escape(name)}</span>" for name in names) if several else "",
        facts=data,
        about=escape(ABOUT.format(IN_STEP if is_local(shown[0].graph) else IN_GRAPH)),
    )


FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>TorchShard: {title}</title><style>{css}</style></head><body>
<header><h1>{title}</h1>
<label>search <input id="search" type="search" placeholder="module, op, layout, file"></label>
<button id="before" title="the hit before (shift+Enter)">previous</button>
<button id="next" title="the next hit (Enter)">next</button> <span id="hits" role="status"></span>
<button id="open-all">open all</button> <button id="fold-all">fold all</button>
<label><input id="only" type="checkbox"> collectives only</label>
<label><input id="books" type="checkbox"> shapes and masks</label>
<div class="about">{about}</div></header>
<main>{differences}<div class="columns">{columns}</div>{figures}
<h2 id="modules">Modules</h2><div class="line names">{names}</div><div id="tree">{tree}</div></main>
<aside id="panel" aria-label="facts of the picked row" tabindex="-1"><button id="close">close</button>
<dl id="fact-list" aria-live="polite"></dl></aside>
<script id="facts" type="application/json">{facts}</script><script>{js}</script></body></html>
"""
ABOUT = (
    "⬡ collective: ▼ what each rank sends in the forward pass, ▲ in the backward. {} Click a row for its facts; "
    "/ searches, arrows go from row to row, Enter picks, Escape closes."
)
IN_GRAPH = (
    "64@tp: a dim of 64 split over the axis tp; P@tp: partial sums; R@tp: whole, its gradient in partial sums; "
    "all else is whole."
)
IN_STEP = "Types are those of what this rank holds: its parts, or the whole."


def _asset(name: str) -> str:
    return files("torchshard.report.drawing").joinpath("assets", name).read_text(encoding="utf-8")


def _title(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """The model with its sizes, the ranks and the machine; for several plans, their names."""
    models = dict.fromkeys(one.plan.title for one in shown if one.plan.title)
    return ": ".join(filter(None, [" and ".join(models), " and ".join(names)]))


def _names(shown: Sequence[Shown]) -> list[str]:
    """The given names, by default made of ranks, data sharding and machine; equal ones are numbered."""
    found = [one.name or ", ".join(filter(None, _facts(one.plan))) for one in shown]
    many = Counter(found)
    return [f"{name} ({found[:i].count(name) + 1})" if many[name] > 1 else name for i, name in enumerate(found)]


def _facts(plan: Plan) -> tuple[str, str, str]:
    ways = dict.fromkeys(str(each.axis.holds) for each in plan.in_order if each.data)
    return mesh_text(plan), " and ".join(ways), plan.machine.name


# --- one plan --------------------------------------------------------------------------------------------------------


def _summary(side: Side, charts: Charts, scales: Scales) -> Iterator[str]:
    yield f'<div class="tiles">{"".join(_tile(figure) for figure in _figures(side.plan).values())}</div>'
    yield time_chart(charts, scales.part)
    yield course(charts, scales.way)
    yield bounds_table(side.plan)
    yield memory_chart(charts, scales.group)
    yield _most_expensive(side)


class Tile(NamedTuple):
    """A number of a plan, with its caption."""

    value: str
    name: str


def _figures(plan: Plan) -> dict[str, Tile]:
    """The costs of a plan, by the name of each row in comparisons."""
    costs, (whole, held) = plan.costs, plan.parameter_bytes()
    ranks, _, names = mesh_text(plan).partition(" ranks")
    found = {"ranks": Tile(ranks.removesuffix(" rank"), f"ranks{names}")}

    def add(name: str, value: str, more: str = "", key: str = "") -> None:
        found[key or name] = Tile(value, f"{name}{more}")

    axes = [each for each in plan.in_order if each.world_size > 1 or not plan.across]
    apart = [(f" over {each.axis.label}", [each]) for each in axes] if len(axes) > 1 else []
    for over, parts in (("", plan.in_order), *apart):
        ahead, back = (sum(calls) for calls in zip(*(each.costs.calls for each in parts), strict=True))
        add(f"sent by a rank per step{over}", size_text(sum(each.costs.nbytes for each in parts)))
        add(f"collectives forward + backward{over}", f"{ahead} + {back}")
    kinds = Counter[str]()
    for sent in (sent for each in plan.in_order for c in each.costs.collectives for sent in c.sent if sent.nbytes):
        kinds[sent.message] += sent.times
    for kind, count in sorted(kinds.items()):
        add(kind, str(count))
    add("parameters on a rank", size_text(held), f", of {size_text(whole)}")
    add("per step", time_text(sum(plan.step_seconds.values())), f" on {costs.machine or 'an unnamed machine'}")
    if "peak" in plan.step_memory:
        add("peak memory of a rank", size_text(plan.step_memory["peak"]))
    return found


def _tile(figure: Tile) -> str:
    return f'<div class="tile"><b>{escape(figure.value)}</b><span>{escape(figure.name)}</span></div>'


def _most_expensive(side: Side) -> str:
    kinds = [kind for each in side.plan.in_order for kind in kinds_of(each)]
    kinds.sort(key=lambda kind: -sum(c.seconds for c in kind))
    if not kinds:
        return ""
    rows = "".join(_kind(side, kind) for kind in kinds[:MAX_ALTERNATIVES])
    head = "".join(f'<th scope="col">{name}</th>' for name in ("collective", "of", "where", "why"))
    head += "".join(f'<th scope="col" class="n">{name}</th>' for name in ("sent", "time"))
    return f"<h2>Most expensive collectives</h2><table><tr>{head}</tr>{rows}</table>"


def _kind(side: Side, kind: Sequence[Collective]) -> str:
    first = kind[0]
    where = star_differences(*(c.place for c in kind)) or "the model"
    count = f" ×{len(kind)}" if len(kind) > 1 else ""
    sent, seconds = (sum(getattr(c, part) for c in kind) for part in ("nbytes", "seconds"))
    name, row = f"⬡ {escape(first.name)}{count}", side.row_of(first)
    of = first.type if first.is_inside else f"{first.type} → {first.into}"
    link = f'<button class="link" data-row="{row}">{name}</button>' if row else name
    return (
        f"<tr><td>{link}</td><td>{escape(of)}</td><td>{escape(where)}</td>"
        f'<td class="why">{escape(REASONS[first.name])}</td>'
        f'<td class="n">{size_text(sent)}</td><td class="n">{time_text(seconds)}</td></tr>'
    )


def _figure(side: Side, name: str) -> str:
    drawn = lanes(side.plan, side.layer, side.prefix)
    title = f"One layer on each rank{f': {name}' if name else ''}"
    return f'<h2>{escape(title)}</h2><div class="figure" tabindex="0">{drawn}</div>' if drawn else ""


# --- several plans ---------------------------------------------------------------------------------------------------


def _differences(shown: Sequence[Shown], names: Sequence[str]) -> str:
    """Compares the totals of all plans, and the parameters with different layouts."""
    figures = [_figures(one.plan) for one in shown]
    head = "".join(f'<th scope="col" class="n">{escape(name)}</th>' for name in names)
    none = Tile(ABSENT, "")
    rows = "".join(
        _compared(name, [figure.get(name, none).value for figure in figures])
        for name in dict.fromkeys(name for figure in figures for name in figure)
    )
    rows += "".join(_compared(name, layouts) for name, layouts in _layouts(shown))
    return f"<h2>Differences</h2><table><tr><td></td>{head}</tr>{rows}</table>"


def _layouts(shown: Sequence[Shown]) -> Iterator[tuple[str, Sequence[str]]]:
    """The parameters with layouts that differ between plans, grouped by equal layers."""
    found = held_otherwise([one.plan for one in shown])
    shared = Counter(star_differences(*names) for names, _ in found)
    for names, layouts in found:
        stars = star_differences(*names)
        yield stars if shared[stars] == 1 else f"{stars} ({_numbers(stars, names)})", layouts


def _numbers(stars: str, names: Sequence[str]) -> str:
    """The numbers in some names at the place of the stars."""
    places = [i for i, step in enumerate(stars.split(".")) if "*" in step]
    return ", ".join(".".join(name.split(".")[i] for i in places) for name in names)


def _compared(name: str, values: Sequence[str]) -> str:
    look = ' class="differs"' if len(set(values)) > 1 else ""
    cells = "".join(f'<td class="n">{escape(value)}</td>' for value in values)
    return f'<tr{look}><th scope="row">{escape(name)}</th>{cells}</tr>'
