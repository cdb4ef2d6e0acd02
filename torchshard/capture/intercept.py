"""Python in a forward whose meaning a graph of ops would lose: kept whole, told, or refused.

    custom autograd.Function    kept whole (see `torchshard.custom_ops.whole`), though `f = F.apply` was bound at import
    h.register_hook(f)          kept whole
    torch.utils.checkpoint      its forward is kept, with a warning: activations are saved
    m.register_buffer(...)      a plain attribute: a cache, or state, which is refused
    torch.manual_seed           refused: a graph is seeded once, when it is captured
    random, numpy.random        refused: the numbers of the capture would be those of every call

Export records a stand-in with the number of the call. All holds for the thread that captures: others go on as they are.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard.capture.own_code import user_line
from torchshard.capture.signature import Leaves, flatten
from torchshard.capture.visible import Kept
from torchshard.core.autocast import autocasting, current_autocast
from torchshard.core.errors import CaptureError
from torchshard.custom_ops.recurrent import RecurrentCall, is_recurrent
from torchshard.custom_ops.whole import HookCall, WholeCall, state_of


@dataclass
class Recording:
    """What one capture has met."""

    calls: list[WholeCall] = field(default_factory=list)
    """By the number that stands in the graph."""
    results: dict[int, Leaves] = field(default_factory=dict)
    """By the same number: what it gave on fake tensors."""
    checkpoints: list[str] = field(default_factory=list)
    """The lines that checkpoint activations."""
    within: bool = False
    """Whether a call that is kept whole is running."""
    seeded: bool = False
    """Whether that call asked the system for a seed."""


_local = threading.local()


def _recording() -> Recording | None:
    """That of the capture that runs in this thread."""
    found: Recording | None = getattr(_local, "recording", None)
    return found


@torch.library.custom_op(
    "torchshard::whole", mutates_args=(), schema="(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]"
)
def whole(tensors: Sequence[Tensor], sizes: Sequence[int], number: int) -> list[Tensor]:
    """A call that is kept whole, while a model is captured."""
    raise NotImplementedError("it stands in graphs that are being captured alone")


@whole.register_fake
def _(tensors: Sequence[Tensor], sizes: Sequence[int], number: int) -> list[Tensor]:
    recording = _recording()
    assert recording is not None
    return _run_on_fakes(recording, number, tensors, sizes)


whole.register_autograd(lambda ctx, *grads: (None, None, None), setup_context=lambda ctx, inputs, output: None)
WHOLE: Any = torch.ops.torchshard.whole.default
torch.fx.node.has_side_effect(WHOLE)  # nothing uses the result of a hook, which must stay nevertheless


# --- custom functions ------------------------------------------------------------------------------------------------


def _keep_whole(
    recording: Recording, function: Any, args: Sequence[Any], kwargs: dict[str, Any], kind: type[WholeCall] = WholeCall
) -> Any:
    """Records a call of a custom Function, and gives what it gives on fake tensors."""
    flat = flatten((args, kwargs))
    modules = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, nn.Module)}
    tensors = [i for i, value in enumerate(flat.tensors) if isinstance(value, Tensor)]
    order = [*tensors, *(i for i in range(len(flat.tensors)) if i not in tensors)]

    def rebuild(operands: Sequence[Any]) -> Any:
        return flat.rebuild([value for _, value in sorted(zip(order, operands, strict=True))])

    call = kind(function, rebuild, len(order), modules=modules)
    given, sizes = [flat.tensors[i] for i in tensors], [flat.tensors[i] for i in order[len(tensors) :]]
    made = _record(recording, call, [*given, *(tensor for _, _, tensor in state_of(modules.values()))], sizes)
    return recording.results[len(recording.calls) - 1].rebuild(made)


def _keep_hook(recording: Recording, tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    """Records a gradient hook."""
    held = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    if any(is_fake(leaf) for leaf in pytree.tree_leaves((held, getattr(hook, "__defaults__", ()))) if _is_tensor(leaf)):
        raise _refused(hook, "the gradient hook uses a tensor that forward has computed, which is another at each call")
    _record(recording, HookCall(hook, lambda operands: (operands, {}), 1), [tensor], [])
    return _NoHandle()


class _NoHandle:
    """What `register_hook` gives in a captured forward."""

    def remove(self) -> None:
        """A hook of a graph stays.

        Raises:
            CaptureError: always.
        """
        raise CaptureError(
            "the model removes a gradient hook within forward",
            where=user_line(traceback.extract_stack()),
            why="a hook is a part of the captured graph, for all of its calls",
            attempt="register the hook only where it is to act",
        )


def _record(recording: Recording, call: WholeCall, tensors: list[Tensor], sizes: list[Any]) -> list[Tensor]:
    call.autocast = current_autocast()
    recording.calls.append(call)
    made: list[Tensor] = WHOLE(tensors, sizes, len(recording.calls) - 1)
    return made


def _run_on_fakes(recording: Recording, number: int, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
    """What a call gives, told apart as it must be to be repeated."""
    call = recording.calls[number]
    slots, kept = state_of(call.modules.values()), [Kept(module) for module in call.modules.values()]
    count = call.operands - len(sizes)
    recording.within, recording.seeded = True, False
    try:
        with torch.no_grad(), autocasting(call.autocast), _Observed(tensors) as observed:
            for (holder, name, _), tensor in zip(slots, tensors[count:], strict=True):
                holder[name] = tensor
            args, kwargs = call.rebuild([*tensors[:count], *sizes])
            before = flatten((args, kwargs)).structure[0]
            result = flatten(call.run(args, kwargs))
    finally:
        recording.within = False
        for was in kept:  # what the call assigns it assigns each time, to modules of its own
            was.put_back()
    if observed.writes or flatten((args, kwargs)).structure[0] != before:
        raise _refused(call.function, "it writes to a tensor, list or dict that it is given")
    call.draws, call.seeds = call.draws or observed.draws or recording.seeded, recording.seeded
    call.single = len(result.tensors) == 1
    recording.results[number] = result
    return [t.clone() for t in result.tensors]


class _Observed(TorchDispatchMode):
    """Whether an op draws random numbers, or writes to one of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.draws = self.writes = False
        self._given = {t.untyped_storage()._cdata for t in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                self.writes = self.writes or value.untyped_storage()._cdata in self._given
        return func(*args, **(kwargs or {}))


def _refused(function: Any, why: str) -> CaptureError:
    return CaptureError(
        f"{getattr(function, '__name__', function)} can't be kept whole in a graph",
        where=user_line(traceback.extract_stack()) or str(function),
        why=why,
        attempt="an autograd.Function that gives all that it computes and takes all that it uses as arguments",
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


# --- patches ---------------------------------------------------------------------------------------------------------


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    recording = _recording()
    if recording is None or recording.within or cls.__name__.startswith("GeneratedBackwardFor_"):
        return _ORIGINAL_APPLY.__get__(None, cls)(*args, **kwargs)  # a torch.library op is whole in a graph anyway
    if cls is torch.utils.checkpoint.CheckpointFunction:
        recording.checkpoints.append(user_line(traceback.extract_stack()))
        return args[0](*args[2:])
    if cls is torch.nn.modules._functions.BackwardHookFunction:
        raise CaptureError(
            "a module of the model has backward hooks",
            where=user_line(traceback.extract_stack()) or "register_full_backward_hook",
            why="they belong to calls of the module; a graph has its ops, not its calls",
            attempt="h.register_hook(...) on a module's result in forward, or hooks on the sharded model's parameters",
        )
    return _keep_whole(recording, cls, args, kwargs)


_FUNCTION: Any = torch.autograd.function._SingleLevelFunction
_ORIGINAL_APPLY: Any = torch._C._FunctionBase.__dict__["apply"]
_checkpoint: Any = torch.utils.checkpoint._checkpoint_without_reentrant_generator
_seeding: dict[str, Any] = {
    "manual_seed": torch.manual_seed, "seed": torch.seed, "set_rng_state": torch.set_rng_state,
}  # fmt: skip


def _checkpoint_noted(*args: Any, **kwargs: Any) -> Any:
    recording = _recording()
    if recording is not None and not recording.within:
        recording.checkpoints.append(user_line(traceback.extract_stack()))
    return _checkpoint(*args, **kwargs)


def _seeds(name: str) -> Callable[..., Any]:
    def seed(*args: Any) -> Any:
        recording = _recording()
        if recording is None:
            return _seeding[name](*args)
        if recording.within:
            recording.seeded = recording.seeded or name == "seed"
            return 0
        raise seeds_within(user_line(traceback.extract_stack()) or f"torch.{name}")

    return seed


def seeds_within(where: str) -> CaptureError:
    """The error for a model that seeds a random number generator."""
    return CaptureError(
        "the model seeds the random numbers",
        where=where,
        why="a graph draws from the RNG state as it finds it: seeded once, when it was captured, and never again",
        attempt="torch.manual_seed before the call, outside the model",
    )


_register_buffer: Any = nn.Module.register_buffer


def _buffer_noted(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
    """A buffer that forward registers is a plain attribute of the capture: a cache, or state, as those are."""
    if _recording() is None or name in module._buffers:
        _register_buffer(module, name, tensor, persistent)
    else:
        module.__dict__[name] = tensor


class _Patches:
    """Functions of PyTorch that ask whether this thread captures; put in place while any thread does."""

    _lock, _users = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            _Patches._users += 1
            if self._users == 1:
                _FUNCTION.apply = classmethod(_apply)
                setattr(nn.Module, "register_buffer", _buffer_noted)  # noqa: B010
                torch.utils.checkpoint._checkpoint_without_reentrant_generator = _checkpoint_noted
                for name in _seeding:
                    setattr(torch, name, _seeds(name))
                    setattr(torch.random, name, _seeds(name))

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            _Patches._users -= 1
            if self._users == 0:
                del _FUNCTION.apply
                setattr(nn.Module, "register_buffer", _register_buffer)  # noqa: B010
                torch.utils.checkpoint._checkpoint_without_reentrant_generator = _checkpoint
                for name, original in _seeding.items():
                    setattr(torch, name, original)
                    setattr(torch.random, name, original)


Homes = dict[int, tuple[dict[str, Any], str]]
"""The id of a parameter or buffer -> the dict of the module that holds it, and its name there."""


def homes_of(model: nn.Module) -> Homes:
    """Where each parameter and buffer is held."""
    return {id(tensor): (held, name) for held, name, tensor in state_of([model])}


class _Tensors(TorchFunctionMode):
    """Gradient hooks are recorded; a real tensor that needs a gradient is a parameter that the model doesn't own.

    Export puts fake tensors in the place of parameters and buffers where modules hold them. One that something else
    holds too (a cache object, a list) is found there as it was, and what stands for it is taken in its place.
    """

    def __init__(self, recording: Recording, homes: Homes) -> None:
        super().__init__()
        self._recording, self._homes = recording, homes

    def _at_home(self, value: Any) -> Any:
        home = self._homes.get(id(value))
        return value if home is None else home[0].get(home[1], value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        if any(id(leaf) in self._homes for leaf in leaves):
            args, kwargs = pytree.tree_map(self._at_home, (args, kwargs or {}))
        for held in pytree.arg_tree_leaves(*args, **(kwargs or {})):
            if type(held) in (Tensor, nn.Parameter) and held.requires_grad and not is_fake(held):
                raise CaptureError(
                    "the model uses a parameter that is not its own",
                    where=user_line(traceback.extract_stack()),
                    why=f"{tuple(held.shape)}, requires_grad: as a constant of the graph its gradient would be lost",
                    attempt="register it: assign the parameter or its module to an attribute of the model",
                )
        if func == _DATA.__get__ and is_fake(args[0]):
            return args[0].detach()
        if func == _DATA.__set__ and is_fake(args[0]):
            return _set_data(args[0], args[1])
        if func is Tensor.register_hook and not self._recording.within and args[0].requires_grad:
            return _keep_hook(self._recording, args[0], args[1] if len(args) > 1 else (kwargs or {})["hook"])
        if not self._recording.within and is_recurrent(func, args):
            return _keep_whole(self._recording, func, args, kwargs or {}, RecurrentCall)
        return func(*args, **(kwargs or {}))


_DATA: Any = Tensor.data


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """`x.data = y` as what it does to the values of a tensor of the same kind."""
    if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
        raise CaptureError(
            "the model assigns to .data what has another shape, dtype or device",
            where=user_line(traceback.extract_stack()),
            why=f"{tuple(tensor.shape)}, {tensor.dtype} becomes {tuple(value.shape)}, {value.dtype}",
            attempt="a new tensor, under a name of its own",
        )
    tensor.detach().copy_(value)


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """While it is open, what this thread's forwards run is recorded."""
    held, before = Recording(), _recording()
    _local.recording = held
    try:
        with _Patches():
            yield held
    finally:
        _local.recording = before


def following(held: Recording, homes: Homes) -> TorchFunctionMode:
    """The mode in which a recorded forward runs.

    Args:
        homes: of the model, before it is captured.
    """
    return _Tensors(held, homes)


def random_states() -> dict[str, Any]:
    """The states of the random number generators that a process has in common."""
    numpy: Any = sys.modules.get("numpy.random")
    return {
        "random": random.getstate(),
        "numpy.random": repr(numpy.get_state()) if numpy is not None else "",
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


@contextlib.contextmanager
def odd_random_states(*, beside_others: bool = False) -> Iterator[dict[str, Any]]:
    """While it is open, the generators are in states that nobody seeds them to; gives these.

    A forward that seeds one as it is seeded already would not be seen else. Where other threads run, which may draw
    meanwhile, the states stay as they are, unless `beside_others`.
    """
    alone, before = beside_others or threading.active_count() == 1, random.getstate()
    numpy = sys.modules.get("numpy.random")
    held: Any = (torch.get_rng_state(), numpy.get_state() if numpy is not None else None)
    if alone:
        random.seed("torchshard")
        _seeding["manual_seed"](0x70C45A4D)
        if numpy is not None:
            numpy.seed(0x70C45A4D)
    found = random_states()
    try:
        yield found
    finally:
        moved = _moved(found)
        found["moved"] = moved
        if alone:
            random.setstate(before)
            _seeding["set_rng_state"](held[0])
            if numpy is not None:
                numpy.set_state(held[1])


def check_random_states(model: nn.Module, changed: list[str], run: Callable[[], Any]) -> None:
    """Refuses a forward that moved one of the generators.

    Args:
        changed: those that were moved while it was captured.
        run: runs forward on fake tensors. Where other threads run, they may have moved it: then each run of three must.

    Raises:
        CaptureError: forward draws from Python's or NumPy's random numbers, or seeds PyTorch's.
    """
    for _ in range(3 if changed and threading.active_count() > 1 else 0):
        with odd_random_states(beside_others=True) as states:
            run()
        changed = [name for name in states["moved"] if name in changed]
    if "torch" in changed:
        raise seeds_within(f"{type(model).__name__}.forward")
    if changed:
        raise CaptureError(
            f"forward draws random numbers from {changed[0]}",
            where=f"{type(model).__name__}.forward",
            why="a graph would keep the numbers of its capture for every call",
            attempt="torch.rand and the like with torch.where; or draw outside of the model and pass what was drawn "
            "(Hugging Face's speech models take mask_time_indices=), or switch it off (config.apply_spec_augment = "
            "False), or model.eval()",
        )


def _moved(before: dict[str, Any]) -> list[str]:
    return [name for name, state in random_states().items() if state != before.get(name)]


def warn_of_checkpoints(recording: Recording, model: nn.Module) -> None:
    """Says that activation checkpoints save no memory in a graph."""
    if recording.checkpoints:
        warnings.warn(
            f"{type(model).__name__}: {len(recording.checkpoints)} activation checkpoints (the first at "
            f"{recording.checkpoints[0] or 'a library'}) save no memory in a sharded model: the graph keeps the "
            "activations, and computes the same",
            stacklevel=2,
        )
