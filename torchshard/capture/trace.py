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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchshard.capture.rehearsal import refuse_state
from torchshard.capture.signature import Leaves, check_results, flatten, unchanged
from torchshard.capture.visible import Kept, Place, attributes, changed
from torchshard.errors import CaptureError, InputError

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


def trace(model: nn.Module, call: Leaves, *, dynamic: bool = True) -> Traced:
    """One call as an exported program; the model is left as it was.

    Raises:
        CaptureError: the model can't be captured; it says at which line and what to do.
        InputError: a tensor is not what the model takes.
    """
    results: list[Leaves] = []
    places: list[Place] = []
    kept, before = Kept(model), attributes(model)
    own = {name: model.__dict__[name] for name in _CALLING if name in model.__dict__}

    def flat_forward(*tensors: Tensor) -> list[Any]:
        held = dataclasses.replace(call, tensors=tensors)
        call_args, call_kwargs = call.rebuild(tensors)
        _set(model, own)
        with _ForeignParameters():
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
        with _refused_functions(), _quiet():
            exported = _export(model, call, dynamic)
    finally:
        kept.put_back()
    left = tuple(dict.fromkeys(places))
    if left:
        refuse_state(model, call, left)
    return Traced(exported, results[-1], left)


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
    for sizes in (Dim.AUTO, Dim.STATIC) if dynamic else (Dim.STATIC,):
        tensors = tuple(_example(t, model) for t in call.tensors)
        shapes = tuple({d: sizes for d in DYNAMIC_DIMS if d < t.ndim} for t in tensors)
        try:
            named = {"tensors": shapes} if tensors else None
            exported = torch.export.export(model, tensors, strict=False, dynamic_shapes=named)
            _refuse_transforms(exported)
            return exported
        except (CaptureError, InputError):
            raise
        except Exception as error:
            failure = error
    assert failure is not None
    raise _capture_error(model, failure) from failure


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


class _ForeignParameters(TorchFunctionMode):
    """A real tensor that needs a gradient, amid the fake ones of a capture, is a parameter the model doesn't own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for held in pytree.arg_tree_leaves(*args, **(kwargs or {})):
            if type(held) in (Tensor, nn.Parameter) and held.requires_grad and not is_fake(held):
                raise CaptureError(
                    "the model uses a parameter that is not its own",
                    where=_user_line(traceback.extract_stack()),
                    why=f"{tuple(held.shape)}, requires_grad: as a constant of the graph its gradient would be lost",
                    attempt="register it: assign the parameter or its module to an attribute of the model",
                )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export's remarks on sizes of one and on assigned attributes are ours to make, where they matter."""
    logger = logging.getLogger("torch._export.non_strict_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The tensor attribute")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _refused_functions() -> Iterator[None]:
    """What a graph would silently lose is an error while capturing: a custom autograd.Function's backward, a seed."""
    original = torch.autograd.Function.__dict__.get("apply")
    applied: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return args[0](*args[2:])
        if cls.__name__.startswith("GeneratedBackwardFor_"):  # a torch.library op: the graph holds it whole
            return applied(cls, *args, **kwargs)
        raise CaptureError(
            f"the model calls the custom autograd.Function {cls.__name__}",
            where=_user_line(traceback.extract_stack()) or cls.__qualname__,
            why="a captured graph would hold its forward and silently lose its backward",
            attempt="write it in plain torch ops, or as a torch.library.custom_op with register_autograd, "
            "and give it a rule with @torchshard.rule",
        )

    def manual_seed(seed: Any) -> Any:
        raise CaptureError(
            "the model seeds the random stream",
            where=_user_line(traceback.extract_stack()) or "torch.manual_seed",
            why="a graph draws from the stream as it finds it: seeded once, when it was captured, and never again",
            attempt="torch.manual_seed before the call, outside the model",
        )

    seeding = torch.manual_seed
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    torch.manual_seed = torch.random.manual_seed = manual_seed
    try:
        yield
    finally:
        torch.manual_seed = torch.random.manual_seed = seeding
        if original is None:
            del torch.autograd.Function.apply
        else:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]


_ADVICE = (
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
    text = f"{type(error).__name__}: {error}"
    advice = next((row for row in _ADVICE if re.search(row[0], text)), None)
    reason = advice[1] if advice else "torch.export could not run the model on fake tensors"
    line = text.strip().splitlines()[0][:300]
    return CaptureError(
        f"{type(model).__name__} can't be captured as a graph",
        where=_user_line(traceback.extract_tb(error.__traceback__)) or _line_in(str(error)) or type(model).__name__,
        why=f"{reason} ({line})",
        attempt=advice[2]
        if advice
        else "run the model on these inputs without torchshard first; if that works, move "
        "what can't be traced out of forward",
    )


def is_library(path: str) -> bool:
    return "/torch/" in path or "/torchshard/" in path or path.startswith(("<", "torch/"))


def _user_line(stack: Sequence[traceback.FrameSummary]) -> str:
    frames = [f for f in stack if not is_library(f.filename)]
    own = [f for f in frames if f.name not in ("<module>", "main")] or frames
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else ""


def _line_in(text: str) -> str:
    found = [m for m in re.findall(r'File "([^"]+)", line (\d+)', text) if not is_library(m[0])]
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""
