"""Runs a model once under `torch.export`, on fake tensors, and refuses what its result could not hold.

What comes of it is an ExportedProgram with ATen ops; how sizes, names and inputs are read from it, `capture` says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from torchshard.capture.equal_sizes import equal_sizes
from torchshard.capture.intercept import (
    check_random_states,
    following,
    homes_of,
    odd_random_states,
    recording,
    warn_of_checkpoints,
)
from torchshard.capture.modes import noting_modes
from torchshard.capture.own_code import layer_line, line_in, user_line
from torchshard.capture.rehearsal import refuse_state, run_on_fakes
from torchshard.capture.signature import Leaves, check_results, flatten, unchanged
from torchshard.capture.visible import Kept, Place, attributes, changed
from torchshard.core.errors import CaptureError, InputError
from torchshard.custom_ops.whole import WholeCall

DYNAMIC_DIMS = (0, 1)
"""The dims of input tensors that may vary from call to call: batch and sequence."""


@dataclass(frozen=True)
class Traced:
    """One call of a model."""

    exported: ExportedProgram
    result: Leaves
    """What `forward` returned."""
    left: tuple[Place, ...]
    """The attributes that it assigned."""
    whole: tuple[WholeCall, ...] = ()
    """The calls that are kept whole, by the numbers that stand in the graph."""


def trace(model: nn.Module, call: Leaves, *, dynamic: bool = True) -> Traced:
    """One call as an exported program; the model is left as it was.

    Raises:
        CaptureError: the model can't be captured; it says at which line and what to do.
        InputError: a tensor is not what the model takes.
    """
    results: list[Leaves] = []
    places: list[Place] = []
    kept, before, homes = Kept(model), attributes(model), homes_of(model)
    own = {name: model.__dict__[name] for name in _CALLING if name in model.__dict__}

    def flat_forward(*tensors: Tensor) -> list[Any]:
        held = dataclasses.replace(call, tensors=tensors)
        call_args, call_kwargs = call.rebuild(tensors)
        _set(model, own)
        recorded.checkpoints.clear()  # a model may be exported twice
        with following(recorded, homes), noting_modes():
            results.append(flatten(nn.Module._call_impl(model, *call_args, **call_kwargs)))
        _set(model, bare)
        _check_results(model, results[-1])
        places.extend(changed(before, attributes(model)))
        if not unchanged(held, call_args, call_kwargs):
            raise _written_arguments(model)
        return list(results[-1].tensors)

    bare = {"forward": flat_forward, **{name: OrderedDict() for name in _CALLING[1:]}}
    _set(model, bare)
    try:
        with odd_random_states() as states, recording() as recorded, _quiet(), saved_tensors_hooks(_same, _same):
            exported = _export(_plain(model), call, dynamic)
    finally:
        kept.put_back()
    check_random_states(model, states["moved"], lambda: run_on_fakes(model, call))
    warn_of_checkpoints(recorded, model)
    left = tuple(dict.fromkeys(places))
    if left:
        refuse_state(model, call, left)
    return Traced(exported, results[-1], left, tuple(recorded.calls))


def _same(tensor: Tensor) -> Tensor:
    """The innermost hooks on saved tensors are those of the capture, not those of a checkpoint around the call."""
    return tensor


class _Plain(nn.Module):
    """An `fx.GraphModule` as an ordinary module: export runs the nodes of the former, not its forward."""


def _plain(model: nn.Module) -> nn.Module:
    if not isinstance(model, torch.fx.GraphModule):
        return model
    made = object.__new__(_Plain)
    made.__dict__ = model.__dict__  # the same attributes, those that are set for the capture too
    return made


_CALLING = ("forward", "_forward_hooks", "_forward_pre_hooks")
"""What a call of a module runs, apart from its class."""


def _set(model: nn.Module, values: Mapping[str, Any]) -> None:
    for name in _CALLING:
        model.__dict__.pop(name, None)
    model.__dict__.update(values)


def _check_results(model: nn.Module, results: Leaves) -> None:
    try:
        check_results(results)
    except InputError as error:
        kind = str(error).splitlines()[0].rpartition(" ")[2]
        raise CaptureError(
            f"forward returns a {kind}, which can't be taken apart",
            where=f"{type(model).__name__}.forward",
            why="a graph gives tensors, and puts them into containers that PyTorch's pytree knows or plain objects",
            attempt="a dict, list, tuple or dataclass; or torch.utils._pytree.register_pytree_node for the class",
        ) from None


def _written_arguments(model: nn.Module) -> CaptureError:
    return CaptureError(
        "forward writes to its arguments",
        where=f"{type(model).__name__}.forward",
        why="a list, dict or object that it is given holds something else afterwards; a graph gives results only",
        attempt="return what is new; with Hugging Face models use_cache=False",
    )


def _export(model: nn.Module, call: Leaves, dynamic: bool) -> ExportedProgram:
    """With dynamic sizes; with those of this call alone where only that works (a dict or cache keyed by a size)."""
    failure: Exception | None = None
    for sizes in (Dim.AUTO, Dim.STATIC) if dynamic and call.tensors else (Dim.STATIC,):
        shapes = [{d: sizes for d in DYNAMIC_DIMS if d < t.ndim} for t in call.tensors]
        try:
            exported = _exported(model, call, shapes)
            if failure is not None:
                _warn_of_fixed_sizes(model, failure)
            return _with_equal_sizes(model, call, shapes, exported)
        except (CaptureError, InputError):
            raise
        except Exception as error:
            failure = error
    assert failure is not None
    raise _capture_error(model, failure) from failure


Shapes = list[dict[int, Any]]
"""Of each input: dim -> whether and how its size may vary."""


def _exported(model: nn.Module, call: Leaves, shapes: Shapes) -> ExportedProgram:
    tensors = tuple(_example(t, model) for t in call.tensors)
    named = {"tensors": tuple(shapes)} if tensors else None
    exported = torch.export.export(model, tensors, strict=False, dynamic_shapes=named)
    _refuse_transforms(exported)
    return exported


def _with_equal_sizes(model: nn.Module, call: Leaves, shapes: Shapes, exported: ExportedProgram) -> ExportedProgram:
    """The same where inputs' sizes must be equal for the model to run (two batches, one viewed by the other's size).

    Export leaves that open, with sizes such as `8 * b // a` in the graph, which nothing can be split by.
    """
    equal = equal_sizes(exported)
    if not equal:
        return exported
    shared = [dict(shape) for shape in shapes]
    for number, places in enumerate(equal):
        for index, dim in places:
            shared[index][dim] = Dim(f"size{number}")
    try:
        return _exported(model, call, shared)
    except Exception:  # they need not be equal
        return exported


def _warn_of_fixed_sizes(model: nn.Module, failure: Exception) -> None:
    why = f"{type(failure).__name__}: {failure}".strip().splitlines()[0][:200]
    warnings.warn(
        f"{type(model).__name__} can't be captured for varying batch and sequence sizes: each pair of sizes is "
        f"captured anew, which takes seconds ({why})",
        stacklevel=2,
    )


def _refuse_transforms(exported: ExportedProgram) -> None:
    """Values within torch.func's transforms are none of a flat graph's: it would hold them as constants."""
    for node in exported.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
                raise RuntimeError(f"a functorch transform inside the model, at {node.name}")


def _example(tensor: Tensor, model: nn.Module) -> Tensor:
    """An input for export: a tensor of its own (two arguments may be one tensor), on the model's device."""
    device = next((p.device for p in model.parameters()), tensor.device)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export's remarks on sizes of one and on assigned attributes are ours to make, where they matter."""
    loggers = [logging.getLogger(name) for name in _REMARKING]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The tensor attribute")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_REMARKING = ("torch._export.non_strict_utils", "torch.fx.experimental.symbolic_shapes")


_ADVICE = (
    (
        r"float\(self\.num_batches_tracked\)",
        "BatchNorm with momentum=None weighs each batch by a tensor's value, the count of batches",
        "a number: momentum=0.1, as it is by default",
    ),
    (
        r"_detect_is_causal_mask",
        "torch.nn.Transformer looks at the mask's values, whether it is the causal one",
        "say so: is_causal=True beside the mask (tgt_is_causal=True of nn.Transformer), or False",
    ),
    (
        r"exported program constant's list|functorch",
        "it differentiates or maps within forward (torch.autograd.grad, torch.func), which a flat graph can't hold",
        "plain ops on batched tensors in place of torch.func.vmap; gradients taken outside the model",
    ),
    (
        r"data.dependent|GuardOnDataDependent|Could not extract specialized|\.item\(\)|_local_scalar_dense|unbacked",
        "the graph would depend on the values of a tensor",
        "compute with torch.where or a mask instead of a Python branch on a tensor's value",
    ),
    (
        r"dynamic|Constraints violated|specializ",
        "the sizes of the inputs could not be kept dynamic",
        "inputs of one fixed shape, or a model that does not compare sizes",
    ),
)


def _capture_error(model: nn.Module, error: Exception) -> CaptureError:
    text, stack = f"{type(error).__name__}: {error}", traceback.extract_tb(error.__traceback__)
    layer = layer_line(stack)
    called = " ".join((*(frame.name for frame in stack), layer))
    advice = next((row for row in _ADVICE if re.search(row[0], f"{text} {called}")), None)
    reason = advice[1] if advice else "torch.export could not run the model on fake tensors"
    line = text.strip().splitlines()[0][:300]
    return CaptureError(
        f"{type(model).__name__} can't be captured as a graph",
        where=user_line(stack) or line_in(str(error)) or layer or type(model).__name__,
        why=f"{reason} ({line})",
        attempt=advice[2]
        if advice
        else "run the model on these inputs without torchshard first; if that works, move "
        "what can't be traced out of forward",
    )
