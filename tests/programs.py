"""Random models with random plans, for cases that no hand-written test covers.

A program is a list of words of four small numbers. Each word refers to the values so far and becomes one line of a
`forward`; a word that does not fit is skipped. So any list of words is a valid model. A shorter list of smaller
numbers is a simpler model, so a failure shrinks to a few lines that can be run as they are.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from torchshard.testing import Report, capture

Word = tuple[int, int, int, int]
"""The kind of line, the value (counted back from the latest), and two numbers that each kind interprets differently."""

LARGEST = 1500
"""The most elements of a value; a line with a larger result is skipped."""
LOUDEST = 1e3
"""The largest absolute value; larger values would lose digits to rounding."""
CLASSES = 7

words = st.tuples(st.integers(0, 10_000), st.integers(0, 6), st.integers(0, 8), st.integers(0, 8))
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


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


# --- lines -----------------------------------------------------------------------------------------------------------


class _Writer:
    """Turns words into lines, and keeps the values that the lines so far compute."""

    def __init__(self, shape: tuple[int, ...]) -> None:
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

    def read(self, word: Word) -> None:
        """Adds a line, unless the word does not fit the values so far."""
        kind, a, b, c = word
        names, parameters = list(self.values), list(self.parameters)
        name = names[-1 - a % len(names)]
        line = KINDS[kind % len(KINDS)](self, name, b, c) if self.values[name].ndim else f"{name}[None] * 0.5"
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


Kind = Callable[[_Writer, str, int, int], str | None]


def _linear(w: _Writer, x: str, b: int, c: int) -> str:
    wide = w.values[x].shape[-1]
    bias = f", {w.parameter(1 + b)}" if c % 2 else ""
    return f"F.linear({x}, {w.parameter(1 + b, wide)}{bias})"


def _pointwise(w: _Writer, x: str, b: int, c: int) -> str:
    known = ("{}.relu()", "F.gelu({})", "{}.tanh()", "-{}", "{}.sigmoid()", "{} * 0.5 + 1", "{}.abs()",
             "F.silu({})", "{}.clamp(-0.5, 0.7)", "{}.float().double()", "torch.where({0} > 0, {0}, 0.1)",
             "({} * 2).exp().log1p()")  # fmt: skip
    return known[(b * 9 + c) % len(known)].format(x)


def _two(w: _Writer, x: str, b: int, c: int) -> str:
    known = ("{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "torch.atan2({}, 2 + {}.abs())")
    return known[c % len(known)].format(x, w.like(x, b))


def _scaled(w: _Writer, x: str, b: int, c: int) -> str:
    """Combines a value with a parameter that varies along one dim."""
    shape = w.values[x].shape
    dim = b % len(shape)
    return f"{x} {'+*-'[c % 3]} {w.parameter(*[n if i == dim else 1 for i, n in enumerate(shape)][dim:])}"


def _matmul(w: _Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    if len(shape) < 2:
        return f"torch.outer({x}, {x})" if len(shape) else None
    return (f"{x} @ {x}.mT", f"{x}.mT @ {x}", f"torch.einsum('...ij,kj->...ik', {x}, {w.parameter(1 + b, shape[-1])})")[
        c % 3
    ]


def _norm(w: _Writer, x: str, b: int, c: int) -> str:
    shape = w.values[x].shape
    wide = shape[-1]
    known = (
        lambda: f"F.layer_norm({x}, ({wide},), {w.parameter(wide)}, {w.parameter(wide)}, 1e-2)",
        lambda: f"F.rms_norm({x}, ({wide},), {w.parameter(wide)}, 1e-2)",
        lambda: f"{x}.softmax({b % len(shape)})",
        lambda: f"F.log_softmax({x}, {b % len(shape)})",
        lambda: f"F.group_norm({x}, 1, eps=1e-2)",
        lambda: f"{x} * torch.rsqrt({x}.square().mean(-1, keepdim=True) + 0.1)",
    )
    return known[c % len(known)]()


def _merged(w: _Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    if len(shape) < 2:
        return f"{x}[None]"
    dim = b % (len(shape) - 1)
    return f"{x}.{('flatten', 'contiguous().flatten')[c % 2]}({dim}, {dim + 1})"


def _factored(w: _Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    dim = b % len(shape)
    factors = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]
    return f"{x}.unflatten({dim}, (-1, {factors[c % len(factors)]}))" if len(shape) < 5 else None


def _viewed(w: _Writer, x: str, b: int, c: int) -> str:
    """Merges all dims and cuts the result into two."""
    total = w.values[x].numel()
    first = [n for n in range(1, total + 1) if total % n == 0]
    return f"{x}.reshape({first[b % len(first)]}, -1)" if c % 2 else f"{x}.reshape(-1, {first[b % len(first)]})"


def _moved(w: _Writer, x: str, b: int, c: int) -> str:
    ndim = len(w.values[x].shape)
    order = random.Random(9 * b + c).sample(range(ndim), ndim)
    known = (f"{x}.transpose({b % ndim}, {c % ndim})", f"{x}.permute({order})", f"{x}.unsqueeze({c % (ndim + 1)})",
             f"{x}.squeeze({b % ndim})", f"{x}.movedim({b % ndim}, {c % ndim})")  # fmt: skip
    return known[(b + c) % len(known)]


def _cut(w: _Writer, x: str, b: int, c: int) -> str:
    shape = w.values[x].shape
    dim = b % len(shape)
    size = shape[dim]
    start = c % size
    known = (
        f"{x}.narrow({dim}, {start}, {size - start})",
        f"{x}.narrow({dim}, 0, {start + 1})",
        f"{x}.chunk({1 + c % 3}, {dim})[-1]",
        f"{x}.split({1 + c}, {dim})[0]",
        f"{x}.select({dim}, {start})" if len(shape) > 1 else f"{x}[::2]",
        f"{x}.flip({dim})",
        f"{x}.roll({c}, {dim})",
        f"{x}.tril({c - 4})",
        f"{x}.index_select({dim}, torch.arange({size}).flip(0))",
        f"F.pad({x}, ({c % 3}, {b % 2}))",
        f"{x}.unfold({dim}, {start + 1}, 1)",
    )
    return known[(b * 9 + c) % len(known)]


def _joined(w: _Writer, x: str, b: int, c: int) -> str:
    other, ndim = w.like(x, b), len(w.values[x].shape)
    return (f"torch.cat([{x}, {other}], {c % ndim})", f"torch.stack([{x}, {other}], {c % (ndim + 1)})",
            f"{x}.expand(2, *{x}.shape)", f"{x}.repeat_interleave(2, {c % ndim})")[(b + c) % 4]  # fmt: skip


def _reduced(w: _Writer, x: str, b: int, c: int) -> str:
    dim = b % len(w.values[x].shape)
    known = (f"{x}.sum({dim})", f"{x}.mean({dim}, keepdim=True)", f"{x}.amax({dim})", f"{x}.logsumexp({dim})",
             f"{x}.var({dim}, correction=0)", f"{x}.cumsum({dim})", f"{x}.mean()", f"{x}.norm(dim={dim}) + 1",
             f"{x}.argmax({dim}).double() + {x}.sum({dim})")  # fmt: skip
    return known[c % len(known)]


def _written(w: _Writer, x: str, b: int, c: int) -> str | None:
    if x not in w.own:
        return f"{x}.clone()"
    dim = b % len(w.values[x].shape)
    known = (f"{x}.mul_(0.5)", f"{x}.add_({w.like(x, b)})", f"{x}.narrow({dim}, 0, 1).mul_(2)", f"{x}.relu_()",
             f"{x}.view(-1).add_(1)", f"{x}.select({dim}, 0).zero_()", f"{x}.transpose(0, {dim}).sub_(0.3)",
             f"{x}.masked_fill_({x} > 0.5, 0.25)", f"{x}.copy_({w.like(x, c)})")  # fmt: skip
    return known[c % len(known)]


def _random(w: _Writer, x: str, b: int, c: int) -> str:
    return (f"F.dropout({x}, 0.3)", f"{x} + torch.rand_like({x})", f"{x} * torch.bernoulli({x}.detach().sigmoid())",
            f"{x} + torch.randn({list(w.values[x].shape)}, dtype={x}.dtype)")[c % 4]  # fmt: skip


def _looked_up(w: _Writer, x: str, b: int, c: int) -> str:
    return f"F.embedding(ids, {w.parameter(CLASSES, 1 + b)})"


def _lost(w: _Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    wide = w.parameter(CLASSES, shape[-1])
    ids = w.values["x"].shape[:2].numel()
    if len(shape) > 1 and shape[:-1].numel() == ids:
        how = ("", ", ignore_index=2", ", label_smoothing=0.1", ", reduction='sum'")[c % 4]
        return f"F.cross_entropy(F.linear({x}, {wide}).reshape(-1, {CLASSES}), ids.reshape(-1){how})"
    return (f"F.mse_loss({x}, {w.like(x, b)})", f"F.l1_loss({x}, {x}.detach() * 2)", f"F.smooth_l1_loss({x}, {x} * 0)",
            f"F.binary_cross_entropy_with_logits({x}, {x}.detach().sigmoid())")[c % 4]  # fmt: skip


def _attended(w: _Writer, x: str, b: int, c: int) -> str | None:
    if len(w.values[x].shape) < 3:
        return None
    how = ("", ", is_causal=True", ", scale=0.5")[c % 3]
    return f"F.scaled_dot_product_attention({x}, {x} * {w.parameter(w.values[x].shape[-1])}, {x} + 1{how})"


def _convolved(w: _Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    if len(shape) != 3:
        return None
    return f"F.conv1d({x}, {w.parameter(1 + b, shape[1], 1 + c % 3)}, {w.parameter(1 + b)}, padding={c % 2})"


def _picked(w: _Writer, x: str, b: int, c: int) -> str:
    """Picks elements by the order of their values or by constant indices."""
    shape = w.values[x].shape
    dim = b % len(shape)
    size = shape[dim]
    order, places = f"{x}.argsort(dim={dim}, stable=True)", f"torch.arange({size}).flip(0)"
    known = (
        f"{x}.sort(dim={dim}, stable=True).values",
        f"{x}.topk({1 + c % size}, {dim}).values",
        f"{x}.gather({dim}, {order})",
        f"{x}.gather({dim}, {order}.narrow({dim}, 0, {1 + c % size}))",
        f"torch.zeros_like({x}).scatter({dim}, {order}, {x})",
        f"({x} * 2).scatter_add({dim}, {order}.narrow(0, 0, 1), {x})",
        f"{x}.index_add({dim}, {places}, {x})",
        f"{x}.index_copy({dim}, {places}, {x} * 3)",
        f"{x}[{places}]" if dim == 0 else f"{x}[:, {places}]",
        f"{x}.index_put((torch.tensor([{c % shape[0]}]),), {x}[:1] * 2)",
        f"{x} * torch.searchsorted(torch.linspace(-1, 1, 5, dtype={x}.dtype), {x}.detach().contiguous())",
    )
    return known[(b * 9 + c) % len(known)]


def _batched(w: _Writer, x: str, b: int, c: int) -> str | None:
    """Ops on a batch of matrices or signals."""
    shape = w.values[x].shape
    if len(shape) < 3:
        return None
    known = (
        f"F.avg_pool1d({x}, 2, ceil_mode=True)",
        f"F.max_pool1d({x}, 1 + {c % 2})",
        f"F.adaptive_avg_pool1d({x}, {1 + b})",
        f"F.interpolate({x}, scale_factor=2)",
        f"F.conv_transpose1d({x}, {w.parameter(shape[1], 1 + b, 1 + c % 3)})",
        f"F.conv1d({x}, {w.parameter(shape[1] * (1 + b % 2), 1, 1 + c % 2)}, groups={shape[1]})",
        f"torch.fft.rfft({x}, dim={b % len(shape)}).real",
        f"torch.linalg.solve({x} @ {x}.mT + 3 * torch.eye({shape[-2]}, dtype={x}.dtype), {x})",
        f"torch.linalg.inv({x}.mT @ {x} + 2 * torch.eye({shape[-1]}, dtype={x}.dtype))",
        f"torch.baddbmm({x}.flatten(0, -3) @ {x}.flatten(0, -3).mT, {x}.flatten(0, -3), {x}.flatten(0, -3).mT, beta=2)",
    )
    return known[(b * 9 + c) % len(known)]


def _normed(w: _Writer, x: str, b: int, c: int) -> str | None:
    """Normalizes by statistics of a batch, a sample or a vector."""
    shape = w.values[x].shape
    if len(shape) < 2:
        return None
    weight = w.parameter(shape[1])
    groups = [n for n in range(1, shape[1] + 1) if shape[1] % n == 0]
    known = (
        f"F.batch_norm({x}, None, None, {weight}, training=True, eps=1e-2)",
        f"F.batch_norm({x}, {weight}.detach() * 0, {weight}.detach() * 0 + 1, {weight}, eps=1e-2)",
        f"F.instance_norm({x}, eps=1e-2)",
        f"F.group_norm({x}, {groups[-1 - b % len(groups)]}, {weight}, {weight}, 1e-2)",
        f"F.normalize({x} + 0.1, dim={b % len(shape)})",
    )
    return known[c % len(known)]


def _counted(w: _Writer, x: str, b: int, c: int) -> str:
    """Writes to a buffer and reads it."""
    return f"{x} * (1 + self.running.add_({x}.detach().mean(), alpha=0.1))"


KINDS: tuple[Kind, ...] = (
    _linear, _pointwise, _two, _linear, _scaled, _norm, _merged, _factored, _moved, _cut, _joined, _reduced, _written,
    _matmul, _viewed, _random, _looked_up, _lost, _attended, _convolved, _pointwise, _linear, _written, _counted,
    _picked, _batched, _normed,
)  # fmt: skip


def written(shape: tuple[int, ...], said: Sequence[Word], results: int = 2) -> Text:
    """The program that a list of words describes."""
    writer = _Writer(shape)
    for word in said:
        writer.read(word)
    return writer.text(results)


def drawn(seed: int) -> Text:
    """A program of random words, determined by a seed."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 4)))
    count = draw.randint(3, 30)
    said = [
        (draw.randint(0, 10_000), draw.choice((0, 0, 0, 1, 1, 2, 3)), draw.randint(0, 8), draw.randint(0, 8))
        for _ in range(count)
    ]
    return written(shape, said, draw.randint(1, 3))


def can_be_trained(text: Text) -> bool:
    """Whether its backward runs, and some gradient exceeds rounding noise."""
    model, inputs = text.model(), text.inputs()
    try:
        outputs = model(inputs[0].requires_grad_(), inputs[1])
        made = outputs if isinstance(outputs, tuple) else (outputs,)
        sum((o.sum() for o in made if o.requires_grad), torch.zeros(())).backward()
    except RuntimeError:  # writes to a tensor that was saved for the backward, or to one of several views
        return False
    grads = [t.grad.abs().max() for t in (inputs[0], *model.parameters()) if t.grad is not None]
    return any(bool(g > 1e-6) for g in grads)


def texts(longest: int = 30) -> st.SearchStrategy[Text]:
    """Trainable programs of at most `longest` lines."""
    said = st.lists(words, min_size=1, max_size=longest)
    return st.builds(written, shapes, said, st.integers(1, 3)).filter(can_be_trained)


def checked(text: Text, world: int, seed: int) -> Report:
    """Compares a program under a random plan with the unsharded model.

    Raises:
        AssertionError: an op lacks a rule.
    """
    model, inputs = text.model(), text.inputs()
    inputs[0].requires_grad_()
    call = capture(model, inputs, dynamic=False)
    ruleless = call.ops_without_rule()
    assert not ruleless, f"no rule: {ruleless}"
    return call.plan_at_random(world, seed).check(by_graphs=True)
