"""Recurrent layers (LSTM, GRU, RNN) as single ops of a graph, unsharded or split by hidden units.

A call with all its layers and steps is one op, because unrolled it would be thousands of nodes.
Unsharded operands go to PyTorch's own kernel. If hidden units are split, a rank has the rows of all
gates for its units. Each step needs all units of the previous step, and computes the rank's own:

    gates[t] = x[t] @ w_ih[own].T + all_gather(h[t - 1]) @ w_hh[own].T          backward: reduce_scatter
    h[t], c[t] = cell(gates[t], h[t - 1][own], c[t - 1][own])

The next layer reads the units that were gathered for the next step, so it needs no collective of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchshard.core.autocast import current_autocast
from torchshard.core.layouts import Part
from torchshard.custom_ops.fx_types import Argument, Target
from torchshard.custom_ops.stepwise import Computation, Stepwise
from torchshard.custom_ops.whole import WholeCall


class Recurrence(NamedTuple):
    """The computation of one of PyTorch's recurrent functions."""

    gates: int
    states: int
    cell: Callable[..., tuple[Tensor, ...]]
    """(gates of the input, gates of the hidden units, *state before the step) -> state after it."""


def _lstm(x: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = (x + hidden).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, hidden: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), hidden.chunk(3, -1)
    z = (xz + hz).sigmoid()
    return ((1 - z) * (xn + (xr + hr).sigmoid() * hn).tanh() + z * h,)


RECURRENCES: Mapping[Target, Recurrence] = {
    torch.lstm: Recurrence(4, 2, _lstm),
    torch.gru: Recurrence(3, 1, _gru),
    torch.rnn_tanh: Recurrence(1, 1, lambda x, hidden, h: ((x + hidden).tanh(),)),
    torch.rnn_relu: Recurrence(1, 1, lambda x, hidden, h: ((x + hidden).relu(),)),
}
"""PyTorch's function -> its computation, as in the docs of `torch.nn.LSTM`, `GRU` and `RNN`."""

ARGUMENTS = (
    "input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first",
)  # fmt: skip
"""The arguments of those functions; calls with packed sequences have others."""


def is_recurrent(function: Target, args: Sequence[Argument]) -> bool:
    """Returns whether a call is a recurrent function's on sequences that are not packed."""
    return function in RECURRENCES and len(args) == len(ARGUMENTS) and isinstance(args[3], bool)


@dataclass(eq=False)
class RecurrentCall(WholeCall):
    """A call of a recurrent function, for all steps and layers."""

    device: str = "cpu"
    """The device type: dropout between layers draws from PyTorch's RNG on CPUs, from cuDNN's on GPUs."""

    def bound(self, operands: Sequence[Argument]) -> dict[str, Argument]:
        """Returns the arguments by name, plus the device type, which the rule needs."""
        return dict(zip(ARGUMENTS, self.rebuild(operands)[0], strict=True)) | {"device": self.device}

    def run(self, args: Sequence[Argument], kwargs: dict[str, Argument]) -> object:
        """Runs PyTorch's kernel; on fake tensors only computes shapes: PyTorch would unroll all steps."""
        if not is_fake(args[0]):
            return self.function(*args)
        self.device, self.uses_rng = args[0].device.type, uses_rng(dict(zip(ARGUMENTS, args, strict=True)))
        # autocast casts inside the real kernels, which do not run here
        dtype = _autocast_dtype(self.function, args[0])
        return tuple(t.to(dtype) for t in _shapes(args))


def _autocast_dtype(function: Target, x: Tensor) -> torch.dtype:
    """Returns the results' dtype: autocast casts for cuDNN, and on a CPU only for oneDNN's LSTM."""
    dtype = dict(current_autocast()).get(x.device.type)
    is_supported = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if dtype is None or x.dtype is torch.float64:
        return x.dtype
    if x.device.type != "cpu":
        return dtype
    uses_onednn = function is torch.lstm and getattr(torch.ops.mkldnn, is_supported[dtype])()
    return dtype if uses_onednn else x.dtype


def uses_rng(args: Mapping[str, Argument]) -> bool:
    """Returns whether a call draws random numbers: dropout is applied between layers only."""
    return bool(args["train"] and args["dropout"] > 0 and args["num_layers"] > 1)


def states_of(hx: Argument) -> list[Tensor]:
    """Returns the states of a recurrence as a list; PyTorch passes a single one as a tensor."""
    return list(hx) if isinstance(hx, (list, tuple)) else [hx]


def _shapes(args: Sequence[Argument]) -> tuple[Tensor, ...]:
    """Returns empty tensors with the shapes of the results."""
    x, states = args[0], states_of(args[1])
    width = states[0].shape[-1] * (2 if args[7] else 1)
    return x.new_empty(*x.shape[:2], width), *(torch.empty_like(state) for state in states)


@dataclass(frozen=True)
class SplitRecurrent(Stepwise):
    """A call of a recurrent function with its hidden units split over the ranks."""

    function: Target
    parts: tuple[Part, ...]
    """The parts that the hidden units are split into; see `layouts.Shard`."""
    __module__: str = __name__

    @property
    def __name__(self) -> str:
        """The name in the graph's code."""
        return f"split_{self.function.__name__}"

    def __call__(self, *args: Argument) -> Argument:
        """Runs the op in a process group; on fake tensors computes the shapes only."""
        return _shapes(args) if is_fake(args[0]) else super().__call__(*args)

    def steps(self, *args: Argument) -> Computation:
        """Runs all layers as PyTorch's function does, for this rank's rows and hidden units."""
        x, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first = args
        states = states_of(hx)
        each, directions = 4 if has_biases else 2, 2 if bidirectional else 1
        # the formulas below have the time first, like PyTorch's kernels
        x = x.transpose(0, 1) if batch_first else x
        last: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            x = F.dropout(x, dropout, train) if layer else x
            runs = []
            for index in range(layer * directions, (layer + 1) * directions):
                weights, state = params[index * each : (index + 1) * each], tuple(state[index] for state in states)
                run = self._run(x, state, weights, backward=bool(index % directions), whole=layer < layers - 1)
                runs.append((yield from run))
            x = torch.cat([units for units, _ in runs], -1)
            last += [state for _, state in runs]
        return x.transpose(0, 1) if batch_first else x, *(torch.stack(state) for state in zip(*last, strict=True))

    def collectives(self, *args: Argument) -> Iterable[tuple[Target, tuple[Argument, ...], int]]:
        """Yields the gather: one per step of a layer, and one of the last units for the next layer."""
        x, hx, _, _, layers, _, _, bidirectional, batch_first = args
        time, directions = x.shape[1 if batch_first else 0], 2 if bidirectional else 1
        op, operands = self._gather(states_of(hx)[0][0])
        yield op, operands, directions * (layers * time + layers - 1)

    def _run(
        self, x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor], *, backward: bool, whole: bool
    ) -> Computation:
        """Runs one layer in one direction; returns the hidden units of each step and the last state.

        Args:
            whole: whether to return all hidden units, as the next layer needs, or only this rank's.
        """
        biases, cell = weights[2:] or (None, None), RECURRENCES[self.function].cell
        # the input's gates need no earlier step, so one matrix product computes the gates of all
        # steps
        gates, outputs = F.linear(x, weights[0], biases[0]), []
        steps = range(len(x) - 1, -1, -1) if backward else range(len(x))
        for step in steps:
            units = yield self._gather(state[0])
            outputs.append(units if whole else state[0])
            state = cell(gates[step], F.linear(units, weights[1], biases[1]), *state)
        # each entry is the state before its step: drop the initial state, append the last
        outputs = [*outputs[1:], (yield self._gather(state[0])) if whole else state[0]]
        return torch.stack(outputs[::-1] if backward else outputs), state

    def _gather(self, h: Tensor) -> tuple[Target, tuple[Argument, ...]]:
        """Returns the collective, with its arguments, that gathers the hidden units of all ranks."""
        parts = tuple(number for part in self.parts for number in part)
        return torch.ops.torchshard.all_gather.default, (h, h.ndim - 1, parts, self.group)
