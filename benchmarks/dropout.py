"""What exact random numbers cost: a rank's slice by the whole mask, beside a mask of the slice alone.

python benchmarks/dropout.py
python benchmarks/dropout.py --ranks 8 --shape 8 2048 4096
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchshard.capture.facts import ModelFacts
from torchshard.checking.lockstep import rank_graphs
from torchshard.compiler.constraints import read_constraints
from torchshard.compiler.prepare import prepared
from torchshard.compiler.program import planned
from torchshard.core.layouts import S
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.plans.objective import read_aim


class Dropped(nn.Module):
    """Dropout of a value that is stored in slices along its last dim."""

    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.register_buffer("x", torch.randn(shape))

    def forward(self) -> Tensor:
        return nn.functional.dropout(self.x, 0.1)  # type: ignore[arg-type]


def seconds(fn: Callable[[], object], repeats: int) -> float:
    """The least of some runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--shape", type=int, nargs="+", default=[8, 512, 1024])
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    model = Dropped(given.shape)
    last = len(given.shape) - 1
    captured = prepared(model, (), {}, dynamic=False)
    whole = seconds(lambda: nn.functional.dropout(model.x, 0.1), given.repeats)
    for world in given.ranks:
        aim = read_aim({"machine": "cpu-gloo", "split": "all"})
        constraints = read_constraints(ModelFacts.of(model), {}, Mesh((MeshAxis(world),)), aim).with_layouts(
            {"x": S(last)}
        )
        plan = planned(captured, model, constraints)
        graph, mine = rank_graphs(plan.graph, MeshAxis(world))[0], model.x.chunk(world, last)[0].contiguous()
        steps = [n for n in graph.graph.nodes if n.op == "call_function" and "torchshard" not in str(n.target)]
        env = {n: mine for n in graph.graph.nodes if n.op == "placeholder"}

        def exact(steps: list[torch.fx.Node] = steps, env: dict[torch.fx.Node, Tensor] = env) -> None:
            held = dict(env)
            for node in steps:
                args = torch.fx.map_arg(node.args, held.__getitem__)
                held[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]

        own = seconds(lambda mine=mine: nn.functional.dropout(mine, 0.1), given.repeats)
        cost = seconds(exact, given.repeats)
        print(
            f"{world} ranks: {cost / own:.1f} times a mask of the slice alone, {cost / whole:.2f} times the model's own"
        )


if __name__ == "__main__":
    main()
