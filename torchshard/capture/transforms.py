"""Records `torch.func` transforms in forward (`vmap`, `grad`, ...) as the ops that they run.

    vmap(lambda w: F.linear(x, w))(weights)      expand, transpose, bmm
    grad(lambda t: net(t).tanh().sum())(x)       ..., tanh, sum, ones_like, expand, tanh_backward, mm

`torch.export` records forward above autograd and the transforms, where it sees neither the tensors that they wrap nor
the ops of a derivative. Inside a transform, ops are recorded below both, as ATen ops on plain tensors. Autograd then
differentiates the recorded ops, including those of a derivative.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch, _set_mode_pre_dispatch, unset_mode_pre_dispatch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.overrides import _pop_mode, _push_mode

from torchshard.capture.function_mode import CaptureMode
from torchshard.core.errors import in_short


def is_in_transform() -> bool:
    """Whether this thread, which captures, records below autograd."""
    return _get_dispatch_mode_pre_dispatch(_TorchDispatchModeKey.PROXY) is None


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    above = unset_mode_pre_dispatch(_TorchDispatchModeKey.PROXY)
    if above is None:  # a transform within another
        yield
        return
    function_modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    with contextlib.ExitStack() as stack:
        stack.callback(_set_mode_pre_dispatch, above)
        for mode in function_modes:
            stack.callback(_push_mode, mode)
        stack.enter_context(_without_hooks())
        stack.enter_context(ProxyTorchDispatchMode(above.tracer, "symbolic", pre_dispatch=False))
        for mode in reversed(function_modes):
            if isinstance(mode, CaptureMode):
                stack.enter_context(mode)
        yield


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Takes the hooks on saved tensors away, which transforms refuse."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        if hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def recorded(transform: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a transform, and records the ops that it runs."""
    with _below_autograd():
        return transform(*args, **kwargs)


def recorded_vjp(transform: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `recorded`, of one whose result's second part is a function that goes on with it."""
    result, vjp_fn, *more = recorded(transform, *args, **kwargs)
    return (result, lambda *cotangents, **how: recorded(vjp_fn, *cotangents, **how), *more)


def recorded_jvp(transform: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As `recorded`, of the forward mode, which some ops have on real tensors alone."""
    try:
        return recorded(transform, *args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(f"torch.func.jvp on tensors without values: {in_short(error)}") from error
