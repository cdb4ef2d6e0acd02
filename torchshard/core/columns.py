"""Text that fits a terminal: tables with cells that wrap, and paragraphs.

module      parameters         time
blocks.*.   weight[64@tp,16],  1.2 ms
mlp.up ×12  bias[64@tp]
"""

from __future__ import annotations

import html
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import zip_longest

NO_TERMINAL = (80, 24)
GAP = "  "
CUT_PART = 4
"""The cost of a cut within a part, counted in cuts of words between parts."""
NARROWEST = 12
"""The minimum width to which a column is narrowed."""


def terminal_width() -> int:
    """Returns the columns of the terminal, or the variable COLUMNS if set; 80 without a terminal."""
    return shutil.get_terminal_size(NO_TERMINAL).columns


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of aligned rows; cells wrap if the terminal is too narrow, in few lines."""
    by_column = [*zip(*rows, strict=True)]
    widths = [max(map(len, cells)) for cells in by_column]
    room = terminal_width() - len(GAP) * (len(widths) - 1)

    @cache
    def cost(column: int, width: int) -> int:
        """Returns the lines of a column at a width, plus a penalty for cut words."""
        cells = by_column[column]
        cut_words = sum(_too_long(cell, width, WORDS) + CUT_PART * _too_long(cell, width, PARTS) for cell in cells)
        return sum(len(_cut(cell, width)) for cell in cells) + cut_words

    while sum(widths) > room and max(widths) > NARROWEST:
        wide = [i for i, width in enumerate(widths) if width > NARROWEST]
        narrowed = min(wide, key=lambda i: (cost(i, widths[i] - 1) - cost(i, widths[i]), -widths[i]))
        widths[narrowed] -= 1
    for cells in rows:
        lines = zip_longest(*map(_cut, cells, widths), fillvalue="")
        for line in lines:
            yield GAP.join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


WORDS = re.compile(r"(?:\[[^\]]*\]|[^\s.,_])*[\s.,_]+|(?:\[[^\]]*\]|[^\s.,_])+")
"""Words end after blanks, dots, commas and underscores, but never inside brackets."""
PARTS = re.compile(r"[^\s.,_+(]*[\s.,_+(]+|[^\s.,_+(]+")
"""Parts of words: they also end after "+" and "(", and inside brackets."""


def _indent(text: str, width: int) -> str:
    return text[: len(text) - len(text.lstrip())][: width // 2]


def _too_long(text: str, width: int, words: re.Pattern[str]) -> int:
    """Returns the number of words that do not fit on a line."""
    room = width - len(_indent(text, width))
    return sum(len(word.rstrip()) > room for word in words.findall(text.lstrip()))


def _cut(text: str, width: int) -> list[str]:
    """Returns a text as lines, cut between words if possible, else within them; all keep its indent."""
    indent = _indent(text, width)
    lines, line = list[str](), indent
    for word in (PARTS if _too_long(text, width, WORDS) else WORDS).findall(text.lstrip()):
        if len((line + word).rstrip()) > width and line != indent:
            lines.append(line.rstrip())
            line = indent
        line += word
        while len(line.rstrip()) > width:
            lines.append(line[:width])
            line = indent + line[width:]
    return [*lines, line.rstrip()]


class Notebook:
    """Shows an object in a notebook as it prints."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def counted(number: int, thing: str) -> str:
    """'1 collective', '2 collectives'."""
    return f"{number} {thing}{'s' * (number != 1)}"


def paragraph(text: str, indent: int = 4) -> str:
    """Returns a line wrapped to the terminal, with continuation lines indented further."""
    blanks = " " * (len(text) - len(text.lstrip()) + indent)
    lines = textwrap.wrap(
        text, max(terminal_width(), 2 * NARROWEST), subsequent_indent=blanks, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines)
