"""Writes docs/collectives.md and its figures from what examples/collectives.py prints.

python docs/make_collectives.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
EXAMPLE = DOCS.parent / "examples" / "collectives.py"

INTRODUCTION = """# The collectives, one by one

Made from `examples/collectives.py` by `docs/make_collectives.py`; run the example to see the same numbers.

Four ranks; each box is what one rank holds: on the left the argument of the call, in the middle its result, and on
the right the gradient of the argument, if there is one. The backward starts from gradients of 1, 10, 100 and 1000 on
ranks 0 to 3.

`I`, `R`, `S(0)` and `P` are layouts: whole on every rank, whole with partial gradients, split along dim 0, and a
partial sum; [design.md](design.md) says what each means for the gradient. All calls use the model-parallel group of
`init_process_group(group_size)`; `src` and `dst` are ranks within it. Without a launcher, each call behaves as in a
group of one.

```python
import torchshard.distributed as tsd

tsd.init_process_group(group_size=4)    # under torchrun --nproc-per-node 4
```

Slices may be uneven: seven elements over four ranks are 2, 2, 2 and 1, as `torch.chunk` divides them. A collective
that starts from slices first exchanges their sizes in a small message, unless `size=` states the global size. With
`async_op=True` the conversions (`copy` to `all_to_all`) return a `Handle`, whose `wait()` returns the tensor.
If no gradient is needed, `reduce` works in place, and so do the collectives that `torch.distributed` runs in place:
`all_reduce`, `broadcast`, `reduce_to` on `dst`, `recv`. `all_reduce` and `reduce_to` also take `PRODUCT`, `MIN`,
`BAND`, `BOR` and `BXOR`; `send` and `recv` are `isend` and `irecv` followed by a wait; `barrier()` waits for all
ranks.

If a rank calls with another shape, dtype, operation, order or number of calls, or is late, stopped or dead, every
rank that still runs raises a `DistributedError` within `init_process_group(timeout_seconds=60)`. Through
memory and over gloo each call is verified by default; over NCCL, only calls whose signature is new: where another
does not end, the watchdog ends the process ([multi_node.md](multi_node.md)). `tsd.debug(True)` verifies each call,
forward and backward, and reports its line:

```
DistributedError: the ranks are about to do different things
  where: reduce() of f32[4] (train.py:12 in step)
  why:   ranks 0, 1, 3: reduce() of f32[4] (train.py:12 in step); rank 2: gather(dim=0) of f32[*] (train.py:14)
  try:   the same calls with the same shapes and dtypes in one order on every rank, which no set has
```
"""


@dataclass(frozen=True)
class Section:
    """One collective as the example printed it."""

    call: str
    meaning: str
    ranks: tuple[tuple[str, str, str], ...]
    """(before, after, gradient) of each rank."""

    @property
    def figure(self) -> str:
        """The figure's file name."""
        return re.sub(r"\W+", "_", self.call).strip("_").lower() + ".svg"


_RANK = re.compile(r"  rank \d+   (.*?) +-> (.*?)(?: +gradient (.*))?$")


def sections(printed: str) -> list[Section]:
    """Parses what the example printed."""
    found = []
    for block in printed.strip().split("\n\n"):
        title, *lines = block.splitlines()
        call, meaning = title.split("    ")
        ranks = (match.groups(default="") for match in map(_RANK.match, lines) if match)
        found.append(Section(call, meaning, tuple((before, after, grad) for before, after, grad in ranks)))
    return found


def files(printed: str) -> dict[str, str]:
    """Returns the content of each file, by its name within docs."""
    held = sections(printed)
    return {"collectives.md": _page(held)} | {f"figures/{section.figure}": _figure(section) for section in held}


def _page(held: list[Section]) -> str:
    parts = [INTRODUCTION]
    for section in held:
        code = re.sub(r"\b(AVG|MAX)\b", r"tsd.ReduceOp.\1", section.call)
        parts.append(
            f"## `{section.call}`\n\n{section.meaning}.\n\n![{section.call}](figures/{section.figure})\n\n"
            f"```python\ny = tsd.{code}\n```\n"
        )
    return "\n".join(parts)


_STYLE = (
    "text{font:13px ui-monospace,monospace;fill:#1f2328}rect{fill:#f6f8fa;stroke:#59636e}.name{fill:#59636e}"
    ".grad{stroke-dasharray:4 3}path{stroke:#59636e;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}rect{fill:#151b23;stroke:#9198a1}.name{fill:#9198a1}"
    "path{stroke:#9198a1}}"
)
_ROW, _CHARACTER, _GAP, _TOP, _LEFT = 34, 8, 56, 30, 64


def _figure(section: Section) -> str:
    columns = [list(column) for column in zip(*section.ranks, strict=True)]
    heads = ["before", "after", "gradient"]
    if not any(columns[2]):
        columns, heads = columns[:2], heads[:2]
    widths = [max(len(head), *map(len, column)) * _CHARACTER + 16 for head, column in zip(heads, columns, strict=True)]
    starts = [_LEFT + sum(widths[:i]) + _GAP * i for i in range(len(widths))]
    ranks = len(section.ranks)
    total, height = starts[-1] + widths[-1] + 8, _TOP + ranks * _ROW + 8
    body = [f'<text class="name" x="{x}" y="18">{head}</text>' for x, head in zip(starts, heads, strict=True)]
    for rank in range(ranks):
        y = _TOP + rank * _ROW
        body.append(f'<text class="name" x="8" y="{y + 19}">rank {rank}</text>')
        for i, (x, width) in enumerate(zip(starts, widths, strict=True)):
            kind = ' class="grad"' if i == 2 else ""
            body.append(f'<rect{kind} x="{x}" y="{y}" width="{width}" height="28" rx="4"/>')
            body.append(f'<text x="{x + 8}" y="{y + 19}">{escape(columns[i][rank])}</text>')
    for left, width, right in zip(starts, widths, starts[1:], strict=False):
        a, b, y = left + width + 10, right - 10, _TOP + ranks * _ROW // 2 - 3
        body.append(f'<path d="M{a} {y}H{b}m-6 -5l6 5l-6 5"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}" viewBox="0 0 {total} {height}" '
        f'role="img"><title>{escape(section.call)}: {escape(section.meaning)}</title><style>{_STYLE}</style>'
        f"{''.join(body)}</svg>\n"
    )


def main() -> None:
    """Runs the example and writes the files."""
    printed = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True).stdout
    (DOCS / "figures").mkdir(exist_ok=True)
    for name, content in files(printed).items():
        (DOCS / name).write_text(content)


if __name__ == "__main__":
    main()
