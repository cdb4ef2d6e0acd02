"""The sharded model: the same forward signature and parameter names, this rank's slices, one graph per kind of call.

Like `jax.jit`, it captures a graph for the first call with a key (`call_key`) and keeps it
(`compiled`). Before a call runs, the ranks verify that they all make it (`call_verification`). All
graphs share the parameters (`state`); the first graph fixes their layouts.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchshard.capture import (
    KnownCalls,
    Leaves,
    ModelCall,
    Watch,
    check_buffers,
    check_devices,
    check_inputs,
    check_weights,
    describe,
    global_hooks,
    model_without_storage,
    refuse_transforms,
    shared_names,
    without_storage,
    without_tools,
)
from torchshard.capture.facts import ModelFacts
from torchshard.compiler.batches import layouts_of_parts, whole_batch
from torchshard.compiler.constraints import Constraints, PlanLike, check_layouts, read_constraints
from torchshard.compiler.program import Program, program
from torchshard.core.autocast import autocasting
from torchshard.core.columns import Notebook
from torchshard.core.errors import CaptureError, DistributedError, InputError, PlanError, ShardError
from torchshard.core.layouts import Layout, Shard
from torchshard.core.mesh import MODEL
from torchshard.core.user_files import warn
from torchshard.distributed.consistency import running, verify_equal
from torchshard.distributed.group import CheckLevel, Group
from torchshard.distributed.ranks import Ranks
from torchshard.distributed.wire import settling
from torchshard.plans.objective import Aim
from torchshard.plans.plan import Plan
from torchshard.runtime.batches import advised_of_parts, entering, joined, leaving, own_parts
from torchshard.runtime.call_key import call_key
from torchshard.runtime.call_verification import (
    PreparedCall,
    Purpose,
    Sums,
    begin_verifying_call,
    call_error,
    tell_failure,
    verify_same_program,
    verify_same_weights,
)
from torchshard.runtime.carried import (
    CarriedSlice,
    check_once,
    is_of_all,
    local_tensors,
    mark,
    mark_whole,
    refuse_changes,
    whole_inputs,
)
from torchshard.runtime.compilation import Compiler, compiler_of
from torchshard.runtime.compiled import Compiled, RankProgram, compile_program
from torchshard.runtime.digests import describe_contents
from torchshard.runtime.dynamo import call_outside, tracing_compiler
from torchshard.runtime.generation import entry_of, generation_method, with_self
from torchshard.runtime.history import History, HistorySnapshot
from torchshard.runtime.later_sums import sum_kept
from torchshard.runtime.optimizers import mark_state_dicts, observe_steps
from torchshard.runtime.results_beside import refuse_hooks
from torchshard.runtime.state import State
from torchshard.runtime.step import LazyStep
from torchshard.runtime.submodule import ShardedSubmodule
from torchshard.weights.folder import Weights, check_missing, read_folder
from torchshard.weights.local_slice import unwatched
from torchshard.weights.over_ranks import check_other_group

_CALL_LOCK = threading.RLock()
"""Makes the threads of a process call sharded models one after the other, across all models.

A lock for each model would not do: `torch.export` and the patches of a capture act on the whole
process, and the collectives of two models would reach the backend in another order on each rank.
"""


class ShardedModule(State, Notebook):
    """A model split over the ranks of a group; made by `torchshard.shard`."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Creates an instance of a subclass with the unsharded forward's signature, which training loops read."""
        if cls is not ShardedModule:
            return object.__new__(cls)
        return cast(Self, object.__new__(_class_for(cast(nn.Module, args[0]))))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":  # users call only this module: accelerate wraps its forward for mixed precision
            nn.Module.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Checks the process group of a `DistributedDataParallel` that wraps this model: it reads this attribute.

        DDP offers no other hook before it broadcasts rank 0's slices to all ranks. It does not pass
        itself, so its caller's frame is read.
        """
        wrapper = sys._getframe(1).f_locals.get("self")
        if wrapper is None or type(wrapper).__name__ != "DistributedDataParallel":
            return []
        split = [axis for axis, of in self._ts_of_batch.items() if any(isinstance(each, Shard) for each in of.values())]
        groups = [self._ts_group, *(self._ts_ranks.groups[axis] for axis in split)]
        check_other_group(getattr(wrapper, "process_group", None), groups, type(wrapper).__name__)
        return []

    def __getattr__(self, name: str) -> Any:
        method = generation_method(self, name) if "_ts_source" in self.__dict__ else None
        return super().__getattr__(name) if method is None else method

    # Submodules refuse hooks (`ShardedSubmodule`), because they are not called; the model itself is called.
    register_forward_hook: Callable[..., RemovableHandle] = nn.Module.register_forward_hook
    register_forward_pre_hook: Callable[..., RemovableHandle] = nn.Module.register_forward_pre_hook
    register_full_backward_hook: Callable[..., RemovableHandle] = nn.Module.register_full_backward_hook
    register_full_backward_pre_hook: Callable[..., RemovableHandle] = nn.Module.register_full_backward_pre_hook

    def __init__(
        self,
        model: nn.Module,
        plan: PlanLike,
        ranks: Ranks,
        aim: Aim | None = None,
        *,
        whole_batches: bool = False,
        cut: bool = True,
        weights: str | os.PathLike[str] | Weights | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        """Splits a model.

        Args:
            whole_batches: whether each rank passes the full batch, which the ranks split, and gets full results.
        """
        group, mesh = ranks.group, ranks.mesh.without_idle

        def read() -> tuple[Constraints, ModelFacts, Weights | None]:
            check_weights(model)
            facts = ModelFacts.of(model)
            constraints = read_constraints(facts, plan, mesh, aim)
            check_layouts(facts, constraints.first_layouts(facts))
            if weights is None or isinstance(weights, Weights):
                return constraints, facts, weights
            found = read_folder(model_without_storage(model), shared_names(model), weights)
            check_missing(model, found, weights)
            return constraints, facts, found

        what = "the ranks can't shard this model together"
        constraints, of_model, loaded = ranks.run_on_all(read, PlanError, what)
        layouts = constraints.first_layouts(of_model)
        of_batch = dict[str, Mapping[str, Layout]]()
        if mesh.across:
            of_batch = {each.axis.name: each.first_layouts(of_model) for each in constraints.of_batch}
        if ranks.count > 1:
            ways = [f"{axis} {axis.data}" for axis in mesh.across] or [str(constraints.data)]
            asked = f"{', '.join(ways)}; {'global' if whole_batches else 'local'}"
            ranks.verify({"mesh= and inputs=": asked}, what, "the same mesh= and inputs= on every rank")
        verify_same_weights(model, ranks, () if loaded is None else loaded.tensors)
        if loaded is not None:
            facts = describe_contents(loaded.tensors) | loaded.samples
            ranks.verify(facts, "the ranks would read different weights", "a folder with the same files on every rank")
        if any(p.grad is not None for p in model.parameters()):
            what = "gradients that the parameters hold already stay with the unsharded model"
            warn(f"{what}: call backward() after ts.shard")
        super().__init__(model, layouts, ranks, of_batch=of_batch, cut=cut, weights=loaded)
        self._ts_constraints = constraints
        self._ts_whole_batches = whole_batches
        self._ts_is_in_no_sync = False
        self._ts_compiler = compiler
        self._ts_watch = Watch(self.source)
        self._ts_entries = {"": KnownCalls(self.source)}
        self._ts_carried_places: set[str] = set()
        self._ts_numbers: set[str] = set()
        self._ts_history = History(group, type(model).__name__)
        self._ts_across = History(ranks.replicas, type(model).__name__) if mesh.across else None
        observe_steps(self, model)

    def note_step(self, settings: str) -> None:
        """Counts a step of this model's parameters, which an optimizer with these settings is about to make."""
        for history in self._histories:
            history.note_step(settings)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Marks the slices in the state dicts of an optimizer of this model's parameters."""
        mark_state_dicts(optimizer)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Gathers the unsharded model's state dict on every rank: a collective call.

        First the ranks compare their histories and their replicated parameters.

        Raises:
            DistributedError: the ranks have drifted apart.
        """
        self.verify_state()
        return super().full_state_dict()

    @property
    def _histories(self) -> list[History]:
        """This rank's histories: the one compared over the model's axis, then the one over the replicas."""
        return [self._ts_history] if self._ts_across is None else [self._ts_history, self._ts_across]

    @property
    def _ts_number(self) -> int:
        return self._histories[-1].number

    @property
    def _batch_group(self) -> Group | None:
        """The group that the batch is split over, or None."""
        if self._ts_constraints.mesh.across:
            return self._ts_ranks.replicas
        return self._ts_group if self._ts_constraints.data else None

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        """The names of the groups that the batch is split over."""
        if self._ts_constraints.mesh.across:
            return tuple(each.axis.name for each in self._ts_constraints.of_batch)
        return (self._ts_group.name,) if self._ts_constraints.data else ()

    @property
    def _split_over_data(self) -> dict[str, Layout]:
        """The layouts of the tensors that are split over a data axis, by name."""
        found = (item for of_axis in self._ts_of_batch.values() for item in of_axis.items())
        return {name: layout for name, layout in found if isinstance(layout, Shard)}

    def verify_state(self) -> None:
        """Checks that the ranks' histories and replicated parameters match: a collective call.

        Raises:
            DistributedError: they differ.
        """
        if not self._verifies_calls():
            return
        ranks, what = self._ts_ranks, "the ranks hold different states"
        facts, gradients = self._ts_history.all_facts(self._tensors_by_first_name(), self._ts_layouts)
        compare = partial(verify_equal, ranks.group, facts, call_error, what, near=gradients)
        ranks.on_replicas(compare, DistributedError, what)
        if self._ts_across is not None:
            facts, gradients = self._ts_across.all_facts(self._tensors_by_first_name(), self._split_over_data)
            compare = partial(verify_equal, ranks.replicas, facts, call_error, what, near=gradients)
            ranks.run_on_all(compare, DistributedError, what)

    def __copy__(self) -> NoReturn:
        raise InputError(
            "a sharded model has no shallow copy",
            where="copy.copy(model)",
            why="two models would hold one set of slices, and count their calls apart",
            attempt="copy.deepcopy(model)",
        )

    # --- calling -----------------------------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Computes the unsharded model's forward; the results are equal on every rank.

        If each rank passes its shard of the batch, results with the batch are this rank's shard.

        Raises:
            InputError: the arguments don't fit, are on another device, or differ between the ranks.
        """
        if torch.compiler.is_dynamo_compiling():
            return call_outside(self, tracing_compiler(), args, kwargs)
        return self.call_compiled(self._ts_compiler, args, kwargs)

    def call_compiled(
        self, compiler: Compiler | None, args: Sequence[object], kwargs: Mapping[str, object], entry: str = ""
    ) -> Any:
        """Computes `forward` with graphs that `compiler` compiles, if there is one.

        Args:
            entry: the path of the called submodule; '' for the model itself.
        """
        with _CALL_LOCK:
            refuse_transforms(self.source)  # within the lock: another thread's capture would look like a transform
            return self._call(compiler, args, kwargs, entry)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defers the sums of gradients over the batch's ranks to the next call outside of this context.

        Use it to accumulate gradients over several calls: parameters keep this rank's partial
        gradients, and the backward of the next call sums them together with its own. Until then
        reading `p.grad` raises; `zero_grad()` drops the partial gradients. The forward has to run
        within the context. Meanwhile a rank stores gradients that are not split over the data axes.

            with model.no_sync():
                for batch in batches[:-1]:
                    model(batch).backward()
            model(batches[-1]).backward()

        It does nothing unless the mesh splits the batch across ranks.

        Source: torch.nn.parallel.DistributedDataParallel.no_sync, FullyShardedDataParallel.no_sync
        """
        before, self._ts_is_in_no_sync = self._ts_is_in_no_sync, True
        try:
            yield
        finally:
            self._ts_is_in_no_sync = before

    @property
    def divides_batch(self) -> bool:
        """Whether the batch is split across ranks, which must then call the model together."""
        return bool(self._batch_axes)

    def call_part(self, path: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Calls one submodule, as generation calls an encoder; it has its own graphs."""
        if path not in self._ts_entries:
            self._ts_entries[path] = KnownCalls(entry_of(self.source, path))
        return self.call_compiled(self._ts_compiler, args, kwargs, path)

    def _call(self, compiler: Compiler | None, args: Sequence[object], kwargs: Mapping[str, object], entry: str) -> Any:
        name = self._ts_history.next_call
        if compiler is not None:
            compiler.begin_call(self._ts_group, (t.device for t in self._ts_tensors.values()))
        with unwatched():
            call, verify = self._begun_call(args, kwargs, "a call", compiler, entry)
            if isinstance(call, ShardError) or not self._can_run_ahead(call, compiler):
                verify()
                verify = _nothing
        assert not isinstance(call, ShardError)
        compiled, batch_group = call.compiled or self._compile(call, args, kwargs), self._batch_group
        state = [self._ts_tensors[value] if isinstance(value, str) else value for value in compiled.state]
        with running(name), unwatched(), autocasting(()):
            try:
                with settling(self._ts_group, verify):
                    tensors: Sequence[Tensor] = call.tensors
                    if batch_group is not None:
                        named = dict(zip(call.inputs.names, tensors, strict=True))
                        enter = own_parts if self._ts_whole_batches else entering
                        tensors = enter(named, call.batches, batch_group)
                    results = self._executable(compiled, call, compiler)(*state, *tensors, *call.inputs.numbers)
            except (RuntimeError, IndexError) as error:
                _check_dtypes(call.inputs, state)  # explains the commonest cause better than the op's own error
                _check_indices(error)
                raise error
        captured = compiled.program.captured
        count = captured.changes.results
        if batch_group is not None and not self._ts_whole_batches:
            results = leaving(results, compiled.result_layouts, batch_group)
        results, left = results[:count], results[count:]
        equal = results
        if batch_group is not None:
            layouts = compiled.result_layouts[:count]
            if self._ts_whole_batches:
                equal = results = joined(results, layouts, batch_group)
            else:
                equal = [r for r, layout in zip(results, layouts, strict=True) if not isinstance(layout, Shard)]
        if torch.is_grad_enabled():
            refuse_hooks(results, compiled.results_beside, self._ts_history.latest_text)
        if self._verifies_calls() and torch.is_grad_enabled():
            if self._ts_across is not None:
                self._ts_across.watch_results(equal)
                equal = results  # over the model's axis, ranks compute the same shard of the batch
            self._ts_history.watch_results(equal)
        kept = [
            mark(tensor, layout, shape, self._ts_group, self._ts_history.latest_call)
            for tensor, (layout, shape) in zip(left, compiled.carried, strict=True)
        ]
        if batch_group is not None:
            mark_whole(kept, compiled.result_layouts[len(results) :])
        return captured.finish([*results, *kept], call.arguments)

    def _executable(self, compiled: Compiled, call: PreparedCall, compiler: Compiler | None) -> Callable[..., Any]:
        """Returns the callable for a call: with a backward graph if gradients are enabled.

        PyTorch's autograd computes the backward if PyTorch traces the call, or if each collective
        is verified.
        """
        if self._ts_group.level is CheckLevel.ALL or any(map(is_fake, call.tensors)):
            if call.sums == "with those of earlier calls":
                sum_kept(self._ts_parameters.values())
            return compiled.executable
        if call.sums != "in its backward":
            return partial(self._run_unsummed, compiled.training(compiler, self._batch_axes), call.sums)
        return compiled.training(compiler).next_call() if torch.is_grad_enabled() else compiled.inference(compiler)

    def _run_unsummed(self, training: LazyStep, sums: Sums, *tensors: Any) -> Any:
        """Runs a call, and keeps its partial gradients or sums them with those kept earlier."""
        run, keeps = training.next_call(), sums == "in a later one"
        reached = set(map(id, training.parameters(*tensors)))
        if not keeps:
            sum_kept(p for p in self._ts_parameters.values() if id(p) not in reached)
        return run(*tensors, keeps=keeps) if training.has_graphs else run(*tensors)

    def _can_run_ahead(self, call: PreparedCall, compiler: Compiler | None) -> bool:
        """Returns whether the call's graph may start before the ranks have verified the call.

        The graph waits for that when it first communicates. A compiled graph communicates past
        `wire`, which does the waiting.
        """
        if call.compiled is None or compiler is not None or self._ts_group.level is CheckLevel.ALL:
            return False
        if call.sums != "in its backward":
            return False
        return call.compiled.can_run_ahead

    def _begun_call(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        purpose: Purpose,
        compiler: Compiler | None = None,
        entry: str = "",
    ) -> tuple[PreparedCall | ShardError, Callable[[], None]]:
        """Prepares a call, and returns it with a function that waits until the ranks have compared it.

        The ranks compare its key, shapes and values. A rank that refuses the call takes part in the
        comparison, because the others would wait for it; the function raises its error.
        """
        call: PreparedCall | ShardError
        try:
            with torch._C.DisableTorchFunctionSubclass():  # reads slices as plain tensors
                call = self._prepared_call(args, kwargs, purpose, compiler, entry)
        except ShardError as error:
            call = error
        compare = _nothing
        if self._verifies_calls():
            with self._resetting_history():
                compare = self._begin_comparing(call, purpose)

        def verify() -> None:
            with self._resetting_history():
                self._finish_comparing(compare, call, purpose)
                if isinstance(call, ShardError):
                    raise call
            if purpose == "a call":
                for history in self._histories:
                    history.count_call()

        return call, verify

    def _begin_comparing(self, call: PreparedCall | ShardError, purpose: Purpose) -> Callable[[], None]:
        """Starts to compare a call over the model's axis; returns a function that waits for the result."""
        try:
            return begin_verifying_call(self._ts_group, call, purpose, self._history_snapshot(call))
        except ShardError as error:
            if self._ts_across is None:
                raise
            return partial(_raise, error)  # later, when the ranks of the data axis can learn of it

    def _finish_comparing(self, compare: Callable[[], None], call: PreparedCall | ShardError, purpose: Purpose) -> None:
        """Waits for the comparison of a call over the model's axis, then compares it over the data axis.

        A difference along one axis must raise on all ranks of the other.
        """
        if self._ts_across is None or not self._verifies_calls():
            return compare()
        failure: ShardError | None = None
        try:
            compare()
        except ShardError as error:
            failure = error
        made = call if failure is None else failure
        if isinstance(made, PreparedCall):
            made = replace(made, compared=made.inputs)
        snapshot = self._snapshot_of(self._ts_across, made)
        try:
            begin_verifying_call(self._ts_ranks.replicas, made, purpose, snapshot)()
        except ShardError as error:
            failure = failure or error
        tell_failure(self._ts_group, failure)

    @contextlib.contextmanager
    def _resetting_history(self) -> Iterator[None]:
        try:
            yield
        except ShardError:
            for history in self._histories:
                history.reset()
            raise

    def _prepared_call(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        purpose: Purpose,
        compiler: Compiler | None,
        entry: str,
    ) -> PreparedCall:
        self._follow()
        given = self._ts_entries[entry].flatten(args, kwargs, self._ts_numbers)
        check_inputs(self.source, given)
        self._check_devices(given)
        if purpose == "a call":
            self._check_has_values(given)
        inputs, layouts = whole_inputs(given, self._ts_group, self._ts_history.number, self._ts_carried_places)
        compared, batches, batch_group = inputs, dict[str, Layout](), self._batch_group
        if batch_group is not None:
            if self._ts_whole_batches:
                batches = layouts_of_parts(inputs, batch_group.size)
            else:
                whole = {name for name, tensor in given.named_tensors if is_of_all(tensor)}
                inputs, batches = whole_batch(inputs, batch_group.size, whole)
            compared = inputs if self._ts_across is None else compared
        if self._ts_assigned:
            self._follow_assigned()
        state = self._ts_watch.state()
        key = call_key(inputs, state, self._ts_source_modules, self._ts_tensors.values(), layouts | batches, entry)
        key = self._ts_graphs.with_numbers(key, self._ts_tensors)
        seen = f"state {self._ts_watch.number}"
        if self._ts_watch.latest_change:
            seen += f", changed last: {self._ts_watch.latest_change}"
        compiled = self._ts_graphs.find(key, (*inputs.tensors, *inputs.numbers))
        tensors = given.tensors if inputs is given else local_tensors(given)
        calls = [t.left_by for t in given.tensors if isinstance(t, CarriedSlice)]
        if compiled is not None:
            check_once(given, compiled.program.captured.changes)
        elif torch.is_grad_enabled():  # a refused call never has a graph: the key contains requires_grad
            names = [name for name, names in self._ts_names.items() if names[0] not in self._ts_parameters]
            check_buffers({name: self._ts_tensors[name] for name in names})
        how = "" if compiler is None else str(compiler)
        return PreparedCall(
            inputs, compared, tensors, layouts, batches, calls, given.arguments, key, compiled, how, self._sums, seen
        )

    def _follow_assigned(self) -> None:
        """Notices attributes assigned since the last call, and drops entries for submodules, which copy some."""
        self._ts_watch.look()
        self._ts_entries = {"": self._ts_entries[""]}
        self._ts_assigned.clear()

    @property
    def _sums(self) -> Sums:
        """When the ranks sum the gradients of a call made now."""
        if not self._batch_axes or not torch.is_grad_enabled():
            return "in its backward"
        if self._ts_is_in_no_sync:
            return "in a later one"
        return "with those of earlier calls" if any(map(_is_unsummed, self.parameters())) else "in its backward"

    def _history_snapshot(self, call: PreparedCall | ShardError) -> HistorySnapshot:
        # Until the first graph fixes the layouts, they follow each rank's own plan, and plans may differ.
        if self._ts_fixed and not self._ts_watched:
            tensors, distinct = self._tensors_by_first_name(), self._ts_distinct
            self._ts_history.watch(tensors, self._ts_layouts, distinct[MODEL])
            if self._ts_across is not None:
                over_data = {name: any(distinct[axis].get(name) for axis in self._ts_of_batch) for name in tensors}
                self._ts_across.watch(tensors, self._split_over_data, over_data)
            self._ts_watched = True
        return self._snapshot_of(self._ts_history, call)

    def _snapshot_of(self, history: History, call: PreparedCall | ShardError) -> HistorySnapshot:
        if isinstance(call, ShardError):
            return history.snapshot({}, {})
        return history.snapshot(self._ts_tensors, call.elsewhere)

    def _verifies_calls(self) -> bool:
        """Returns whether the ranks compare their calls of this model."""
        return self._ts_ranks.count > 1 and self._ts_group.level is not CheckLevel.OFF

    def _check_has_values(self, inputs: Leaves) -> None:
        """Checks that inputs and parameters all have values, or all lack them, as in a dry run on the meta device."""
        without = [n for n, t in zip(inputs.names, inputs.tensors, strict=True) if t.is_meta or is_fake(t)]
        if not without:
            self.check_initialized()
        elif not all(t.is_meta or is_fake(t) for t in self._ts_tensors.values()):
            raise InputError(
                f"input {without[0]} has no values",
                where=f"argument {without[0]!r}",
                why="it is on the meta device, or fake; the model's parameters are not",
                attempt="real inputs; example_inputs= of ts.shard and ts.plan may be without values",
            )

    def _check_devices(self, inputs: Leaves) -> None:
        """Checks the inputs' devices, once per combination: the check is slow."""
        devices = tuple(t.device for t in inputs.tensors)
        if devices not in self._ts_fitting_devices:
            check_devices(self.source, inputs)
            self._ts_fitting_devices.add(devices)

    def compile(self, **options: Any) -> None:
        """Compiles the graphs of later calls with `torch.compile`, like the objective `{"compile": options}`.

        Args:
            options: keyword arguments of torch.compile, such as backend, mode, dynamic.

        Raises:
            InputError: torch.compile rejects them.

        Source: torch.nn.Module.compile
        """
        self._ts_compiler = compiler_of(options or True, where="model.compile()")

    # --- capturing ---------------------------------------------------------------------------------------------------

    def warm_up(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Captures the graph of a call without running it."""
        with _CALL_LOCK:
            with unwatched():
                call, verify = self._begun_call(args, kwargs, "a capture for example inputs")
                verify()
            assert not isinstance(call, ShardError)
            self._compile(call, args, kwargs)

    @without_tools()
    def _compile(self, call: PreparedCall, args: Sequence[object], kwargs: Mapping[str, object]) -> Compiled:
        """Captures, plans and compiles a call that needs a new graph, on all ranks together."""
        for name, parameter in self.named_parameters():
            self._source_tensor(name).requires_grad_(parameter.requires_grad)
        self.give_source_numbers()
        constraints = self._ts_constraints
        if self._ts_fixed:
            constraints = constraints.with_layouts(self._ts_layouts)
        trains = call.key.has_gradients or (constraints.aim.trains and not self._ts_fixed)
        constraints = constraints.with_gradients(trains)
        inputs = _without_storage(call.inputs)

        if any(isinstance(layout, Shard) for layout in (*call.layouts.values(), *call.batches.values())):
            args, kwargs = call.inputs.rebuild(call.inputs.tensors)

        def capture_and_plan() -> RankProgram:
            numbers = call.inputs.number_names
            entry = self._ts_entries[call.key.entry].model
            try:
                captured = program(
                    entry, constraints, args, kwargs, inputs=call.layouts, batches=call.batches, numbers=numbers
                )
            except CaptureError as error:
                raise advised_of_parts(error, entry, call.tensors, call.batches) from error
            if self._ts_whole_batches:
                refuse_changes(captured.captured.changes)
            self._ts_graphs.refuse_dependence(entry, _model_call(inputs, call, captured), captured)
            check_once(replace(call.inputs, tensors=call.tensors), captured.captured.changes)
            return RankProgram.of(captured, self._ts_ranks)

        _warn_of_global_hooks()
        what = "the ranks can't make a program of the model together"
        made = self._ts_ranks.run_on_all(capture_and_plan, CaptureError, what)
        planned = made.program
        verify_same_program(self._ts_ranks, made, call)
        if not self._ts_fixed:
            own = planned.plan.parameters.items()
            self._fix_layouts({name: layout for name, layout in own if name in self._ts_tensors})
        device = next((p.device for p in self.parameters()), None)
        key = self._ts_graphs.with_numbers(call.key, self._ts_tensors, planned.captured.conditions)
        compiled = compile_program(made, key, _model_call(inputs, call, planned), self._ts_ranks, device)
        self._ts_carried_places.update(planned.captured.changes.names)
        self._ts_numbers.update(planned.captured.changes.numbers)
        self._ts_graphs.add(key, compiled, self._ts_watch.latest_change)
        self._note_left(planned.captured.left)
        return compiled

    def _note_left(self, places: Sequence[tuple[str, ...]]) -> None:
        """Warns about tensors that forward stores in attributes: graphs don't store them, and reading them raises."""
        new = [place for place in places if place not in self._ts_left_places]
        self._ts_left_places.update(new)
        submodules = dict(self.named_modules())
        for path, name, *keys in new:
            module = submodules.get(path)
            if isinstance(module, ShardedSubmodule) and not any(key.startswith(".") for key in keys):
                module.note_left(name)
        if new:
            warn(
                f"forward leaves tensors in {', '.join(map(describe, new))}, which calls of a sharded model do not: "
                "what it computes for others to read, such as an auxiliary loss, has to be among its results"
            )

    # --- looking -----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the latest captured graph.

        Raises:
            InputError: no graph is captured yet.
        """
        return self._latest().plan

    @property
    def graph(self) -> fx.GraphModule:
        """The latest captured graph, with its collectives and global sizes."""
        return self._latest().program.graph

    @property
    def local_graph(self) -> fx.GraphModule:
        """The latest captured graph of this rank; parameters and inputs are its arguments."""
        return self._latest().graph

    @property
    def captures(self) -> int:
        """The number of captured graphs, one per kind of call; a number that keeps growing costs time."""
        return self._ts_graphs.captures

    def _latest(self) -> Compiled:
        if self._ts_graphs.latest is None:
            raise InputError(
                "no graph is captured yet",
                where="ShardedModule",
                why="it was made without example_inputs and has not been called",
                attempt="torchshard.shard(model, plan, example_inputs=...), or call it once",
            )
        return self._ts_graphs.latest


_CLASSES: weakref.WeakValueDictionary[type[nn.Module], type[ShardedModule]] = weakref.WeakValueDictionary()
"""Class of unsharded models -> class of sharded ones: `torch.func.stack_module_state` requires equal classes."""


def _class_for(model: nn.Module) -> type[ShardedModule]:
    if "forward" in vars(model):
        return _made_class(model)
    made = _CLASSES.get(type(model))
    if made is None:
        made = _CLASSES[type(model)] = _made_class(model)
    return made


def _made_class(model: nn.Module) -> type[ShardedModule]:
    def forward(self: ShardedModule, *args: object, **kwargs: object) -> Any:
        return ShardedModule.forward(self, *args, **kwargs)

    with contextlib.suppress(AttributeError, ValueError):  # `check_weights` refuses these
        forward.__signature__ = with_self(inspect.signature(model.forward))  # type: ignore[attr-defined]
    namespace = {"forward": forward, "made_for": ShardedModule, "__module__": __name__}
    made = cast(type, type(ShardedModule))(type(model).__name__, (ShardedModule,), namespace)
    return cast(type[ShardedModule], made)


def _is_unsummed(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "unsummed", None))


def _nothing() -> None:
    """A wait that returns at once."""


def _raise(error: ShardError) -> NoReturn:
    raise error


def _warn_of_global_hooks() -> None:
    if global_hooks():
        warn(
            "hooks on all modules (register_module_forward_hook) become part of a sharded model's graph; on the "
            "model itself they are called once more"
        )


def _check_dtypes(inputs: Leaves, state: Sequence[Tensor]) -> None:
    """After a failure, raises InputError if an input has a floating dtype that the model lacks."""
    dtypes = {t.dtype for t in state if t.is_floating_point()}
    for name, tensor in zip(inputs.names, inputs.tensors, strict=True):
        if tensor.is_floating_point() and dtypes and tensor.dtype not in dtypes:
            model_dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise InputError(
                f"input {name} is {str(tensor.dtype).removeprefix('torch.')}, the model {model_dtypes}",
                where=f"argument {name!r}",
                why="an op of the model takes both, of one dtype",
                attempt=f"{name}.to({next(iter(dtypes))}), model.to({tensor.dtype}), or torch.autocast around the call",
            )


def _check_indices(error: Exception) -> None:
    """After a failure, raises InputError if an op rejected an index, as an embedding does."""
    if str(error).startswith("index out of range"):
        raise InputError(
            "an index is out of range",
            where="the call",
            why="an embedding has fewer rows: a token id beyond the vocabulary, or more positions than the model has",
            attempt="ids of the model's tokenizer; a shorter sequence",
        ) from error


def _model_call(inputs: Leaves, call: PreparedCall, made: Program) -> ModelCall:
    """Returns a call without values, for a rehearsal to repeat."""
    return ModelCall(inputs, call.key.training, [number for _, number in made.captured.conditions])


def _without_storage(inputs: Leaves) -> Leaves:
    """Returns a call's inputs without memory, which a graph can store for its lifetime."""
    tensors = (without_storage(tensor).requires_grad_(tensor.requires_grad) for tensor in inputs.tensors)
    return replace(inputs, tensors=tuple(tensors), arguments=((), {}))
