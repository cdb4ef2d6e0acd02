"""The last step before a graph runs: replaces each op with the function that is cheapest to call.

An operator (`torch.ops.aten.mm.default`) takes a microsecond longer to call than its function in
PyTorch's Python bindings (`torch.mm`). The pass finds that function by trial: it calls a candidate
on fake tensors, and accepts it if it runs the same ops on the same operands. The graph's code calls
the function by name, so the name must resolve to it: `torch.stft` is a Python function around the
binding of that name.

fx calls operators through `torch.ops`, whose calls cost more in Python than the bindings (PyTorch
2.13). The pass could go if the difference did.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

# `_get_qualified_name`: how fx prints a function in a graph's code (PyTorch 2.13.0).
from torch.fx.node import Argument, Target, _get_qualified_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torchshard.core.fakes import new_fake_mode
from torchshard.custom_ops.carry import CARRY
from torchshard.ir.editing import duplicate
from torchshard.ir.effects import reads_memory, uses_rng
from torchshard.ir.fake_values import faking, in_numbers
from torchshard.ir.graph import is_tensor
from torchshard.ir.listing import purpose
from torchshard.ops import OPS, Begin, kernels, wait
from torchshard.passes.nodes import FOR_ANY_STRIDES, node_arg

aten = torch.ops.aten
# `_VariableFunctions`, `_nn`: the C functions that `torch` and `torch.nn.functional` bind to names (PyTorch 2.13.0).
_BINDINGS = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
chosen: dict[tuple[Target, str], Target] = {}
"""An op and the types of its arguments -> what is called for it."""


def direct(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that calls functions of PyTorch's bindings; it computes the same."""
    copied = duplicate(module)
    for node in list(copied.graph.nodes):
        if uses_rng(node) or reads_memory(node):
            _keep_order(copied.graph, node)
        if node.target is CARRY or (node.target in OPS and OPS[node.target].kernel == "none"):
            # values are never changed in place, so the result may share its operand's memory
            node.replace_all_uses_with(node_arg(node))
            copied.graph.erase_node(node)
        elif node.target in OPS:
            node.target = _traced(kernels().computing(node.target), node)
        elif isinstance(node.target, Begin):
            (waiting,) = node.users
            node.target = _traced(node.target, waiting)
        elif node.target is wait:
            node.target = _traced(wait, node)
        elif node.target in FOR_ANY_STRIDES:
            node.target = FOR_ANY_STRIDES[node.target]
        elif isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            key = node.target, str(fx.map_arg((node.args, node.kwargs), _type_of))
            if key not in chosen:
                chosen[key] = function_of(node)
            node.target = chosen[key]
    copied.recompile()
    return copied


def _traced(function: Callable[..., object], collective: fx.Node) -> Callable[..., object]:
    """A collective, or its begin or wait, labelled for profilers: 'begin_reduce in down, for down'."""
    module = collective.meta.get("module") or "the model"
    label = f"{function.__name__} in {module}, {purpose(collective, {})}"
    # `_profiler_enabled`: no public question for a running profiler (PyTorch 2.13.0).
    is_watched = torch.autograd._profiler_enabled

    @functools.wraps(function)
    def call(*args: object) -> object:
        if not is_watched():
            return function(*args)
        with torch.profiler.record_function(label):
            return function(*args)

    return call


def _keep_order(graph: fx.Graph, node: fx.Node) -> None:
    """Makes the operands of an op contiguous if they were when it was recorded.

    PyTorch draws random numbers in the order of memory, so the order must not change.
    """
    for operand in node.all_input_nodes:
        if is_tensor(operand) and operand.meta["val"].layout == torch.strided and operand.meta["val"].is_contiguous():
            with graph.inserting_before(node):
                node.replace_input_with(operand, graph.call_function(torch.Tensor.contiguous, (operand,)))


def _type_of(node: fx.Node) -> Argument:
    value = _value(node)
    return f"{type(value).__name__} {getattr(value, 'dtype', '')}"


def _value(node: fx.Node) -> Argument:
    value: Argument = (
        node.all_input_nodes[0].meta["val"] if node.target is torch.Tensor.contiguous else node.meta["val"]
    )
    return value


def function_of(node: fx.Node) -> Target:
    """The function that runs a node's op; the op itself if there is none."""
    with faking(new_fake_mode()):
        args, kwargs = in_numbers(fx.map_arg((node.args, dict(node.kwargs)), _value))
        return next((f for f in _candidates(node.target) if _runs(f, node.target, args, kwargs)), node.target)


def _candidates(op: Target) -> Iterator[Callable[..., object]]:
    assert isinstance(op, OpOverload)
    name = op._schema.name.removeprefix("aten::")
    found = (getattr(owner, name) for owner in _BINDINGS if hasattr(owner, name))
    return (function for function in found if _is_found_by_name(function))


def _is_found_by_name(function: Callable[..., object]) -> bool:
    """Whether fx's name for a function resolves to it; some bindings, as `__rshift__`, lack a name."""
    try:
        name = _get_qualified_name(function)
    except (AttributeError, RuntimeError):
        return False
    found: object = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found is function


def _runs(function: Callable[..., object], op: Target, args: Sequence[Argument], kwargs: dict[str, Argument]) -> bool:
    """Whether a function runs the same ops as an op on the same arguments, and returns the same."""
    assert isinstance(op, OpOverload)
    calls, wanted = _Calls(), _Calls()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # rejects signatures that PyTorch deprecates
            calls.watch(function, args, kwargs)
        wanted.watch(op, args, kwargs)
    except Exception:  # for any error, call the op itself
        return False
    return len(calls.made) > 1 and calls.made == wanted.made


class _Calls(TorchDispatchMode):
    """Records ops and their tensors: with types only, `a - b` would equal `b - a`."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[object, str]] = []
        self._seen: dict[int, Tensor] = {}

    def watch(self, function: Callable[..., object], args: Sequence[Argument], kwargs: dict[str, Argument]) -> None:
        """Records the ops that a function calls, and its result."""
        self._text((args, kwargs))  # numbers the operands in this order
        with self:
            found = function(*args, **kwargs)
        self.made.append(("result", self._text(tree_leaves(found))))

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        """Runs an op and records it."""
        if func.namespace == "aten":
            self.made.append((func, self._text((args, kwargs or {}))))
        return func(*args, **(kwargs or {}))

    def _text(self, value: object) -> str:
        return repr(tree_map_only(Tensor, self._number, value))

    def _number(self, tensor: Tensor) -> str:
        """A tensor's number in order of first appearance, with its type."""
        self._seen.setdefault(id(tensor), tensor)
        return f"{list(self._seen).index(id(tensor))}: {tensor!r}"
