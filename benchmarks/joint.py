"""How far plans that are made one axis after the other are from the best of all, on small random models over two axes.

Over {"dp": ..., "tp": ...} the plan of the weights' axis is searched for on its own, and that of the batch's axis for
what it leaves. Here every plan of the weights' axis is tried, with the batch's for each: what counts is the step over
both, in which messages of one hide behind computation and messages of the other, and the bytes of weights at the
planner's price. A plan whose own costs are more than the best step found is not tried, nor a model with too many plans.

    python benchmarks/joint.py --models 200
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchshard.capture import flatten_call
from torchshard.capture.facts import ModelFacts
from torchshard.compiler.batches import whole_batch
from torchshard.compiler.constraints import read_constraints
from torchshard.compiler.meshes import read_mesh
from torchshard.compiler.program import Program, program
from torchshard.core.layouts import I
from torchshard.core.mesh import Holds, mesh_option
from torchshard.ir.fake_values import nbytes, sizes_as
from torchshard.ir.graph import is_weight
from torchshard.passes import rewrite
from torchshard.planner.build import build
from torchshard.planner.constants import MAX_PRICE
from torchshard.planner.conversions import conversions_of
from torchshard.planner.network import Network
from torchshard.planner.predict import predict
from torchshard.planner.prune import prune
from torchshard.planner.search import expand_to_all_layers, most_weights, solve_within_budget
from torchshard.planner.solver import Solution, Solver
from torchshard.plans.machines import MachineName
from torchshard.plans.objective import read_aim
from torchshard.plans.plan import Plan

MOST_PLANS, MOST_TRIED = 400_000, 300
EPSILON = 1e-9
"""Steps that differ by a smaller part are equal but for rounding."""


class Drawn(nn.Module):
    """A stack of one to four layers, with a table before and a head behind it, or not."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width = width = draw.choice([8, 32, 128, 512])
        vocab = draw.choice([16, 512, 8192])
        self.table = nn.Embedding(vocab, width) if draw.random() < 0.4 else None
        self.layers, self.adds = nn.ModuleList(), draw.random() < 0.5
        for kind in draw.choices(["linear", "norm", "relu", "softmax"], [4, 1, 1, 1], k=draw.randint(1, 4)):
            if kind == "linear":
                wide = draw.choice([self.width, self.width, 4 * self.width])
                self.layers.append(nn.Linear(width, wide, bias=draw.random() < 0.4))
                width = wide
            else:
                self.layers.append({"norm": nn.LayerNorm(width), "relu": nn.ReLU(), "softmax": nn.Softmax(-1)}[kind])
        self.head = nn.Linear(width, vocab) if draw.random() < 0.3 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x) if self.table is not None else x
        for layer in self.layers:
            y = layer(x)
            x = x + y if self.adds and x.shape == y.shape else y
        return self.head(x) if self.head is not None else x

    def example(self, draw: random.Random) -> Tensor:
        """A part of the batch."""
        shape = draw.choice([2, 8]), draw.choice([4, 64])
        if self.table is not None:
            return torch.zeros(shape, dtype=torch.long)
        return torch.zeros(*shape, self.width, requires_grad=draw.random() < 0.3)


@dataclass(frozen=True)
class Case:
    """What is planned."""

    seed: int

    @property
    def mesh(self) -> dict[str, int | tuple[int, Holds]]:
        draw = random.Random(self.seed)
        ways: tuple[Holds, ...] = ("replicate", "shard")
        return {"dp": (draw.choice([2, 8]), ways[self.seed % 2]), "tp": draw.choice([2, 3, 4])}

    @property
    def machine(self) -> MachineName:
        return ("cpu-gloo", "h100x8")[self.seed // 2 % 2]

    def __str__(self) -> str:
        return f"{self.seed:4}  {mesh_option(self.mesh)}, {self.machine}"

    def planned(self) -> Program:
        """A model with the plan that is found axis by axis."""
        draw = random.Random(self.seed)
        model, axes = Drawn(draw), read_mesh(self.mesh)
        call, batch = whole_batch(flatten_call(model, (model.example(draw),), {}), axes)
        args, kwargs = call.rebuild(call.tensors)
        aim = read_aim({"machine": self.machine}, "cpu")
        constraints = read_constraints(ModelFacts.of(model), "auto", axes, aim)
        return program(model, constraints, args, kwargs, batches=batch)


class Joint:
    """All plans of the weights' axis, and the steps over both axes of those that are tried."""

    def __init__(self, made: Program) -> None:
        self.made, self.problem = made, made.problems[0]
        with sizes_as(self.problem.sizes):
            self.network, pruned = self._network(), self._network()
            self.variables = [v for v, kind in self.network.graph.nodes(data="kind") if kind in ("op", "stored")]
            if math.prod(self.network.sizes[v] for v in self.variables) > MOST_PLANS:
                raise OverflowError("too many plans")
            self.seconds, self.nbytes = _tables(self.network, self.variables)
            prune(pruned)
            solver = Solver(pruned)
            smallest = solver.best(MAX_PRICE)
            self.most = most_weights(self.problem.graph, pruned, smallest)
            _, _, self.price = solve_within_budget(solver, lambda _: self.most, smallest)

    def _network(self) -> Network:
        return build(self.problem.graph, self.problem.model, self.problem.constraints, fold=False)

    def found(self) -> float:
        """What the plan costs that is found axis by axis."""
        weights = (n for n in self.problem.graph.nodes if n.op == "placeholder" and is_weight(n))
        share = {n.meta["path"]: nbytes(n.meta["val"]) for n in weights}
        layouts, ranks = self.made.plan.last.layouts, self.made.axis.size
        held = sum(size if layouts.get(name, I) == I else size / ranks for name, size in share.items())
        return self._step(self.made.plan) + self.price * held

    def best(self, known: float) -> tuple[float, int, bool]:
        """What the best plan costs, how many were tried, and whether that is proven.

        Args:
            known: what one of them costs.
        """
        least = np.where(self.nbytes <= self.most * (1 + EPSILON), self.seconds + self.price * self.nbytes, np.inf)
        for tried, place in enumerate(np.argsort(least, axis=None)):
            if least.flat[place] >= known * (1 - EPSILON):
                return known, tried, True
            if tried == MOST_TRIED:
                return known, tried, False
            plan = self._plan(np.unravel_index(place, least.shape))
            known = min(known, self._step(plan) + self.price * self.nbytes.flat[place])
        return known, least.size, True

    def _plan(self, states: Sequence[int]) -> Plan:
        """The plan of the weights' axis in which variables have these states."""
        graph, model, plan = self.problem.graph, self.problem.model, self.made.plan
        solution = Solution(dict(zip(self.variables, states, strict=True)), (), 0, 0, 0)
        with sizes_as(self.problem.sizes):
            choices, layouts = expand_to_all_layers(graph, self.network, solution)
            conversions = conversions_of(graph, model, choices, layouts)
            costs = predict(graph, model, choices, layouts, conversions)
        held = {name: layout for name, layout in layouts.items() if name in plan.stored}
        return plan.with_last(choices=choices, parameters=held, conversions=conversions, costs=costs)

    def _step(self, plan: Plan) -> float:
        """The seconds of a step over both axes, the batch's planned for what this plan leaves."""
        graph = rewrite(self.made.captured.graph, plan.last)
        step = replace(self.made, plan=plan, graph=graph).priced(with_memory=False).costs.step
        assert step is not None
        return step


def _tables(network: Network, variables: Sequence[str]) -> tuple[Any, Any]:
    """The seconds and the bytes of all states of these variables, with the best of all others."""
    factors = [(factor.scope, factor.seconds) for factor in network.factors]
    for v in (v for v in network.sizes if v not in variables):
        around = [factor for factor in factors if v in factor[0]]
        scope = (*sorted({other for scope, _ in around for other in scope} - {v}), v)
        factors = [factor for factor in factors if v not in factor[0]]
        factors.append((scope[:-1], _joined(network, around, scope).min(-1)))
    held = [(factor.scope, factor.nbytes) for factor in network.factors if factor.nbytes is not None]
    return _joined(network, factors, variables), _joined(network, held, variables)


def _joined(network: Network, factors: Sequence[tuple[Sequence[str], Any]], over: Sequence[str]) -> Any:
    """The sum of factors, as a table over variables."""
    total = np.zeros([network.sizes[v] for v in over])
    for scope, table in factors:
        order = sorted(range(len(scope)), key=lambda i: over.index(scope[i]))
        total += table.transpose(order).reshape([network.sizes[v] if v in scope else 1 for v in over])
    return total


def compared(models: int) -> Iterator[float]:
    """For so many models the cost of the plan that is found, in terms of that of the best."""
    seed = 0
    while models:
        case, seed = Case(seed), seed + 1
        try:
            joint = Joint(case.planned())
        except OverflowError:
            continue
        models -= 1
        found = joint.found()
        best, tried, proven = joint.best(found)
        text = f"{tried} plans tried" + ("" if proven else ", and there are more")
        print(f"{case}: {found / best:.4f} of the best, {text}", flush=True)
        yield found / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    warnings.simplefilter("ignore", UserWarning)
    ratios = list(compared(parser.parse_args().models))
    best = sum(ratio <= 1 + EPSILON for ratio in ratios)
    print(f"{best} of {len(ratios)} plans are the best; mean {statistics.mean(ratios):.4f}, worst {max(ratios):.4f}")


if __name__ == "__main__":
    main()
