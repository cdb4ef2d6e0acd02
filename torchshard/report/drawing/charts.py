"""Charts of a plan's step: time by layer, the timeline of one layer, bottlenecks, memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torchshard.core.units import size_text, time_text
from torchshard.plans.plan import Plan
from torchshard.report.memory import RankMemory, memory_of_ranks
from torchshard.report.times import COMPUTES, SENDS, Event, Share, Span, bounds, layer_timeline, shares

LEAST = 0.005
"""The share of a step below which layers are combined as "others"."""
MOST_BOUNDS = 10
"""The number of kinds of ops and messages in the table."""
KINDS = ("parameters", "gradients", "optimizer", "caches", "activations")
"""The kinds of a rank's memory, in stacking order."""
WAYS = ("forward", "backward")
WIDE, LANE, LEFT = 900, 22, 86
"""Pixels of a timeline: its length, the height of a lane, the margin before it."""
BESIDE = (
    "As the planner counts it: each axis of the batch sends one message after another, in the order of the ops, while "
    "the rank computes; a rank waits for weights that are not there yet. What is pale is not of this layer."
)
NARROWEST = 0.5
"""The width in pixels below which an op is not drawn."""


@dataclass(frozen=True)
class Charts:
    """The data of a plan's charts."""

    layer: str
    parts: list[Share]
    """The step's time by layers."""
    ways: tuple[Span, ...]
    """The layer's forward and backward; empty for a loaded plan without a graph."""
    groups: list[RankMemory]
    """Memory by groups of ranks."""

    @staticmethod
    def of(plan: Plan, layer: str) -> Charts:
        """The charts of a plan and one of its layers."""
        return Charts(layer, _parts(plan), layer_timeline(plan, layer), memory_of_ranks(plan))


@dataclass(frozen=True)
class Scales:
    """The value of a bar's full length, equal on all charts of one kind on a page."""

    part: float
    way: float
    """Seconds of the longest forward or backward of a layer."""
    group: float
    """Bytes."""

    @staticmethod
    def of(charts: Sequence[Charts]) -> Scales:
        """The smallest scales that fit all charts."""
        parts = (part.seconds + part.hidden for each in charts for part in each.parts)
        ways = (way.seconds for each in charts for way in each.ways)
        groups = (group.total for each in charts for group in each.groups)
        return Scales(*(max(found, default=0.0) for found in (parts, ways, groups)))


def _parts(plan: Plan) -> list[Share]:
    """The time of a step by layers, with small shares combined."""
    parts = shares(plan)
    total = sum(part.seconds for part in parts)
    shown = [part for part in parts if part.seconds >= LEAST * total] if total else []
    small = [part for part in parts if part not in shown]
    if small and shown:
        sums = (sum(getattr(part, what) for part in small) for what in ("computes", "waits", "hidden"))
        shown.append(Share("others", {path for part in small for path in part.modules}, *sums))
    return shown


def time_chart(charts: Charts, longest: float) -> str:
    """The distribution of a step's time: computation, waits for collectives, hidden collectives."""
    total, rows = sum(part.seconds for part in charts.parts), []
    if not total:
        return ""
    for part in charts.parts:
        name = part.name + (f" ×{len(part.modules)}" if len(part.modules) > 1 else "")
        bar = _bar({"computes": part.computes, "waits": part.waits, "hidden": part.hidden}, longest)
        texts = (time_text(part.computes), time_text(part.waits), time_text(part.hidden), f"{part.seconds / total:.0%}")
        rows.append((name, bar, *texts))
    key = _key(("computes", "computation"), ("waits", "waits for collectives"), ("hidden", "collectives meanwhile"))
    head = ("module", key, "computes", "waits", "hidden", "of the step")
    return _table("Where the time of a step goes", head, rows)


def course(charts: Charts, longest: float) -> str:
    """The timeline of a rank in one layer, as SVG; empty if the layer takes no time."""
    spans = {way: span for way, span in zip(WAYS, charts.ways, strict=False) if span.seconds}
    lanes = [*dict.fromkeys([COMPUTES, SENDS, *(event.lane for span in charts.ways for event in span.events)])]
    if not spans:
        return ""
    height, parts, within = 14, list[str](), f"{charts.layer.replace('.', '_')}_"
    for way, span in spans.items():
        parts.append(_line(LEFT, height + 2, f"{way}, {time_text(span.seconds)}"))
        for number, name in enumerate(lanes):
            top = height + 10 + number * LANE
            parts.append(_line(0, top + 14, name))
            kind = name if name in (COMPUTES, SENDS) else "over"
            events = "".join(_event(e, within, WIDE / longest, span.seconds) for e in span.events if e.lane == name)
            parts.append(f'<g class="{kind}" transform="translate({LEFT} {top})">{events}</g>')
        height += len(lanes) * LANE + 30
    told = "; ".join(f"{way} {time_text(span.seconds)}" for way, span in spans.items())
    note = f"<p>{BESIDE}</p>" if len(lanes) > 2 else ""
    return (
        f"<h2>One layer in time: {escape(charts.layer or 'the model')}</h2>"
        f'<svg class="course" role="img" aria-label="{escape(told)}" width="{WIDE + LEFT}" height="{height}" '
        f'viewBox="0 0 {WIDE + LEFT} {height}">{"".join(parts)}</svg>{note}'
    )


def _event(event: Event, within: str, scale: float, seconds: float) -> str:
    """Draws an event in its lane, cut to the first `seconds` of its span.

    Args:
        within: what the names of the layer's own ops begin with.
    """
    start, end = (min(max(time, 0.0), seconds) * scale for time in (event.start, event.end))
    if end - start < NARROWEST:
        return ""
    of_other = "" if event.is_own else ", not of this layer"
    tip = f"{event.name}, {event.of.removeprefix(within)}: {time_text(event.seconds)}{of_other}"
    fits = end - start > 6.5 * len(event.name)
    inner = f'<text x="{start + 3:.1f}" y="13">{escape(event.name)}</text>' if fits else ""
    other = "" if event.is_own else ' class="other"'
    return f'<g><title>{escape(tip)}</title><rect{other} x="{start:.1f}" width="{end - start:.1f}"/>{inner}</g>'


def _line(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escape(text)}</text>'


def bounds_table(plan: Plan) -> str:
    """The bottleneck of each kind of op and message, as a table."""
    found = bounds(plan)
    total = sum(plan.step_seconds.values()) + plan.hidden_seconds
    shown = [bound for bound in found if bound.seconds >= LEAST * total][:MOST_BOUNDS] if total else []
    rows = [
        (
            f"{bound.name} ×{bound.count}",
            escape(bound.by),
            f"{bound.flops / bound.nbytes:.3g}" if bound.flops and bound.nbytes else "",
            size_text(bound.nbytes),
            time_text(bound.seconds),
            f"{bound.seconds / total:.0%}",
        )
        for bound in shown
    ]
    ridge = plan.machine.flops / plan.machine.memory_bandwidth
    head = ("op or message", "bound by", "operations per byte", "bytes moved or sent", "time", "of the step")
    note = f"Where the host is fast enough, an op with fewer than {ridge:.3g} operations per byte is bound by memory."
    if plan.hidden_seconds > 0:
        note += (
            " Messages over the batch's axes are on their way while the rank computes, and not all waited for: "
            "shares are of all times, one after the other."
        )
    return _table("What bounds a step", head, rows) + f"<p>{note}</p>" if rows else ""


def memory_chart(charts: Charts, most: float) -> str:
    """The memory of each rank in a step, as a table."""
    groups = charts.groups
    if not any(group.total for group in groups):
        return ""
    kinds = [kind for kind in KINDS if any(group.nbytes.get(kind) for group in groups)]
    rows = [
        (
            group.name,
            _bar({kind: group.nbytes.get(kind, 0.0) for kind in kinds}, most),
            *(size_text(group.nbytes.get(kind, 0.0)) for kind in kinds),
            size_text(group.total),
        )
        for group in groups
    ]
    head = ("ranks", _key(*((kind, kind) for kind in kinds)), *kinds, "in all")
    return _table("Memory of each rank", head, rows)


def _bar(parts: Mapping[str, float], whole: float) -> str:
    """A stacked bar; hidden from screen readers, which get the same values as text."""
    drawn = (f'<i class="{kind}" style="width:{100 * part / whole:.2f}%"></i>' for kind, part in parts.items() if part)
    return f'<div class="bar" aria-hidden="true">{"".join(drawn)}</div>'


def _key(*kinds: tuple[str, str]) -> str:
    return " ".join(f'<span class="key"><i class="{kind}"></i>{escape(name)}</span>' for kind, name in kinds)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first cell of a row is text, the second is HTML."""
    return f"<h2>{escape(title)}</h2><table>{''.join(_cells(head, rows))}</table>"


def _cells(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    names = (f'<th scope="col"{" class=n" * (i > 1)}>{cell}</th>' for i, cell in enumerate(head))
    yield f"<tr>{''.join(names)}</tr>"
    for name, second, *rest in rows:
        numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in rest)
        yield f'<tr><th scope="row">{escape(name)}</th><td>{second}</td>{numbers}</tr>'
