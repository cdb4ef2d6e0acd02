"""The question that a plan answers: a captured call, facts about its model, and the user's constraints.

A plan's file stores it as data, so that it can be planned again under other constraints, without
the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx, nn

from torchshard.capture.facts import ModelFacts, TensorFacts
from torchshard.compiler.batches import SplitDims
from torchshard.compiler.constraints import Constraints
from torchshard.core.errors import PlanError
from torchshard.core.layouts import Layout, parse_layout
from torchshard.core.mesh import Mesh
from torchshard.core.types import is_of, texts
from torchshard.ir.data import graph_data, graph_from
from torchshard.ir.fake_values import plain_shape
from torchshard.ir.graph import placeholders
from torchshard.ir.sizes import Equal
from torchshard.planner.styles import OPS_OF_MODULES, Style
from torchshard.plans.json_form import read_axis
from torchshard.plans.machine import Machine
from torchshard.plans.objective import Aim


@dataclass(frozen=True)
class Question:
    """One call of a model, with the requirements for its plan."""

    graph: fx.GraphModule
    """The normalized graph of the full batch."""
    facts: ModelFacts
    constraints: Constraints
    multiples: frozenset[sympy.Symbol] = frozenset()
    """The dynamic sizes that may be split across ranks."""
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    """The layouts of the call's tensors that earlier calls have left, by name."""
    batches: SplitDims = field(default_factory=dict)
    """The dims of the call's tensors that the mesh splits, by name."""
    equal: Equal = field(default_factory=dict)
    """Facts about the graph's sizes before planning."""

    def data(self) -> dict[str, object]:
        """The question as JSON data; {"unwritten": reason} if the graph can't be written."""
        try:
            graph = graph_data(self.graph, self.equal)
        except ValueError as error:
            return {"unwritten": str(error)}
        return {
            "graph": graph,
            "multiples": sorted({*map(str, self.multiples)} & graph["sizes"].keys()),
            "facts": _facts_data(self.facts),
            "constraints": _constraints_data(self.constraints),
            "inputs": _texts(self.inputs),
            "batches": {name: list(dims) for name, dims in self.batches.items()},
        }


def question_from(data: Mapping[str, Any] | None) -> Question:
    """The question in a plan's file.

    Raises:
        PlanError: the question is missing, or can't be read here.
    """
    if not data or "unwritten" in data:
        raise PlanError(
            "the plan does not hold the graph that it was made for",
            where="the plan",
            why=(data or {}).get("unwritten", "it was written by Plan.to_json(question=False)"),
            attempt="torchshard.plan(model, ...), with other pins",
        )
    with of_a_file("read"):
        graph, symbols = graph_from(data["graph"])
        graph.meta["multiples"] = multiples = frozenset(symbols[name] for name in data["multiples"])
        facts, constraints = _facts(data["facts"]), _constraints(data["constraints"])
        _check_parameters(graph.graph, facts)
        split = {name: tuple(dims) for name, dims in data["batches"].items()}
        return Question(graph, facts, constraints, multiples, _layouts(data["inputs"]), split)


@contextmanager
def of_a_file(what: str, *told: type[Exception]) -> Iterator[None]:
    """Converts errors on graphs that capture can't produce, such as in an edited file, to PlanErrors.

    Rules and passes do not check for such graphs.

    Args:
        what: the failed operation as a past participle: "planned".
        told: error classes that pass unchanged, because their own text is clear.

    Raises:
        PlanError: instead of all other errors.
    """
    try:
        yield
    except told:
        raise
    except Exception as error:  # PyTorch may raise any error for an op with unexpected arguments
        raise PlanError(
            f"the graph in the plan's file can't be {what}",
            where="the plan",
            why=f"{type(error).__name__}: {' '.join(str(error).split()) or 'no words'}",
            attempt="a file that this version of torchshard wrote, with the same PyTorch",
        ) from error


# --- as data ---------------------------------------------------------------------------------------------------------


def _texts(layouts: Mapping[str, Layout]) -> dict[str, str]:
    return {name: str(layout) for name, layout in layouts.items()}


def _layouts(data: Mapping[str, str]) -> dict[str, Layout]:
    return {name: parse_layout(text) for name, text in data.items()}


_CLASSES = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in OPS_OF_MODULES}
"""The module classes that planning distinguishes; for all others only the name counts."""


def _facts_data(facts: ModelFacts) -> dict[str, object]:
    names = {path: f"{cls.__module__}.{cls.__qualname__}" for path, cls in facts.modules.items()}
    return {
        "modules": names,
        "grouped": sorted(facts.grouped),
        "tensors": {name: dataclasses.asdict(tensor) for name, tensor in facts.tensors.items()},
        "device": facts.device,
    }


def _facts(data: object) -> ModelFacts:
    fields = is_of(dict, data)
    classes: dict[str, type[nn.Module]] = dict(_CLASSES)
    for name in fields["modules"].values():
        classes.setdefault(name, type(name.rpartition(".")[2], (nn.Module,), {}))
    tensors = {name: _tensor_facts(tensor) for name, tensor in fields["tensors"].items()}
    modules = {path: classes[name] for path, name in fields["modules"].items()}
    return ModelFacts(modules, frozenset(fields["grouped"]), tensors, fields["device"])


def _tensor_facts(data: object) -> TensorFacts:
    fields = is_of(dict, data)
    return TensorFacts(
        tuple(is_of(int, size) for size in fields["shape"]),
        is_of(int, fields["itemsize"]),
        is_of(str, fields["module"]),
        texts(fields["names"]),
        is_of(bool, fields["is_parameter"]),
        is_of(bool, fields["is_trained"]),
    )


def _check_parameters(graph: fx.Graph, facts: ModelFacts) -> None:
    """Checks that the parameters and buffers of a graph are the model's."""
    for node in placeholders(graph):
        if node.meta["kind"] in ("parameter", "buffer"):
            path, shape = node.meta["path"], plain_shape(node.meta["val"])
            if facts.tensors[facts.first_names[path]].shape != shape:
                raise ValueError(f"{path} has the shape {shape} in the graph, and another one in the model")


def _constraints_data(constraints: Constraints) -> dict[str, object]:
    aim = constraints.aim
    return {
        "mesh": [dataclasses.asdict(axis) for axis in constraints.mesh.axes],
        "aim": {f.name: getattr(aim, f.name) for f in dataclasses.fields(aim)} | {"machine": aim.machine.fields},
        "pins": {path: [key, style.name, style.whole_result] for path, (key, style) in constraints.pins.items()},
        "recompute": list(constraints.recompute),
        "steady": constraints.steady,
    }


def _constraints(data: object) -> Constraints:
    fields = is_of(dict, data)
    aim = fields["aim"]
    read = Aim(**{**aim, "machine": Machine(**aim["machine"]), "recompute": tuple(aim["recompute"])})
    mesh = Mesh(tuple(read_axis(axis) for axis in fields["mesh"]))
    pins = {
        path: (is_of(str, key), Style(is_of(str, name), is_of(bool, whole)))
        for path, (key, name, whole) in fields["pins"].items()
    }
    return Constraints(mesh, read, pins, recompute=texts(fields["recompute"]), steady=is_of(bool, fields["steady"]))
