"""The sharded model: the same forward signature and parameter names, this rank's slices, one graph per kind of call.

Like `jax.jit` it captures a graph for the first call of a kind and keeps it. A kind is: train or eval (of every
module), which parameters and inputs need a gradient, everything in the arguments that is no tensor, and the fixed
sizes; batch and sequence may vary within one kind. All graphs share the parameters, whose layouts the first fixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, fx, nn

from torchshard.agreement import agree, digest
from torchshard.capture import Leaves, check_devices, flatten_call, hollow, hollow_tensor, shared_names
from torchshard.distributed.groups import MODEL, Group
from torchshard.distributed.kernels import convert
from torchshard.distributed.ops import OPS, direct
from torchshard.errors import DistributedError, InputError, ShardError
from torchshard.explain import listing, value_text
from torchshard.graph import draws_random, duplicate
from torchshard.layouts import I, Layout, Shard, parts_of, split
from torchshard.materialize import local_state
from torchshard.passes import localized
from torchshard.planner.plan import Plan
from torchshard.planner.styles import check_matches, parameter_layouts
from torchshard.program import PlanLike, Program, program, read_plan


@dataclass(frozen=True)
class Compiled:
    """One kind of call, ready to run on this rank."""

    program: Program
    graph: fx.GraphModule
    """This rank's graph, to look at."""
    run: fx.GraphModule
    """This rank's graph, to call."""
    state: tuple[Tensor, ...]
    """The parameters, buffers and constants in the order of the graph's placeholders."""


class Scope(nn.Module):
    """A module's place in the sharded model: its parameters' slices under their names, and its train or eval mode."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self._source = [source]  # in a list, so that it is no submodule
        self.training = source.training

    def train(self, mode: bool = True) -> Self:
        """Train or eval, of this module and all in it."""
        super().train(mode)
        self._source[0].train(mode)
        return self

    def __getitem__(self, index: int | str) -> nn.Module:
        return self.get_submodule(str(index))


class ShardedModule(Scope):
    """A model split over the ranks of a group; made by `torchshard.shard`."""

    def __init__(self, model: nn.Module, plan: PlanLike, group: Group, group_name: str = MODEL) -> None:
        wanted = read_plan(plan, group.size)
        _check_same_weights(model, group)
        layouts = _first_layouts(model, wanted)
        source = hollow(model)
        super().__init__(source)
        self._plan, self._group, self._group_name = wanted, group, group_name
        self._layouts: dict[str, Layout] = dict(layouts)
        self._fixed = False
        self._names = shared_names(source)
        self._programs: dict[Any, list[Compiled]] = {}
        self._register(local_state(model, layouts, group.rank, group.size), model)
        self._note_parameters()

    # --- parameters --------------------------------------------------------------------------------------------------

    def _register(self, state: Mapping[str, Tensor], model: nn.Module) -> None:
        for path, _ in self._source[0].named_modules(remove_duplicate=False):
            self._scope(path)
        persistent = set(model.state_dict())
        for name, names in self._names.items():
            path, _, leaf = name.rpartition(".")
            scope, tensor = self._scope(path), state[names[0]]
            if isinstance(tensor, nn.Parameter):
                scope.register_parameter(leaf, tensor)
            else:
                scope.register_buffer(leaf, tensor, persistent=name in persistent)

    def _scope(self, path: str) -> nn.Module:
        scope: nn.Module = self
        for part in path.split(".") if path else ():
            if part not in scope._modules:
                scope.add_module(part, Scope(cast(Scope, scope)._source[0].get_submodule(part)))
            child = scope._modules[part]
            assert child is not None
            scope = child
        return scope

    def _held(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        held: Tensor = getattr(self.get_submodule(path), leaf)
        return held

    @property
    def group(self) -> Group:
        """The group that the model is split over."""
        return self._group

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each parameter and buffer, by its first name."""
        return dict(self._layouts)

    def _fix_layouts(self, layouts: Mapping[str, Layout]) -> None:
        """The first graph says how parameters lie; those that were split otherwise until now are split anew."""
        for name, layout in layouts.items():
            have, tensor = self._layouts.get(name, I), self._held(name)
            if have != layout:
                tensor.data = self._relaid(tensor.data, have, layout, name)
            self._layouts[name] = layout
        self._fixed = True

    def _relaid(self, tensor: Tensor, have: Layout, want: Layout, name: str) -> Tensor:
        whole = self._whole(tensor, have, name)
        return split(whole, want, self._group.rank, self._group.size).clone(memory_format=torch.contiguous_format)

    def _whole(self, tensor: Tensor, layout: Layout, name: str) -> Tensor:
        if not isinstance(layout, Shard):
            return tensor
        if tensor.is_meta:
            return torch.empty_like(self._source_tensor(name), device="meta")
        size = self._source_tensor(name).shape[layout.dim]
        return convert("all_gather", tensor, Shard(layout.dim, parts_of(size, layout)), I, self._group)

    def _source_tensor(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        held: Tensor = getattr(self._source[0].get_submodule(path), leaf)
        return held

    def full_state_dict(self) -> dict[str, Tensor]:
        """The unsharded model's state dict, whole on every rank (a collective call: all ranks must make it)."""
        return {
            name: self._whole(tensor.detach(), self._layouts.get(self._names[name][0], I), name)
            for name, tensor in self.state_dict().items()
        }

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes this rank's slices of an unsharded state dict.

        Raises:
            InputError: a name is missing, unknown, or has another shape than the unsharded model's.
        """
        own = self.state_dict()
        for name in [*own, *state]:
            ok = name in own and name in state and state[name].shape == self._source_tensor(name).shape
            if not ok:
                found = tuple(state[name].shape) if name in state else "missing"
                raise InputError(
                    f"the state dict does not fit at {name!r}",
                    where="load_full_state_dict",
                    why=f"given: {found}; the unsharded model has "
                    f"{tuple(self._source_tensor(name).shape) if name in own else 'no such tensor'}",
                    attempt="a state dict of the unsharded model; load_state_dict takes this rank's slices",
                )
        for name, tensor in state.items():
            layout = self._layouts.get(self._names[name][0], I)
            with torch.no_grad():
                self._held(name).copy_(split(tensor, layout, self._group.rank, self._group.size))

    # --- modes -------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedModule:
        """Moves and casts (`.to`, `.cuda`, `.double`, `.to_empty`): graphs are captured anew for what comes of them."""
        super()._apply(fn, recurse)
        self._note_parameters()
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes this rank's slices, as `state_dict()` gave them; `load_full_state_dict` takes an unsharded one."""
        loaded = super().load_state_dict(state_dict, strict, assign)
        self._note_parameters()
        return loaded

    def _note_parameters(self) -> None:
        """The source for captures follows the parameters' dtype and device; graphs hold the parameters themselves."""
        for names in dict.fromkeys(self._names.values()):
            held, source = self._held(names[0]), self._source_tensor(names[0])
            if (held.dtype, held.device) != (source.dtype, source.device):
                moved = hollow_tensor(source, dtype=held.dtype, device=held.device)
                for name in names:
                    path, _, leaf = name.rpartition(".")
                    scope = self._source[0].get_submodule(path)
                    if isinstance(moved, nn.Parameter):
                        scope._parameters[leaf] = moved
                    else:
                        scope._buffers[leaf] = moved
        self._programs.clear()
        self._parameter_list = tuple(self.parameters())
        self._source_modules = tuple(self._source[0].modules())
        self._fitting_devices: set[tuple[torch.device, ...]] = set()

    # --- calling -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the unsharded model's forward gives for these arguments, the same on every rank.

        Raises:
            InputError: the arguments don't fit, are on another device, or differ between the ranks.
        """
        kind, call = self._agreed_call(args, kwargs)
        compiled = next((c for c in self._programs.get(kind, ()) if c.program.captured.accepts(call.tensors)), None)
        if compiled is None:
            compiled = self._compile(kind, call, args, kwargs)
        results = compiled.run(*compiled.state, *call.tensors)
        return compiled.program.captured.rebuild(results)

    def _agreed_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Leaves]:
        """The call as the ranks agree on it: they compare its kind and its shapes before anything else."""
        failure: ShardError | None = None
        call, kind, text = None, None, ""
        try:
            call = flatten_call(self._source[0], args, kwargs)
            self._check_devices(call)
            kind = self._kind(call)
            text = repr((kind, [(t.shape, t.dtype) for t in call.tensors]))
        except ShardError as error:
            failure, text = error, str(error)
        what = "the ranks were called with different arguments"
        agree(self._group, lambda: self._call_facts(call, failure), digest(text), InputError, what)
        if failure is not None:
            raise failure
        assert call is not None
        return kind, call

    def _check_devices(self, call: Leaves) -> None:
        """Devices that fit the model once fit it in each later call."""
        devices = tuple(t.device for t in call.tensors)
        if devices not in self._fitting_devices:
            check_devices(self._source[0], call)
            self._fitting_devices.add(devices)

    def _kind(self, call: Leaves) -> Any:
        grads = tuple(t.requires_grad for t in call.tensors)
        dtypes = tuple((t.dtype, t.device.type) for t in call.tensors)
        modes = tuple(m.training for m in self._source_modules)
        autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return call.structure, grads, dtypes, modes, autocast, tuple(p.requires_grad for p in self._parameter_list)

    def _call_facts(self, call: Leaves | None, failure: ShardError | None) -> dict[str, str]:
        if call is None or failure is not None:
            return {"the arguments": str(failure).splitlines()[0]}
        facts = {f"input {n}": value_text(t) for n, t in zip(call.names, call.tensors, strict=True)}
        return facts | {"what is no tensor": str(call.structure), "mode and gradients": str(self._kind(call)[1:])}

    def _compile(self, kind: Any, call: Leaves, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compiled:
        self._source_requires_grad()
        made = program(
            self._source[0],
            self._plan,
            self._group.size,
            args,
            kwargs,
            parameters=self._layouts if self._fixed else None,
        )
        self._check_same_program(made, call)
        if not self._fixed:
            self._fix_layouts(made.plan.parameters)
        graph = localized(made.graph, self._group.rank, self._group.size, self._group_name)
        compiled = Compiled(made, graph, _calling_directly(graph), self._graph_state(made, graph))
        self._programs.setdefault(kind, []).append(compiled)
        return compiled

    def _source_requires_grad(self) -> None:
        for name, parameter in self.named_parameters():
            self._source_tensor(name).requires_grad_(parameter.requires_grad)

    def _graph_state(self, made: Program, graph: fx.GraphModule) -> tuple[Tensor, ...]:
        device = next((p.device for p in self.parameters()), None)
        constants = {path: t.to(device) for path, t in made.captured.constants.items()}
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] != "input"]
        return tuple(constants[p] if p in constants else self._held(p) for p in (n.meta["path"] for n in nodes))

    def _check_same_program(self, made: Program, call: Leaves) -> None:
        """Graph, plan and the inputs' values are the same on all ranks; so is the random stream, where it counts."""
        if self._group.size == 1:
            return
        facts = {
            "the graph": listing(made.graph, sources=False),
            "the plan": made.plan.to_json(),
        }
        text = repr(facts)
        what = "the ranks made different programs of the model"
        agree(self._group, facts, digest(text), DistributedError, what)
        values = {f"input {n}": _content(t) for n, t in zip(call.names, call.tensors, strict=True)}
        what = "the ranks were called with inputs of the same shape but different values"
        agree(self._group, values, digest(repr(values)), InputError, what)
        if any(map(draws_random, made.graph.graph.nodes)):
            stream = {"the random stream": _stream_state(call)}
            what = "the ranks' random streams differ, and the model draws random numbers"
            agree(self._group, stream, digest(repr(stream)), DistributedError, what)

    # --- looking -----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the latest captured graph.

        Raises:
            InputError: no graph is captured yet.
        """
        return self._latest().program.plan

    def _latest(self) -> Compiled:
        if not self._programs:
            raise InputError(
                "no graph is captured yet",
                where="ShardedModule",
                why="it was made without example_inputs and has not been called",
                attempt="torchshard.shard(model, plan, example_inputs=...), or call it once",
            )
        return list(self._programs.values())[-1][-1]

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
        kind, call = self._agreed_call(args, kwargs)
        self._compile(kind, call, args, kwargs)


def _calling_directly(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a rank's graph whose collectives are called without the dispatcher."""
    held = duplicate(graph)
    for node in held.graph.nodes:
        node.target = direct(node.target) if node.target in OPS else node.target
    held.recompile()
    return held


def _first_layouts(model: nn.Module, plan: Plan | Mapping[str, Any]) -> dict[str, Layout]:
    """How parameters lie before any graph is known: as a Plan says, or plain slices of what a dict names."""
    if isinstance(plan, Plan):
        return dict(plan.parameters)
    chosen = check_matches(plan, [name for name, _ in model.named_modules()])
    return parameter_layouts(model, {path: style for path, (_, style) in chosen.items()})


def _check_same_weights(model: nn.Module, group: Group) -> None:
    if group.size == 1:
        return
    facts = {name: _content(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    what = "the ranks hold different models"
    agree(group, facts, digest(repr(facts)), DistributedError, what)


def _content(tensor: Tensor) -> str:
    """Shape, dtype and a hash of the values."""
    if tensor.is_meta or not tensor.numel():
        return value_text(tensor)
    held = (
        tensor.detach().contiguous().view(torch.uint8) if tensor.ndim else tensor.detach().reshape(1).view(torch.uint8)
    )
    return f"{value_text(tensor)} with hash {int(torch.hash_tensor(held)):x}"


def _stream_state(call: Leaves) -> str:
    on_gpu = any(t.is_cuda for t in call.tensors)
    state = torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()
    return f"{digest(repr(state.tolist())):x}"
