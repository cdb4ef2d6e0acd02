"""Reads the calls of a sharded model: a call's tensors, layouts and key, and the graph that computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from torchshard.capture import KnownCalls, Leaves, Watch, check_buffers, check_devices, check_inputs
from torchshard.capture.carried import Changes
from torchshard.core.errors import InputError
from torchshard.runtime.agreement import Agreement
from torchshard.runtime.batch_split import BatchSplit
from torchshard.runtime.call_key import call_key
from torchshard.runtime.call_verification import PreparedCall, Purpose, Sums
from torchshard.runtime.carried import CarriedSlice, check_once, local_tensors, whole_inputs
from torchshard.runtime.compilation import Compiler
from torchshard.runtime.compiled import Compiled, GraphCache
from torchshard.runtime.generation import entry_of
from torchshard.runtime.store import WeightStore


class CallReader:
    """Reads the calls of one model."""

    def __init__(
        self,
        source: nn.Module,
        store: WeightStore,
        agreement: Agreement,
        graphs: GraphCache,
        batch: BatchSplit,
        assigned: set[str],
    ) -> None:
        """Starts without known calls.

        Args:
            source: the unsharded model, without memory.
            graphs: the graphs captured for earlier calls.
            assigned: collects the names of the attributes that users assign between calls.
        """
        self._source, self._store, self._agreement = source, store, agreement
        self._graphs, self._batch, self._assigned = graphs, batch, assigned
        self._watch = Watch(source)
        self._entries = {"": KnownCalls(source)}
        self._carried_places: set[str] = set()
        self._numbers: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Drops facts about the model's tensors and modules, after these have changed."""
        self._modules = tuple(self._source.modules())
        self._fitting_devices: set[tuple[torch.device, ...]] = set()

    def note(self, changes: Changes) -> None:
        """Notes the inputs that calls change: later calls carry slices and numbers in them."""
        self._carried_places.update(changes.names)
        self._numbers.update(changes.numbers)

    @property
    def latest_change(self) -> str:
        """The attribute that forward reads and that changed last; '' if none did."""
        return self._watch.latest_change

    def entry(self, path: str) -> nn.Module:
        """Returns the module that a call runs: the unsharded model, with the forward of a submodule for a path."""
        return self._known_calls(path).model

    def _known_calls(self, path: str) -> KnownCalls:
        if path not in self._entries:
            self._entries[path] = KnownCalls(entry_of(self._source, path))
        return self._entries[path]

    def read(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        purpose: Purpose,
        compiler: Compiler | None,
        entry: str,
        sums: Sums,
    ) -> PreparedCall:
        """Returns a call as this rank sees it.

        Args:
            entry: the path of the called submodule; '' for the model itself.
            sums: when the ranks sum the gradients.

        Raises:
            InputError: the arguments don't fit the model.
        """
        given = self._flat(args, kwargs, purpose, entry)
        number = self._agreement.group_number
        unsplit, layouts = whole_inputs(given, self._store.ranks.group, number, self._carried_places)
        inputs, batches = self._batch.inputs(given, unsplit)
        compared = unsplit if self._agreement.is_across else inputs
        if self._assigned:
            self._follow_assigned()
        state, tensors = self._watch.state(), self._store.tensors.now
        key = call_key(inputs, state, self._modules, tensors.values(), {**layouts, **batches}, entry)
        key = self._graphs.with_numbers(key, tensors)
        compiled = self._graphs.find(key, (*inputs.tensors, *inputs.numbers))
        self._check_changes(given, compiled)
        local = given.tensors if inputs is given else local_tensors(given)
        calls = [t.left_by for t in given.tensors if isinstance(t, CarriedSlice)]
        how = "" if compiler is None else str(compiler)
        return PreparedCall(
            inputs, compared, local, layouts, batches, calls, given.arguments, key, compiled, how, sums, self._seen
        )

    def _flat(self, args: Sequence[object], kwargs: Mapping[str, object], purpose: Purpose, entry: str) -> Leaves:
        """Returns the tensors and structure of a call's arguments, after checks of those."""
        given = self._known_calls(entry).flatten(args, kwargs, self._numbers)
        check_inputs(self._source, given)
        self._check_devices(given)
        if purpose == "a call":
            self._check_has_values(given)
        return given

    def _follow_assigned(self) -> None:
        """Notices attributes assigned since the last call, and drops entries for submodules, which copy some."""
        self._watch.look()
        self._entries = {"": self._entries[""]}
        self._assigned.clear()

    @property
    def _seen(self) -> str:
        """The current values of attributes and globals that forward reads, for errors."""
        changed = self._watch.latest_change
        return f"state {self._watch.number}" + (f", changed last: {changed}" if changed else "")

    def _check_changes(self, given: Leaves, compiled: Compiled | None) -> None:
        """Checks that a call doesn't change an argument passed twice, or train a buffer."""
        if compiled is not None:
            check_once(given, compiled.program.captured.changes)
        elif torch.is_grad_enabled():  # a refused call never has a graph: the key contains requires_grad
            check_buffers(self._store.buffers())

    def _check_has_values(self, inputs: Leaves) -> None:
        """Checks that inputs and parameters all have values, or all lack them, as in a dry run on the meta device."""
        without = [n for n, t in zip(inputs.names, inputs.tensors, strict=True) if _lacks_values(t)]
        if not without:
            self._store.check_initialized()
        elif not all(map(_lacks_values, self._store.tensors.now.values())):
            raise InputError(
                f"input {without[0]} has no values",
                where=f"argument {without[0]!r}",
                why="it is on the meta device, or fake; the model's parameters are not",
                attempt="real inputs; example_inputs= of ts.shard and ts.plan may be without values",
            )

    def _check_devices(self, inputs: Leaves) -> None:
        """Checks the inputs' devices, once per combination: the check is slow."""
        devices = tuple(t.device for t in inputs.tensors)
        if devices not in self._fitting_devices:
            check_devices(self._source, inputs)
            self._fitting_devices.add(devices)


def _lacks_values(tensor: Tensor) -> bool:
    return tensor.is_meta or is_fake(tensor)
