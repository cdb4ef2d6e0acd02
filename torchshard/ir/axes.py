"""The mesh axes that a graph is split over: which of them a collective sends over, and how a value lies over all."""

from __future__ import annotations

from itertools import zip_longest

from torch import Tensor, fx

from torchshard.core.layouts import Layout
from torchshard.core.mesh import MeshAxis, simulated
from torchshard.core.sharding import UNSHARDED, Sharding
from torchshard.ir.graph import values, whole_shapes
from torchshard.ir.sizes import Names, value_text


def axes_of(graph: fx.Graph) -> tuple[MeshAxis, ...]:
    """Those that it was split over before, in their order, and last the one that it is split over now."""
    module = graph.owning_module
    return () if module is None or "axis" not in module.meta else (*earlier_axes(graph), module.meta["axis"])


def earlier_axes(graph: fx.Graph) -> tuple[MeshAxis, ...]:
    """Those that it was split over before, in their order."""
    module = graph.owning_module
    axes: tuple[MeshAxis, ...] = () if module is None else module.meta.get("earlier_axes", ())
    return axes


def mesh_of(graph: fx.Graph) -> tuple[MeshAxis, ...]:
    """The same, outermost first: that of the weights is split over first, and lies innermost."""
    weights, *others = axes_of(graph)
    return (*others, weights)


def is_local(graph: fx.Graph) -> bool:
    """Whether the shapes in it are those of a rank's part, over all axes."""
    module = graph.owning_module
    return module is not None and "group" in module.meta


def axis_of(collective: fx.Node) -> MeshAxis:
    """The axis that a collective sends over; before a process has groups for them it bears its name."""
    axes, group = axes_of(collective.graph), str(collective.args[-1])
    place = simulated(group)
    name = group if place is None else place.among
    return next((axis for axis in axes if axis.name == name), axes[-1])


def shardings_of(node: fx.Node) -> list[Sharding]:
    """How the ranks hold a node's results over all axes; none if it is not known of each axis."""
    of_axes, axes = layouts_of(node), axes_of(node.graph)
    along = [[(axis, layout) for layout in of_axes.get(axis.name, ())] for axis in axes]
    return [Sharding.of(*letters) for letters in zip(*along, strict=False)]


def layouts_of(node: fx.Node) -> dict[str, tuple[Layout, ...]]:
    """The name of each axis for which they are known -> the layouts of a node's results."""
    earlier: dict[str, tuple[Layout, ...]] = node.meta.get("earlier", {})
    own, axes = node.meta.get("layouts"), axes_of(node.graph)
    return earlier | {axes[-1].name: own} if own and axes else earlier


def typed(node: fx.Node, names: Names) -> list[str]:
    """The types of a node's results, of the whole: 'f32[batch@dp,length,64@tp]'; in a rank's own graph of its part.

    Args:
        names: as `size_names` gives them.
    """
    results = values(node)
    if is_local(node.graph):
        return [value_text(value, names) for value in results]
    known = zip_longest(results, whole_shapes(node), shardings_of(node)[: len(results)])
    return [value_text(value, names, shape, held or UNSHARDED) for value, shape, held in known]


def tensors_typed(node: fx.Node, names: Names) -> list[str]:
    """The same of those of its results that are tensors."""
    return [text for value, text in zip(values(node), typed(node, names), strict=True) if isinstance(value, Tensor)]


def typed_as(node: fx.Node, axis: MeshAxis, layout: Layout, names: Names) -> str:
    """The type of a one-tensor node if the ranks of an axis held it in this layout."""
    of_axes = {name: layouts[0] for name, layouts in layouts_of(node).items() if layouts}
    earlier = [(each, of_axes[each.name]) for each in earlier_axes(node.graph) if each.name in of_axes]
    return value_text(node.meta["val"], names, whole_shapes(node)[0], Sharding.of(*earlier, (axis, layout)))


def converted(collective: fx.Node, names: Names) -> str:
    """The type of what a collective converts; '' in a rank's own graph, where it would not say how ranks hold it."""
    if is_local(collective.graph):
        return ""
    return tensors_typed(collective.all_input_nodes[0], names)[0]
