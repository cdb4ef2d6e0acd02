"""A tape of recorded ops, from which tensors are computed later, one at a time.

`lazy` records a constructor's tensor ops. To compute a parameter, the tape replays only the calls on
which its value depends:

    w = empty(8, 4)         runs: w needs memory
    w.uniform_(-1, 1)       runs on scratch memory: later random numbers depend on it, w does not
    w.normal_(0, 0.02)      runs
    b = zeros(8)            runs only if b is requested

Dependencies are tracked by the storages that calls read and write, not by tensors. So views, and writes
through views, need no special case.

Source: deferred initialisation in torchdistx (`deferred_init`), which replays each tensor's calls separately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torchshard.core.hashing import hash_tensor, hash_text
from torchshard.custom_ops.fx_types import Args, Kwargs
from torchshard.weights.stored_tensors import StoredTensor

aten = torch.ops.aten
_OVERWRITE_ALL = frozenset(
    getattr(aten, name)
    for name in ("uniform_", "normal_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_")
)
"""Ops that overwrite all values of their first operand."""


def is_overwriting(op: OpOverload) -> bool:
    """Returns whether an op overwrites all values of its first operand."""
    return op.overloadpacket in _OVERWRITE_ALL


Call = tuple[OpOverload, Args, Kwargs]


@dataclass(frozen=True)
class Slot:
    """A reference to a tape's tensor by number."""

    number: int


@dataclass(frozen=True)
class GeneratorState:
    """The state of a `torch.Generator` argument when the call was recorded."""

    state: Tensor
    device: torch.device

    def made(self) -> torch.Generator:
        """Returns a new generator in this state."""
        return torch.Generator(self.device).set_state(self.state)


@dataclass(frozen=True)
class Entry:
    """One recorded call."""

    op: OpOverload | StoredTensor
    args: Args
    """The arguments, with `Slot` for recorded tensors and `GeneratorState` for generators."""
    kwargs: Kwargs
    operands: tuple[int, ...]
    """The slots among the arguments."""
    results: tuple[int | None, ...]
    """The slots of the results that are new tensors; None for others."""
    written: frozenset[int]
    """The storages that the call writes to, by number."""
    read: frozenset[int]
    """The storages with values that the result may depend on, by number."""
    draws: bool
    """Whether the call draws from the process's default generator."""
    default_dtype: torch.dtype
    """PyTorch's default dtype when the call was recorded."""
    rng_state: Tensor | int | None = None
    """The RNG state before a call that draws, or the number of the entry that produces that state."""


@dataclass
class Tape:
    """Recorded calls, and the shapes of the tensors that they create."""

    entries: list[Entry] = field(default_factory=list)
    examples: list[Tensor] = field(default_factory=list)
    """Slot -> a meta tensor with its shape and strides."""
    memories: list[int] = field(default_factory=list)
    """Slot -> the number of its storage; a tensor and its views share one."""

    marks: dict[int, int] = field(default_factory=dict)
    """Hash of a placeholder RNG state that `add` set -> the number of the draw before it."""

    def add(self, entry: Entry) -> None:
        """Records a call.

        A recorded draw does not advance the process's RNG, so a later reseed or restored state could not be
        detected. Each recorded draw therefore sets a unique RNG state.
        """
        if entry.draws:
            state = torch.get_rng_state()
            entry = replace(entry, rng_state=self.marks.get(hash_tensor(state), state))
            torch.default_generator.manual_seed(hash_text(f"{hash_tensor(state)} {len(self.entries)}"))
            self.marks[hash_tensor(torch.get_rng_state())] = len(self.entries)
        self.entries.append(entry)

    @property
    def is_latest(self) -> bool:
        """Whether the process's RNG is in a state that `add` set, or was restored to one."""
        return hash_tensor(torch.get_rng_state()) in self.marks

    def digest(self, wanted: Sequence[int]) -> str:
        """Returns a hash of the calls that compute these slots, with their input tensors and RNG states."""
        runs = self._runs(self._needed(wanted))
        return f"{hash_text(repr([(i, _entry_text(self.entries[i])) for i in runs])):x}"

    def rng_state(self) -> Tensor:
        """Returns the RNG state that an ordinary constructor would have reached by now."""
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
        """Adds a slot, in the memory with this number or in a new one; returns its number."""
        self.examples.append(example)
        self.memories.append(len(self.memories) if memory is None else memory)
        return len(self.examples) - 1

    def advance(self, call: Call, generator: torch.Generator) -> None:
        """Advances the generator argument of a recorded call past the call's draws; discards the result."""
        op, args, kwargs = call

        def value(leaf: object) -> object:
            if isinstance(leaf, GeneratorState):
                return generator
            return self._scratch(leaf) if isinstance(leaf, Slot) else leaf

        with _alone():
            op(*pytree.tree_map(value, args), **pytree.tree_map(value, dict(kwargs)))

    def _scratch(self, slot: Slot) -> Tensor:
        """Returns scratch memory with the shape and strides of a slot."""
        example = self.examples[slot.number]
        return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device="cpu")

    def compute(self, wanted: Sequence[int], use: Callable[[int, Tensor], None]) -> None:
        """Calls `use(slot, value)` for each wanted slot, in the order in which they are ready.

        A tensor is freed after its last use, so `use` should not keep the value.
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
        """Returns the entries to run: the needed ones, and all draws before the last needed draw."""
        last_draw = max((i for i in needed if self.entries[i].draws), default=-1)
        return [i for i, e in enumerate(self.entries) if i in needed or (e.draws and i <= last_draw)]

    def _needed(self, wanted: Sequence[int]) -> set[int]:
        """Returns the numbers of the entries on which the wanted values depend."""
        slots, contents = set(wanted), {self.memories[slot] for slot in wanted}
        needed = set[int]()
        for i in reversed(range(len(self.entries))):
            entry = self.entries[i]
            # the number of random numbers that an op draws may depend on the values it reads
            if slots.intersection(entry.results) or contents & entry.written or (entry.draws and entry.read):
                needed.add(i)
                slots.update(entry.operands)
                contents = (contents - entry.written) | entry.read
        return needed

    def _lifetimes(self, wanted: Sequence[int], needed: set[int]) -> tuple[dict[int, int], dict[int, list[int]]]:
        """Returns (slot -> the last entry that needs it, entry -> the wanted slots that are ready after it)."""
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
        """Runs a recorded call.

        Args:
            held: slot -> its value; the call's results are added.
            left: draw -> the RNG state after it; the call's is added.
            number: the entry's number.
            is_needed: False for a call that runs on scratch memory, only to advance the RNG.
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
    """Disables all dispatch modes, which would record or change the calls; restores RNG and default dtype."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=()), torch.no_grad(), _disable_current_modes():
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def entry_of(tape: Tape, call: Call, results: tuple[int | None, ...]) -> Entry:
    """Returns the entry for a call; its recorded tensors are `Slot`s."""
    op, args, kwargs = call
    operands = [leaf.number for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Slot)]
    written = frozenset(tape.memories[leaf.number] for leaf in written_arguments(call) if isinstance(leaf, Slot))
    is_overwritten = is_overwriting(op) and _is_all_memory(tape, operands[0])
    read = frozenset(tape.memories[slot] for slot in (operands[1:] if is_overwritten else operands))
    has_generator = any(isinstance(leaf, GeneratorState) for leaf in pytree.tree_leaves((args, dict(kwargs))))
    draws = torch.Tag.nondeterministic_seeded in op.tags and not has_generator
    return Entry(op, args, kwargs, tuple(operands), results, written, read, draws, torch.get_default_dtype())


def written_arguments(call: Call) -> list[object]:
    """Returns the arguments that a call writes to."""
    return [leaf for leaf, alias in _aliases(call) if alias is not None and alias.is_write]


def viewed_argument(call: Call) -> object:
    """Returns the first argument that a result may alias; None if all results have new memory."""
    return next((leaf for leaf, alias in _aliases(call) if alias is not None), None)


def _aliases(call: Call) -> list[tuple[object, torch.AliasInfo | None]]:
    op, args, kwargs = call
    given = {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)} | dict(kwargs)
    schema = [(given[a.name], a.alias_info) for a in op._schema.arguments if a.name in given]
    return [(leaf, alias) for value, alias in schema for leaf in pytree.tree_leaves(value)]


def _is_all_memory(tape: Tape, slot: int) -> bool:
    """Returns whether a tensor covers its entire memory; most views do not."""
    whole, example = tape.examples[tape.memories[slot]], tape.examples[slot]
    return example.numel() == whole.numel() and example.dtype == whole.dtype
