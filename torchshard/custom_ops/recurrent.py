"""Recurrent layers, each one op of a graph: PyTorch's kernels on what is whole, and hidden units split over the ranks.

A rank that has some of the hidden units has their rows of all gates. In each step it needs all units of the step
before, and computes its own:

    gates[t] = x[t] @ w_ih[own].T + all_gather(h[t - 1]) @ w_hh[own].T          backward: reduce_scatter
    h[t], c[t] = cell(gates[t], h[t - 1][own], c[t - 1][own])

The units that the next layer reads are those that were gathered for the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchshard.core.autocast import current_autocast
from torchshard.core.layouts import Part
from torchshard.custom_ops.stepwise import Steps, Stepwise
from torchshard.custom_ops.whole import WholeCall


class Kind(NamedTuple):
    """One of PyTorch's recurrences."""

    gates: int
    states: int
    cell: Callable[..., tuple[Tensor, ...]]
    """(gates of the input, gates of the hidden units, own state before) -> own state."""


def _lstm(x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = (x + hidden).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, hidden: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), hidden.chunk(3, -1)
    z = (xz + hz).sigmoid()
    return ((1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * h,)


KINDS: Mapping[Any, Kind] = {
    torch.lstm: Kind(4, 2, _lstm),
    torch.gru: Kind(3, 1, _gru),
    torch.rnn_tanh: Kind(1, 1, lambda x, hidden, h: ((x + hidden).tanh(),)),
    torch.rnn_relu: Kind(1, 1, lambda x, hidden, h: ((x + hidden).relu(),)),
}
"""PyTorch's function -> what it computes; the formulas are those of `torch.nn.LSTM`, `GRU` and `RNN`."""

ARGUMENTS = (
    "input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first",
)  # fmt: skip
"""Those functions' arguments, for tensors that are not packed."""


def is_recurrent(function: Any, args: Sequence[Any]) -> bool:
    """Whether a call is of one of these, of sequences that are not packed."""
    return function in KINDS and len(args) == len(ARGUMENTS) and isinstance(args[3], bool)


@dataclass(eq=False)
class RecurrentCall(WholeCall):
    """A call of one of them, for all steps and layers."""

    device: str = "cpu"
    """The type of the device: dropout between layers is drawn by PyTorch's own stream on a CPU, by cuDNN's on a GPU."""

    def bound(self, operands: Sequence[Any]) -> dict[str, Any]:
        """The arguments by their names."""
        return dict(zip(ARGUMENTS, self.rebuild(operands)[0], strict=True)) | {"device": self.device}

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """PyTorch's own op; on fake tensors shapes alone, for there it would be unrolled."""
        if not is_fake(args[0]):
            return self.function(*args)
        self.device, self.draws = args[0].device.type, draws(dict(zip(ARGUMENTS, args, strict=True)))
        dtype = _autocast_dtype(self.function, args[0])
        return tuple(t.to(dtype) for t in _shapes(args))


def _autocast_dtype(function: Any, x: Tensor) -> torch.dtype:
    """The dtype of the results: on a GPU autocast casts all that cuDNN computes, on a CPU oneDNN's LSTM alone."""
    dtype = dict(current_autocast()).get(x.device.type)
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype is None or x.dtype is torch.float64:
        return x.dtype
    if x.device.type == "cpu" and (function is not torch.lstm or not getattr(torch.ops.mkldnn, known[dtype])()):
        return x.dtype
    return dtype


def draws(args: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers."""
    return bool(args["train"] and args["dropout"] > 0 and args["num_layers"] > 1)


def states_of(hx: Any) -> list[Tensor]:
    """The states of a recurrence, of which PyTorch takes one by itself."""
    return list(hx) if isinstance(hx, (list, tuple)) else [hx]


def _shapes(args: Sequence[Any]) -> tuple[Tensor, ...]:
    x, states = args[0], states_of(args[1])
    width = states[0].shape[-1] * (2 if args[7] else 1)
    return x.new_empty(*x.shape[:2], width), *(torch.empty_like(state) for state in states)


@dataclass(frozen=True)
class SplitRecurrent(Stepwise):
    """The same call where each rank has some of the hidden units."""

    function: Any
    parts: tuple[Part, ...]
    """How the units lie: see `layouts.Shard`."""
    group: str
    __module__: str = __name__

    @property
    def __name__(self) -> str:
        """As the graph's code has it."""
        return f"split_{self.function.__name__}"

    def __call__(self, *args: Any) -> Any:
        """In a process group, or on fake tensors."""
        return _shapes(args) if is_fake(args[0]) else super().__call__(*args)

    def steps(self, *args: Any) -> Steps:
        """PyTorch's arguments, with this rank's rows of the parameters and units of the states; so are the results."""
        x, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first = args
        states = states_of(hx)
        each, directions = 4 if has_biases else 2, 2 if bidirectional else 1
        x = x.transpose(0, 1) if batch_first else x
        last: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            x = F.dropout(x, dropout, train) if layer else x
            runs = []
            for at in range(layer * directions, (layer + 1) * directions):
                weights, before = params[at * each : (at + 1) * each], tuple(state[at] for state in states)
                run = self._run(x, before, weights, backward=bool(at % directions), whole=layer < layers - 1)
                runs.append((yield from run))
            x = torch.cat([made for made, _ in runs], -1)
            last += [state for _, state in runs]
        return x.transpose(0, 1) if batch_first else x, *(torch.stack(state) for state in zip(*last, strict=True))

    def _run(
        self, x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor], *, backward: bool, whole: bool
    ) -> Steps:
        """One layer in one direction: the hidden units of each step, own or of all ranks, and the last state."""
        biases, cell = weights[2:] or (None, None), KINDS[self.function].cell
        gates, made = F.linear(x, weights[0], biases[0]), []
        steps = range(len(x) - 1, -1, -1) if backward else range(len(x))
        for step in steps:
            units = yield self._all(state[0])
            made.append(units if whole else state[0])
            state = cell(gates[step], F.linear(units, weights[1], biases[1]), *state)
        made = [*made[1:], (yield self._all(state[0])) if whole else state[0]]
        return torch.stack(made[::-1] if backward else made), state

    def _all(self, h: Tensor) -> tuple[Any, tuple[Any, ...]]:
        """The hidden units of all ranks: the collective that gives them."""
        parts = tuple(number for part in self.parts for number in part)
        return torch.ops.torchshard.all_gather.default, (h, h.ndim - 1, parts, self.group)
