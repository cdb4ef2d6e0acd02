"""Keeps calls whole in a graph: custom autograd.Functions, recurrent layers and gradient hooks.

A graph of ATen ops would contain the forward of a custom Function or hook, and lose its backward.
So the call is recorded (see `recording`). It becomes one op of the graph that runs the model's own
Python code, forward and backward.

Export in PyTorch 2.13 runs `Function.apply` (`torch/autograd/function.py`), and records only the
ops of its forward; `Tensor.register_hook` leaves no node. This module is needed as long as export
loses such backward code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from torchshard.capture.recording import Recording, Size, cannot_keep_whole, current_recording, record_call
from torchshard.capture.signature import flatten
from torchshard.capture.user_code import calling_line
from torchshard.core.errors import CaptureError
from torchshard.core.patches import Patch, Patches
from torchshard.custom_ops.whole import HookCall, WholeCall, state_of


def keep_whole(
    recording: Recording,
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    call_class: type[WholeCall] = WholeCall,
) -> object:
    """Records a call and returns its result on fake tensors."""
    flat = flatten((args, kwargs))
    modules = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, nn.Module)}
    tensors = [i for i, value in enumerate(flat.tensors) if isinstance(value, Tensor)]
    sizes = [i for i in range(len(flat.tensors)) if i not in tensors]
    rebuild_arguments = flat.rebuild  # `flat` itself refers to tensors of the capture

    def rebuild(operands: Sequence[object]) -> tuple[Sequence[object], dict[str, object]]:
        # The op takes tensors before sizes; the call's arguments may mix them.
        by_place = dict(zip([*tensors, *sizes], operands, strict=True))
        call_args, call_kwargs = rebuild_arguments([by_place[place] for place in range(len(by_place))])
        return call_args, call_kwargs

    call = call_class(function, rebuild, len(flat.tensors), modules=modules)
    state = [tensor for _, _, tensor in state_of(modules.values())]
    size_operands = cast(list[Size], [flat.tensors[i] for i in sizes])
    results = record_call(recording, call, [*(flat.tensors[i] for i in tensors), *state], size_operands)
    return recording.results[len(recording.calls) - 1].rebuild(results)


# --- gradient hooks --------------------------------------------------------------------------------------------------


def keep_hook(recording: Recording, tensor: Tensor, hook: Callable[[Tensor], object]) -> _NoHandle:
    """Records a gradient hook; refuses one that uses a tensor of forward."""
    values = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    values.append(getattr(hook, "__defaults__", ()))
    if any(isinstance(leaf, Tensor) and is_fake(leaf) for leaf in pytree.tree_leaves(values)):
        raise cannot_keep_whole(
            hook, "the gradient hook uses a tensor that forward has computed, which is another at each call"
        )
    record_call(recording, HookCall(hook, lambda operands: (operands, {}), 1), [tensor], [])
    return _NoHandle()


class _NoHandle:
    """The result of `register_hook` in a captured forward."""

    def remove(self) -> NoReturn:
        """Refuses to remove a hook, because it is part of the graph.

        Raises:
            CaptureError: always.
        """
        raise CaptureError(
            "the model removes a gradient hook within forward",
            where=calling_line(),
            why="a hook is a part of the captured graph, for all of its calls",
            attempt="register the hook only where it is to act",
        )


# --- custom functions ------------------------------------------------------------------------------------------------


def _replace_apply(original: object) -> object:
    bind = cast(Any, original).__get__

    def apply(cls: type[torch.autograd.Function], /, *args: object, **kwargs: object) -> object:
        recording = current_recording()
        # A torch.library op has such a class as its backward, and is one op of a graph already.
        if recording is None or recording.inside_call or cls.__name__.startswith("GeneratedBackwardFor_"):
            return bind(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            # The second argument is preserve_rng_state.
            function, _, *operands = args
            return recording.run_checkpoint(cast(Callable[..., object], function), operands)
        # `BackwardHookFunction` is the Function of a module's backward hooks (PyTorch 2.13.0).
        if cls is torch.nn.modules._functions.BackwardHookFunction:
            raise _backward_hooks()
        return keep_whole(recording, cls, args, kwargs)

    return classmethod(apply)


def _backward_hooks() -> CaptureError:
    return CaptureError(
        "a module of the model has backward hooks",
        where=calling_line() or "register_full_backward_hook",
        why="they belong to calls of the module; a graph has its ops, not its calls",
        attempt="h.register_hook(...) on a module's result in forward, or hooks on the sharded model's parameters",
    )


# `Function.apply` calls `_SingleLevelFunction.apply` (PyTorch 2.13.0; pytorch/pytorch#106388: export of Functions).
INTERCEPTED_FUNCTIONS = Patches(Patch(torch.autograd.function._SingleLevelFunction, "apply", _replace_apply))
"""Keeps calls of custom Functions whole, in threads that capture.

A model may have bound `f = F.apply` at import, so the base class's `apply` is replaced, which
`Function.apply` calls. Modes see the ops of a Function's forward, but not the call itself.
"""
