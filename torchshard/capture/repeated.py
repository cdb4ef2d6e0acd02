"""Traces a model's equal layers for the first and the last of them, and repeats the first: for plans, not to run.

    export records     enter(x) ... leave(y)    repeated(y)    repeated(...)    enter(x) ... leave(y)
                       the first layer          the second     the third        the last
    `repeat` makes     the first layer's ops, with each layer's own parameters, in place of `repeated`

Tracing the layers takes most of a capture's time. Layers are equal if their modules have the same classes, attributes,
hooks and kinds of parameters, and are called with the same kinds of arguments. An attribute may be the layer's own
number: while the first and the last layer run it is out of their `__dict__`, so that a read is seen, and then each
layer is traced. What can't be seen, such as a counter among the globals, the last layer tells: where its ops are not
those of the first, the model is exported again, layer by layer. Code that tells layers apart by their identity, in the
middle alone, goes unseen: so graphs that run are captured layer by layer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from torchshard.capture.attributes import Attributes, attributes, changed
from torchshard.capture.modes import modes_in
from torchshard.capture.recording import current_recording
from torchshard.core.autocast import current_autocast
from torchshard.core.patches import Patch, Patches
from torchshard.ir.graph import size_expr

FEWEST = 4
"""So many equal layers are repeated; with fewer, nothing is gained."""


class DifferentLayers(Exception):
    """Layers that were taken for equal are not."""


# --- which layers are equal ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Layer:
    """One of several equal layers."""

    module: nn.Module
    path: str
    looks: Looks
    places: list[tuple[str, str]]
    """Where it holds its own number: (path within it, attribute)."""
    parts: list[int] = field(init=False)
    """The ids of its modules."""

    def __post_init__(self) -> None:
        self.parts = [*map(id, self.module.modules())]

    @property
    def numbers(self) -> list[tuple[nn.Module, str]]:
        """The attributes that hold its own number."""
        return [(self.module.get_submodule(path), name) for path, name in self.places]

    def is_as_before(self) -> bool:
        """Whether its attributes are what they were when it was compared with the others."""
        now = _looks(self.module)
        # export puts tensors of its own in the place of parameters and buffers
        same = all(now.get(place) == look for place, look in self.looks.items() if place[1] not in _TENSORS)
        return same and now.keys() == self.looks.keys() and self.parts == [*map(id, self.module.modules())]


Looks = dict[tuple[str, str], Hashable]
"""(path within a layer, attribute) -> what it holds; equal for equal values."""
_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.Size)
_TENSORS = ("_parameters", "_buffers")


def equal_layers(model: nn.Module) -> list[list[Layer]]:
    """The sets of equal children of one container; at least `FEWEST` in each."""
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return []
    containers = [(p, m) for p, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    found = [run for path, m in containers if len(m) >= FEWEST for run in _equal_children(path, m)]
    return [run for run in found if len(run) >= FEWEST]


_GLOBAL_HOOKS = [name for name in vars(torch_module) if name.startswith("_global_") and name.endswith("_hooks")]


def _equal_children(path: str, container: nn.Module) -> list[list[Layer]]:
    firsts: list[tuple[Looks, int, list[Layer]]] = []
    for number, (name, child) in enumerate(container.named_children()):
        looks = _looks(child)
        layer = Layer(child, f"{path}.{name}".lstrip("."), looks, [])
        for first, first_number, run in firsts:
            own = _own_numbers(first, first_number, looks, number)
            # all of them hold their numbers in the same places, or one of these holds something else
            if own is not None and (len(run) == 1 or own == run[-1].places) and _may_be_hidden(child, own):
                layer.places = run[0].places = own
                run.append(layer)
                break
        else:
            if looks:
                firsts.append((looks, number, [layer]))
    return [run for _, _, run in firsts]


def _own_numbers(first: Looks, first_number: int, looks: Looks, number: int) -> list[tuple[str, str]] | None:
    """The places where each of two layers holds its own number; None if they differ elsewhere."""
    if first.keys() != looks.keys():
        return None
    differing = [place for place in looks if first[place] != looks[place]]
    own = all((first[place], looks[place]) == ((int, first_number), (int, number)) for place in differing)
    return differing if own else None


def _may_be_hidden(layer: nn.Module, places: Sequence[tuple[str, str]]) -> bool:
    """Whether a read of these attributes comes to `nn.Module.__getattr__` while they are out of their `__dict__`s."""
    classes = [(type(layer.get_submodule(path)), name) for path, name in places]
    return all(
        cls.__getattr__ is nn.Module.__getattr__ and inspect.getattr_static(cls, name, None) is None
        for cls, name in classes
    )


def _looks(layer: nn.Module) -> Looks:
    """What two layers must have in common to compute the same of the same; empty for one without parts."""
    paths = {id(module): path for path, module in layer.named_modules()}
    tensors: dict[int, tuple[str, str]] = {}
    looks: Looks = {}
    for path, module in layer.named_modules():
        looks[path, "__class__"] = id(type(module))
        if any(cls.__dict__.get("__slots__") for cls in type(module).__mro__):
            return {}
        for name, value in vars(module).items():
            if name == "register_buffer":  # a capture's own
                continue
            if name == "_modules":
                looks[path, name] = tuple((key, paths.get(id(child))) for key, child in value.items())
            elif name in _TENSORS:
                held = ((key, _tensor_looks(tensor, tensors.setdefault(id(tensor), (path, key))))
                        for key, tensor in value.items())  # fmt: skip
                looks[path, name] = tuple(held)
            else:
                looks[path, name] = _value_looks(value, paths)
    return looks if len(paths) > 1 else {}


def _tensor_looks(tensor: Tensor | None, first: tuple[str, str]) -> Hashable:
    """A parameter or buffer, and the first place where the layer holds it."""
    if tensor is None:
        return None
    return (id(type(tensor)), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, first)


def _value_looks(value: object, paths: dict[int, str]) -> Hashable:
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if id(value) in paths:
        return ("module", paths[id(value)])
    if isinstance(value, (list, tuple, set, frozenset)):
        return (type(value), tuple(_value_looks(one, paths) for one in value))
    if isinstance(value, dict):
        return (type(value), tuple((_value_looks(k, paths), _value_looks(v, paths)) for k, v in value.items()))
    if isinstance(value, MethodType) and id(value.__self__) in paths:
        return ("method", id(value.__func__), paths[id(value.__self__)])
    return ("object", id(value))


# --- tracing ---------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a layer returned."""

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]
    """What is in it; a tensor as its number among the marks behind the layer."""


class _Result(NamedTuple):
    number: int


Marks = range
"""The numbers of the marks of several tensors."""


class Traced(NamedTuple):
    """A layer that was traced: its call, and the marks around its ops."""

    layer: Layer
    call: Hashable
    attributes: Attributes
    """What it could see before its call."""
    outcome: Outcome
    enter: Marks
    leave: Marks


@dataclass
class Run:
    """Equal layers, and what their capture has found out so far."""

    layers: list[Layer]
    first: Traced | None = None
    last: Traced | None = None
    repeated: dict[Marks, Layer] = field(default_factory=dict)
    """Marks -> the layer that they stand for."""
    called: set[int] = field(default_factory=set)
    is_off: bool = False
    """Whether each layer is traced."""


class _TensorType(NamedTuple):
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorType:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad)

    def key(self) -> Hashable:
        """Equal for equal types; sizes are compared as expressions, which adds no assumption to the graph."""
        return (tuple(map(size_expr, self.shape)), tuple(map(size_expr, self.stride)), *self[2:])

    def made(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Repeats:
    """The equal layers of a model during one capture."""

    def __init__(self, layers: Sequence[list[Layer]]) -> None:
        self.runs = [Run(run) for run in layers]
        self._layers = {id(vars(layer.module)): (run, layer) for run in self.runs for layer in run.layers}
        """By their `__dict__`s: while export traces a module, proxies with the same one stand for it."""
        self.types: list[_TensorType] = []
        """Number of a mark -> the type of its result."""
        self._is_inside = False
        self.hidden: dict[tuple[int, str], object] = {}
        """(id of a module's `__dict__`, attribute) -> its value, of the layer that runs."""
        self.was_read = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Calls of the layers go through this object."""
        previous, _local.repeats = getattr(_local, "repeats", None), self
        classes = dict.fromkeys(type(layer.module) for run in self.runs for layer in run.layers)
        try:
            with Patches(*(Patch(cls, "forward", _intercepted) for cls in classes)):
                yield
        finally:
            _local.repeats = previous
        for run in self.runs:
            if run.repeated and not self._are_alike(run.first, run.last):
                raise DifferentLayers(f"{run.layers[-1].path} is called in another way than {run.layers[0].path}")

    def call(
        self, module: nn.Module, own: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """Calls a module's own forward, or does what is to be done in place of it."""
        run, layer = self._layers.get(id(vars(module)), (None, None))
        if run is None or layer is None or self._is_inside or run.is_off or id(layer) in run.called:
            return own(*args, **kwargs)
        run.called.add(id(layer))
        if not layer.is_as_before():
            return own(*args, **kwargs)
        call, is_last = _call_key(args, kwargs), layer is run.layers[-1]
        if call is not None and run.first is not None and call == run.first.call and not is_last:
            seen = changed(run.first.attributes, attributes(layer.module))
            if {place[:2] for place in seen} <= set(layer.places):
                return self._repeated(run, run.first, layer, (args, kwargs))
            return own(*args, **kwargs)
        if call is not None and (is_last or not run.repeated):  # until one is repeated, the first may be a later one
            return self._traced(run, layer, call, own, (args, kwargs))
        return own(*args, **kwargs)

    def _traced(
        self, run: Run, layer: Layer, call: Hashable, own: Callable[..., object], arguments: tuple[Any, Any]
    ) -> object:
        before = attributes(layer.module)
        (args, kwargs), enter = self._marked(arguments)
        kept = _kept()
        with self._running(layer):
            result = own(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(result)
        known = all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)
        numbers = {key: number for number, key in enumerate(_tensors(leaves))}
        ends = tuple(_Result(numbers[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        unbacked = any(isinstance(leaf, Tensor) and free_unbacked_symbols(leaf) for leaf in leaves)
        has_state = changed(before, attributes(layer.module)) or _kept() != kept
        if self.was_read or has_state or unbacked or not (known and numbers and enter):
            run.is_off = True
            if run.repeated:
                raise DifferentLayers(f"what {layer.path} does can't be seen in its ops alone")
        result, leave = self._marked(result)
        traced = Traced(layer, call, before, Outcome(spec, ends), enter, leave)
        if run.repeated:
            run.last = traced
        else:
            run.first = traced
        return result

    @contextlib.contextmanager
    def _running(self, layer: Layer) -> Iterator[None]:
        """Runs a layer whose own number is hidden."""
        self._is_inside, self.was_read = True, False
        self.hidden = {(id(vars(module)), name): vars(module).pop(name) for module, name in layer.numbers}
        try:
            with _READS:
                yield
        finally:
            for module, name in layer.numbers:
                vars(module).setdefault(name, self.hidden[id(vars(module)), name])
            self._is_inside, self.hidden = False, {}

    def _marked(self, value: Any) -> tuple[Any, Marks]:
        """The same value, each of whose tensors comes out of a mark in the graph."""
        leaves, spec = pytree.tree_flatten(value)
        tensors = _tensors(leaves)
        made, marks = self._mark([[tensor] for tensor in tensors.values()], map(_TensorType.of, tensors.values()))
        marked = dict(zip(tensors, made, strict=True))
        leaves = [marked[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(leaves, spec), marks

    def _mark(self, operands: Sequence[list[Tensor]], types: Iterable[_TensorType]) -> tuple[list[Tensor], Marks]:
        first, made = len(self.types), []
        for taken, known in zip(operands, types, strict=True):
            self.types.append(known)
            made.append(MARK(taken, len(self.types) - 1))
        return made, range(first, len(self.types))

    def _repeated(self, run: Run, first: Traced, layer: Layer, arguments: tuple[Any, Any]) -> object:
        operands = [*_tensors(pytree.tree_leaves(arguments)).values(), *layer.module.parameters()]
        types = [self.types[number] for number in first.leave]
        # by autograd's account a result requires a gradient if any operand does
        without = [t for t in operands if not (t.requires_grad and torch.is_grad_enabled())]
        if len(without) < len(operands) and not any(known.requires_grad for known in types):
            raise DifferentLayers(f"{layer.path} has no results with a gradient")
        made, marks = self._mark([operands if known.requires_grad else without for known in types], types)
        if [t.requires_grad for t in made] != [known.requires_grad for known in types]:
            raise DifferentLayers(f"results of {layer.path} have no gradient")
        run.repeated[marks] = layer
        leaves = [made[leaf.number] if isinstance(leaf, _Result) else leaf for leaf in first.outcome.leaves]
        return pytree.tree_unflatten(leaves, first.outcome.spec)

    def _are_alike(self, first: Traced | None, last: Traced | None) -> bool:
        """Whether two layers were called in the same way and returned the same kinds of results."""
        if first is None or last is None or first.call != last.call or first.outcome != last.outcome:
            return False
        pairs = zip(first.leave, last.leave, strict=True)
        return all(self.types[one].key() == self.types[other].key() for one, other in pairs)


def _kept() -> tuple[int, int]:
    """How many calls are kept whole, and how many checkpoints there are, by what is recorded so far."""
    recording = current_recording()
    return (0, 0) if recording is None else (len(recording.calls), len(recording.checkpoints))


def _tensors(leaves: Sequence[object]) -> dict[int, Tensor]:
    """The tensors among some values, each once, by their ids."""
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}


def _is_fixed(value: object) -> bool:
    """Whether a layer can't write to a value but by ops: a list or dict would be another one in the layer."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (Tensor, torch.SymInt, *_PLAIN)) and not isinstance(value, nn.Parameter)


def _call_key(args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    """Equal for calls that the same ops compute; None for one with arguments whose content may change."""
    if not all(map(_is_fixed, (*args, *kwargs.values()))):
        return None
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places: dict[int, int] = {}
    modes = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    defaults = torch.get_default_dtype(), torch.get_default_device()
    keys: list[Hashable] = [spec, torch.is_grad_enabled(), current_autocast(), modes, defaults]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            keys.append((_TensorType.of(leaf).key(), places.setdefault(id(leaf), place)))
        elif isinstance(leaf, torch.SymInt):
            keys.append(size_expr(leaf))
        elif isinstance(leaf, _PLAIN):
            keys.append((type(leaf), leaf))
        else:
            return None
    return tuple(keys)


_local = threading.local()


def _current() -> Repeats | None:
    repeats: Repeats | None = getattr(_local, "repeats", None)
    return repeats


def _intercepted(original: object) -> object:
    own: Any = original

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        repeats, bound = _current(), own.__get__(self)
        return bound(*args, **kwargs) if repeats is None else repeats.call(self, bound, args, kwargs)

    return forward


def _noting_reads(original: object) -> object:
    get: Callable[[nn.Module, str], object] = original  # type: ignore[assignment]

    def __getattr__(self: nn.Module, name: str) -> object:
        repeats = _current()
        if repeats is not None and repeats.hidden and (id(vars(self)), name) in repeats.hidden:
            repeats.was_read = True
            return repeats.hidden[id(vars(self)), name]
        return get(self, name)

    return __getattr__


_READS = Patches(Patch(nn.Module, "__getattr__", _noting_reads))
"""While it is entered, a read of a hidden attribute is noted."""


@torch.library.custom_op("torchshard::mark", mutates_args=(), schema="(Tensor[] tensors, int number) -> Tensor")
def _mark(tensors: Sequence[Tensor], number: int) -> Tensor:
    """A value that enters or leaves a layer, or a result of a layer that is not traced."""
    raise NotImplementedError("torchshard::mark exists only in graphs that are being captured")


@_mark.register_fake
def _(tensors: Sequence[Tensor], number: int) -> Tensor:
    repeats = _current()
    assert repeats is not None
    return repeats.types[number].made()


_mark.register_autograd(lambda ctx, *grads: (None, None), setup_context=lambda ctx, inputs, output: None)
MARK: torch._ops.OpOverload = torch.ops.torchshard.mark.default
# A layer may write to its buffers, and export must not remove it as dead code.
torch.fx.node.has_side_effect(MARK)


# --- the graph -------------------------------------------------------------------------------------------------------


def repeat(graph: fx.Graph, repeats: Repeats, constants: Mapping[str, Tensor]) -> None:
    """Puts the first layer's ops in place of the marks that stand for layers, and removes the others.

    Args:
        graph: with marks; its placeholders have meta["kind"], ["path"] and ["names"].
        constants: path -> value, of the placeholders that are constants.

    Raises:
        DifferentLayers: the last layer's ops are not those of the first.
    """
    marks = {_args(node)[1]: node for node in graph.nodes if node.target is MARK}
    own = {name: node for node in graph.nodes if node.op == "placeholder" for name in node.meta["names"]}
    if any(run.repeated for run in repeats.runs) and any(map(_writes, graph.nodes)):
        # they are made functional later, by the memory of values, which the layers' values would share
        raise DifferentLayers("the model writes to tensors in place")
    for run in (run for run in repeats.runs if run.repeated):
        assert run.first is not None and run.last is not None
        first, last = (_Part(marks, traced) for traced in (run.first, run.last))
        if first.described(constants) != last.described(constants):
            raise DifferentLayers(f"{last.path} computes something else than {first.path}")
        for numbers, layer in run.repeated.items():
            _put(first, [marks.pop(number) for number in numbers], layer.path, own)
    for mark in marks.values():
        (operand,) = _args(mark)[0]
        mark.replace_all_uses_with(operand)
        graph.erase_node(mark)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


class _Part:
    """The ops of a traced layer: those between two marks."""

    def __init__(self, marks: Mapping[int, fx.Node], traced: Traced) -> None:
        self.path = traced.layer.path
        self.results: list[fx.Node] = [_args(marks[number])[0][0] for number in traced.leave]
        self.arguments = {marks[number]: index for index, number in enumerate(traced.enter)}
        """Mark -> which argument of the layer it is."""
        self.nodes: list[fx.Node] = []
        node, end = marks[traced.enter[-1]].next, marks[traced.leave[0]]
        while node is not end:
            self.nodes.append(node)
            node = node.next

    def described(self, constants: Mapping[str, Tensor]) -> list[object]:
        """What it computes, by which two layers can be compared."""
        ops = [node for node in self.nodes if not isinstance(node.meta.get("val"), torch.SymInt)]
        numbers = {node: number for number, node in enumerate(ops)}

        def describe(node: fx.Node) -> object:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):  # a layer may use the size that an earlier one has read
                return f"size {size_expr(value)}"
            if node in self.arguments:
                return f"argument {self.arguments[node]}"
            if node in numbers:
                return f"op {numbers[node]}"
            if node.op == "placeholder" and node.meta["path"] in constants:
                constant = constants[node.meta["path"]]
                content = constant.tolist() if constant.numel() <= _MOST_COMPARED else node.name
                return f"constant {constant.dtype} {content}"
            return f"own {self._own_name(node)}" if self._own_name(node) else f"outer {node.name}"

        described = [
            (node.op, str(node.target), _texts(node.args, describe), _texts(node.kwargs, describe),
             [_TensorType.of(v).key() for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)])
            for node in ops
        ]  # fmt: skip
        return [*described, _texts(self.results, describe)]

    def _own_name(self, node: fx.Node) -> str:
        """The name within the layer of a parameter or buffer; '' for what is no such."""
        if node.meta.get("kind") == "constant":
            return ""
        names = [name for name in node.meta.get("names", ()) if name.startswith(f"{self.path}.")]
        return names[0].removeprefix(f"{self.path}.") if names else ""

    def place(self, node: fx.Node, path: str, own: Mapping[str, fx.Node]) -> fx.Node:
        """What another layer takes in place of a node from outside."""
        name = self._own_name(node)
        return own[f"{path}.{name}"] if name else node


_MOST_COMPARED = 64
"""Constants of at most so many elements are compared by value."""


def _args(node: fx.Node) -> Any:
    """The arguments of a mark, or of a node that takes an element of its results."""
    return node.args


def _texts(value: Any, describe: Callable[[fx.Node], Any]) -> str:
    return str(fx.map_arg(value, describe))


def _put(first: _Part, marks: Sequence[fx.Node], path: str, own: Mapping[str, fx.Node]) -> None:
    """Puts the first layer's ops in place of the marks of another one."""
    graph, given = marks[0].graph, max((_args(mark)[0] for mark in marks), key=len)
    copies: dict[fx.Node, fx.Node] = {mark: given[index] for mark, index in first.arguments.items()}

    def copied(node: fx.Node) -> fx.Node:
        return copies[node] if node in copies else first.place(node, path, own)

    with graph.inserting_before(marks[0]):
        for node in first.nodes:
            if isinstance(node.meta.get("val"), torch.SymInt):
                copies[node] = node  # a size is the same in each layer
                continue
            copies[node] = graph.node_copy(node, copied)
            copies[node].meta = _meta_of(node, first.path, marks[0], path)
    for mark, result in zip(marks, first.results, strict=True):
        mark.replace_all_uses_with(copied(result))
        graph.erase_node(mark)


def _meta_of(node: fx.Node, first_path: str, mark: fx.Node, path: str) -> dict[str, Any]:
    """A node's meta in another layer: the modules that it belongs to, and the checkpoint that the layer is in."""
    stack = {}
    for key, (module_path, cls) in (node.meta.get("nn_module_stack") or {}).items():
        inner = module_path == first_path or module_path.startswith(f"{first_path}.")
        stack[key] = (path + module_path.removeprefix(first_path) if inner else module_path, cls)
    return node.meta | {"nn_module_stack": stack} | modes_in(node, mark)
