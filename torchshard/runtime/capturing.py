"""Captures the graph of a call that no earlier graph computes, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from torchshard.capture import Leaves, ModelCall, describe, global_hooks, without_storage, without_tools
from torchshard.compiler.constraints import Constraints
from torchshard.compiler.program import Program, program
from torchshard.core.errors import CaptureError
from torchshard.core.layouts import Shard
from torchshard.core.user_files import warn
from torchshard.runtime.batch_split import BatchSplit
from torchshard.runtime.batches import advised_of_parts
from torchshard.runtime.call_verification import PreparedCall, verify_same_program
from torchshard.runtime.carried import check_once, refuse_changes
from torchshard.runtime.compiled import Compiled, GraphCache, RankProgram, compile_program
from torchshard.runtime.reader import CallReader
from torchshard.runtime.store import WeightStore
from torchshard.runtime.submodule import Unsharded


class Capturer:
    """Captures, plans and compiles the calls of one model; the first graph fixes the layouts of its weights."""

    def __init__(
        self,
        store: WeightStore,
        reader: CallReader,
        graphs: GraphCache,
        batch: BatchSplit,
        constraints: Constraints,
        modules: Mapping[str, Unsharded],
    ) -> None:
        """Starts without graphs.

        Args:
            graphs: receives the graphs.
            modules: the unsharded modules by path; they note the attributes in which forward leaves tensors.
        """
        self._store, self._reader, self._graphs = store, reader, graphs
        self._batch, self._constraints, self._modules = batch, constraints, modules
        self._left_places = set[tuple[str, ...]]()

    @without_tools()
    def capture(self, call: PreparedCall, args: Sequence[object], kwargs: Mapping[str, object]) -> Compiled:
        """Returns a new graph for a call: a collective call.

        Raises:
            CaptureError: the model can't be captured or planned on some rank.
            DistributedError: the ranks have made different programs.
        """
        store, ranks = self._store, self._store.ranks
        store.update_source()
        if any(call.batches.values()) or any(isinstance(layout, Shard) for layout in call.layouts.values()):
            args, kwargs = call.inputs.rebuild(call.inputs.tensors)
        inputs = _without_storage(call.inputs)
        constraints = self._constraints_of(call)
        _warn_of_global_hooks()

        def make() -> RankProgram:
            return RankProgram.of(self._planned(call, inputs, constraints, args, kwargs), ranks)

        made = ranks.run_on_all(make, CaptureError, "the ranks can't make a program of the model together")
        verify_same_program(ranks, made, call)
        planned, tensors = made.program, store.tensors
        if not store.shardings.is_fixed:
            own = planned.plan.parameters.items()
            store.fix_layouts({name: layout for name, layout in own if name in tensors.now})
        device = next((p.device for p in tensors.parameters().values()), None)
        key = self._graphs.with_numbers(call.key, tensors.now, planned.captured.conditions)
        compiled = compile_program(made, key, _model_call(inputs, call, planned), ranks, device)
        self._reader.note(planned.captured.changes)
        self._graphs.add(key, compiled, self._reader.latest_change)
        self._note_left(planned.captured.left)
        return compiled

    def _constraints_of(self, call: PreparedCall) -> Constraints:
        """Returns the constraints for a call's plan: after the first graph, the layouts of the weights are fixed."""
        shardings, constraints = self._store.shardings, self._constraints
        if shardings.is_fixed:
            constraints = constraints.with_layouts(shardings.of_model)
        trains = call.key.grad_enabled or (constraints.aim.trains and not shardings.is_fixed)
        return constraints.with_gradients(trains)

    def _planned(
        self,
        call: PreparedCall,
        inputs: Leaves,
        constraints: Constraints,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> Program:
        """Returns the planned program of a call, after checks that its graph may run later calls."""
        entry, numbers = self._reader.entry(call.key.entry), call.inputs.number_names
        try:
            made = program(entry, constraints, args, kwargs, inputs=call.layouts, batches=call.batches, numbers=numbers)
        except CaptureError as error:
            raise advised_of_parts(error, entry, call.tensors, call.batches) from error
        if self._batch.is_whole:
            refuse_changes(made.captured.changes)
        self._graphs.refuse_dependence(entry, _model_call(inputs, call, made), made)
        check_once(replace(call.inputs, tensors=call.tensors), made.captured.changes)
        return made

    def _note_left(self, places: Sequence[tuple[str, ...]]) -> None:
        """Notes and warns of attributes to which forward assigns tensors; graphs do not, so reading them raises."""
        new = [place for place in places if place not in self._left_places]
        self._left_places.update(new)
        for path, name, *keys in new:
            if path in self._modules and not any(key.startswith(".") for key in keys):
                self._modules[path].left.add(name)
        if new:
            warn(
                f"forward assigns tensors to {', '.join(map(describe, new))}; a sharded model does not assign them. "
                "Return the values that other code reads, such as an auxiliary loss"
            )


def _warn_of_global_hooks() -> None:
    if global_hooks():
        warn(
            "hooks on all modules (register_module_forward_hook) become part of a sharded model's graph; on the "
            "model itself they are called once more"
        )


def _model_call(inputs: Leaves, call: PreparedCall, made: Program) -> ModelCall:
    """Returns a call without values, for a rehearsal to repeat."""
    return ModelCall(inputs, call.key.training, [number for _, number in made.captured.conditions])


def _without_storage(inputs: Leaves) -> Leaves:
    """Returns a call's inputs without memory, which a graph can store for its lifetime."""
    tensors: list[Tensor] = [without_storage(t).requires_grad_(t.requires_grad) for t in inputs.tensors]
    return replace(inputs, tensors=tuple(tensors), arguments=((), {}))
