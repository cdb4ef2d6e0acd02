"""Converts a graph to plain data for JSON, and back.

Ops are written as names, values as types, dynamic sizes as expressions: `["Mul", 2, "s0"]`. Names
are looked up among ops, and among the few Python functions that graphs call: data contains no code.

`torch.export.save` (`torch/_export/serde`, PyTorch 2.13) writes an `ExportedProgram` with its
weights and signature. A graph here is a plain `fx.Graph` with collectives and layouts in its meta,
and a plan's file must not contain code or tensors. The module could go if serde wrote any
`fx.Graph` with chosen keys of meta.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TypedDict

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, ShapeGuard
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from torchshard.core.fakes import new_fake_mode
from torchshard.core.types import Json, is_of, texts
from torchshard.custom_ops.fx_types import Argument
from torchshard.ir.editing import empty_module
from torchshard.ir.sizes import Equal

META = {
    "kind": str, "path": str, "names": list, "module": str, "source": str, "needs_grad": bool, "place": str,
    "recompute": str, "holds": list,
}  # fmt: skip
"""The meta keys written for each node in addition to its call and value, with their types."""
_OF_NUMBERS = {
    operator: (
        "abs and_ add eq floordiv ge getitem gt index invert is_ is_not le lshift lt mod mul ne neg not_ or_ pos pow "
        "rshift sub truediv truth xor"
    ),
    math: "ceil exp fabs floor log log2 pow sqrt trunc",
    torch: "sym_float sym_fresh_size sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum",
}
"""The Python functions that a graph may call: they compute numbers and have no side effects."""
_PYTHONS: Mapping[str, Callable[..., object]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in _OF_NUMBERS.items()
    for name in names.split()
    if hasattr(module, name)
}
_NAMES = {function: name for name, function in _PYTHONS.items()}
_FUNCTIONS: Mapping[str, Callable[..., object]] = {
    **{cls.__name__: cls for cls in (sympy.Add, sympy.Mul, sympy.Pow, sympy.Rational)},
    **{name: getattr(functions, name) for name in (*functions.__all__, "Max", "Min")},
}
"""The functions that occur in expressions of sizes."""
_CONSTANTS = {
    name: {str(getattr(torch, n)).removeprefix("torch."): getattr(torch, n)
           for n in dir(torch) if isinstance(getattr(torch, n), kind)}
    for name, kind in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format))
}  # fmt: skip


class GraphData(TypedDict):
    """A graph as JSON-compatible data."""

    nodes: list[dict[str, object]]
    sizes: dict[str, tuple[int, int, int | None]]
    """Name of a dynamic size -> (value in the example inputs, lower bound, upper bound or None)."""
    named_sizes: dict[str, object]
    """Name that the user gave a size -> its expression."""


def graph_data(module: fx.GraphModule, equal: Equal) -> GraphData:
    """Returns the part of a graph that planning needs, as JSON-compatible data.

    Args:
        equal: the result of `equal_sizes` before the graph was planned.

    Raises:
        ValueError: a part of the graph can't be written; the message names it.
    """
    writer = _Writer(equal)
    nodes = [writer.node(node) for node in module.graph.nodes]  # collects the sizes
    named = {word: writer.size(size) for word, size in module.meta.get("named_sizes", {}).items()}
    return {"nodes": nodes, "sizes": writer.sizes, "named_sizes": named}


def graph_from(data: GraphData) -> tuple[fx.GraphModule, dict[str, sympy.Symbol]]:
    """Returns (the graph that was written, with values on the CPU; its dynamic sizes by name).

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the data is not a result of `graph_data`,
            or names an op that does not exist.
    """
    reader, module = _Reader(data["sizes"]), empty_module({"recordings": {}})
    for each in data["nodes"]:
        reader.add(module.graph, each)
    module.meta["named_sizes"] = {word: reader.size(size) for word, size in data["named_sizes"].items()}
    return module, reader.symbols


class _Writer:
    """Writes nodes and values, and collects the dynamic sizes in them."""

    def __init__(self, equal: Equal) -> None:
        self._equal = equal
        self.sizes: dict[str, tuple[int, int, int | None]] = {}

    def node(self, node: fx.Node) -> dict[str, object]:
        """Returns a node's call, value and facts as data."""
        found: dict[str, object] = {"name": node.name, "op": node.op}
        if node.op == "call_function":
            found["target"] = _target_name(node)
        if node.args and node.op != "placeholder":
            found["args"] = [_argument_data(arg) for arg in node.args]
        if node.kwargs:
            found["kwargs"] = {name: _argument_data(arg) for name, arg in node.kwargs.items()}
        if "val" in node.meta:
            found["val"] = self.value(node.meta["val"])
        return found | {key: node.meta[key] for key in META if key in node.meta}

    def value(self, value: object) -> object:
        """Returns a fake value as data: its type, without contents."""
        if isinstance(value, (list, tuple)):
            return {"several": [self.value(item) for item in value]}
        if isinstance(value, Tensor):
            shape = [self.size(size) for size in value.shape]
            stride = None if value.is_contiguous() else [self.size(step) for step in value.stride()]
            dtype = str(value.dtype).removeprefix("torch.")
            return {"dtype": dtype, "shape": shape, "stride": stride, "requires_grad": value.requires_grad}
        if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
            return {"size": self.size(value)}
        if value is None or isinstance(value, (bool, float)):
            return {"value": value}
        raise ValueError(f"a value is a {type(value).__name__}")

    def size(self, size: int | torch.SymInt) -> object:
        """Returns a size as data: a number or an expression."""
        if isinstance(size, int):
            return size
        expr, env = size.node._expr, size.node.shape_env
        while (known := expr.xreplace(self._equal)) != expr:
            expr = known
        for symbol in expr.free_symbols:
            if symbol not in env.backed_var_to_val:
                raise ValueError(f"the size {expr} depends on the values of tensors")
            bounds = env.var_to_range[symbol]
            most = int(bounds.upper) if bounds.upper.is_Integer else None
            self.sizes[str(symbol)] = int(env.backed_var_to_val[symbol]), int(bounds.lower), most
        return _expr_data(expr)


def _target_name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target)
    name = _NAMES.get(node.target) if callable(node.target) else None
    if name is None:
        raise ValueError(f"{node.name} calls {node.target}, which has no name of its own")
    return name


def _argument_data(arg: object) -> object:
    if isinstance(arg, fx.Node):
        return {"node": arg.name}
    if isinstance(arg, (list, tuple)):
        items = [_argument_data(item) for item in arg]
        return {"tuple": items} if isinstance(arg, tuple) else items
    if arg is None or isinstance(arg, (bool, int, str)) or (isinstance(arg, float) and math.isfinite(arg)):
        return arg
    if isinstance(arg, float):
        return {"float": str(arg)}
    if isinstance(arg, torch.device):
        return {"device": arg.type}
    if isinstance(arg, slice):
        return {"slice": [_argument_data(part) for part in (arg.start, arg.stop, arg.step)]}
    for kind, known in _CONSTANTS.items():
        name = str(arg).removeprefix("torch.")
        if known.get(name) is arg:
            return {kind: name}
    raise ValueError(f"an argument is a {type(arg).__name__}")


def _expr_data(expr: sympy.Expr) -> object:
    """Returns a size's expression: a number, a symbol's name, or [function, *arguments]."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return str(expr)
    if expr.is_Rational:
        return ["Rational", int(expr.p), int(expr.q)]
    name = type(expr).__name__
    if name not in _FUNCTIONS:
        raise ValueError(f"a size is computed by {name}")
    return [name, *map(_expr_data, expr.args)]


class _Unasked(list[ShapeGuard]):
    """Drops guards on sizes: the graph's assumptions were settled when it was captured."""

    def append(self, assumption: ShapeGuard) -> None:
        """Drops the guard."""


class _Reader:
    """Creates nodes and values from data, with new symbols for the named sizes."""

    def __init__(self, sizes: Mapping[str, tuple[int, int, int | None]]) -> None:
        self._env = ShapeEnv()
        self._env.guards = _Unasked()
        self._mode = new_fake_mode(shape_env=self._env)
        self._nodes: dict[str, fx.Node] = {}
        self.symbols = {name: self._symbol(name, *known) for name, known in sizes.items()}

    def _symbol(self, name: str, number: int, least: int, most: int | None) -> sympy.Symbol:
        from torch._dynamo.source import ConstantSource  # this import takes seconds; every capture has done it before

        kind = DimDynamic.DYNAMIC
        # by default, a ShapeEnv makes constants of the sizes 0 and 1
        symbol = self._env.create_symbol(number, ConstantSource(name), kind, do_not_specialize_zero_one=True)
        self._env.var_to_range[symbol] = ValueRanges(least, int_oo if most is None else most)
        return symbol

    def add(self, graph: fx.Graph, data: Json) -> None:
        """Appends a node to the graph."""
        args = tuple(self._argument(arg) for arg in data.get("args", ()))
        kwargs = {name: self._argument(arg) for name, arg in data.get("kwargs", {}).items()}
        op, name = data["op"], data["name"]
        if op == "output":
            node = graph.output(args[0])
        elif op == "placeholder":
            node = graph.placeholder(name)
        else:
            node = graph.create_node(op, _target(data["target"]), args, kwargs, name)
        node.meta = {key: is_of(kind, data[key]) for key, kind in META.items() if key in data}
        node.meta |= {key: texts(data[key]) for key in ("names", "holds") if key in data}
        if "val" in data:
            node.meta["val"] = self._value(data["val"])
        self._nodes[name] = node

    def size(self, data: Json) -> int | torch.SymInt:
        """Returns a size from its expression."""
        expr = self._expr(data)
        if expr.is_Integer:
            return int(expr)
        hint = int(expr.xreplace(self._env.backed_var_to_val))
        return self._env.create_symintnode(expr, hint=hint)

    def _expr(self, data: Json) -> sympy.Expr:
        if isinstance(data, int):
            return sympy.Integer(data)
        if isinstance(data, str):
            return self.symbols[data]
        name, *parts = data
        return _FUNCTIONS[name](*map(self._expr, parts))

    def _argument(self, data: Json) -> Argument:
        if isinstance(data, list):
            return [self._argument(item) for item in data]
        if not isinstance(data, dict):
            return data
        ((kind, value),) = data.items()
        if kind == "node":
            return self._nodes[value]
        if kind == "tuple":
            return tuple(self._argument(item) for item in value)
        if kind == "slice":
            return slice(*(self._argument(part) for part in value))
        if kind == "device":
            return torch.device("cpu")
        return float(value) if kind == "float" else _CONSTANTS[kind][value]

    def _value(self, data: Json) -> object:
        if "several" in data:
            return [self._value(item) for item in data["several"]]
        if "size" in data:
            return self.size(data["size"])
        if "value" in data:
            return data["value"]
        shape, dtype = [self.size(size) for size in is_of(list, data["shape"])], _CONSTANTS["dtype"][data["dtype"]]
        with self._mode:
            if data["stride"] is None:
                made = torch.empty(shape, dtype=dtype, device="cpu")
            else:
                steps = [self.size(step) for step in data["stride"]]
                made = torch.empty_strided(shape, steps, dtype=dtype, device="cpu")
        return made.requires_grad_(data["requires_grad"])


def _target(name: str) -> Callable[..., object]:
    if name in _PYTHONS:
        return _PYTHONS[name]
    namespace, op, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    if not isinstance(found, OpOverload):
        raise ValueError(f"{name!r} is no op")
    return found
