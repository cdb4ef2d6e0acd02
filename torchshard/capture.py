"""Module and example inputs in, one flat ATen graph out, with global shapes.

`torch.export` (non-strict, training IR) runs the model on fake tensors, so that linear, attention, layer_norm,
cross_entropy and dropout stay whole and no parameter is read. Here its result becomes what all passes work on:

    placeholders    parameters, buffers and constants first, then the call's tensors; meta["kind"], meta["path"]
    call_function   ATen ops; meta["val"] (fake, global shape), meta["module"] (path), meta["source"] (user's line)
    output          the flat list of result tensors

Each input tensor's first two dims (batch, sequence) are dynamic where the model holds for any size. What the graph
then assumes of its inputs, `Captured.accepts` checks at each call.

Limits, each an error: control flow that depends on data; a custom `autograd.Function` (its backward would be lost).
Activation checkpoints are flattened.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import is_fake
from torch.export import Dim
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchshard.errors import CaptureError, InputError
from torchshard.graph import duplicate, op_name, size_expr
from torchshard.inline import inline_regions
from torchshard.signature import Leaves, flatten, flatten_call

DYNAMIC_DIMS = (0, 1)
"""The dims of input tensors that may vary from call to call: batch and sequence."""


@dataclass(frozen=True)
class Captured:
    """A graph with what is needed to call it."""

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    """The names of the call's tensors, in the order of their placeholders."""
    constants: Mapping[str, Tensor]
    """Tensors that the model makes of Python numbers, by path."""
    rebuild: Callable[[Sequence[Any]], Any]
    """The graph's results -> what `forward` returns."""
    assumes: Callable[[Sequence[Tensor]], bool]
    """Whether tensors satisfy what the graph assumes of sizes."""

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph computes the model on these inputs."""
        return self.assumes(tensors)


def hollow(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers have shape and device but no memory, for later captures."""
    memo = {id(t): hollow_tensor(t) for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def hollow_tensor(tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """A tensor (or Parameter) of the same shape, without memory."""
    chosen: dict[str, Any] = {"dtype": dtype or tensor.dtype, "device": device or tensor.device}
    held = torch.empty_strided(tensor.shape, tensor.stride(), **chosen)
    held.untyped_storage().resize_(0)
    return nn.Parameter(held, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else held


def capture(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Captured:
    """Captures one call of the model; the model and the inputs are read for shapes alone.

    Raises:
        CaptureError: the model can't be captured; it says at which line and what to do.
        InputError: `forward` does not take these arguments, or a tensor is on another device than the model.
    """
    call = flatten_call(model, args, kwargs or {})
    check_devices(model, call)
    results: list[Leaves] = []
    exported = _export(model, call, results)
    graph = _flat_graph(exported, call, shared_names(model))
    return Captured(graph, call.names, _constants(exported), results[-1].rebuild, _assumption(graph, exported, call))


def check_devices(model: nn.Module, call: Leaves) -> None:
    """Every input on the model's device (fake and meta inputs stand for any)."""
    devices = {p.device for p in (*model.parameters(), *model.buffers())}
    if len(devices) != 1:
        return
    (device,) = devices
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if isinstance(tensor, Tensor) and tensor.device != device and "meta" not in (tensor.device.type, device.type):
            raise InputError(
                f"input {name} is on {tensor.device}, the model on {device}",
                where=f"argument {name!r} of {type(model).__name__}.forward",
                why="a graph computes on one device per rank",
                attempt=f"{name}.to({str(device)!r})",
            )


def shared_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of a parameter or buffer -> all names of that tensor, the first one first (tied ones have several)."""
    by_id: dict[int, list[str]] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        by_id.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in by_id.values() for name in names}


# --- torch.export ----------------------------------------------------------------------------------------------------


def _export(model: nn.Module, call: Leaves, results: list[Leaves]) -> torch.export.ExportedProgram:
    forward, own = model.forward, model.__dict__.get("forward")

    def flat_forward(*tensors: Tensor) -> list[Any]:
        call_args, call_kwargs = call.rebuild(tensors)
        with _ForeignParameters():
            results.append(flatten(forward(*call_args, **call_kwargs)))
        return list(results[-1].tensors)

    tensors = tuple(_example(t, model) for t in call.tensors)
    dims = tuple({d: Dim.AUTO for d in DYNAMIC_DIMS if d < t.ndim} for t in tensors)
    model.forward = flat_forward
    try:
        with _refused_functions(), _quiet():
            return torch.export.export(model, tensors, strict=False, dynamic_shapes={"tensors": dims})
    except (CaptureError, InputError):
        raise
    except Exception as error:
        raise _capture_error(model, error) from error
    finally:
        del model.forward
        if own is not None:
            model.forward = own


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
    """Export's remarks on sizes of one are ours to make, where they matter."""
    logger = logging.getLogger("torch._export.non_strict_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _refused_functions() -> Iterator[None]:
    """A custom autograd.Function is an error while capturing: a graph would lose its backward."""
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

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if original is None:
            del torch.autograd.Function.apply
        else:
            torch.autograd.Function.apply = original  # type: ignore[method-assign]


_ADVICE = (
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


def _is_library(path: str) -> bool:
    return "/torch/" in path or "/torchshard/" in path or path.startswith(("<", "torch/"))


def _user_line(stack: Sequence[traceback.FrameSummary]) -> str:
    frames = [f for f in stack if not _is_library(f.filename)]
    own = [f for f in frames if f.name not in ("<module>", "main")] or frames
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else ""


def _line_in(text: str) -> str:
    found = [m for m in re.findall(r'File "([^"]+)", line (\d+)', text) if not _is_library(m[0])]
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""


# --- ExportedProgram -> GraphModule ----------------------------------------------------------------------------------


def _flat_graph(
    exported: torch.export.ExportedProgram, call: Leaves, shared: Mapping[str, tuple[str, ...]]
) -> fx.GraphModule:
    module = fx.GraphModule(exported.graph_module, copy.deepcopy(exported.graph_module.graph))
    inline_regions(module)
    graph = module.graph
    kinds = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    names = iter(call.names)
    for node in graph.nodes:
        if node.op == "placeholder":
            spec = kinds[node.target]
            kind = spec.kind.name.lower()
            kind = {"user_input": "input", "constant_tensor": "constant"}.get(kind, kind)
            node.meta["kind"] = kind
            path = next(names) if kind == "input" else str(spec.target)
            node.meta["names"] = shared.get(path, (path,)) if kind != "input" else (path,)
            node.meta["path"] = node.meta["names"][0]
        elif node.op == "call_function":
            node.meta["module"] = _module_path(node)
            node.meta["source"] = _source(node.meta.get("stack_trace") or "")
    flat = graph.output_node()
    results: Any = flat.args[0]
    flat.args = (tuple(results),)
    _order_placeholders(graph)
    _rename(graph)
    return duplicate(fx.GraphModule(nn.Module(), graph))


def _order_placeholders(graph: fx.Graph) -> None:
    """Parameters, buffers and constants first, then the call's tensors."""
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input"]
    rest = [n for n in graph.nodes if n.op == "placeholder" and n.meta["kind"] != "input"]
    for node in reversed([*rest, *inputs]):
        graph._root.append(node)


def _constants(exported: torch.export.ExportedProgram) -> dict[str, Tensor]:
    specs = exported.graph_signature.input_specs
    wanted = [s.target for s in specs if s.kind.name in ("CONSTANT_TENSOR",) and s.target]
    return {path: exported.constants[path] for path in wanted}


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    path = paths[-1] if paths else ""
    return "" if path.startswith("_empty_nn_module_stack") else path.split("@")[0]


def _source(trace: str) -> str:
    """The innermost line of the user's (or a model library's) code in a stack trace: 'mlp.py:12'."""
    frames = [m for m in re.findall(r'File "([^"]+)", line (\d+)', trace) if not _is_library(m[0])]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""


def _rename(graph: fx.Graph) -> None:
    """Names follow the module path: the one linear of `blocks.0.attn.q` is `blocks_0_attn_q`."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    per_module: dict[str, list[fx.Node]] = {}
    for node in calls:
        per_module.setdefault(node.meta["module"], []).append(node)
    nested = {path.rpartition(".")[0] for path in per_module}
    for node in graph.nodes:
        node.name = f"_old_{node.name}"
    taken: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            wanted = node.meta["path"]
        elif node.op == "call_function":
            path = node.meta["module"]
            single = path and path not in nested and len(per_module[path]) == 1
            wanted = path if single else f"{path}_{op_name(node)}".lstrip("_")
        else:
            wanted = "output"
        node.name = _free(re.sub(r"\W+", "_", wanted).strip("_") or "value", taken)
        if node.op == "placeholder":
            node.target = node.name


def _free(name: str, taken: set[str]) -> str:
    name = f"_{name}" if name[0].isdigit() else name
    chosen = (
        name
        if name not in taken
        else next(f"{name}_{i}" for i in range(1, len(taken) + 2) if f"{name}_{i}" not in taken)
    )
    taken.add(chosen)
    return chosen


# --- what the graph assumes of its inputs ----------------------------------------------------------------------------


def _assumption(graph: fx.GraphModule, exported: Any, call: Leaves) -> Callable[[Sequence[Tensor]], bool]:
    nodes = [n for n in graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input"]
    shapes = [[size_expr(s) for s in n.meta["val"].shape] for n in nodes]
    bounds = {symbol: (r.lower, r.upper) for symbol, r in exported.range_constraints.items()}
    guards = [compile(text, "<guard>", "eval") for text in getattr(exported, "_guards_code", [])]
    scope = {
        "math": __import__("math"),
        "torch": torch,
        "__builtins__": {"max": max, "min": min, "abs": abs, "int": int},
    }

    def assumes(tensors: Sequence[Tensor]) -> bool:
        bound: dict[Any, int] = {}
        for tensor, shape in zip(tensors, shapes, strict=True):
            if len(shape) != tensor.ndim or not all(
                size == want if isinstance(want, int) else bound.setdefault(want, size) == size
                for size, want in zip(tensor.shape, shape, strict=True)
            ):
                return False
        if not all(low <= bound[s] <= high for s, (low, high) in bounds.items() if s in bound):
            return False
        local = {"tensors": tuple(tensors)}
        return all(eval(guard, scope, {"L": local}) for guard in guards)

    return functools.partial(assumes)
