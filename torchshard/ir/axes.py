"""The mesh axes of a graph: which axis a collective uses, how values are sharded over all axes."""

from __future__ import annotations

from itertools import zip_longest

from torch import Tensor, fx

from torchshard.core.layouts import Layout
from torchshard.core.mesh import MeshAxis, simulated
from torchshard.core.sharding import UNSHARDED, Sharding
from torchshard.ir.graph import values, whole_shapes
from torchshard.ir.sizes import Names, value_text


def axes_of(graph: fx.Graph) -> tuple[MeshAxis, ...]:
    """Returns a graph's axes in the order in which it is split, the current one last."""
    module = graph.owning_module
    return () if module is None or "axis" not in module.meta else (*earlier_axes(graph), module.meta["axis"])


def earlier_axes(graph: fx.Graph) -> tuple[MeshAxis, ...]:
    """Returns a graph's axes before the current one, in the order in which it was split."""
    module = graph.owning_module
    axes: tuple[MeshAxis, ...] = () if module is None else module.meta.get("earlier_axes", ())
    return axes


def mesh_of(graph: fx.Graph) -> tuple[MeshAxis, ...]:
    """Returns the axes that a graph is split over, outermost first.

    The weights' axis is split first and is the innermost one.
    """
    weights, *others = axes_of(graph)
    return (*others, weights)


def is_local(graph: fx.Graph) -> bool:
    """Returns whether a graph's shapes are local: one rank's shards over all axes."""
    module = graph.owning_module
    return module is not None and "group" in module.meta


def axis_of(collective: fx.Node) -> MeshAxis:
    """Returns the axis that a collective communicates over.

    A simulated group has no process group; its name contains the name of the axis.
    """
    axes, group = axes_of(collective.graph), str(collective.args[-1])
    place = simulated(group)
    name = group if place is None else place.among
    return next((axis for axis in axes if axis.name == name), axes[-1])


def shardings_of(node: fx.Node) -> list[Sharding]:
    """Returns the shardings of a node's results; [] if a layout over some axis is unknown."""
    of_axes, axes = layouts_of(node), axes_of(node.graph)
    along = [[(axis, layout) for layout in of_axes.get(axis.name, ())] for axis in axes]
    return [Sharding.of(*letters) for letters in zip(*along, strict=False)]


def layouts_of(node: fx.Node) -> dict[str, tuple[Layout, ...]]:
    """Returns {axis name: layouts of a node's results}, for the axes with known layouts."""
    earlier: dict[str, tuple[Layout, ...]] = node.meta.get("earlier", {})
    own, axes = node.meta.get("layouts"), axes_of(node.graph)
    return earlier | {axes[-1].name: own} if own and axes else earlier


def typed(node: fx.Node, names: Names) -> list[str]:
    """Returns the types of a node's results, as in 'f32[batch@dp,length,64@tp]'.

    Shapes are global; in a rank's own graph they are local.

    Args:
        names: from `size_names`.
    """
    results = values(node)
    if is_local(node.graph):
        return [value_text(value, names) for value in results]
    known = zip_longest(results, whole_shapes(node), shardings_of(node)[: len(results)])
    return [value_text(value, names, shape, held or UNSHARDED) for value, shape, held in known]


def tensors_typed(node: fx.Node, names: Names) -> list[str]:
    """Returns the types of a node's tensor results, as in 'f32[batch@dp,length,64@tp]'."""
    return [text for value, text in zip(values(node), typed(node, names), strict=True) if isinstance(value, Tensor)]


def typed_as(node: fx.Node, axis: MeshAxis, layout: Layout, names: Names) -> str:
    """Returns the type of a one-tensor node as if its layout over an axis were this one."""
    of_axes = {name: layouts[0] for name, layouts in layouts_of(node).items() if layouts}
    earlier = [(each, of_axes[each.name]) for each in earlier_axes(node.graph) if each.name in of_axes]
    return value_text(node.meta["val"], names, whole_shapes(node)[0], Sharding.of(*earlier, (axis, layout)))


def converted(collective: fx.Node, names: Names) -> str:
    """Returns the type of a collective's operand; '' in a rank's own graph, with local shapes."""
    if is_local(collective.graph):
        return ""
    return tensors_typed(collective.all_input_nodes[0], names)[0]
