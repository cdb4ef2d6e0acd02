"""Runs the calls of a sharded model: finds or captures a call's graph, and runs it once the ranks agree.

call ── reader ──> PreparedCall ── agreement ──> verified ── capturer, if no graph fits ──> graph ──> results
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchshard.capture import Leaves, refuse_transforms
from torchshard.compiler.constraints import Constraints
from torchshard.core.autocast import autocasting
from torchshard.core.errors import InputError, ShardError
from torchshard.custom_ops.fx_types import Argument
from torchshard.distributed.consistency import running
from torchshard.distributed.group import CheckLevel
from torchshard.distributed.wire import settling
from torchshard.runtime.agreement import Agreement, no_wait
from torchshard.runtime.batch_split import BatchSplit
from torchshard.runtime.call_verification import PreparedCall, Purpose, Sums
from torchshard.runtime.capturing import Capturer
from torchshard.runtime.carried import mark, mark_whole
from torchshard.runtime.compilation import Compiler
from torchshard.runtime.compiled import Compiled, GraphCache
from torchshard.runtime.later_sums import sum_kept
from torchshard.runtime.lazy_step import LazyStep
from torchshard.runtime.reader import CallReader
from torchshard.runtime.results_beside import refuse_hooks
from torchshard.runtime.step import RunGraph
from torchshard.runtime.store import WeightStore
from torchshard.runtime.submodule import Unsharded
from torchshard.weights.local_slice import unwatched

_CALL_LOCK = threading.RLock()
"""Makes the threads of a process call sharded models one after the other, across all models.

A lock for each model would not do: `torch.export` and the patches of a capture act on the whole
process, and the collectives of two models would reach the backend in another order on each rank.
"""


class Runner:
    """Runs the calls of one model."""

    def __init__(
        self,
        modules: Mapping[str, Unsharded],
        store: WeightStore,
        agreement: Agreement,
        constraints: Constraints,
        *,
        whole_batches: bool,
        compiler: Compiler | None,
    ) -> None:
        """Starts without graphs.

        Args:
            modules: the unsharded modules by path; '' for the model itself.
            whole_batches: whether each rank passes the full batch, which the ranks split, and gets full results.
            compiler: compiles the graphs, if there is one.
        """
        self._source, self._store, self._agreement = modules[""].module, store, agreement
        self.batch = BatchSplit.of(constraints, store.ranks, is_whole=whole_batches)
        """How the ranks split the batch."""
        self.compiler = compiler
        self.graphs = GraphCache()
        """The captured graphs."""
        self._is_in_no_sync = False
        self._moves = store.tensors.moves
        assigned = modules[""].assigned
        self._reader = CallReader(self._source, store, agreement, self.graphs, self.batch, assigned)
        self._capturer = Capturer(store, self._reader, self.graphs, self.batch, constraints, modules)

    def call(
        self, compiler: Compiler | None, args: Sequence[object], kwargs: Mapping[str, object], entry: str = ""
    ) -> object:
        """Computes `forward` with graphs that `compiler` compiles, if there is one.

        Args:
            entry: the path of the called submodule; '' for the model itself.
        """
        with _CALL_LOCK:
            refuse_transforms(self._source)  # within the lock: another thread's capture would look like a transform
            name = self._agreement.next_call
            call, verify = self._verified(compiler, args, kwargs, entry)
            compiled = call.compiled or self._capturer.capture(call, args, kwargs)
            with running(name), unwatched(), autocasting(()):
                returned = self._run(call, compiled, compiler, verify)
            return self._finished(call, compiled, returned)

    def warm_up(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Captures the graph of a call without running it."""
        with _CALL_LOCK:
            with unwatched():
                call, verify = self._begun(args, kwargs, "a capture for example inputs")
                verify()
            assert not isinstance(call, ShardError)
            self._capturer.capture(call, args, kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defers the sums of gradients over the batch's ranks to the next call outside of this context."""
        before, self._is_in_no_sync = self._is_in_no_sync, True
        try:
            yield
        finally:
            self._is_in_no_sync = before

    # --- before the graph runs ---------------------------------------------------------------------------------------

    def _verified(
        self, compiler: Compiler | None, args: Sequence[object], kwargs: Mapping[str, object], entry: str
    ) -> tuple[PreparedCall, Callable[[], None]]:
        """Prepares a call; the ranks have verified it when the returned function returns."""
        if compiler is not None:
            compiler.begin_call(self._store.ranks.group, (t.device for t in self._store.tensors.now.values()))
        with unwatched():
            call, verify = self._begun(args, kwargs, "a call", compiler, entry)
            if isinstance(call, ShardError) or not self._can_run_ahead(call, compiler):
                verify()
                verify = no_wait
        assert not isinstance(call, ShardError)
        return call, verify

    def _begun(
        self,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        purpose: Purpose,
        compiler: Compiler | None = None,
        entry: str = "",
    ) -> tuple[PreparedCall | ShardError, Callable[[], None]]:
        """Prepares a call, and returns it with a function that waits until the ranks have compared it."""
        call: PreparedCall | ShardError
        try:
            with torch._C.DisableTorchFunctionSubclass():  # reads slices as plain tensors
                self._follow()
                call = self._reader.read(args, kwargs, purpose, compiler, entry, self._sums)
        except ShardError as error:
            call = error
        return call, self._agreement.begin(call, purpose)

    def _follow(self) -> None:
        """Follows the user's replacements of tensors, and drops graphs that don't fit the new ones."""
        self._store.follow()
        if self._moves != self._store.tensors.moves:
            self._moves = self._store.tensors.moves
            self.graphs.clear()
            self._reader.forget()

    @property
    def _sums(self) -> Sums:
        """When the ranks sum the gradients of a call made now."""
        if not self.batch.axes or not torch.is_grad_enabled():
            return "in its backward"
        if self._is_in_no_sync:
            return "in a later one"
        parameters = self._store.tensors.parameters().values()
        is_unsummed = any(getattr(parameter, "unsummed", None) for parameter in parameters)
        return "with those of earlier calls" if is_unsummed else "in its backward"

    def _can_run_ahead(self, call: PreparedCall, compiler: Compiler | None) -> bool:
        """Returns whether the call's graph may start before the ranks have verified the call.

        The graph waits for that when it first communicates. A compiled graph communicates past
        `wire`, which does the waiting.
        """
        if call.compiled is None or compiler is not None or self._store.ranks.group.level is CheckLevel.ALL:
            return False
        return call.sums == "in its backward" and call.compiled.can_run_ahead

    # --- running the graph -------------------------------------------------------------------------------------------

    def _run(
        self, call: PreparedCall, compiled: Compiled, compiler: Compiler | None, verify: Callable[[], None]
    ) -> Sequence[Argument]:
        """Returns the values that a call's graph returns."""
        tensors = self._store.tensors.now
        state = [tensors[value] if isinstance(value, str) else value for value in compiled.state]
        try:
            with settling(self._store.ranks.group, verify):
                own = self.batch.entering(call)
                run = self._executable(compiled, call, compiler)
                returned = run(*state, *own, *call.inputs.numbers)
        except (RuntimeError, IndexError) as error:
            _check_dtypes(call.inputs, state)  # explains the commonest cause better than the op's own error
            _check_indices(error)
            raise error
        return returned

    def _executable(self, compiled: Compiled, call: PreparedCall, compiler: Compiler | None) -> RunGraph:
        """Returns the callable for a call: with a backward graph if gradients are enabled.

        PyTorch's autograd computes the backward if PyTorch traces the call, or if each collective
        is verified.
        """
        if self._store.ranks.group.level is CheckLevel.ALL or any(map(is_fake, call.tensors)):
            if call.sums == "with those of earlier calls":
                sum_kept(self._store.parameters.values())
            return compiled.executable
        if call.sums != "in its backward":
            return partial(self._run_unsummed, compiled.training(compiler, self.batch.axes), call.sums)
        return compiled.training(compiler).next_call() if torch.is_grad_enabled() else compiled.inference(compiler)

    def _run_unsummed(self, training: LazyStep, sums: Sums, *tensors: Tensor) -> Sequence[Argument]:
        """Runs a call, and keeps its partial gradients or sums them with those kept earlier."""
        run, keeps = training.next_call(), sums == "in a later one"
        reached = set(map(id, training.parameters(*tensors)))
        if not keeps:
            sum_kept(p for p in self._store.parameters.values() if id(p) not in reached)
        return run(*tensors, keeps=keeps) if training.has_graphs else run(*tensors)

    def _finished(self, call: PreparedCall, compiled: Compiled, returned: Sequence[Argument]) -> object:
        """Returns the results of a call, and stores the carried values in the caller's arguments."""
        captured, shardings = compiled.program.captured, compiled.result_shardings
        count = captured.changes.results
        results, equal, left = self.batch.leaving(returned, shardings, count)
        if torch.is_grad_enabled():
            refuse_hooks(results, compiled.results_beside, self._agreement.latest_text)
            if self._agreement.verifies:
                self._agreement.watch_results(results, equal)
        group, left_by = self._store.ranks.group, self._agreement.latest_call
        kept: list[Tensor] = [
            mark(tensor, layout, shape, group, left_by)
            for tensor, (layout, shape) in zip(left, compiled.carried, strict=True)
        ]
        if self.batch.axes:
            mark_whole(kept, shardings[count:])
        return captured.finish([*results, *kept], call.arguments)


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
