"""Module and example inputs in, one flat ATen graph out, with global shapes.

`torch.export` (non-strict, training IR) runs the model on fake tensors, so that linear, attention, layer_norm,
cross_entropy and dropout stay whole and no parameter is read. Here its result becomes what all passes work on:

    placeholders    parameters, buffers and constants first, then the call's tensors; meta["kind"], meta["path"]
    call_function   ATen ops; meta["val"] (fake, global shape), meta["module"] (path), meta["source"] (user's line)
    output          the flat list of result tensors

Each input tensor's first two dims (batch, sequence) are dynamic where the model holds for any size. What the graph
then assumes of its inputs, `Captured.accepts` checks at each call.

Limits, each an error: control flow that depends on data. Custom `autograd.Function`s and gradient hooks are ops of the
graph, called whole. Activation checkpoints are flattened.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from torchshard.capture.intercept import WHOLE
from torchshard.capture.models import check_devices, hollow_tensor, shared_names
from torchshard.capture.modes import modes_of
from torchshard.capture.own_code import is_library
from torchshard.capture.regions import inline_regions
from torchshard.capture.signature import flatten_call
from torchshard.capture.trace import trace
from torchshard.capture.visible import Place
from torchshard.core.errors import CaptureError
from torchshard.custom_ops.whole import HookCall, WholeCall
from torchshard.ir.graph import duplicate, op_name, size_expr


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
    left: tuple[Place, ...] = ()
    """The attributes that forward assigned, in one call as in the next."""

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph computes the model on these inputs."""
        return self.assumes(tensors)


def capture(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, dynamic: bool = True
) -> Captured:
    """Captures one call of the model; the model and the inputs are read for shapes alone.

    Args:
        dynamic: whether batch and sequence may vary from call to call, where the model allows it.

    Raises:
        CaptureError: the model can't be captured; it says at which line and what to do.
        InputError: `forward` does not take these arguments, or a tensor is on another device than the model.
    """
    call = flatten_call(model, args, kwargs or {})
    check_devices(model, call)
    traced = trace(model, call, dynamic=dynamic)
    exported = traced.exported
    shared = shared_names(model)
    names = tuple(f"{name} (argument)" if name in shared else name for name in call.names)
    memo = {id(t): hollow_tensor(t) for t in (*model.parameters(), *model.buffers())}
    graph = _flat_graph(exported, names, shared, [held.copied(memo) for held in traced.whole])
    assumes = _assumption(graph, exported)
    return Captured(graph, names, _constants(exported), traced.result.rebuild, assumes, traced.left)


# --- ExportedProgram -> GraphModule ----------------------------------------------------------------------------------


def _flat_graph(
    exported: torch.export.ExportedProgram,
    inputs: Sequence[str],
    shared: Mapping[str, tuple[str, ...]],
    whole: Sequence[WholeCall],
) -> fx.GraphModule:
    module = fx.GraphModule(exported.graph_module, copy.deepcopy(exported.graph_module.graph))
    inline_regions(module)
    for node in module.graph.nodes:
        _check_node(node)
    stand_ins = {node: whole[node.args[2]] for node in module.graph.nodes if node.target is WHOLE}
    hooks = {node for node, call in stand_ins.items() if isinstance(call, HookCall)}
    for node, call in stand_ins.items():
        made: Any = _call_whole(module.graph, node, call)
        if node in hooks:  # those set later come before it, so that gradients meet the hook that was set first
            made.args[0].replace_all_uses_with(made, lambda user: user is not made and user not in hooks)  # noqa: B023
        module.graph.erase_node(node)
    graph = module.graph
    kinds = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    names = iter(inputs)
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
            node.meta["autocast"] = modes_of(node).autocast
    flat = graph.output_node()
    results: Any = flat.args[0]
    flat.args = (tuple(results),)
    _order_placeholders(graph)
    _rename(graph)
    return duplicate(fx.GraphModule(nn.Module(), graph))


def _check_node(node: fx.Node) -> None:
    """Raises CaptureError for what can't be planned: numbers made of tensors' values, generators of the model's own."""
    line = _source(node.meta.get("stack_trace") or "") or node.name
    if node.target in _READING and not all(map(_is_only_checked, node.users)):
        raise CaptureError(
            "forward makes a Python number of a tensor's value",
            where=line,
            why="the graph would depend on the values of a tensor: .item(), float(t) and int(t) read one",
            attempt="compute with the tensor itself (`x * t` in place of `x * t.item()`), and call .item() outside",
        )
    if any(_is_generator(a) for a in pytree.tree_leaves((node.args, node.kwargs))):
        raise CaptureError(
            "forward draws random numbers from a generator of its own",
            where=line,
            why="the ranks have one RNG state in common, PyTorch's; a generator would be a constant of the graph",
            attempt="torch.randn(...) and the like without generator=; torch.manual_seed outside of the model",
        )


def _is_only_checked(user: fx.Node) -> bool:
    """Whether a number of a tensor's value is asserted about, or says where to cut: what a graph can hold."""
    if isinstance(user.target, torch._ops.OpOverload):
        return user.target in _CHECKING
    return user.op == "call_function" and all(map(_is_only_checked, user.users))


_CHECKING = {
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten.split_with_sizes.default,
}
_READING = {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default}


def _is_generator(value: Any) -> bool:
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    return isinstance(value, torch.Generator) or "Generator" in type(value).__name__ or _is_script_object(value)


def _is_script_object(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) or type(value).__name__ in ("CustomObjArgument", "FakeScriptObject")


def _call_whole(graph: fx.Graph, node: fx.Node, call: WholeCall) -> fx.Node:
    """The call itself, which takes the place of its stand-in; a hook stands right behind what it is set on."""
    tensors, sizes, _ = cast(Any, node.args)
    count = call.operands - len(sizes)
    with graph.inserting_after(tensors[0]) if isinstance(call, HookCall) else graph.inserting_before(node):
        made = graph.call_function(call, (*tensors[:count], *sizes, *tensors[count:]))
    made.meta = dict(node.meta)
    if call.single:
        made.meta["val"] = node.meta["val"][0]
    for user in list(node.users):
        if call.single:
            user.replace_all_uses_with(made)
            graph.erase_node(user)
        else:
            user.args = (made, user.args[1])
    return made


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


def _source(stack: str) -> str:
    """The innermost line of the user's (or a model library's) code in a stack trace: 'mlp.py:12'."""
    frames = [m for m in re.findall(r'File "([^"]+)", line (\d+)', stack) if not is_library(m[0])]
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


def _assumption(graph: fx.GraphModule, exported: Any) -> Callable[[Sequence[Tensor]], bool]:
    nodes = [n for n in graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input"]
    shapes = [[size_expr(s) for s in n.meta["val"].shape] for n in nodes]
    bounds = {symbol: (r.lower, r.upper) for symbol, r in exported.range_constraints.items()}
    guards = [compile(text, "<guard>", "eval") for text in exported._guards_code]
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
