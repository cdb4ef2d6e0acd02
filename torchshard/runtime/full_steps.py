"""Steps of optimizers that read full parameters: Muon, Adafactor, LBFGS.

    before, after    each rank has its slices of parameters, gradients and the optimizer's state
    the step         one rank has the full ones of a parameter, and runs the optimizer's own step;
                     to the other ranks the parameter has no gradient

PyTorch's own steps run in turns, for some parameters each, so a rank has few full ones at a time.

The parameters are the same objects all the time, as are the optimizer and its groups: only their data
change. So the optimizer's code, and all that refers to a parameter, stay as they are. State of a
parameter's shape is split like the parameter, other state by rows. If a step reads all parameters,
every rank has all of them, and makes the same step.

Source: ZeRO-1 (Rajbhandari et al., 2020) has an owner for each slice of a state; here it has the full
matrix, and only during the step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer

from torchshard.core.errors import DistributedError, InputError
from torchshard.core.mesh import Place
from torchshard.distributed.consistency import gather_bytes
from torchshard.distributed.group import Group
from torchshard.distributed.kernels import reduced
from torchshard.distributed.objects import decode, encode
from torchshard.distributed.owners import Owned, collected, dealt
from torchshard.distributed.ranks import Ranks
from torchshard.runtime.optimizer_classes import Reach, parameters_of
from torchshard.runtime.optimizer_states import as_slice, state_type
from torchshard.runtime.state_forms import Form, State, closed, opened, split_tensors
from torchshard.weights.following import SliceType
from torchshard.weights.local_slice import LocalSlice, unwatched, watched
from torchshard.weights.parameter import DATA, ShardedParameter

_TURN_BYTES = 1 << 26
"""The full parameters that an owner has at a time, in bytes, if a step may run in turns; one may be larger."""

Closure = Callable[[], Any]
Gradient = Literal["kept", "none", "new"]
"""A gradient after a step: as before, dropped (`zero_grad`), or with other values."""


@dataclass
class _Entry:
    """A parameter during a step."""

    parameter: ShardedParameter
    owner: Place
    """The place of the rank that steps it, on the axes that split it."""
    state: State | None = None
    """The state of this rank's slice; None without any."""
    data: Tensor | None = None
    """This rank's slice, during the step."""
    grad: Tensor | None = None
    """This rank's slice of the gradient."""
    is_full: bool = False
    """Whether this rank steps it."""
    given: tuple[Tensor, int] | None = None
    """The full gradient that the optimizer was given, and its version."""
    has_state: bool = False
    """Whether the optimizer has the full state by now, on the ranks that step it."""

    @property
    def slice(self) -> Tensor:
        """This rank's slice, during the step."""
        assert self.data is not None
        return self.data

    @property
    def type(self) -> SliceType:
        """The type of the slice."""
        return state_type(self.parameter, self.parameter.whole)

    def slice_of(self, state: Tensor) -> tuple[Tensor, SliceType]:
        """Returns this rank's slice of a tensor of the state, and its type; a full one may have been loaded."""
        if isinstance(state, LocalSlice) and state.is_split:
            return state.plain, SliceType(state.sharding, state.whole)
        if state.shape == self.slice.shape:
            return _plain(state), self.type
        of = state_type(self.parameter, state.shape)
        return of.sharding.local(_plain(state), self.parameter.ranks.place), of

    @property
    def gradient(self) -> Gradient:
        """What the optimizer has done to the full gradient that it was given."""
        grad = self.parameter.grad
        if grad is None:
            return "none"
        is_kept = self.given is not None and grad is self.given[0] and _version(grad) == self.given[1]
        return "kept" if is_kept else "new"

    def owned(self, of: SliceType, dtype: torch.dtype) -> Owned:
        """Returns the facts by which a tensor of this parameter moves to the owner and back."""
        return Owned(of.sharding, of.whole, dtype, {axis.name: self.owner[axis.name] for axis, _ in of.sharding})


def _plain(x: Tensor) -> Tensor:
    return x.plain if isinstance(x, LocalSlice) else x


def _version(x: Tensor) -> int:
    # `_version`: no public name; tensors of inference mode have none (PyTorch 2.13.0)
    return -1 if x.is_inference() else x._version


def _owners(parameters: Sequence[ShardedParameter]) -> list[Place]:
    """Returns the owner's place of each parameter, so that the ranks have about as much to compute.

    A matrix product of its smaller dims with itself stands for the work: the largest go first, each
    to the rank that has the least.
    """
    work = dict[str, dict[tuple[int, ...], float]]()
    found = dict[int, Place]()

    def cost(number: int) -> float:
        whole = [n for n in parameters[number].whole if n > 1]
        return float(math.prod(whole) * min(whole, default=1))

    for number in sorted(range(len(parameters)), key=cost, reverse=True):
        axes = [axis for axis, _ in parameters[number].sharding]
        places = itertools.product(*(range(axis.size) for axis in axes))
        of_axes = work.setdefault(str(axes), dict.fromkeys(places, 0.0))
        place = min(of_axes, key=of_axes.__getitem__)
        of_axes[place] += cost(number)
        found[number] = dict(zip((axis.name for axis in axes), place, strict=True))
    return [found[number] for number in range(len(parameters))]


@contextlib.contextmanager
def _without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Takes gradients away for a while."""
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(parameters, gradients, strict=True):
            p.grad = grad


class BatchOwner(Protocol):
    """A sharded model, as its optimizers see it."""

    @property
    def batch_group(self) -> Group | None:
        """The ranks whose closures return losses of their own parts of the batch; None if all have the same."""


class FullStep:
    """One step of an optimizer, with full parameters."""

    def __init__(self, optimizer: Optimizer, reaches: Sequence[Reach], *, in_turns: bool = False) -> None:
        """Prepares a step.

        Args:
            reaches: the reach of each of the optimizer's groups.
            in_turns: whether the class's step may run several times, for some of the parameters each.

        Raises:
            InputError: its parameters are of models on different meshes.
        """
        self._optimizer, self._everywhere = optimizer, "model" in reaches
        self._in_turns = in_turns and not self._everywhere
        groups = (g for g, reach in zip(optimizer.param_groups, reaches, strict=True) if reach != "element")
        found = [p for group in groups for p in group["params"] if isinstance(p, ShardedParameter) and p.is_split]
        meshes = {tuple(group.name for group in p.ranks.groups.values()) for p in found}
        if len(meshes) > 1:
            raise InputError(
                f"{type(optimizer).__name__} has parameters of models on different meshes",
                where=f"{type(optimizer).__name__}.step(), meshes {' and '.join(', '.join(m) for m in sorted(meshes))}",
                why="its step reads full parameters, which the ranks of one mesh bring together",
                attempt="an optimizer for each model",
            )
        self._all = [_Entry(p, owner) for p, owner in zip(found, _owners(found), strict=True)]
        self._turn = self._all
        """The parameters of this turn."""
        self._entries: list[_Entry] = []
        """Those that take part so far: with gradients."""

    @property
    def _ranks(self) -> Ranks:
        return self._all[0].parameter.ranks

    def run(self, step: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Makes the step, on all ranks or none.

        Args:
            step: the class's own, without hooks.

        Raises:
            DistributedError: it failed on a rank.
        """
        given = [self._with_slices(arg) if callable(arg) else arg for arg in args]
        named = {name: self._with_slices(arg) if callable(arg) else arg for name, arg in kwargs.items()}

        def made() -> object:
            with unwatched():
                return step(self._optimizer, *given, **named)

        if not self._all:
            return made()
        if args or kwargs or not self._in_turns:
            return self._make(made)
        result, turns = None, self._turns()
        replicated = [p for p in parameters_of(self._optimizer) if not (isinstance(p, ShardedParameter) and p.is_split)]
        for number, turn in enumerate(turns):
            self._turn = turn
            others = [entry.parameter for each in turns if each is not turn for entry in each]
            with _without_gradients([*others, *(replicated if number else ())]):
                result = self._make(made)
        return result

    def _make(self, made: Callable[[], object]) -> object:
        """Makes the step of this turn's parameters."""
        try:
            self._begin()
            result = self._ranks.run_on_all(made, DistributedError, f"{type(self._optimizer).__name__}.step() failed")
            self._end()
        finally:
            self._restore()
        return result

    def _turns(self) -> list[list[_Entry]]:
        """Returns the parameters of each turn: no owner has many full ones at a time."""
        turns, filled = list[list[_Entry]](), dict[str, tuple[int, int]]()
        for entry in self._all:
            size = math.prod(entry.parameter.whole) * entry.parameter.itemsize
            number, total = filled.get(key := str(entry.owner), (0, 0))
            if total and total + size > _TURN_BYTES:
                number, total = number + 1, 0
            filled[key] = number, total + size
            turns += [[] for _ in range(number + 1 - len(turns))]
            turns[number].append(entry)
        return turns

    def _with_slices(self, closure: Closure) -> Closure:
        """Returns a closure that has slices of the parameters, amid a step."""
        call = watched(closure)

        def between() -> Any:
            self._deal_values(self._facts())
            self._to_slices()
            loss = call()
            self._begin()
            return self._mean(loss)

        return between

    def _mean(self, loss: Any) -> Any:
        """Averages a loss over the ranks that split the batch, as DistributedDataParallel averages gradients."""
        batch = cast(BatchOwner | None, self._all[0].parameter.owner())
        group = None if batch is None else batch.batch_group
        if group is None or not (isinstance(loss, Tensor) and loss.numel() == 1):
            return loss
        what = f"the loss in a step of {type(self._optimizer).__name__}"
        return reduced(loss.detach(), dist.ReduceOp.SUM, group, eager=what) / group.size

    # --- from slices to full tensors ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Gives the optimizer full parameters, gradients and, where it has none yet, full states."""
        states, moved = self._optimizer.state, list[tuple[_Entry, Tensor, SliceType]]()
        with unwatched():
            self._entries = [e for e in self._turn if self._everywhere or e.has_state or e.parameter.grad is not None]
            for entry in self._entries:
                grad = entry.parameter.grad
                entry.data, entry.grad = DATA(entry.parameter), None if grad is None else _plain(grad)
                if not entry.has_state:
                    entry.state = opened(states.get(entry.parameter))
            for entry in self._entries:
                moved += [(entry, x, entry.type) for x in (entry.data, entry.grad) if x is not None]
                moved += [] if entry.has_state else [(entry, *entry.slice_of(x)) for x in split_tensors(entry.state)]
        full = iter(self._collected(moved))
        for entry in self._entries:
            self._fill(entry, full)

    def _fill(self, entry: _Entry, full: Iterator[Tensor | None]) -> None:
        """Gives the optimizer a full parameter, or one without a gradient on ranks that do not step it."""
        p, states, data = entry.parameter, self._optimizer.state, next(full)
        grad = next(full) if entry.grad is not None else None
        entry.is_full = data is not None
        p.__class__ = nn.Parameter  # type: ignore[assignment]  # the optimizer's code sees an ordinary parameter
        p.grad = None
        if data is not None:
            p.data, p.grad = data, grad
        entry.given = None if grad is None else (grad, _version(grad))
        if not entry.has_state and entry.state is not None:
            form = Form.of(entry.state)
            tensors = [next(full) for _ in form.sliced]
            states[p] = closed(form.filled(cast("Iterator[Tensor]", iter(tensors)))) if entry.is_full else {}
        entry.has_state = True

    def _collected(self, moved: Sequence[tuple[_Entry, Tensor, SliceType]]) -> Sequence[Tensor | None]:
        if self._everywhere:
            return [self._ranks.gathered(x, of.sharding, of.whole) for _, x, of in moved]
        owned = [entry.owned(of, x.dtype) for entry, x, of in moved]
        return collected(self._ranks, owned, [x for _, x, _ in moved]) if moved else []

    # --- from full tensors to slices ---------------------------------------------------------------------------------

    def _end(self) -> None:
        """Gives each rank its slices of the parameters and of the states."""
        facts = self._facts()
        self._deal_values(facts)
        forms = [form for _, form in facts]
        owned, full = list[Owned](), list[Tensor | None]()
        for entry, form in zip(self._entries, forms, strict=True):
            if form is not None:
                owned += [entry.owned(state_type(entry.parameter, x.whole), x.dtype) for x in form.sliced]
                state = opened(self._optimizer.state[entry.parameter]) if entry.is_full else None
                full += [None] * len(form.sliced) if state is None else split_tensors(state)
        slices = iter(self._dealt(owned, full))
        self._to_slices()
        for entry, form in zip(self._entries, forms, strict=True):
            shapes = [] if form is None else [x.whole for x in form.sliced]
            marked = (as_slice(next(slices), entry.parameter, whole) for whole in shapes)
            entry.state = None if form is None else form.filled(marked)

    def _deal_values(self, facts: Sequence[tuple[Gradient, Form | None]]) -> None:
        """Gives each rank its slices of the parameters, and of the gradients that the optimizer has changed."""
        new = [entry for entry, (gradient, _) in zip(self._entries, facts, strict=True) if gradient == "new"]
        owned = [entry.owned(entry.type, entry.slice.dtype) for entry in (*self._entries, *new)]
        full = [DATA(entry.parameter) if entry.is_full else None for entry in self._entries]
        full += [entry.parameter.grad if entry.is_full else None for entry in new]
        slices = iter(self._dealt(owned, full))
        for entry in self._entries:
            entry.slice.copy_(next(slices))
            if not torch.is_inference_mode_enabled():
                increment_version(entry.parameter)  # as in-place updates of the parameter itself do
        for entry, (gradient, _) in zip(self._entries, facts, strict=True):
            entry.grad = entry.grad if gradient == "kept" else next(slices) if gradient == "new" else None

    def _dealt(self, owned: Sequence[Owned], full: Sequence[Tensor | None]) -> list[Tensor]:
        if self._everywhere:
            place = self._ranks.place
            return [of.sharding.local(cast(Tensor, x), place).clone() for of, x in zip(owned, full, strict=True)]
        return dealt(self._ranks, owned, full, self._entries[0].slice.device) if owned else []

    def _facts(self) -> list[tuple[Gradient, Form | None]]:
        """Returns each parameter's gradient and the form of its state, as the ranks that step it have them."""
        states, found = self._optimizer.state, dict[int, tuple[Gradient, Form | None]]()
        for number, entry in enumerate(self._entries):
            if entry.is_full:
                form = Form.of(opened(states[entry.parameter])) if entry.parameter in states else None
                found[number] = entry.gradient, form
        for group in () if self._everywhere else (self._ranks.group, self._ranks.replicas):
            own = {number: [gradient, form and form.data()] for number, (gradient, form) in found.items()}
            for data in gather_bytes(group, "an optimizer's step", partial(encode, own, allow_pickle=True)):
                for number, (gradient, form) in decode(data, allow_pickle=True).items():
                    found.setdefault(number, (gradient, form and Form.read(form)))
        return [found[number] for number in range(len(self._entries))]

    def _to_slices(self) -> None:
        for entry in self._entries:
            if entry.data is not None:
                p = entry.parameter
                p.grad = None
                p.data, p.grad = entry.data, entry.grad
                p.__class__ = ShardedParameter
                entry.data = None

    def _restore(self) -> None:
        """Gives the optimizer this rank's slices."""
        self._to_slices()
        for entry in self._turn:
            entry.given = None
            if entry.has_state:  # in an order that is the same on all ranks
                self._optimizer.state.pop(entry.parameter, None)
                if entry.state is not None:
                    self._optimizer.state[entry.parameter] = entry.state
