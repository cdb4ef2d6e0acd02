"""Describes the nodes of a captured graph in their meta, and names them after the modules that called them.

    before    linear_3, linear_4
    after     blocks_0_attn_q, blocks_0_attn_k

Their meta gets kinds, all names of a tensor, module paths, source lines, autocast and checkpoints.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import fx
from torch.export import ExportedProgram

from torchshard.capture.modes import modes_of
from torchshard.capture.user_code import line_in
from torchshard.core.user_files import warn
from torchshard.ir.effects import writes, written_state
from torchshard.ir.graph import op_name


def describe_placeholders(
    graph: fx.Graph, exported: ExportedProgram, inputs: Sequence[str], shared: Mapping[str, tuple[str, ...]]
) -> None:
    """Sets meta["kind"], ["names"] and ["path"]; `shared` lists all names of a tied parameter."""
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    names = iter(inputs)
    for node in (n for n in graph.nodes if n.op == "placeholder"):
        spec = specs[node.target]
        kind = spec.kind.name.lower()
        node.meta["kind"] = {"user_input": "input", "constant_tensor": "constant"}.get(kind, kind)
        if node.meta["kind"] == "input":
            node.meta["names"] = (next(names),)
        else:
            node.meta["names"] = shared.get(str(spec.target), (str(spec.target),))
        node.meta["path"] = node.meta["names"][0]


def describe_ops(graph: fx.Graph) -> None:
    """Sets meta["module"], ["source"], ["autocast"] and ["recompute"]."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["module"] = _module_path(node)
            node.meta["source"] = line_in(node.meta.get("stack_trace") or "")
            modes = modes_of(node)
            node.meta["autocast"] = modes.autocast
            if modes.checkpoint is not None:
                node.meta["recompute"] = f"checkpoint {modes.checkpoint}"
    _warn_of_writes_in_checkpoints(graph)


def _warn_of_writes_in_checkpoints(graph: fx.Graph) -> None:
    """Warns of buffers that the unsharded model writes twice per step, like batch norm's."""
    written = [
        node.meta["path"]
        for node in written_state(graph)
        if any("recompute" in n.meta for user in node.users if writes(user) for n in (user, *user.all_input_nodes))
    ]
    if written:
        more = f" and {len(written) - 1} more" if len(written) > 1 else ""
        warn(
            f"buffer {written[0]}{more}: updated within torch.utils.checkpoint. The sharded model updates it once per "
            "step, the unsharded model twice, because its backward recomputes the checkpoint"
        )


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    path = paths[-1] if paths else ""
    # Export appends '@1' to the path of a module that is called a second time.
    # `_empty_nn_module_stack...` is export's entry for ops outside of all modules (PyTorch 2.13.0).
    return "" if path.startswith("_empty_nn_module_stack") else path.split("@")[0]


def order_placeholders(graph: fx.Graph) -> None:
    """Orders placeholders: parameters, buffers and constants first, then the call's tensors."""
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input"]
    rest = [n for n in graph.nodes if n.op == "placeholder" and n.meta["kind"] != "input"]
    # Each node goes before the current first one, hence the reversed order.
    for node in reversed([*rest, *inputs]):
        next(iter(graph.nodes)).prepend(node)


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
