"""The sharded model: the same forward signature and parameter names, this rank's slices, one graph per kind of call.

Like `jax.jit` it captures a graph for the first call of a kind and keeps it. A kind is: train or eval (of every
module), the grad mode and the default dtype, which parameters and inputs need a gradient, how inputs lie in memory,
everything in the arguments that is no tensor, what attributes and globals forward sees, and the fixed sizes; batch and
sequence may vary within one kind. All graphs share the parameters, whose layouts the first fixes.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake

from torchshard.capture import (
    Leaves,
    ModelCall,
    Watch,
    check_devices,
    check_strided,
    check_weights,
    flatten_call,
    global_hooks,
    memory_order,
    refuse_state_between,
    refuse_transforms,
    without_storage,
)
from torchshard.capture.facts import ModelFacts
from torchshard.compiler.constraints import Constraints, PlanLike, check_layouts, read_constraints
from torchshard.compiler.program import Program, program
from torchshard.core.autocast import Autocast, autocasting, current_autocast
from torchshard.core.errors import CaptureError, DistributedError, InputError, PlanError, ShardError
from torchshard.core.hashing import hash_tensor, hash_text
from torchshard.core.layouts import Layout
from torchshard.custom_ops.stepwise import Stepwise
from torchshard.distributed.consistency import run_on_all_ranks, running, verify_equal
from torchshard.distributed.group import CheckLevel, Group
from torchshard.distributed.ops import OPS, direct, hashable
from torchshard.ir.graph import duplicate, uses_rng
from torchshard.ir.listing import listing, value_text
from torchshard.passes import localized
from torchshard.plans.machine import Objective
from torchshard.plans.plan import Plan
from torchshard.runtime.history import (
    EARLIER,
    GRADIENTS,
    MODEL,
    PARAMETER,
    SENT,
    STEPS,
    History,
    is_here,
    values_digest,
)
from torchshard.runtime.optimizers import watch
from torchshard.runtime.state import State, content
from torchshard.runtime.submodule import refuse_class
from torchshard.weights.slice_values import check_other_group, unwatched, watch_slices

log = logging.getLogger("torchshard.runtime.module")
MANY_GRAPHS = 16
"""As many captures are worth a warning: an argument that is no tensor may change with each call."""
MOST_GRAPHS = 64
"""As many graphs are kept; that of the kind that was called least recently goes first."""
_ONE_AT_A_TIME = threading.RLock()
"""Threads of a process call sharded models in turn: captures and collectives are of one thread at a time."""
CALL = "a call"
VALUES = "the values of input"


@dataclass(frozen=True)
class Compiled:
    """One kind of call, ready to run on this rank."""

    program: Program
    graph: fx.GraphModule
    """This rank's graph, to look at."""
    run: fx.GraphModule
    """This rank's graph, to call."""
    state: tuple[str | Tensor, ...]
    """The names of parameters and buffers, and the constants, in the order of the graph's placeholders."""
    draws: bool
    """Whether it draws random numbers."""
    mark: int
    """A digest of the kind of call."""
    visit: ModelCall
    """The call that it was captured for, without values."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        return self


class Kind(NamedTuple):
    """What makes two calls the same to a graph."""

    structure: Any
    """All in the arguments that is no tensor."""
    state: int
    """The number of the state that attributes, closures and globals are in: see `Watch`."""
    grads: tuple[bool, ...]
    """Which inputs need a gradient."""
    tensors: tuple[Any, ...]
    """(dtype, device type, order in memory) of each input."""
    modes: tuple[bool, ...]
    """Train or eval, of each module."""
    autocast: Autocast
    globally: tuple[Any, ...]
    """Grad mode, default dtype, default device, hooks on all modules."""
    trainable: tuple[bool, ...]
    """Which parameters and buffers need a gradient."""


class ShardedModule(State):
    """A model split over the ranks of a group; made by `torchshard.shard`."""

    __class__ = property(lambda self: ShardedModule, refuse_class)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """What `DistributedDataParallel` asks a module that it wraps; its group is checked then."""
        wrapper = sys._getframe(1).f_locals.get("self")
        if wrapper is None or type(wrapper).__name__ != "DistributedDataParallel":
            return []
        check_other_group(getattr(wrapper, "process_group", None), self._ts_group, type(wrapper).__name__)
        return []

    register_forward_hook: Any = nn.Module.register_forward_hook
    register_forward_pre_hook: Any = nn.Module.register_forward_pre_hook
    register_full_backward_hook: Any = nn.Module.register_full_backward_hook
    register_full_backward_pre_hook: Any = nn.Module.register_full_backward_pre_hook

    def __init__(
        self,
        model: nn.Module,
        plan: PlanLike,
        group: Group,
        aim: Objective | None = None,
    ) -> None:
        def prepared() -> tuple[Constraints, dict[str, Layout]]:
            check_weights(model)
            facts = ModelFacts.of(model)
            constraints = read_constraints(facts, plan, group.coordinate.axis, aim)
            layouts = constraints.first_layouts(facts)
            check_layouts(facts, layouts)
            return constraints, layouts

        what = "the ranks can't shard this model together"
        constraints, layouts = run_on_all_ranks(group, prepared, PlanError, what)
        _check_same_weights(model, group)
        if any(p.grad is not None for p in model.parameters()):
            what = "gradients that the parameters hold already stay with the unsharded model"
            warnings.warn(f"{what}: call backward() after ts.shard", stacklevel=3)
        super().__init__(model, layouts, group)
        self._ts_constraints = constraints
        self._ts_watch, self._ts_captures = Watch(self.source), 0
        self._ts_latest_compiled: Compiled | None = None
        self._ts_history = History(group, type(model).__name__)
        self._note_distinct(dict((*model.named_parameters(), *model.named_buffers())))
        watch(self, model)

    def note_step(self, settings: str) -> None:
        """An optimizer with these settings is about to step this model's parameters."""
        self._ts_history.note_step(settings)

    def full_state_dict(self) -> dict[str, Tensor]:
        """As `State.full_state_dict`; before, the ranks compare what they have done, and what they hold whole.

        Raises:
            DistributedError: the ranks have drifted apart.
        """
        if self._compares():
            facts, gradients = self._ts_history.all_facts(self._own_tensors(), self._ts_layouts)
            what = "the ranks hold different states"
            verify_equal(self._ts_group, facts, _call_error, what, near=gradients)
        return super().full_state_dict()

    # --- calling -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the unsharded model's forward gives for these arguments, the same on every rank.

        Raises:
            InputError: the arguments don't fit, are on another device, or differ between the ranks.
        """
        watch_slices(True)
        with _ONE_AT_A_TIME:
            refuse_transforms(self.source)  # another thread's capture would be taken for an export of this call
            return self._called(args, kwargs)

    def __copy__(self) -> NoReturn:
        raise InputError(
            "a sharded model has no shallow copy",
            where="copy.copy(model)",
            why="two models would hold one set of slices, and count their calls apart",
            attempt="copy.deepcopy(model)",
        )

    def _called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with unwatched():
            kind, call, compiled = self._agreed_call(args, kwargs)
        if compiled is None:
            compiled = self._compile(kind, call, args, kwargs)
        state = [self._ts_tensors[held] if isinstance(held, str) else held for held in compiled.state]
        with running(self._ts_history.begin_call()), unwatched(), autocasting(()):
            try:
                results = compiled.run(*state, *call.tensors)
            except RuntimeError as error:
                _check_dtypes(call, state)
                raise error
        if self._compares() and torch.is_grad_enabled():
            self._ts_history.watch_results(results)
        return compiled.program.captured.rebuild(results)

    def _agreed_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], step: str = CALL
    ) -> tuple[Any, Leaves, Compiled | None]:
        """The call as the ranks agree on it: they compare its kind, shapes and values before anything else."""
        failure: ShardError | None = None
        call, kind, compiled = None, None, None
        try:
            self._follow()
            call = flatten_call(self.source, args, kwargs)
            check_strided(self.source, call)
            self._check_devices(call)
            if step == CALL:
                self._check_real(call)
            kind = self._kind(call)
            compiled = self._known(kind, call)
        except ShardError as error:
            failure = error
        try:
            if self._compares():
                self._agree(call, kind, compiled, failure, step)
            if failure is not None:
                raise failure
        except ShardError:
            self._ts_history.reset()
            raise
        assert call is not None
        return kind, call, compiled

    def _compares(self) -> bool:
        """Whether the ranks compare what they do with this model."""
        return self._ts_group.size > 1 and self._ts_group.level is not CheckLevel.OFF

    def _own_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, each by its first name."""
        return {name: t for name, t in self._ts_tensors.items() if self._ts_names[name][0] == name}

    def _check_real(self, call: Leaves) -> None:
        """What is computed with has values, unless all of it has none."""
        without = [n for n, t in zip(call.names, call.tensors, strict=True) if t.is_meta or is_fake(t)]
        if not without:
            self.check_initialized()
        elif not all(t.is_meta or is_fake(t) for t in self._ts_tensors.values()):
            raise InputError(
                f"input {without[0]} has no values",
                where=f"argument {without[0]!r}",
                why="it is on the meta device, or fake; the model's parameters are not",
                attempt="real inputs; example_inputs= of ts.shard and ts.plan may be without values",
            )

    def _known(self, kind: Kind, call: Leaves) -> Compiled | None:
        """The graph for a call, if there is one; its kind becomes the one that was called latest."""
        held = self._ts_programs.pop(kind, None)
        if held is None:
            return None
        self._ts_programs[kind] = held
        return next((c for c in held if c.program.captured.accepts(call.tensors)), None)

    def _agree(
        self, call: Leaves | None, kind: Any, compiled: Compiled | None, failure: ShardError | None, step: str
    ) -> None:
        """The ranks compare a digest of the call, and the call itself where that differs."""
        tensors = [] if call is None or failure is not None else call.tensors
        values = [(tuple(t.shape), values_digest(t) if is_here(t) else 0) for t in tensors]
        elsewhere = {} if call is None or failure is not None else _elsewhere(call)
        if self._ts_fixed and not self._ts_watched:  # before, layouts are what the ranks' plans say, which may differ
            self._ts_history.watch(self._own_tensors(), self._ts_layouts, self._ts_distinct)
            self._ts_watched = True
        snapshot = self._ts_history.snapshot({} if failure else self._ts_tensors, elsewhere)
        stream = _stream_state(call) if call is not None and compiled is not None and compiled.draws else ""
        mark = _mark(kind) if compiled is None else compiled.mark
        text = "" if failure is None else str(failure).partition("\n")[0]

        def facts() -> dict[str, str]:
            if call is None or failure is not None:
                return {"the arguments": text, "what is asked for": step}
            found: dict[str, Any] = {"the arguments": "they fit"}
            for name, tensor, (_, total) in zip(call.names, call.tensors, values, strict=True):
                found |= {f"input {name}": value_text(tensor), f"{VALUES} {name}": total}
            found |= {"what is no tensor": call.structure}
            found |= {"what forward sees beside its arguments": self._visible(), "mode and gradients": kind[2:]}
            found["the captured graph"] = "captured before" if compiled else "to be captured now"
            found |= {"the random stream": stream, "what is asked for": step, **snapshot.facts}
            return {key: str(fact) for key, fact in found.items()}

        mine = hash_text(f"{mark} {values} {stream} {compiled is None} {text} {step} {snapshot.facts}")
        what = "the ranks were called with different arguments"
        same_slice = verify_equal(
            self._ts_group,
            facts,
            _call_error,
            what,
            digest=mine,
            unlike=snapshot.slice_digest,
            near=snapshot.gradients,
        )
        if same_slice and snapshot.slice_name:
            raise _same_slices(snapshot.slice_name)
        self._ts_group.handshake.recent_unverified.clear()

    def _visible(self) -> str:
        changed = f", changed last: {self._ts_watch.latest_change}" if self._ts_watch.latest_change else ""
        return f"state {self._ts_watch.number}{changed}"

    def _check_devices(self, call: Leaves) -> None:
        """Devices that fit the model once fit it in each later call."""
        devices = tuple(t.device for t in call.tensors)
        if devices not in self._ts_fitting_devices:
            check_devices(self.source, call)
            self._ts_fitting_devices.add(devices)

    def _kind(self, call: Leaves) -> Kind:
        return Kind(
            call.structure,
            self._ts_watch.state(),
            tuple(t.requires_grad for t in call.tensors),
            tuple((t.dtype, t.device.type, memory_order(t)) for t in call.tensors),
            tuple(m.training for m in self._ts_source_modules),
            current_autocast(),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
             torch.get_default_device(), global_hooks()),
            tuple(t.requires_grad for t in self._ts_tensors.values()),
        )  # fmt: skip

    def _compile(self, kind: Any, call: Leaves, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compiled:
        for name, parameter in self.named_parameters():
            self._source_tensor(name).requires_grad_(parameter.requires_grad)
        constraints = self._ts_constraints
        if self._ts_fixed:
            constraints = constraints.with_layouts(self._ts_layouts)
        visit = ModelCall(replace(call, tensors=tuple(map(_without_values, call.tensors))), kind.modes)

        def make() -> Program:
            made = program(self.source, constraints, args, kwargs)
            self._refuse_left(visit, made)
            return made

        if global_hooks():
            warnings.warn(
                "hooks on all modules (register_module_forward_hook) become part of a sharded model's graph; on the "
                "model itself they are called once more",
                stacklevel=2,
            )
        what = "the ranks can't make a program of the model together"
        made = run_on_all_ranks(self._ts_group, make, CaptureError, what)
        draws = any(map(uses_rng, made.graph.graph.nodes))
        self._check_same_program(made, call, draws)
        if not self._ts_fixed:
            self._fix_layouts(made.plan.parameters)
        graph = localized(made.graph, self._ts_group.coordinate)
        run, state = _calling_directly(graph), self._graph_state(made, graph)
        compiled = Compiled(made, graph, run, state, draws, _mark(kind), visit)
        self._keep(kind, compiled)
        return compiled

    def _keep(self, kind: Kind, compiled: Compiled) -> None:
        """Remembers a graph, and forgets the kind of call that was made least recently where there are many."""
        self._ts_programs.setdefault(kind, []).append(compiled)
        self._ts_latest_compiled = compiled
        self._ts_captures += 1
        if self._ts_captures == MANY_GRAPHS:
            changed = self._ts_watch.latest_change
            why = f"{changed} changes" if changed else "an argument that is no tensor changes"
            log.warning("%d graphs captured: perhaps %s with each call", MANY_GRAPHS, why)
        while sum(map(len, self._ts_programs.values())) > MOST_GRAPHS:
            oldest = next(iter(self._ts_programs))
            self._ts_programs[oldest].pop(0)
            if not self._ts_programs[oldest]:
                del self._ts_programs[oldest]

    def _refuse_left(self, visit: ModelCall, made: Program) -> None:
        """One kind of call may not read what another leaves in attributes."""
        for other in (compiled for held in self._ts_programs.values() for compiled in held):
            left = made.captured.assigned + other.program.captured.assigned
            for first, second in ((visit, other.visit), (other.visit, visit)) if left else ():
                refuse_state_between(self.source, first, second, tuple(dict.fromkeys(left)))

    def _graph_state(self, made: Program, graph: fx.GraphModule) -> tuple[str | Tensor, ...]:
        device = next((p.device for p in self.parameters()), None)
        constants = {path: t.to(device) for path, t in made.captured.constants.items()}
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] != "input"]
        return tuple(constants.get(n.meta["path"], n.meta["path"]) for n in nodes)

    def _check_same_program(self, made: Program, call: Leaves, draws: bool) -> None:
        """Graph, plan and the inputs' values are the same on all ranks; so is the random stream, where it counts."""
        if self._ts_group.size == 1:
            return
        facts = {"the graph": listing(made.graph, sources=False), "the plan": made.plan.to_json()}
        what = "the ranks made different programs of the model"
        verify_equal(self._ts_group, facts, DistributedError, what)
        values = {f"input {n}": content(t) for n, t in zip(call.names, call.tensors, strict=True)}
        what = "the ranks were called with inputs of the same shape but different values"
        verify_equal(self._ts_group, values, InputError, what)
        if draws:
            stream = {"the random stream": _stream_state(call)}
            verify_equal(self._ts_group, stream, _call_error, what)

    # --- looking -----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the latest captured graph.

        Raises:
            InputError: no graph is captured yet.
        """
        return self._latest().program.plan

    def _latest(self) -> Compiled:
        if self._ts_latest_compiled is None:
            raise InputError(
                "no graph is captured yet",
                where="ShardedModule",
                why="it was made without example_inputs and has not been called",
                attempt="torchshard.shard(model, plan, example_inputs=...), or call it once",
            )
        return self._ts_latest_compiled

    @property
    def graph(self) -> fx.GraphModule:
        """The latest captured graph with its collectives, global sizes."""
        return self._latest().program.graph

    @property
    def local_graph(self) -> fx.GraphModule:
        """The latest captured graph as this rank runs it: parameters and inputs are its arguments."""
        return self._latest().graph

    def warm_up(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Captures the graph of a call without running it."""
        with _ONE_AT_A_TIME:
            with unwatched():
                kind, call, _ = self._agreed_call(args, kwargs, "a capture for example inputs")
            self._compile(kind, call, args, kwargs)


def _check_dtypes(call: Leaves, state: Sequence[Tensor]) -> None:
    """After a failure: raises InputError where the inputs' floating dtypes are none of the model's."""
    dtypes = {t.dtype for t in state if t.is_floating_point()}
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.is_floating_point() and dtypes and tensor.dtype not in dtypes:
            held = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise InputError(
                f"input {name} is {str(tensor.dtype).removeprefix('torch.')}, the model {held}",
                where=f"argument {name!r}",
                why="an op of the model takes both, of one dtype",
                attempt=f"{name}.to({next(iter(dtypes))}), model.to({tensor.dtype}), or torch.autocast around the call",
            )


def _without_values(tensor: Any) -> Any:
    return without_storage(tensor).requires_grad_(tensor.requires_grad) if isinstance(tensor, Tensor) else tensor


def _calling_directly(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a rank's graph whose collectives are called without the dispatcher."""
    held = duplicate(graph)
    for node in held.graph.nodes:
        if node.target in OPS:
            node.target, node.args = direct(node.target), (node.args[0], *hashable(node.args[1:]))
        elif isinstance(node.target, Stepwise):
            node.target = dataclasses.replace(node.target, collective=direct)
    held.recompile()
    return held


def _check_same_weights(model: nn.Module, group: Group) -> None:
    if group.size == 1:
        return
    facts = {name: content(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    what = "the ranks hold different models"
    verify_equal(group, facts, DistributedError, what)


def _elsewhere(call: Leaves) -> dict[str, Tensor]:
    """The call's tensors whose values are on a device that one would have to wait for."""
    named = zip(call.names, call.tensors, strict=True)
    return {f"input {n}": t for n, t in named if not (is_here(t) or t.is_meta or is_fake(t) or not t.numel())}


def _same_slices(name: str) -> DistributedError:
    return DistributedError(
        f"all ranks hold the same slice of {name!r}",
        where=f"parameter or buffer {name!r}",
        why="each rank had a slice of its own when the model was sharded: one was copied over the others since, by a "
        "broadcast, a wrapper of torch.distributed, or an initialiser that draws the same numbers on every rank",
        attempt="no broadcast of a sharded model's parameters (ts.shard has compared them); load_full_state_dict",
    )


def _mark(kind: Any) -> int:
    """A digest of a kind of call, the same on every rank."""
    return hash_text(repr(kind))


_OTHER_ERRORS: dict[str, tuple[type[ShardError], str]] = {
    "the random stream": (DistributedError, "the ranks' random streams differ, and the model draws random numbers"),
    STEPS: (DistributedError, "the ranks' optimizers have taken different steps since the last call"),
    MODEL: (DistributedError, "the ranks have called different models"),
    GRADIENTS: (DistributedError, "the ranks' losses differ: their backwards have given the results other gradients"),
    SENT: (DistributedError, "the ranks have run different backwards, or in another order, since the last call"),
    "the captured graph": (DistributedError, "some ranks would capture a graph that others have"),
}
"""What differs -> the error, where it is not the arguments."""


def _call_error(what: str, *, where: str, why: str, attempt: str) -> ShardError:
    if where.startswith((PARAMETER, f"{EARLIER} parameter")):
        what = "the ranks' weights have drifted apart"
        attempt = "the same updates on every rank; load_full_state_dict of one of them"
        return DistributedError(what, where=where, why=why, attempt=attempt)
    if where.startswith((VALUES, EARLIER)):
        what = "the ranks were called with inputs of the same shape but different values"
    if where == GRADIENTS:
        attempt = "the same loss of the same results, labels and random numbers on every rank"
    error, what = _OTHER_ERRORS.get(where, (InputError, what))
    return error(what, where=where, why=why, attempt=attempt)


def _stream_state(call: Leaves) -> str:
    on_gpu = any(t.is_cuda for t in call.tensors)
    state = torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()
    return f"{hash_tensor(state):x}"
