"""The mesh axes that a graph is split over: which of them a collective sends over, and how a value lies over all."""

from __future__ import annotations

from torch import fx

from torchshard.core.layouts import I, Layout
from torchshard.core.mesh import MeshAxis, simulated
from torchshard.core.words import Word, word


def axes_of(graph: fx.Graph) -> tuple[MeshAxis, ...]:
    """Those that it was split over before, in their order, and last the one that it is split over now."""
    module = graph.owning_module
    if module is None or "axis" not in module.meta:
        return ()
    return (*module.meta.get("earlier_axes", ()), module.meta["axis"])


def mesh_of(graph: fx.Graph) -> tuple[MeshAxis, ...]:
    """The same, outermost first: that of the weights is split over first, and lies innermost."""
    weights, *others = axes_of(graph)
    return (*others, weights)


def axis_of(collective: fx.Node) -> MeshAxis:
    """The axis that a collective sends over; before a process has groups for them it bears its name."""
    axes, group = axes_of(collective.graph), str(collective.args[-1])
    place = simulated(group)
    name = group if place is None else place.among
    return next((axis for axis in axes if axis.name == name), axes[-1])


def word_of(node: fx.Node) -> Word | None:
    """How the ranks hold a node's value over all axes; None if it is not known, or differs."""
    of_axes = layouts_of(node)
    axes = axes_of(node.graph)
    if any(len(set(of_axes.get(axis.name, ()))) != 1 for axis in axes):
        return None
    return word(*((axis, of_axes[axis.name][0]) for axis in axes))


def layouts_of(node: fx.Node) -> dict[str, tuple[Layout, ...]]:
    """The name of each axis for which they are known -> the layouts of a node's results."""
    earlier: dict[str, tuple[Layout, ...]] = node.meta.get("earlier", {})
    own = node.meta.get("layouts")
    return earlier | {axes_of(node.graph)[-1].name: own} if own else earlier


def layout_texts(node: fx.Node) -> list[str]:
    """How its results lie: 'S(0)' for each, or over several axes one text, 'tp: S(2), dp: S(0)', if that is known."""
    if len(axes_of(node.graph)) < 2:
        return [str(layout) for layout in node.meta.get("layouts", ())]
    found = word_of(node)
    return [] if found is None else [", ".join(map(str, found)) or str(I)]
