"""Records `torch.func` transforms in forward (`vmap`, `grad`, ...) as the ops that they run.

    vmap(lambda w: F.linear(x, w))(weights)      expand, transpose, bmm
    grad(lambda t: net(t).tanh().sum())(x)       ..., tanh, sum, ones_like, expand, tanh_backward, mm

`torch.export` traces forward above autograd and `torch.func`. There it sees neither the tensors that
`torch.func` wraps, nor the ops that autograd runs for a derivative. So inside a transform, tracing
moves below both, and records ATen ops on plain tensors. Autograd then differentiates the recorded
ops, including those of a derivative.

`replacements` patches the entry points: `vmap_impl` in `torch/_functorch/apis.py`;
`grad_and_value_impl`, `_vjp_with_argnums` and `_jvp_with_argnums` in `eager_transforms.py`. Export
in PyTorch 2.13 leaves nodes for functorch's own functions, such as `_add_batch_dim`. This module is
needed as long as it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

# PyTorch 2.13.0 has no public way to set modes aside: `_TorchDispatchModeKey`, `_get_dispatch_mode_pre_dispatch`,
# `_set_mode_pre_dispatch`, `unset_mode_pre_dispatch` and, for functions, `_pop_mode`, `_push_mode`,
# `_len_torch_function_stack`.
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch, _set_mode_pre_dispatch, unset_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.overrides import _pop_mode, _push_mode

from torchshard.capture.function_mode import CaptureMode
from torchshard.core.errors import in_short

T = TypeVar("T")


def is_in_transform() -> bool:
    """Whether this thread is inside a `torch.func` transform; valid only during a capture."""
    return _get_dispatch_mode_pre_dispatch(_TorchDispatchModeKey.PROXY) is None


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    above = unset_mode_pre_dispatch(_TorchDispatchModeKey.PROXY)
    if above is None:  # nested in another transform
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
    """Removes the top hooks on saved tensors inside the block: those that the capture sets.

    `torch.func.grad` refuses hooks. If the model sets more, PyTorch's error is raised, as by the
    unsharded model.
    """
    # `_top_saved_tensors_default_hooks`, `_pop_saved_tensors_default_hooks` and
    # `_push_saved_tensors_default_hooks`: the public `disable_saved_tensors_hooks` raises where there are hooks, and
    # removes none (PyTorch 2.13.0).
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        if hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def recorded(transform: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Calls a transform and records the ops that it runs."""
    with _below_autograd():
        return transform(*args, **kwargs)


def recorded_vjp(transform: Callable[..., tuple[Any, ...]], *args: object, **kwargs: object) -> tuple[object, ...]:
    """Calls and records a transform that returns (result, vjp_fn, ...); also records later calls of `vjp_fn`."""
    result, vjp_fn, *more = recorded(transform, *args, **kwargs)
    return (result, lambda *cotangents, **how: recorded(vjp_fn, *cotangents, **how), *more)


def recorded_jvp(transform: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Calls and records a forward-mode transform.

    Raises:
        NotImplementedError: an op has no forward-mode rule, or none for tensors without values.
    """
    try:
        return recorded(transform, *args, **kwargs)
    except (NotImplementedError, FakeTensorDeviceMismatchError) as error:
        raise NotImplementedError(f"torch.func.jvp on tensors without values: {in_short(error)}") from error
