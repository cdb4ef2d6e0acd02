"""A list of recorded ops, from which tensors are computed later, one at a time.

`lazy` records what a constructor does to its tensors. To compute a parameter, the tape runs again, but only the calls
that its value depends on:

    w = empty(8, 4)         runs: w needs memory
    w.uniform_(-1, 1)       runs on other memory: the random numbers after it depend on it, w does not
    w.normal_(0, 0.02)      runs
    b = zeros(8)            does not run, if b is not wanted

Calls change memory as they did when they were recorded, so views and writes through them need no treatment of their
own: what a value depends on is decided by the memory that calls read and write, not by the tensors.

Source: deferred initialisation in torchdistx (its `deferred_init`), which replays each tensor's calls apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torchshard.core.hashing import hash_tensor, hash_text

aten = torch.ops.aten
_OVERWRITE_ALL = frozenset(
    getattr(aten, name)
    for name in ("uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_")
)
"""Ops after which nothing is left of what their first operand held."""


def is_overwriting(op: Any) -> bool:
    """Whether an op leaves nothing of what its first operand held."""
    return op.overloadpacket in _OVERWRITE_ALL


Call = tuple[Any, tuple[Any, ...], Mapping[str, Any]]
"""(op, its arguments, its keyword arguments)."""


@dataclass(frozen=True)
class Slot:
    """A tensor of a tape, by its number."""

    number: int


@dataclass(frozen=True)
class GeneratorState:
    """A `torch.Generator` that a call was given, as it was then."""

    state: Tensor
    device: torch.device

    def made(self) -> torch.Generator:
        """A generator in this state."""
        return torch.Generator(self.device).set_state(self.state)


@dataclass(frozen=True)
class Entry:
    """One recorded call."""

    op: Any
    args: tuple[Any, ...]
    """With slots in the place of recorded tensors, and generators as they were."""
    kwargs: Mapping[str, Any]
    operands: tuple[int, ...]
    """The slots among the arguments."""
    results: tuple[int | None, ...]
    """The slots of the results that are new tensors; None for others."""
    written: frozenset[int]
    """The memories that the call writes to, by number."""
    read: frozenset[int]
    """The memories whose content it may depend on, by number."""
    draws: bool
    """Whether it takes random numbers of the process's generator."""
    default_dtype: torch.dtype
    """PyTorch's default dtype when it was recorded."""
    rng_state: Tensor | int | None = None
    """The RNG state before it, or the number of the entry that leaves it; None of a call that draws nothing."""


@dataclass
class Tape:
    """Recorded calls, and the shapes of the tensors that they make."""

    entries: list[Entry] = field(default_factory=list)
    examples: list[Tensor] = field(default_factory=list)
    """Slot -> a tensor of its shape and strides on the meta device."""
    memories: list[int] = field(default_factory=list)
    """Slot -> the number of the memory that it lies in; views of a tensor lie in the same."""

    marks: dict[int, int] = field(default_factory=dict)
    """Hash of an RNG state of the process -> the draw after which it was set."""

    def add(self, entry: Entry) -> None:
        """Records a call.

        A draw that is only recorded would leave the process's RNG state as it is, and a constructor that seeds again,
        or restores a state, would look like one that does not. So each draw sets a state that nobody else sets.
        """
        if entry.draws:
            state = torch.get_rng_state()
            entry = replace(entry, rng_state=self.marks.get(hash_tensor(state), state))
            torch.default_generator.manual_seed(hash_text(f"{hash_tensor(state)} {len(self.entries)}"))
            self.marks[hash_tensor(torch.get_rng_state())] = len(self.entries)
        self.entries.append(entry)

    @property
    def is_latest(self) -> bool:
        """Whether nobody has drawn or seeded since the latest draw was recorded."""
        return hash_tensor(torch.get_rng_state()) in self.marks

    def digest(self, wanted: Sequence[int]) -> str:
        """A hash of the calls that make these slots, with the tensors and random numbers that they start from."""
        runs = self._runs(self._needed(wanted))
        return f"{hash_text(repr([(i, _entry_text(self.entries[i])) for i in runs])):x}"

    def rng_state(self) -> Tensor:
        """The RNG state that the constructor would be in now."""
        state = torch.get_rng_state()
        latest = self.marks.get(hash_tensor(state))
        if latest is None:
            return state
        left: dict[int, Tensor] = {}
        with _alone():
            for i, entry in enumerate(self.entries):
                if entry.draws:
                    self._run(entry, {}, left, i, is_needed=False)
        return left[latest]

    def new_slot(self, example: Tensor, memory: int | None) -> int:
        """A slot in the memory with this number, or in one of its own."""
        self.examples.append(example)
        self.memories.append(len(self.memories) if memory is None else memory)
        return len(self.examples) - 1

    def advance(self, call: Call, generator: torch.Generator) -> None:
        """Draws the random numbers of a recorded call from the generator that it was given; its result is let go."""
        op, args, kwargs = call

        def value(leaf: object) -> object:
            if isinstance(leaf, GeneratorState):
                return generator
            return self._scratch(leaf) if isinstance(leaf, Slot) else leaf

        with _alone():
            op(*pytree.tree_map(value, args), **pytree.tree_map(value, dict(kwargs)))

    def _scratch(self, slot: Slot) -> Tensor:
        """Memory in the place of a tensor's."""
        example = self.examples[slot.number]
        return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device="cpu")

    def compute(self, wanted: Sequence[int], use: Callable[[int, Tensor], None]) -> None:
        """Calls `use(slot, value)` for each wanted slot, in the order in which they are ready.

        Of all tensors only those are in memory that a later call needs, so `use` should keep none of the values.
        """
        needed = self._needed(wanted)
        runs = self._runs(needed)
        last_use, ready = self._lifetimes(wanted, needed)
        held, left = dict[int, Tensor](), dict[int, Tensor]()
        with _alone():
            for i in runs:
                self._run(self.entries[i], held, left, i, is_needed=i in needed)
                for slot in ready.get(i, ()):
                    use(slot, held[slot])
                for slot in [s for s in held if last_use.get(s, -1) <= i]:
                    del held[slot]

    def _runs(self, needed: set[int]) -> list[int]:
        """The numbers of the entries that run: those that are needed, and all draws before the last of theirs."""
        last_draw = max((i for i in needed if self.entries[i].draws), default=-1)
        return [i for i, e in enumerate(self.entries) if i in needed or (e.draws and i <= last_draw)]

    def _needed(self, wanted: Sequence[int]) -> set[int]:
        """The numbers of the entries that the wanted values depend on."""
        slots, contents = set(wanted), {self.memories[slot] for slot in wanted}
        needed = set[int]()
        for i in reversed(range(len(self.entries))):
            entry = self.entries[i]
            # how many random numbers a draw takes may depend on what it reads
            if slots.intersection(entry.results) or contents & entry.written or (entry.draws and entry.read):
                needed.add(i)
                slots.update(entry.operands)
                contents = (contents - entry.written) | entry.read
        return needed

    def _lifetimes(self, wanted: Sequence[int], needed: set[int]) -> tuple[dict[int, int], dict[int, list[int]]]:
        """(slot -> the last entry that needs it, entry -> the wanted slots whose values are ready after it)."""
        last_use, last_change = dict[int, int](), dict[int, int]()
        for i in sorted(needed):
            entry = self.entries[i]
            made = [slot for slot in entry.results if slot is not None]
            last_use.update(dict.fromkeys((*entry.operands, *made), i))
            last_change.update(dict.fromkeys((*entry.written, *(self.memories[slot] for slot in made)), i))
        ready: dict[int, list[int]] = {}
        for slot in dict.fromkeys(wanted):
            at = last_change[self.memories[slot]]
            ready.setdefault(at, []).append(slot)
            last_use[slot] = max(last_use[slot], at)
        return last_use, ready

    def _run(
        self, entry: Entry, held: dict[int, Tensor], left: dict[int, Tensor], number: int, *, is_needed: bool
    ) -> None:
        """Runs a call.

        Args:
            held: the values of slots; those that it makes are added.
            left: draw -> the RNG state that it leaves; its own is added.
            number: its own.
        """
        if entry.default_dtype != torch.get_default_dtype():
            torch.set_default_dtype(entry.default_dtype)
        if entry.rng_state is not None:
            torch.set_rng_state(left[entry.rng_state] if isinstance(entry.rng_state, int) else entry.rng_state)

        def value(leaf: object) -> object:
            if isinstance(leaf, GeneratorState):
                return leaf.made()
            if not isinstance(leaf, Slot):
                return leaf
            return held[leaf.number] if is_needed else self._scratch(leaf)  # only the random numbers are wanted

        args, kwargs = pytree.tree_map(value, (entry.args, dict(entry.kwargs)))
        results = pytree.tree_leaves(entry.op(*args, **kwargs))
        if entry.draws:
            left[number] = torch.get_rng_state()
        if is_needed:
            held.update({slot: r for slot, r in zip(entry.results, results, strict=True) if slot is not None})


def _entry_text(entry: Entry) -> str:
    def text(leaf: object) -> object:
        if isinstance(leaf, GeneratorState):
            return f"{leaf.device} {hash_tensor(leaf.state):x}"
        return f"{hash_tensor(leaf):x}" if isinstance(leaf, Tensor) else leaf

    return repr((str(entry.op), pytree.tree_map(text, (entry.args, dict(entry.kwargs), entry.rng_state))))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Outside all modes, for they would record or change the calls; leaves RNG state and default dtype as they are."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=()), torch.no_grad(), _disable_current_modes():
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def entry_of(tape: Tape, call: Call, results: tuple[int | None, ...]) -> Entry:
    """The entry of a call whose recorded tensors are slots."""
    op, args, kwargs = call
    operands = [leaf.number for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Slot)]
    written = frozenset(tape.memories[leaf.number] for leaf in written_arguments(call) if isinstance(leaf, Slot))
    is_overwritten = is_overwriting(op) and _is_all_memory(tape, operands[0])
    read = frozenset(tape.memories[slot] for slot in (operands[1:] if is_overwritten else operands))
    has_generator = any(isinstance(leaf, GeneratorState) for leaf in pytree.tree_leaves((args, dict(kwargs))))
    draws = torch.Tag.nondeterministic_seeded in op.tags and not has_generator
    return Entry(op, args, kwargs, tuple(operands), results, written, read, draws, torch.get_default_dtype())


def written_arguments(call: Call) -> list[object]:
    """The arguments that a call writes to."""
    return [leaf for leaf, alias in _aliases(call) if alias is not None and alias.is_write]


def viewed_argument(call: Call) -> object:
    """The first argument that a result may be a view of; None if all results have memory of their own."""
    return next((leaf for leaf, alias in _aliases(call) if alias is not None), None)


def _aliases(call: Call) -> list[tuple[object, Any]]:
    op, args, kwargs = call
    given = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)} | dict(kwargs)
    schema = [(given[a.name], a.alias_info) for a in op._schema.arguments if a.name in given]
    return [(leaf, alias) for value, alias in schema for leaf in pytree.tree_leaves(value)]


def _is_all_memory(tape: Tape, slot: int) -> bool:
    """Whether a tensor covers the memory that it lies in, as all but views do."""
    whole, example = tape.examples[tape.memories[slot]], tape.examples[slot]
    return example.numel() == whole.numel() and example.dtype == whole.dtype
