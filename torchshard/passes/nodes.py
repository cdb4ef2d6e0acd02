"""Typed access to the arguments and targets of torch.fx nodes.

To a type checker, an argument of a node can be a number, a node or a nested list, and a target a
function or a name. These functions assert the types that the op's schema promises, and fail at once
on a graph that breaks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

# ATen's choice of a memory format for a result, in Python; it has no public name (PyTorch 2.13.0).
from torch._prims_common import suggest_memory_format
from torch.fx.node import Argument, Target

from torchshard.ir.editing import emit
from torchshard.ir.effects import is_view

aten = torch.ops.aten


def node_arg(node: fx.Node, index: int = 0) -> fx.Node:
    """A positional argument that is a node."""
    value = node.args[index]
    assert isinstance(value, fx.Node), f"argument {index} of {node.format_node()}"
    return value


def int_arg(node: fx.Node, index: int) -> int:
    """A positional argument that is a number, as the index of `getitem`."""
    value = node.args[index]
    assert isinstance(value, int), f"argument {index} of {node.format_node()}"
    return value


def int_list_arg(node: fx.Node, index: int) -> list[int]:
    """A positional argument that is a list of ints."""
    value = node.args[index]
    assert isinstance(value, (list, tuple)), f"argument {index} of {node.format_node()}"
    return [number for number in value if isinstance(number, int)]


def read_sizes(module: fx.GraphModule, value: fx.Node, like: fx.Node) -> list[Argument]:
    """The sizes of a value as arguments; new nodes at the insertion point, described as `like`, read dynamic ones."""
    return [
        size if isinstance(size, int) else emit(module, aten.sym_size.int, (value, dim), like)
        for dim, size in enumerate(value.meta["val"].shape)
    ]


def operator_of(node: fx.Node) -> OpOverload[..., object]:
    """The target of a node that calls a PyTorch operator."""
    assert isinstance(node.target, OpOverload), node.format_node()
    return node.target


def _group_norm(x: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = aten.native_group_norm.default(_without_gaps(x, x), *rest)
    return found


def _group_norm_backward(grad: Tensor, x: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    operands = _without_gaps(grad, x), _without_gaps(x, x)
    found: tuple[Tensor, Tensor, Tensor] = aten.native_group_norm_backward.default(*operands, *rest)
    return found


def _without_gaps(x: Tensor, like: Tensor) -> Tensor:
    """A tensor in the memory format that PyTorch's `group_norm` gives its kernels.

    On CPUs, images may be channels-last.
    """
    lies = suggest_memory_format(like) if like.device.type == "cpu" else torch.contiguous_format
    return x.contiguous(memory_format=lies)


FOR_ANY_STRIDES: Mapping[Target, Callable[..., Argument]] = {
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
}
"""Ops that require the recorded strides of their operands -> functions that accept any strides.

Fake values that enter a layer are contiguous; real ones have the strides that the previous op
produced.
"""


def call_target(node: fx.Node, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> Argument:
    """Calls the function of a node."""
    assert callable(node.target), node.format_node()
    return node.target(*args, **kwargs)


def upstream(node: fx.Node, operands: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes that a node depends on, directly or through others, without itself."""
    found, waiting = set[fx.Node](), [node]
    while waiting:
        new = set(operands(waiting.pop())) - found
        found |= new
        waiting += new
    return found


def behind_needs(
    nodes: Iterable[fx.Node], needs: Callable[[fx.Node], Iterable[fx.Node]], place: Mapping[fx.Node, int]
) -> list[fx.Node]:
    """The nodes in their order, each after all its dependencies, which are sorted by `place`."""
    order = dict[fx.Node, None]()

    def missing(node: fx.Node) -> list[fx.Node]:
        return [needed for needed in needs(node) if needed not in order]

    for node in nodes:
        order |= dict.fromkeys([*sorted(upstream(node, missing), key=place.__getitem__), node])
    return list(order)


def read_by(reader: fx.Node) -> set[fx.Node]:
    """A reader of a value and, if it is a view, all readers of the memory that it views."""
    return {reader} | upstream(reader, lambda node: node.users if is_view(node) else ())


def replace_node(node: fx.Node, replacement: fx.Node) -> None:
    """Replaces a node, and keeps its name: plans and listings refer to ops by name."""
    name = node.name
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)
    replacement.name = name


def named_as(node: fx.Node, replacement: fx.Node) -> fx.Node:
    """The replacement, with the name and the metadata of the node that it replaces."""
    name = node.name
    node.name = f"{name}_old"  # frees the name; the node is erased soon after
    replacement.name = name
    replacement.meta.update({k: v for k, v in node.meta.items() if k not in replacement.meta})
    return replacement
