"""A page of its own, without a network: modules that open and close, tiles, the most expensive collectives, search.

Every module is a `<details>`; a row's facts lie in one JSON block, and a few lines of script show them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from torch import fx

from torchshard.core.conversions import TABLE
from torchshard.core.paths import star_differences
from torchshard.distributed.ops import is_collective, is_or_begins_collective
from torchshard.ir.axes import axes_of, axis_of, layouts_of
from torchshard.ir.graph import op_name
from torchshard.plans.data import Collective
from torchshard.plans.machine import size_text, time_text
from torchshard.plans.plan import Plan
from torchshard.plans.table import mesh_text
from torchshard.report.drawing.outline import Box, Row, outline, sources
from torchshard.report.why import MAX_ALTERNATIVES, REASONS, kinds_of


@dataclass(frozen=True)
class Shown:
    """One plan and its graph."""

    plan: Plan
    graph: fx.Graph


def page(shown: Sequence[Shown]) -> str:
    """The whole file."""
    facts: dict[str, Any] = {}
    sides = [_Side(one, f"{i}-", facts) for i, one in enumerate(shown)]
    columns = "\n".join(f"<section>{side.html()}</section>" for side in sides)
    data = json.dumps(facts, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    title = " and ".join(mesh_text(one.plan) for one in shown)
    return FRAME.format(
        title=title, css=_asset("page.css"), js=_asset("page.js"), columns=columns, facts=data, about=escape(ABOUT)
    )


FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>TorchShard: {title}</title><style>{css}</style></head><body>
<header><h1>TorchShard: {title}</h1>
<input id="search" type="search" placeholder="search: module, op, layout, file" aria-label="search">
<button id="open-all">open all</button> <button id="fold-all">fold all</button> <span id="hits"></span>
<div class="about">{about}</div></header>
<main>{columns}</main>
<aside id="panel"><button id="close">close</button><dl id="fact-list"></dl></aside>
<script id="facts" type="application/json">{facts}</script><script>{js}</script></body></html>
"""
ABOUT = (
    "⬡ collective: ▼ what each rank sends in the forward pass, ▲ in the backward. S(d) split along dim d, "
    "P partial sums, R whole with its gradient in partial sums, I whole. Click a row for its facts."
)


def _asset(name: str) -> str:
    return files("torchshard.report.drawing").joinpath("assets", name).read_text(encoding="utf-8")


class _Side:
    """The column of one plan."""

    def __init__(self, shown: Shown, prefix: str, facts: dict[str, Any]) -> None:
        self.plan, self.facts = shown.plan, facts
        self.root = outline(shown.graph)
        self.rows = self.root.rows()
        self.ids = {node: f"{prefix}{i}" for i, row in enumerate(self.rows) for node in row.nodes}
        self.costs: dict[tuple[str, ...], Collective] = {}
        self.inside: dict[str, list[Collective]] = {}
        for axis, plan in zip(axes_of(shown.graph), shown.plan.over_all, strict=True):
            for c in plan.costs.collectives:
                self.costs[axis.name, c.value, c.name, str(c.target)] = c
                if c.is_inside:
                    self.inside.setdefault(c.value, []).append(c)
        takers: dict[str, list[str]] = {}
        for row in self.rows:
            for source in sources(row.nodes[0]):
                if source in self.ids:
                    takers.setdefault(self.ids[source], []).append(self.ids[row.nodes[0]])
        for row in self.rows:
            self._tell(row, takers)

    def html(self) -> str:
        """Tiles, the table, the modules."""
        boxes = "".join(self._items(self.root))
        return f'<div class="tiles">{"".join(self._tiles())}</div>{self._most_expensive()}<h2>Modules</h2>{boxes}'

    def _tiles(self) -> Iterator[str]:
        costs, (whole, held) = self.plan.costs, self.plan.parameter_bytes()
        kinds: dict[str, int] = {}
        for each in self.plan.over_all:
            for c in each.costs.collectives:
                for sent in c.sent:
                    if sent.nbytes:
                        kinds[sent.kernel] = kinds.get(sent.kernel, 0) + sent.times
        ranks, _, names = mesh_text(self.plan).partition(" ranks")
        yield _tile(f"ranks{names}", ranks.removesuffix(" rank"))
        for each in self.plan.over_all:
            over = f" over {each.label}" if self.plan.over_batch else ""
            yield _tile(f"sent by a rank per step{over}", size_text(each.costs.nbytes))
            yield _tile(f"collectives forward, backward{over}", " + ".join(map(str, each.costs.calls)))
        for kind, count in sorted(kinds.items()):
            yield _tile(kind.replace("_", "-"), str(count))
        yield _tile(f"of {size_text(whole)} parameters on a rank", size_text(held))
        seconds = sum(self.plan.step_seconds.values()) if costs.step is not None else costs.seconds
        yield _tile(f"per step on {costs.machine or 'an unnamed machine'}", time_text(seconds))
        if "peak" in self.plan.step_memory:
            yield _tile("peak memory of a rank", size_text(self.plan.step_memory["peak"]))

    def _most_expensive(self) -> str:
        kinds = [kind for each in self.plan.over_all for kind in kinds_of(each)]
        kinds.sort(key=lambda kind: -sum(c.seconds for c in kind))
        if not kinds:
            return ""
        rows = "".join(self._kind(alike) for alike in kinds[:MAX_ALTERNATIVES])
        head = "<tr><th>collective</th><th>where</th><th>why</th><th>sent</th><th>time</th></tr>"
        return f"<h2>Most expensive collectives</h2><table>{head}{rows}</table>"

    def _kind(self, alike: Sequence[Collective]) -> str:
        first = alike[0]
        where = star_differences(*(c.place for c in alike)) or "the model"
        count = f" ×{len(alike)}" if len(alike) > 1 else ""
        same = (lambda n: n.name == first.value) if first.is_inside else (lambda n: self._record(n) is first)
        rows = (i for n, i in self.ids.items() if same(n))
        row = next(rows, "")
        link = f'<a data-row="{row}">⬡ {escape(first.name)}{count}</a> {escape(f"{first.source} → {first.target}")}'
        sent, seconds = (sum(getattr(c, part) for c in alike) for part in ("nbytes", "seconds"))
        why = REASONS[first.name]
        return (
            f"<tr><td>{link}</td><td>{escape(where)}</td><td>{escape(why)}</td>"
            f'<td class="n">{size_text(sent)}</td><td class="n">{time_text(seconds)}</td></tr>'
        )

    def _record(self, node: fx.Node) -> Collective | None:
        """What the plan says of a collective node."""
        if not is_collective(node.target) or op_name(node) not in TABLE:
            return None
        axis = axis_of(node).name
        targets = layouts_of(node).get(axis)
        if targets is None:
            return None
        value: Any = node.args[0]
        while is_collective(value.target):
            value = value.args[0]
        return self.costs.get((axis, value.name, op_name(node), str(targets[0])))

    # --- modules -----------------------------------------------------------------------------------------------------

    def _items(self, box: Box) -> Iterator[str]:
        for item in box.items:
            yield self._row(item) if isinstance(item, Row) else self._box(item)

    def _box(self, box: Box) -> str:
        look = ' class="stack"' if box.count > 1 else ""
        title = f'<span class="title">{escape(box.title)}</span>{self._badges(box)}'
        return f"<details{look}><summary>{title}</summary>{''.join(self._items(box))}</details>"

    def _badges(self, box: Box) -> str:
        nodes = [node for row in box.rows() for node in row.nodes]
        records = [r for n in nodes for r in (self._record(n), *self.inside.get(n.name, ())) if r is not None]
        sent = [r for r in records if r.nbytes]
        if not sent:
            return ""
        text = f"⬡ {len(sent)} · {size_text(sum(r.nbytes for r in sent))} · {time_text(sum(r.seconds for r in sent))}"
        return f'<span class="badge">{text}</span>'

    def _row(self, row: Row) -> str:
        kind, sign = "row", ""
        if is_or_begins_collective(row.nodes[0].target):
            kind, sign = ("row collective" if "▼" in row.detail else "row collective quiet"), "⬡ "
        texts = {"label": sign + row.label, "detail": row.detail, "shape": row.shape, row.kind: row.layout}
        cells = "".join(f'<span class="{name}">{escape(text)}</span>' for name, text in texts.items())
        return f'<div class="{kind}" id="{self.ids[row.nodes[0]]}">{cells}</div>'

    def _tell(self, row: Row, takers: dict[str, list[str]]) -> None:
        node, record = row.nodes[0], self._record(row.nodes[0])
        own = self.ids[node]
        count = len(row.nodes)
        shown = {
            "op": f"{op_name(node)}{f', in {count} alike layers' if count > 1 else ''}",
            "node": node.name,
            "module": node.meta.get("module", ""),
            "shape": row.shape,
            "layout": row.layout,
            "runs": _when(node),
            "split": row.detail,
            "row": getattr(node.meta.get("row"), "text", ""),
            "choice": getattr(node.meta.get("choice"), "name", ""),
            "source": node.meta.get("source", ""),
        }
        if record is not None:
            shown |= {
                "why": REASONS[record.name],
                "for": ", ".join(record.consumers[:6]),
                "costs": f"{size_text(record.nbytes)}, {time_text(record.seconds)}"
                + (f"; {size_text(count * record.nbytes)} in all layers" if count > 1 else ""),
            }
        self.facts[own] = {
            "name": f"{node.meta.get('module', '')} {row.label}".strip(),
            "shown": {name: text for name, text in shown.items() if text},
            "from": list(dict.fromkeys(self.ids[s] for s in sources(node) if s in self.ids)),
            "to": list(dict.fromkeys(takers.get(own, ()))),
            "search": " ".join([row.label, *shown.values()]).lower(),
        }


def _tile(name: str, value: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _when(node: fx.Node) -> str:
    """In which pass of a step an op runs."""
    if "is_backward" not in node.meta:
        return ""
    return "backward" + (", again" if node.meta.get("is_again") else "") if node.meta["is_backward"] else "forward"
