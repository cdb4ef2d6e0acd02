"""A rank's training step as one graph: its forward, then its backward, in execution order.

begin_reduce   ▼ all-reduce begins     ops that do not need it run meanwhile
wait           its result              from here on
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, fx
from torch._ops import OpOverload

from torchshard.core.columns import counted, paragraph
from torchshard.core.errors import InputError
from torchshard.core.mesh import ranks_text
from torchshard.core.units import size_text
from torchshard.ir.axes import mesh_of
from torchshard.ir.editing import empty_module
from torchshard.ir.effects import is_view
from torchshard.ir.fake_values import nbytes
from torchshard.ir.graph import placeholders, results_of
from torchshard.ir.listing import is_within
from torchshard.ops import Begin
from torchshard.passes import Partition, has_backward, segments, step_graphs
from torchshard.report.folding import folded_lines

Values = dict[fx.Node | str, fx.Node]
"""A node of a part, or the name of a value that several parts use -> the node of the step."""


def step_graph(local: fx.GraphModule) -> fx.GraphModule:
    """The training step of one rank. Meta 'is_backward' of a node: whether backward runs it.

    Raises:
        InputError: the model lacks a backward, or one that can be a graph.
    """
    if not has_backward(local):
        raise _no_graph("nothing needs a gradient, or a call that is kept whole has its own backward, as an LSTM has")
    step = empty_module(local.meta)
    values: Values = {}
    for source in placeholders(local.graph):
        values[source.name] = _copied(step.graph, source, values)
    parts: list[tuple[Partition, tuple[str, ...]]] = []
    for segment in segments(local):
        if segment.is_view:
            values.update(_added(step.graph, segment.graph.graph, segment.arguments, segment.results, values))
            continue
        try:
            made = step_graphs(segment.graph)
        except NotImplementedError as error:
            raise _no_graph(str(error)) from error
        names = (*segment.results, *made.saved)
        values.update(_added(step.graph, made.forward.graph, segment.arguments, names, values))
        parts.append((made, segment.arguments))
    ends = [values[r.name] if isinstance(r, fx.Node) else r for r in results_of(local.graph)]
    gradients: Values = {}
    for made, arguments in reversed(parts):
        given = [n.name for n in placeholders(made.backward.graph) if n.meta["kind"] == "gradient"]
        found = _added(step.graph, made.backward.graph, (*made.saved, *given), arguments, values, is_backward=True)
        gradients |= {name: node for name, node in found.items() if node is not None}
    step.graph.output(([*ends, *(gradients.get(n.name) for n in placeholders(local.graph))],))
    return step


def _no_graph(why: str) -> InputError:
    return InputError(
        "the step has no graph of its backward",
        where="level='step'",
        why=why,
        attempt="level='node', which lists the forward graph of all ranks",
    )


def _added(
    graph: fx.Graph, part: fx.Graph, arguments: tuple[str, ...], results: tuple[str, ...], values: Values, *,
    is_backward: bool = False,
) -> Values:  # fmt: skip
    """Adds the ops of a part to the step; returns the part's results by name."""
    known = dict(values)
    for source, name in zip(placeholders(part), arguments, strict=True):
        known[source] = known[name] if name in known else _copied(graph, source, known)
    for node in part.nodes:
        if node.op == "call_function":
            known[node] = _copied(graph, node, known)
            is_again = is_backward and node.meta.get("is_backward") is False
            known[node].meta |= {"is_again": is_again, "is_backward": is_backward}
    ends = [known[r] if isinstance(r, fx.Node) else r for r in results_of(part)]
    return dict(zip(results, ends, strict=True))


def _copied(graph: fx.Graph, node: fx.Node, known: Values) -> fx.Node:
    copied = graph.node_copy(node, lambda n: known[n])
    copied.meta = dict(node.meta)
    return copied


def step_told(step: fx.GraphModule, rank: int, within: str = "") -> Iterator[str]:
    """The step as text: a heading each for forward and backward, followed by a line per op.

    Args:
        within: the path of a module, to list only the ops of it and its children.
    """
    nodes = [n for n in step.graph.nodes if is_within(n, within)]
    forward = [n for n in nodes if not n.meta["is_backward"]]
    backward = [n for n in nodes if n.meta["is_backward"]]
    takers = [n for n in step.graph.nodes if n.meta.get("is_backward")]
    saved = {used for n in takers for used in n.all_input_nodes if used.op == "call_function"} & {*forward}
    held = sum(nbytes(n.meta["val"]) for n in saved if isinstance(n.meta.get("val"), Tensor) and not is_view(n))
    again = sum(n.meta["is_again"] for n in filter(_computes, backward))
    ranks = ranks_text(mesh_of(step.graph))
    yield paragraph(f"forward of rank {rank} of {ranks}: {_sent(forward)}; {size_text(held)} saved for backward")
    yield folded_lines(forward) if forward else ""
    yield ""
    run_again = f"; {counted(again, 'op')} of forward run again" if again else ""
    yield paragraph(f"backward: {_sent(backward)}{run_again}")
    yield folded_lines(backward) if backward else ""


def _sent(nodes: list[fx.Node]) -> str:
    begun = [i for i, n in enumerate(nodes) if isinstance(n.target, Begin)]
    hidden = sum(any(map(_computes, nodes[i + 1 : _end(nodes, i)])) for i in begun)
    count = counted(len(begun), "collective")
    return f"{count}, {hidden} behind other ops" if begun else count


def _computes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and not is_view(node)


def _end(nodes: list[fx.Node], begin: int) -> int:
    """The index of the node that waits for a collective."""
    (waiting,) = nodes[begin].users
    return nodes.index(waiting)
