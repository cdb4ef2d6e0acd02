"""Checks a model and its inputs before a capture, and lists the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

# `torch.fx` has no public name for this (PyTorch 2.13.0).
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchshard.capture.looks import own_class
from torchshard.capture.shared_memory import memories_of, sharing_pair
from torchshard.capture.signature import Leaves
from torchshard.core.errors import InputError
from torchshard.core.modules import named_tensors
from torchshard.weights.lazy import LazyTensor
from torchshard.weights.parameter import ShardedParameter


def shared_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Name of a parameter or buffer -> all names of its tensor in order; tied ones have several."""
    by_id: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model).items():
        by_id.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in by_id.values() for name in names}


# --- checks of a call ------------------------------------------------------------------------------------------------


_TRANSFORMS: tuple[tuple[Callable[[], bool], str, str], ...] = (
    (
        # `peek_interpreter_stack`: `torch.func` has no public query for the current transform (PyTorch 2.13.0).
        lambda: not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None,
        "a transform of torch.func (vmap, grad, jvp, ...)",
        "a batch dim in place of vmap, and tensor.backward() or torch.autograd.grad in place of grad",
    ),
    (
        # `_current_level` is what `enter_dual_level` sets; it has no public reader (PyTorch 2.13.0).
        lambda: torch.autograd.forward_ad._current_level >= 0,
        "torch.autograd.forward_ad.dual_level",
        "reverse mode: tensor.backward(), torch.autograd.grad",
    ),
    (torch.jit.is_tracing, "torch.jit.trace", "trace the unsharded model"),
    (
        is_fx_symbolic_tracing,
        "torch.fx.symbolic_trace or make_fx",
        "trace the unsharded model; a sharded one has model.graph",
    ),
    (torch.compiler.is_exporting, "torch.export", "export the unsharded model; a sharded one's graph is model.graph"),
)
"""(test whether a transform is active, its name, the advice)."""


def refuse_transforms(model: nn.Module) -> None:
    """Checks that no transform of PyTorch is active.

    Raises:
        InputError: a transform is active.
    """
    transform = next((row for row in _TRANSFORMS if row[0]()), None)
    if transform is not None:
        raise transform_error(model, *transform[1:])


def transform_error(model: nn.Module, name: str, attempt: str) -> InputError:
    """Builds the error for a sharded model that is called within a transform of PyTorch."""
    return InputError(
        f"a sharded {type(model).__name__} was called within {name}",
        where=f"{type(model).__name__}.forward",
        why="it is captured as a graph, with collectives that transforms do not know",
        attempt=attempt,
    )


def check_inputs(model: nn.Module, call: Leaves) -> None:
    """Checks that every input is a plain, strided tensor.

    Raises:
        InputError: an input is sparse or nested, or its class overrides `__torch_dispatch__` or
            `__torch_function__`.
    """
    for name, tensor in zip(call.names, call.tensors, strict=True):
        _check_tensor(tensor, "input", name, f"argument {name!r} of {type(model).__name__}.forward")


def _check_tensor(tensor: Tensor, role: str, name: str, place: str) -> None:
    if tensor.is_nested or tensor.layout != torch.strided:
        raise InputError(
            f"{role} {name} is {'nested' if tensor.is_nested else str(tensor.layout).removeprefix('torch.')}",
            where=place,
            why="a sharded model is captured as a graph of ops on dense tensors, with collectives between them",
            attempt=f"{name}.to_padded_tensor(0)" if tensor.is_nested else f"{name}.to_dense()",
        )
    cls = own_class(tensor)
    overrides = None if cls is None else next((n for n in _METHODS if not _is_default(cls, n)), None)
    if cls is not None and overrides is not None:
        raise InputError(
            f"{role} {name} is of the class {cls.__name__}, which computes ops itself",
            where=place,
            why=f"it overrides {overrides}; a sharded model computes with slices, which are plain tensors",
            attempt=_plain_code(role, name, cls, overrides),
        )


_METHODS = ("__torch_dispatch__", "__torch_function__")
"""The methods that a tensor class overrides to compute ops itself."""


def _is_default(cls: type[Tensor], name: str) -> bool:
    """Whether a class keeps PyTorch's own behavior in this method."""
    # `_disabled_torch_function_impl`: `nn.Parameter` has it in place of `Tensor`'s own method (PyTorch 2.13.0).
    return _function(cls, name) in (_function(Tensor, name), torch._C._disabled_torch_function_impl)


def _function(cls: type[Tensor], name: str) -> object:
    method = getattr(cls, name)
    return getattr(method, "__func__", method)


def _plain_code(role: str, name: str, cls: type[Tensor], overrides: str) -> str:
    """The code that makes a plain tensor, by a known method of the class if it has one."""
    methods = ("dequantize", "full_tensor", "get_data", "get_original_weight")
    method = next((m for m in methods if getattr(cls, m, None) is not getattr(Tensor, m, None)), None)
    variable = name if role == "input" else f"model.{name}"
    if method is not None:
        plain = f"{variable}.{method}()"
    else:
        is_plain = overrides == "__torch_function__"
        plain = f"{variable}.as_subclass(torch.Tensor)" if is_plain else f"torch.tensor({variable}.tolist())"
    if role == "input":
        return plain
    made = f"torch.nn.Parameter({plain})" if role == "parameter" else plain
    return f"shard the model before it is quantized or its {role}s are wrapped; or {variable} = {made}"


def check_devices(model: nn.Module, call: Leaves) -> None:
    """Checks that every input is on the model's device; meta tensors match any device.

    A tensor without dims may be on the CPU, as in PyTorch's ops.

    Raises:
        InputError: an input is on a different device from the model.
    """
    devices = {p.device for p in (*model.parameters(), *model.buffers())}
    if len(devices) != 1:
        return
    (device,) = devices
    for name, tensor in zip(call.names, call.tensors, strict=True):
        is_number = tensor.device.type == "cpu" and tensor.ndim == 0
        if tensor.device != device and not is_number and "meta" not in (tensor.device.type, device.type):
            raise InputError(
                f"input {name} is on {tensor.device}, the model on {device}",
                where=f"argument {name!r} of {type(model).__name__}.forward",
                why="a graph computes on one device per rank",
                attempt=f"{name}.to({str(device)!r})",
            )


# --- checks of a model -----------------------------------------------------------------------------------------------


def check_weights(model: object) -> None:
    """Checks that the model's parameters and buffers can be split.

    Raises:
        InputError: the model is not a module, or a part of it is sharded already; two parameters or
            buffers share memory without being one tensor; a parameter has gradient hooks or no
            values; a buffer requires a gradient; a parameter or buffer is sparse or nested, or its
            class computes ops itself.
    """
    module = _checked_module(model)
    for role, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            _check_unsharded_and_initialized(tensor, role, name)
            _check_tensor(tensor, role, name, type(model).__name__)
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter)
    check_buffers(dict(module.named_buffers()))
    pair = sharing_pair(memories_of(module))
    if pair is not None:
        first, second = pair
        raise InputError(
            f"{first} and {second} share memory, but are two tensors",
            where=second,
            why="a write to one, or an optimizer's step, changes both; slices have memory of their own",
            attempt="to have one value, assign one tensor to both names, or register only the larger one and index it "
            "in forward (self.stats[0]); to have two, a copy: .clone()",
        )


def check_buffers(buffers: Mapping[str, Tensor]) -> None:
    """Checks that no buffer requires a gradient.

    Raises:
        InputError: a buffer requires a gradient.
    """
    for name, buffer in buffers.items():
        if buffer.requires_grad and not isinstance(buffer, nn.Parameter):
            raise InputError(
                f"buffer {name!r} requires a gradient",
                where=f"buffer {name!r}",
                why="a sharded model sums the gradients of parameters and inputs over the ranks, not those of buffers",
                attempt=f"store detached values in {name}, or write to it under torch.no_grad()"
                if buffer.grad_fn is not None
                else f"make {name} an nn.Parameter before ts.shard, or an argument of forward; "
                f"or model.get_buffer({name!r}).requires_grad_(False)",
            )


def _checked_module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            f"a {type(model).__name__} can't be sharded",
            where="the model",
            why="it is captured by running its forward, and its parameters are found by their names",
            attempt="an ordinary nn.Module",
        )
    # `_orig_mod` is the model in the module that `torch.compile` returns (PyTorch 2.13.0).
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "a model that torch.compile has wrapped can't be sharded",
            where="the model",
            why="compiled code does not show which ops it runs",
            attempt='shard(model._orig_mod, ..., objective={"compile": True}), which compiles the graphs of each rank',
        )
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise InputError(
            f"a {type(model).__name__} can't be sharded",
            where="the model",
            why="it wraps the model to shard, and all-reduces the gradients of full parameters",
            attempt="ts.shard(model.module, ...), then wrap the sharded model, over torchshard's data-parallel group",
        )
    return model


def _check_unsharded_and_initialized(tensor: Tensor, role: str, name: str) -> None:
    if isinstance(tensor, ShardedParameter):
        raise InputError(
            f"{role} {name!r} is sharded already",
            where=name,
            why="it is a slice of a parameter of a sharded model",
            attempt="pass the unsharded model, or a part of it",
        )
    if hasattr(tensor, "placements"):
        raise InputError(
            f"{role} {name!r} is a DTensor",
            where=name,
            why="PyTorch has split it already",
            attempt='the model before fully_shard or parallelize_module; mesh="shard" divides weights in that way',
        )
    if is_lazy(tensor):
        raise InputError(
            f"{role} {name!r} is not initialised yet",
            where=name,
            why="a lazy module makes it when it is called first",
            attempt="call the model once on inputs of the right shape, then shard",
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    # `_backward_hooks`, `_post_accumulate_grad_hooks`: no public way to list a tensor's hooks (PyTorch 2.13.0).
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise InputError(
            f"parameter {name!r} has gradient hooks",
            where=name,
            why="they belong to the whole parameter; a slice would not have them",
            attempt="register them on the sharded model's parameters",
        )
    is_real = not parameter.is_meta and not isinstance(parameter, LazyTensor) and not is_fake(parameter)
    if is_real and parameter.numel() and not parameter.untyped_storage().nbytes():
        raise InputError(
            f"parameter {name!r} has no values",
            where=name,
            why="its storage is freed, perhaps because the model was sharded",
            attempt="pass a model that has not been sharded, such as a copy made before",
        )
