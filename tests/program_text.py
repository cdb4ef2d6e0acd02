"""The text of a random model: lines that are written one after the other, each over the values so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Word = tuple[int, int, int, int]
"""The kind of line, the value (counted back from the latest), and two numbers that each kind interprets differently."""

LARGEST = 1500
"""The most elements of a value; a line with a larger result is skipped."""
LOUDEST = 1e3
"""The largest absolute value; larger values would lose digits to rounding."""
CLASSES = 7


@dataclass(frozen=True)
class Text:
    """A model as source text, with its inputs."""

    lines: tuple[str, ...]
    results: tuple[str, ...]
    parameters: tuple[tuple[int, ...], ...]
    """Shapes of p0, p1, ..."""
    shape: tuple[int, ...]
    """The shape of the input x; `ids` has its first two dims."""

    @property
    def source(self) -> str:
        """The source text of the model's forward."""
        body = "\n".join(f"    {line}" for line in (*self.lines, f"return {', '.join(self.results)}"))
        return f"def forward(self, x, ids):\n{body}\n"

    def __str__(self) -> str:
        held = ", ".join(f"p{i} {list(shape)}" for i, shape in enumerate(self.parameters))
        return f"x {list(self.shape)}, {held}\n{self.source}"

    def model(self) -> nn.Module:
        """The model, with weights that depend on the text alone."""
        return _Made(self)

    def inputs(self, batch: int = 0) -> tuple[Tensor, Tensor]:
        """The model's inputs; `batch` is the seed."""
        draw = torch.Generator().manual_seed(batch)
        x = torch.randn(self.shape, generator=draw, dtype=torch.float64)
        return x, torch.randint(CLASSES, self.shape[:2], generator=draw)


class _Made(nn.Module):
    running: Tensor

    def __init__(self, text: Text) -> None:
        super().__init__()
        for i, shape in enumerate(text.parameters):
            self.register_parameter(f"p{i}", nn.Parameter(_weight(i, shape)))
        self.register_buffer("running", torch.ones((), dtype=torch.float64))
        scope: dict[str, Any] = {"torch": torch, "F": F}
        exec(text.source, scope)
        self._text = scope["forward"]

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self._text(self, x, ids)


def _weight(index: int, shape: Sequence[int]) -> Tensor:
    draw = torch.Generator().manual_seed(index)
    return torch.randn(tuple(shape), generator=draw, dtype=torch.float64) / max((1, *shape[-1:])) ** 0.5


class _Held:
    """The `self` of a forward while the program is written."""

    def __init__(self) -> None:
        self.running = torch.ones((), dtype=torch.float64)


class Writer:
    """Turns words into lines, and keeps the values that the lines so far compute."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Starts without lines; `shape` is the input's."""
        self.shape = shape
        self.lines: list[str] = []
        self.parameters: list[tuple[int, ...]] = []
        self._start()

    def _start(self) -> None:
        """Runs all lines."""
        x, ids = Text((), (), (), self.shape).inputs()
        self.values: dict[str, Tensor] = {}
        self.own: set[str] = set()
        """Values that may be written to: they don't share memory with an input, parameter or buffer."""
        self._held = _Held()
        self._scope: dict[str, Any] = {"torch": torch, "F": F, "ids": ids, "self": self._held}
        self._keep("x", x)
        for i, line in enumerate(self.lines):
            self._keep(f"v{i}", self._value(line))

    def _keep(self, name: str, value: Tensor) -> None:
        self.values[name] = self._scope[name] = value
        held = {t.untyped_storage().data_ptr() for t in (self.values["x"], *vars(self._held).values())}
        if value.untyped_storage().data_ptr() not in held:
            self.own.add(name)

    def _value(self, line: str) -> Any:
        for i, shape in enumerate(self.parameters):
            if not hasattr(self._held, f"p{i}"):
                setattr(self._held, f"p{i}", _weight(i, shape))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(len(line))
            return eval(line, self._scope)

    def parameter(self, *shape: int) -> str:
        """The name of a parameter of this shape: on every other line the latest one if it exists, else a new one."""
        found = [i for i, known in enumerate(self.parameters) if known == shape]
        if found and len(self.lines) % 2:
            return f"self.p{found[-1]}"
        self.parameters.append(shape)
        return f"self.p{len(self.parameters) - 1}"

    def like(self, name: str, b: int) -> str:
        """The name of a value that broadcasts with `name`; it may be `name` itself."""
        found = [other for other, v in self.values.items() if _broadcasts(v.shape, self.values[name].shape)]
        return found[-1 - b % len(found)]

    def read(self, word: Word, kinds: Sequence[Kind]) -> None:
        """Adds a line of one of these kinds, unless the word does not fit the values so far."""
        kind, a, b, c = word
        names, parameters = list(self.values), list(self.parameters)
        name = names[-1 - a % len(names)]
        line = kinds[kind % len(kinds)](self, name, b, c) if self.values[name].ndim else f"{name}[None] * 0.5"
        if line is not None and self._is_good(line):
            self.lines.append(line)
        else:
            self.parameters = parameters
            self._start()

    def _is_good(self, line: str) -> bool:
        """Whether a line runs and all values then stay within `LARGEST` and `LOUDEST`; keeps the line's value."""
        try:
            made = self._value(line)
        except (RuntimeError, IndexError, ValueError):
            return False
        if (
            not isinstance(made, Tensor)
            or not made.is_floating_point()
            or not 0 < made.numel() <= LARGEST
            or made.ndim > 5
        ):
            return False
        self._keep(f"v{len(self.lines)}", made)
        return all(bool(v.isfinite().all()) and v.abs().max() < LOUDEST for v in self.values.values())

    def text(self, results: int) -> Text:
        """The program that returns the last values."""
        return Text(
            tuple(f"v{i} = {line}" for i, line in enumerate(self.lines)),
            tuple(list(self.values)[-results:]),
            tuple(self.parameters),
            self.shape,
        )


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    try:
        return len(torch.broadcast_shapes(tuple(a), tuple(b))) <= 5
    except RuntimeError:
        return False


Kind = Callable[[Writer, str, int, int], str | None]
"""Function of the program so far, a value's name and two numbers -> a line; None if it does not fit the value."""
