"""What a step of a plan takes, as tables with bars: time by layers, one layer's course, bounds, memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from torchshard.plans.data import PlanData
from torchshard.plans.machine import size_text, time_text
from torchshard.report.memory import memory_of_ranks
from torchshard.report.times import Event, Share, bounds, layer_timeline, shares

LEAST = 0.005
"""What takes a smaller part of a step is among the others."""
MOST_BOUNDS = 10
"""So many kinds of ops and messages are listed."""
KINDS = ("parameters", "gradients", "optimizer", "caches", "activations")
"""Of a rank's memory, as they are stacked."""
WAYS = ("forward", "backward")
WIDE, LANE, LEFT = 900, 22, 86
"""Pixels of a course: its length, a lane of it, and before it."""
NARROWEST = 0.5
"""Pixels of an op; shorter ones are not drawn."""


def time_chart(plan: PlanData) -> str:
    """Where the time of a step goes: computation, collectives that are waited for, and those behind computation."""
    parts = shares(plan)
    total = sum(part.seconds for part in parts)
    if not total:
        return ""
    shown = [part for part in parts if part.seconds >= LEAST * total]
    small = [part for part in parts if part not in shown]
    if small:
        sums = (sum(getattr(part, what) for part in small) for what in ("computes", "waits", "hidden"))
        shown.append(Share("others", {path for part in small for path in part.modules}, *sums))
    longest = max(part.seconds + part.hidden for part in shown)
    rows = []
    for part in shown:
        name = part.name + (f" ×{len(part.modules)}" if len(part.modules) > 1 else "")
        bar = _bar({"computes": part.computes, "waits": part.waits, "hidden": part.hidden}, longest)
        texts = (time_text(part.computes), time_text(part.waits), time_text(part.hidden), f"{part.seconds / total:.0%}")
        rows.append((name, bar, *texts))
    key = _key(("computes", "computation"), ("waits", "waits for collectives"), ("hidden", "collectives meanwhile"))
    head = ("module", key, "computes", "waits", "hidden", "of the step")
    return _table("Where the time of a step goes", head, rows)


def course(plan: PlanData, layer: str) -> str:
    """What a rank does in one layer, in the order of time, as SVG; nothing for a plan that was loaded."""
    ways = [events for events in layer_timeline(plan, layer) if events]
    longest = max((_end(events) for events in ways), default=0.0)
    if not longest:
        return ""
    height, parts = 14, list[str]()
    for way, events in zip(WAYS, ways, strict=False):
        parts.append(_line(LEFT, height + 2, f"{way}, {time_text(_end(events))}"))
        for lane, name in enumerate(("computes", "sends")):
            parts.append(_line(0, height + 10 + lane * LANE + 14, name))
        scale = WIDE / longest
        parts += (_event(event, height + 10, scale) for event in events if event.seconds * scale >= NARROWEST)
        height += 2 * LANE + 30
    told = "; ".join(f"{way} {time_text(_end(events))}" for way, events in zip(WAYS, ways, strict=False))
    without = ", without what is sent over the batch's axes" if plan.over_all[-1].data else ""
    return (
        f"<h2>One layer in time: {escape(layer or 'the model')}{without}</h2>"
        f'<svg class="course" role="img" aria-label="{escape(told)}" width="{WIDE + LEFT}" height="{height}" '
        f'viewBox="0 0 {WIDE + LEFT} {height}">{"".join(parts)}</svg>'
    )


def _end(events: Sequence[Event]) -> float:
    return max(event.start + event.seconds for event in events)


def _event(event: Event, top: float, scale: float) -> str:
    lane = 0 if event.lane == "computes" else 1
    x, width = LEFT + event.start * scale, event.seconds * scale
    tip = f"{event.name}, {event.node}: {time_text(event.seconds)}"
    inner = f'<text x="{x + 3:.1f}" y="{top + lane * LANE + 13}">{escape(event.name)}</text>'
    fits = width > 6.5 * len(event.name)
    return (
        f'<g><title>{escape(tip)}</title><rect class="{event.lane}" x="{x:.1f}" y="{top + lane * LANE}" '
        f'width="{width:.1f}" height="{LANE - 4}"/>{inner if fits else ""}</g>'
    )


def _line(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escape(text)}</text>'


def bounds_table(plan: PlanData) -> str:
    """What bounds each kind of op and of message."""
    found = bounds(plan)
    total = sum(plan.step_seconds.values())
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
    note = f"An op with fewer than {ridge:.3g} operations for each byte is bound by this machine's memory."
    if plan.hidden_seconds > 0:
        note += " Messages over the batch's axes are on their way while the rank computes, and not all waited for."
    return _table("What bounds a step", head, rows) + f"<p>{note}</p>" if rows else ""


def memory_chart(plan: PlanData) -> str:
    """What each rank holds in a step."""
    groups = memory_of_ranks(plan)
    most = max((group.total for group in groups), default=0.0)
    if not most:
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
    """The parts one after the other; the texts beside it say the same."""
    drawn = (f'<i class="{kind}" style="width:{100 * part / whole:.2f}%"></i>' for kind, part in parts.items() if part)
    return f'<div class="bar" aria-hidden="true">{"".join(drawn)}</div>'


def _key(*kinds: tuple[str, str]) -> str:
    return " ".join(f'<span class="key"><i class="{kind}"></i>{escape(name)}</span>' for kind, name in kinds)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of which the first cells are texts, and the second ones are HTML."""
    return f"<h2>{escape(title)}</h2><table>{''.join(_cells(head, rows))}</table>"


def _cells(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    names = (f'<th scope="col"{" class=n" * (i > 1)}>{cell}</th>' for i, cell in enumerate(head))
    yield f"<tr>{''.join(names)}</tr>"
    for name, second, *rest in rows:
        numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in rest)
        yield f'<tr><th scope="row">{escape(name)}</th><td>{second}</td>{numbers}</tr>'
