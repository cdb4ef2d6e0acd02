"""The sharded model: the same forward signature and parameter names, this rank's slices, one graph per kind of call.

`ShardedModule` is what users call. It stores three objects, each with one job:

    WeightStore    this rank's slices: cut, moved, replaced, gathered, loaded            `store`
    Agreement      compares the ranks: their calls, and on request their states          `agreement`
    Runner         finds or captures the graph of a call, and runs it                    `runner`

`state_dicts` makes its state dicts; `submodule` defines its submodules, which are of the user's classes too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchshard.capture import model_without_storage, views_kept, without_storage
from torchshard.compiler.constraints import PlanLike
from torchshard.core.columns import Notebook
from torchshard.core.errors import InputError
from torchshard.core.layouts import Layout, Shard
from torchshard.distributed.group import Group
from torchshard.distributed.ranks import Ranks
from torchshard.plans.objective import Aim
from torchshard.plans.plan import Plan
from torchshard.runtime import state_dicts, streaming
from torchshard.runtime.agreement import Agreement
from torchshard.runtime.compilation import Compiler, compiler_of
from torchshard.runtime.compiled import Compiled
from torchshard.runtime.dynamo import call_outside, tracing_compiler
from torchshard.runtime.generation import generation_method
from torchshard.runtime.optimizer_states import mark_state_dicts
from torchshard.runtime.optimizers import observe_steps, wrap_steps
from torchshard.runtime.runner import Runner
from torchshard.runtime.shardings import Shardings
from torchshard.runtime.start import WeightsLike, agreed_start
from torchshard.runtime.store import WeightStore
from torchshard.runtime.submodule import ShardedSubmodule
from torchshard.runtime.submodule_classes import class_of_model
from torchshard.weights.folder import Weights
from torchshard.weights.over_ranks import check_wrapper


class ShardedModule(ShardedSubmodule, Notebook):
    """A model split over the ranks of a group; made by `torchshard.shard`."""

    _ts_store: WeightStore
    """This rank's slices; in the model, because its parameters refer to it and `deepcopy` must copy both together."""
    _ts_agreement: Agreement
    """Compares the ranks' calls and states."""
    _ts_runner: Runner
    """Runs the calls."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Creates an instance of a subclass with the unsharded forward's signature, which training loops read."""
        if cls is not ShardedModule:
            return object.__new__(cls)
        return object.__new__(class_of_model(cls, cast(nn.Module, args[0])))

    def __init__(
        self,
        model: nn.Module,
        plan: PlanLike,
        ranks: Ranks,
        aim: Aim | None = None,
        *,
        whole_batches: bool = False,
        cut: bool = True,
        weights: WeightsLike = None,
        compiler: Compiler | None = None,
    ) -> None:
        """Splits a model.

        Args:
            whole_batches: whether each rank passes the full batch, which the ranks split, and gets full results.
            cut: False leaves all tensors without memory until the first graph is captured.
            weights: values that replace the model's.
            compiler: compiles the graphs, if there is one.
        """
        start = agreed_start(model, plan, ranks, aim, weights, whole_batches=whole_batches)
        ShardedSubmodule.__init__(self, model_without_storage(model))
        shardings = Shardings(ranks, start.layouts, start.of_batch)
        self._ts_store = WeightStore(self, model, shardings, start.weights, cut=cut)
        self._ts_agreement = Agreement(self._ts_store, type(model).__name__)
        self._ts_runner = Runner(
            {path: cast(ShardedSubmodule, part)._ts_unsharded for path, part in self.named_modules()},
            self._ts_store,
            self._ts_agreement,
            start.constraints,
            whole_batches=whole_batches,
            compiler=compiler,
        )
        state_dicts.add_hooks(self)
        observe_steps(self, model)

    # --- calling -----------------------------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Computes the unsharded model's forward; the results are equal on every rank.

        If each rank passes its shard of the batch, results with the batch are this rank's shard.

        Raises:
            InputError: the arguments don't fit, are on another device, or differ between the ranks.
        """
        if torch.compiler.is_dynamo_compiling():
            return call_outside(self, tracing_compiler(), args, kwargs)
        return self._ts_runner.call(self._ts_runner.compiler, args, kwargs)

    def call_compiled(self, compiler: Compiler | None, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Computes `forward` with graphs that `compiler` compiles, if there is one."""
        return self._ts_runner.call(compiler, args, kwargs)

    def call_part(self, path: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Calls one submodule, as generation calls an encoder; it has its own graphs."""
        return self._ts_runner.call(self._ts_runner.compiler, args, kwargs, path)

    def warm_up(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Captures the graph of a call without running it."""
        self._ts_runner.warm_up(args, kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
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
        return self._ts_runner.no_sync()

    @property
    def divided_dims(self) -> frozenset[int]:
        """The dims of inputs that are split across ranks, which must then call the model together."""
        return frozenset(self._ts_runner.batch.mesh.parts_of_dims)

    def compile(self, **options: object) -> None:
        """Compiles the graphs of later calls with `torch.compile`, like the objective `{"compile": options}`.

        Args:
            options: keyword arguments of torch.compile, such as backend, mode, dynamic.

        Raises:
            InputError: torch.compile rejects them.

        Source: torch.nn.Module.compile
        """
        self._ts_runner.compiler = compiler_of(options or True, where="model.compile()")

    def verify_state(self) -> None:
        """Checks that the ranks' histories and replicated parameters match: a collective call.

        Raises:
            DistributedError: they differ.
        """
        self._ts_agreement.verify_state()

    # --- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's slices under the unsharded names; each slice knows its place in the full tensor.

        `torch.distributed.checkpoint` saves and loads them as parts of full tensors, with any number of ranks. For its
        `get_state_dict` with `full_state_dict=True` this returns full tensors, in a collective call.
        """
        state_dicts.refuse_method(sys._getframe(1))
        state = nn.Module.state_dict(self, *args, **kwargs)
        if kwargs.get("keep_vars"):
            return state
        return state_dicts.with_places(state, self._ts_store, kwargs.get("prefix", ""))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Gathers the unsharded model's state dict on every rank, after `verify_state`: a collective call.

        Raises:
            DistributedError: the ranks have drifted apart.
        """
        self.verify_state()
        return state_dicts.full_state(self, self._ts_store)

    def named_full_parameters(
        self, *, bucket: int | str = "64MiB", dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, full parameter) on every rank, after `verify_state`: a collective call.

        All ranks must iterate to the end.

        Args:
            bucket: the memory for full tensors, in bytes or with a unit; two halves take turns. A larger tensor has
                memory of its own, and a tensor that the caller keeps is not overwritten, but keeps its half.
            dtype: of the floating-point tensors that are sent and yielded; None for their own.

        Raises:
            DistributedError: the ranks have drifted apart, or make different calls.
        """
        self.verify_state()
        return streaming.full_parameters(self, self._ts_store, bucket, dtype)

    def named_slices(self, make: streaming.Make, *, bucket: int | str = "64MiB") -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) as `make` cuts them out of full parameters, after `verify_state`: a collective call.

        Ranks send only requested elements. All must iterate to the end; each may have its own `make`.

        Args:
            make: receives the full parameters by name, without values, and returns tensors by name.
            bucket: as in `named_full_parameters`.

        Raises:
            InputError: `make` fails on a rank, or computes values.
            DistributedError: the ranks have drifted apart, or make different calls.
        """
        self.verify_state()
        return streaming.parameter_slices(self, self._ts_store, make, bucket)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads this rank's slices of an unsharded state dict: a collective call.

        Raises:
            InputError: a name is missing, unknown, or has a different shape from the unsharded model's.
            DistributedError: the ranks were given different tensors.
        """
        state_dicts.load_full_state(self, self._ts_store, state)

    def computed_buffers(self) -> dict[str, Tensor]:
        """Gathers the full buffers that state dicts omit: a collective call."""
        return state_dicts.computed_buffers(self, self._ts_store)

    def stored_tensors(self) -> dict[str, tuple[str, Tensor, Callable[[], Tensor]]]:
        """Returns {name: (first name, this rank's slice, function that gathers the full tensor)} of a state dict."""
        return state_dicts.stored_tensors(self, self._ts_store)

    def note_loaded(self) -> None:
        """Compares parameters and buffers after all ranks have loaded their slices of one checkpoint.

        Raises:
            DistributedError: replicated values differ.
        """
        self._ts_store.note_loaded()

    def change_whole(self, part: nn.Module, change: Callable[[nn.Module], None], name: str) -> None:
        """Changes a submodule's tensors and attributes by code that needs full tensors: a collective call.

        Args:
            change: receives the unsharded module, which has full values while this runs.
            name: the name of the change, equal on all ranks.
        """
        path = next(path for path, module in self.named_modules() if module is part)
        state_dicts.change_whole(self._ts_store, cast(ShardedSubmodule, part), path, change, name)
        self._ts_unsharded.assigned.add(path)

    # --- as a module -------------------------------------------------------------------------------------------------

    # Submodules refuse hooks (`ShardedSubmodule`), because they are not called; the model itself is called.
    register_forward_hook: Callable[..., RemovableHandle] = nn.Module.register_forward_hook
    register_forward_pre_hook: Callable[..., RemovableHandle] = nn.Module.register_forward_pre_hook
    register_full_backward_hook: Callable[..., RemovableHandle] = nn.Module.register_full_backward_hook
    register_full_backward_pre_hook: Callable[..., RemovableHandle] = nn.Module.register_full_backward_pre_hook

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":  # users call only this module: accelerate wraps its forward for mixed precision
            nn.Module.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        method = generation_method(self, name) if "_ts_unsharded" in self.__dict__ else None
        return super().__getattr__(name) if method is None else method

    # `to`, `cuda` and `half` call `_apply`; PyTorch has no public hook for them (PyTorch 2.13.0).
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts (`.to`, `.cuda`, `.double`, `.to_empty`); later calls capture graphs for the new tensors."""
        were_meta = self._ts_store.on_meta()
        super()._apply(fn, recurse)
        self._ts_store.read_moved(were_meta)
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Returns a copy with its own parameters, in the same group; it captures its own graphs."""
        source = self.source
        memo.update({id(t): without_storage(t) for t in (*source.parameters(), *source.buffers())})
        memo.update(views_kept(source))
        memo.update({id(each): each for each in self._ts_store.shared_by_copies})
        copied = ShardedSubmodule.__deepcopy__(self, memo)
        copied._ts_store.join_copy(copied)
        return copied

    def __copy__(self) -> NoReturn:
        raise InputError(
            "a sharded model has no shallow copy",
            where="copy.copy(model)",
            why="two models would hold one set of slices, and count their calls apart",
            attempt="copy.deepcopy(model)",
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InputError(
            "a sharded model can't be pickled",
            where="ShardedModule",
            why="it belongs to the process group of its ranks",
            attempt="torch.save(model.state_dict()) for this rank's slices, or model.full_state_dict() for the whole",
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Checks the process group of a `DistributedDataParallel` that wraps this model: it reads this attribute."""
        ranks, of_batch = self._ts_store.ranks, self._ts_store.shardings.of_batch
        split = [axis for axis, of in of_batch.items() if any(isinstance(each, Shard) for each in of.values())]
        groups = [ranks.group, *(ranks.groups[axis] for axis in split)]
        check_wrapper(sys._getframe(1), groups)
        return []

    # --- for optimizers and slices -----------------------------------------------------------------------------------

    @property
    def _ts_number(self) -> int:
        """The model's number on its ranks, by which slices name their model; a copy has its original's."""
        return self._ts_agreement.number

    def note_step(self, settings: str) -> None:
        """Counts a step of this model's parameters, which an optimizer with these settings is about to make."""
        self._ts_agreement.note_step(settings)

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Prepares an optimizer of this model's parameters for steps of slices, and its state dicts."""
        wrap_steps(optimizer)
        mark_state_dicts(optimizer)

    @property
    def batch_group(self) -> Group | None:
        """The ranks that pass parts of the batch of their own, and have losses of their own; None without any."""
        batch = self._ts_runner.batch
        return None if batch.is_whole else batch.group

    # --- looking -----------------------------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The group that the model is split over."""
        return self._ts_store.ranks.group

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each parameter and buffer over the group, by its first name."""
        return dict(self._ts_store.shardings.of_model)

    @property
    def weights(self) -> Weights | None:
        """The weights read from the files that `shard` was given; None without files."""
        return self._ts_store.weights

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
        return self._ts_runner.graphs.captures

    def _latest(self) -> Compiled:
        latest = self._ts_runner.graphs.latest
        if latest is None:
            raise InputError(
                "no graph is captured yet",
                where="ShardedModule",
                why="it was made without example_inputs and has not been called",
                attempt="torchshard.shard(model, plan, example_inputs=...), or call it once",
            )
        return latest
