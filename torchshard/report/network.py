"""The network of decisions from which a plan was chosen, with their states and joint costs.

network = network_of(plan)            an nx.Graph with states and tables, as planner.network describes it
draw(network, "network.svg")          a picture; .dot for Graphviz
draw(network, "network.graphml")      for Gephi, yEd, or nx.read_graphml: the same graph with plain attributes
"""

from __future__ import annotations

import networkx as nx
import numpy as np

from torchshard.compiler.what_if import solutions_of
from torchshard.core.errors import PlanError
from torchshard.core.layouts import I
from torchshard.core.rows import Choice
from torchshard.ir.graph import op_name
from torchshard.planner.elimination import Table
from torchshard.planner.network import State
from torchshard.plans.plan import Plan


def network_of(plan: Plan) -> nx.Graph:
    """The decisions of a plan's last mesh axis as nodes, and the costs of each two together as edges.

    Of a run of repeated layers the first three and the last are there. Beside the data that `planner.network` lists, a
    node has `label` (the op, or the tensor's name), `module`, `blocks` (how many equal layers it represents) and, for
    an op or a stored tensor, `chosen`: the number of the plan's state.

    Raises:
        PlanError: the plan's file does not hold the graph that it was made for.
    """
    solved = solutions_of(plan)
    if not solved:
        raise PlanError(
            "the plan has no network of costs",
            where="network_of(plan)",
            why="its file does not hold the graph that it was made for",
            attempt="torchshard.plan(model, ...), and the network of the plan that it returns",
        )
    network = solved[0].problem.network()
    inner = {name: chain.count for chain in network.chains for scope in chain.scopes for name in scope}
    around = {name for chain in network.chains for name in (*chain.entry, *chain.shared)}
    for name, data in network.graph.nodes(data=True):
        node, states = network.node(name), data["states"]
        is_op = node.op == "call_function"
        data["label"] = op_name(node) if is_op else node.meta["path"]
        data["module"] = node.meta.get("module", "") if is_op else node.meta["path"].rpartition(".")[0]
        data["blocks"] = 1 if name in around else inner.get(name, 1)
        if data["kind"] in ("op", "stored"):
            state = plan.choices.get(node.name) if is_op else plan.last.layouts.get(node.meta["path"], I)
            data["chosen"] = states.index(state) if state in states else None
    return network.graph


def plain(network: nx.Graph) -> nx.Graph:
    """The same graph with texts and numbers alone, as GraphML needs: of each table the least and the most legal cost.

    Seconds and bytes of a node are those of the plan's state, where it has one.
    """
    graph = nx.Graph()
    for name, data in network.nodes(data=True):
        texts, chosen = [state_text(state) for state in data["states"]], data.get("chosen")
        costs = _range("seconds", data["seconds"]) | _range("nbytes", data["nbytes"])
        if chosen is not None:
            costs["seconds"] = float(data["seconds"][chosen])
            costs["nbytes"] = 0.0 if data["nbytes"] is None else float(data["nbytes"][chosen])
            costs["chosen"] = texts[chosen]
        about = {key: data[key] for key in ("kind", "label", "module", "blocks", "position")}
        graph.add_node(name, **about, states=" | ".join(texts), **costs)
    for a, b, data in network.edges(data=True):
        costs = _range("seconds", data["seconds"]) | _range("nbytes", data["nbytes"])
        graph.add_edge(a, b, forbidden=float(np.isinf(data["seconds"]).mean()), **costs)
    return graph


def _range(name: str, table: Table | None) -> dict[str, object]:
    legal = np.zeros(1) if table is None else table[np.isfinite(table)]
    return {f"least_{name}": float(legal.min(initial=np.inf)), f"most_{name}": float(legal.max(initial=0.0))}


def state_text(state: State) -> str:
    """'split n: R, S(0) -> S(1)' for an op, 'S(0)' for a stored tensor, 'S(1), also I' for a shared value."""
    if isinstance(state, Choice):
        return f"{state.name}: {', '.join(map(str, state.operands))} -> {', '.join(map(str, state.results))}"
    if isinstance(state, tuple) and isinstance(state[1], frozenset):
        return ", also ".join(filter(None, [str(state[0]), ", ".join(sorted(map(str, state[1])))]))
    return str(state)
