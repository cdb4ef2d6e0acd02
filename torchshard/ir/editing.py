"""Edits a graph: records functions into it; inserts, names and removes nodes; marks where gradients flow.

`ir.graph` only reads. A new node inherits the facts of the op that it replaces or belongs to (`ORIGIN`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import fx, nn
from torch.fx.node import Argument, Target

from torchshard.core.errors import RuleError, ShardError, in_short
from torchshard.core.fakes import new_fake_mode
from torchshard.ir.effects import writes
from torchshard.ir.fake_values import fake_value, in_numbers
from torchshard.ir.graph import ORIGIN, fake_mode, is_float, values, where
from torchshard.ops import is_collective

T = TypeVar("T")


def drop_dead_code(module: fx.GraphModule) -> bool:
    """Removes ops with unused results; returns whether it removed any.

    Never removes a collective: its result may be unused here, but other ranks would wait for it.
    Placeholders stay, because they are the graph's signature, and ops that write.
    """
    return bool(module.graph.eliminate_dead_code(_is_kept))


def _is_kept(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op == "placeholder" or bool(node.is_impure())
    return is_collective(node.target) or node.is_impure() or writes(node)


def mark_needs_grad(module: fx.GraphModule, trainable: Sequence[str]) -> None:
    """Sets meta['needs_grad']: whether a gradient flows through a value to a parameter or input.

    Args:
        trainable: the paths of the parameters and inputs that require gradients.
    """
    # First forward, from the parameters and inputs, then backward, from the results: both must reach a value.
    names, reached = set(trainable), dict[fx.Node, bool]()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            reached[node] = node.meta["path"] in names
        elif node.op == "call_function":
            passes_gradients = node.target is not torch.ops.aten.detach.default and any(map(is_float, values(node)))
            reached[node] = passes_gradients and any(reached[n] for n in node.all_input_nodes)
    for node in reversed(module.graph.nodes):
        if node.op != "output":
            node.meta["needs_grad"] = reached[node] and any(
                user.op == "output" or user.meta["needs_grad"] for user in node.users
            )


def record(graph: fx.Graph, function: Callable[..., T], args: Iterable[Argument], kwargs: Mapping[str, Argument]) -> T:
    """Traces a function into a graph, appending its ops; node arguments become Proxies."""
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def proxy(node: fx.Node) -> Argument:
        # fx's types don't list Proxy among arguments, but `map_arg` accepts it like any other value
        return cast(Argument, fx.Proxy(node, tracer))

    args, kwargs = fx.map_arg((tuple(args), dict(kwargs)), proxy)
    return function(*args, **kwargs)


def record_local(
    graph: fx.Graph,
    node: fx.Node,
    function: Callable[..., T],
    args: Iterable[Argument],
    kwargs: Mapping[str, Argument],
) -> T:
    """Traces a rule's local function into a graph, in place of a node's op.

    Raises:
        RuleError: the function, which may be the user's own, fails.
    """
    try:
        return record(graph, function, args, kwargs)
    except ShardError:
        raise
    except Exception as error:
        raise RuleError(
            f"the local function of the rule of {node.target} fails",
            where=where(node),
            why=in_short(error),
            attempt="a function of a Local, and then of all that the op takes",
        ) from error


def emit(
    module: fx.GraphModule, target: Target, args: tuple[Argument, ...], like: fx.Node, **kwargs: Argument
) -> fx.Node:
    """Inserts an op at the insertion point, with its fake value and `like`'s `ORIGIN` facts."""
    assert callable(target)
    node = module.graph.call_function(target, args, kwargs)
    node.meta = {k: like.meta[k] for k in ORIGIN if k in like.meta}
    node.meta["val"] = fake_value(fake_mode(module.graph), target, args, kwargs)
    return node


def duplicate(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of a graph, which needs `recompile()` to be called; fake values are shared."""
    result = empty_module(module.meta)
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copies[node] = result.graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = copy.copy(node.meta)
    return result


def in_example_sizes(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph for the example inputs' sizes only; ops on its values take a third of the time.

    All copies of a captured graph have one fake mode, and recordings of their own, which hold its values.
    """
    if getattr(fake_mode(module.graph), "shape_env", None) is None:
        return module  # it has no dynamic sizes
    made, values = duplicate(module), dict[int, object]()
    known = module.meta.setdefault("recordings", {})
    mode, made.meta["recordings"] = known.setdefault("in example sizes", (new_fake_mode(), {}))
    with mode:
        for node in (node for node in made.graph.nodes if "val" in node.meta):
            val = node.meta["val"]
            if id(val) not in values:  # nodes may share a value
                values[id(val)] = in_numbers(val)
            node.meta["val"] = values[id(val)]
    return made


def empty_module(meta: Mapping[str, object]) -> fx.GraphModule:
    """Returns a module with an empty graph.

    Call `recompile()` before calling it. Most graphs are only read or run node by node, and
    generating code takes longer than adding the nodes.
    """
    module = fx.GraphModule(nn.Module(), fx.Graph())
    module.meta = dict(meta)
    return module


def name_after(node: fx.Node, name: str) -> None:
    """Names a new node, with a number appended if another node has the name."""
    node._rename(name)
