"""Names the nodes of a captured graph after the modules that called them.

before    linear_3, linear_4        after    blocks_0_attn_q, blocks_0_attn_k
"""

from __future__ import annotations

import itertools
import re
from collections import Counter

from torch import fx

from torchshard.ir.graph import op_name


def rename_nodes(graph: fx.Graph) -> None:
    """Names each node after its module's path, followed by the op if the module has several ops."""
    ops = [node.meta["module"] for node in graph.nodes if node.op == "call_function"]
    counts, parents = Counter(ops), {path.rpartition(".")[0] for path in ops}
    # Only names given by this loop count as used, so that old names never cause a number.
    for node in graph.nodes:
        node.name = f"_old_{node.name}"
    used: set[str] = set()
    for node in graph.nodes:
        name = re.sub(r"[^0-9a-zA-Z_]+", "_", _name(node, counts, parents)).strip("_") or "value"
        node.name = _unused(name, used)
        used.add(node.name)
        if node.op == "placeholder":
            node.target = node.name


def _name(node: fx.Node, counts: Counter[str], parents: set[str]) -> str:
    if node.op == "placeholder":
        return str(node.meta["path"])
    if node.op != "call_function":
        return "output"
    path = str(node.meta["module"])
    if path and path not in parents and counts[path] == 1:
        return path
    return f"{path}_{op_name(node)}".lstrip("_")


def _unused(name: str, used: set[str]) -> str:
    """The name, with a number appended if it is used, or reserved in fx's generated Python code."""
    name = f"_{name}" if name[0].isdigit() else name
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(one for one in itertools.chain([name], numbered) if one not in used and not _is_reserved(one))


def _is_reserved(name: str) -> bool:
    # fx renames such nodes itself, but not placeholders' targets, the parameters of its code
    return name == "self" or fx.Graph()._graph_namespace.create_name(name, object()) != name
