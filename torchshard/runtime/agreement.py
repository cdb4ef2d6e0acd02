"""Compares a model's ranks: their calls before each one runs, and their states on request.

If they differ, every rank raises an error: along the axis that splits the model, and along those
that split the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

from torch import Tensor

from torchshard.core.errors import DistributedError, ShardError
from torchshard.core.layouts import Layout
from torchshard.core.mesh import MODEL
from torchshard.distributed.facts import verify_equal
from torchshard.distributed.group import CheckLevel, Group
from torchshard.runtime.call_verification import PreparedCall, Purpose, begin_verifying_call, call_error, tell_failure
from torchshard.runtime.history import History, HistorySnapshot
from torchshard.runtime.store import WeightStore


class Agreement:
    """Compares the calls of one model's ranks, and their histories since the last call."""

    def __init__(self, store: WeightStore, class_name: str) -> None:
        """Starts the histories of a new model.

        Args:
            class_name: the unsharded model's class, for errors.
        """
        ranks = store.ranks
        self._store, self._ranks = store, ranks
        self._history = History(ranks.group, class_name)
        """The history that the ranks of the model's axis compare."""
        self._across = History(ranks.replicas, class_name) if ranks.mesh.without_idle.across else None
        """The history that the ranks of the data axes compare, if the mesh has any."""
        self._watched: object = None
        """The state of the weights that the histories compare."""

    @property
    def _histories(self) -> list[History]:
        return [self._history] if self._across is None else [self._history, self._across]

    @property
    def is_across(self) -> bool:
        """Whether the ranks of data axes compare the calls too."""
        return self._across is not None

    @property
    def number(self) -> int:
        """The model's number among those of its ranks."""
        return self._histories[-1].number

    @property
    def group_number(self) -> int:
        """The model's number among those of the group that it is split over."""
        return self._history.number

    @property
    def next_call(self) -> str:
        """The name of the next call."""
        return self._history.next_call

    @property
    def latest_text(self) -> str:
        """The name of the latest call's backward."""
        return self._history.latest_text

    @property
    def latest_call(self) -> tuple[int, int]:
        """(the model's number, the latest call's number)."""
        return self._history.latest_call

    @property
    def verifies(self) -> bool:
        """Whether the ranks compare their calls."""
        return self._ranks.count > 1 and self._ranks.group.level is not CheckLevel.OFF

    def note_step(self, settings: str) -> None:
        """Counts a step of the model's parameters, which an optimizer with these settings is about to make."""
        for history in self._histories:
            history.note_step(settings)

    def watch_results(self, results: Sequence[object], equal: Sequence[object]) -> None:
        """Observes the gradients of a call's results; the ranks compare them at the next call.

        Args:
            equal: the results that are equal along the data axes.
        """
        if self._across is not None:
            self._across.watch_results(equal)
            equal = results  # over the model's axis, ranks compute the same shard of the batch
        self._history.watch_results(equal)

    # --- comparing a call --------------------------------------------------------------------------------------------

    def begin(self, call: PreparedCall | ShardError, purpose: Purpose) -> Callable[[], None]:
        """Starts to compare a call; returns a function that waits until all ranks have done so.

        The ranks compare the call's key, shapes and values. A rank that refuses the call takes part
        in the comparison, because the others would wait for it; the function raises its error.
        """
        compare = no_wait
        if self.verifies:
            with self._resetting():
                compare = self._begin_along_model(call, purpose)

        def verify() -> None:
            with self._resetting():
                self._finish(compare, call, purpose)
                if isinstance(call, ShardError):
                    raise call
            if purpose == "a call":
                for history in self._histories:
                    history.count_call()

        return verify

    def _begin_along_model(self, call: PreparedCall | ShardError, purpose: Purpose) -> Callable[[], None]:
        """Starts to compare a call over the model's axis; returns a function that waits for the result."""
        try:
            self._watch_weights()
            return begin_verifying_call(self._ranks.group, call, purpose, self._snapshot(self._history, call))
        except ShardError as error:
            if self._across is None:
                raise
            return partial(_raise, error)  # later, when the ranks of the data axis can learn of it

    def _finish(self, compare: Callable[[], None], call: PreparedCall | ShardError, purpose: Purpose) -> None:
        """Waits for the comparison of a call over the model's axis, then compares it over the data axis.

        A difference along one axis must raise on all ranks of the other.
        """
        if self._across is None or not self.verifies:
            return compare()
        failure: ShardError | None = None
        try:
            compare()
        except ShardError as error:
            failure = error
        made = call if failure is None else failure
        if isinstance(made, PreparedCall):
            made = replace(made, compared=made.inputs)
        snapshot = self._snapshot(self._across, made)
        try:
            begin_verifying_call(self._ranks.replicas, made, purpose, snapshot)()
        except ShardError as error:
            failure = failure or error
        tell_failure(self._ranks.group, failure)

    @contextlib.contextmanager
    def _resetting(self) -> Iterator[None]:
        """Starts the histories over after an error, which all ranks raise."""
        try:
            yield
        except ShardError:
            for history in self._histories:
                history.reset()
            raise

    def _watch_weights(self) -> None:
        """Makes the histories compare the tensors as they are stored now."""
        tensors, shardings = self._store.tensors, self._store.shardings
        # Until the first graph fixes the layouts, they follow each rank's own plan, and plans may differ.
        if not shardings.is_fixed or self._watched == (tensors.moves, shardings.changes):
            return
        named, distinct = tensors.by_first_name(), shardings.distinct
        self._history.watch(named, shardings.of_model, distinct[MODEL])
        if self._across is not None:
            over_data = {name: any(distinct[axis].get(name) for axis in shardings.of_batch) for name in named}
            self._across.watch(named, shardings.over_data, over_data)
        self._watched = tensors.moves, shardings.changes

    def _snapshot(self, history: History, call: PreparedCall | ShardError) -> HistorySnapshot:
        if isinstance(call, ShardError):
            return history.snapshot({}, {})
        return history.snapshot(self._store.tensors.now, call.elsewhere)

    # --- comparing the states ----------------------------------------------------------------------------------------

    def verify_state(self) -> None:
        """Checks that the ranks' histories and replicated parameters match: a collective call.

        Raises:
            DistributedError: they differ.
        """
        if not self.verifies:
            return
        ranks, shardings = self._ranks, self._store.shardings
        what = "the ranks hold different states"
        compare = self._comparison(self._history, ranks.group, shardings.of_model, what)
        ranks.on_replicas(compare, DistributedError, what)
        if self._across is not None:
            compare = self._comparison(self._across, ranks.replicas, shardings.over_data, what)
            ranks.run_on_all(compare, DistributedError, what)

    def _comparison(
        self, history: History, group: Group, layouts: Mapping[str, Layout], what: str
    ) -> Callable[[], bool]:
        """Returns a function that compares a history, and the tensors not split by these layouts, in a group."""
        tensors: dict[str, Tensor] = self._store.tensors.by_first_name()
        facts, gradients = history.all_facts(tensors, layouts)
        return partial(verify_equal, group, facts, call_error, what, near=gradients)


def no_wait() -> None:
    """A wait that returns at once."""


def _raise(error: ShardError) -> NoReturn:
    raise error
