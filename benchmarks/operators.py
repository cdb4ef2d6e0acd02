"""PyTorch's operator database, each tensor of each call split along each dim: right, raised, or silently wrong?

An op is captured as a model whose parameters are the call's tensors. One of them is stored in slices, even and uneven,
of each dim that has two elements or more; what the ranks compute from it is compared with the op itself, values and
gradients, in float64.

    right      equal in all cases; `split`: the share of the cases in which the tensor was not gathered first
    raised     a typed error says why it can't be, in some case
    failed     an error that is not ours, or no end within the limit
    wrong      something differs
    none       the database has no call of it for a CPU

    python benchmarks/operators.py --json operators.json
    python benchmarks/operators.py --ops nn.functional.pad cumsum
    python benchmarks/operators.py --processes --samples 1

With `--processes` the ranks are processes that send through gloo; otherwise all are simulated in one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alone import in_processes
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import torchshard as ts
from torchshard.capture import Captured, check_weights, flatten_call
from torchshard.checking.check import check_program
from torchshard.checking.processes import pieces, report_of
from torchshard.checking.report import Report
from torchshard.checking.steps import backward, unsharded
from torchshard.compiler.constraints import Constraints
from torchshard.compiler.prepare import prepared
from torchshard.compiler.program import Program, planned
from torchshard.core.layouts import Layout, S
from torchshard.core.mesh import MODEL, Mesh, MeshAxis
from torchshard.distributed.launch import launch
from torchshard.passes import localized
from torchshard.plans.objective import read_aim
from torchshard.weights.materialize import local_state

UNDEFINED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Ops whose values are whatever lay in memory: shapes alone are compared."""


LOOKED_AT = 100
"""Calls of an op in the database that are chosen from."""


class Called(nn.Module):
    """One call of an op; its tensors are parameters, those that have no gradient buffers."""

    def __init__(self, op: Any, args: Any, kwargs: Any, *, undefined: bool) -> None:
        super().__init__()
        self.undefined = undefined
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.op, self.rest, self.tensors = op, [], []
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))  # beside it a gradient of zero on paper is noise
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                held = leaf.detach().clone()
                if leaf.requires_grad:
                    self.register_parameter(f"t{i}", nn.Parameter(held))
                else:
                    self.register_buffer(f"t{i}", held)
                self.tensors.append(f"t{i}")
            self.rest.append(leaf)

    def forward(self) -> list[Tensor]:
        made = [getattr(self, f"t{i}") if f"t{i}" in self.tensors else leaf for i, leaf in enumerate(self.rest)]
        args, kwargs = pytree.tree_unflatten(made, self.spec)
        found = [r for r in pytree.tree_leaves(self.op(*args, **kwargs)) if isinstance(r, Tensor)]
        return [*(torch.zeros_like(r) if self.undefined else r for r in found), self.scale * 1.0]


@dataclasses.dataclass
class Result:
    """What became of one op."""

    kind: str
    status: str
    cases: int = 0
    split: int = 0
    """Cases that are right, the tensor not gathered."""
    why: str = ""
    seconds: float = 0.0


def calls(op: Any, most: int) -> Iterator[Called]:
    """Some calls of an op, of different shapes: first and last of the database's, and evenly between."""
    if not op.dtypes:
        return  # none for a CPU
    dtype = torch.float64 if torch.float64 in op.dtypes else next(iter(sorted(op.dtypes, key=str)))
    grad = op.supports_autograd and dtype == torch.float64
    found: dict[str, Called] = {}
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), LOOKED_AT):
        made = Called(op.op, (sample.input, *sample.args), sample.kwargs, undefined=op.name in UNDEFINED)
        looks = str([tuple(t.shape) for t in (*made.parameters(), *made.buffers())]) + str(
            [leaf for leaf in made.rest if not isinstance(leaf, Tensor)]
        )
        found.setdefault(looks, made)
    several = list(found.values())
    step = max(len(several) - 1, 1) / max(most - 1, 1)
    yield from several if len(several) <= most else (several[round(i * step)] for i in range(most))


def tried(name: str, ranks: list[int], most: int) -> Result:
    """All cases of one op; the worst counts."""
    return _cases(name, ranks, most, _try_one)


def _cases(name: str, ranks: list[int], most: int, try_one: Callable[..., None]) -> Result:
    torch.manual_seed(0)
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)  # a seed is set around a call here
    op = next(op for op in op_db if full_name(op) == name)
    result = Result(name, "right")
    for call in calls(op, most):
        if not _is_plain(call):
            continue
        try:
            check_weights(call)
            captured = prepared(call, (), {})
        except ts.ShardError as error:
            _worse(result, "raised", f"{type(error).__name__}: {error}")
            result.cases += 1
            continue
        held = dict((*call.named_parameters(), *call.named_buffers()))
        splits = [{n: S(d)} for n in call.tensors for d in range(held[n].ndim) if held[n].shape[d] > 1] or [{}]
        for world, layouts in itertools.product(ranks, splits):
            result.cases += 1
            try_one(result, call, captured, world, layouts)
    return result if result.cases else dataclasses.replace(result, status="none", why="no call runs here as it is")


def _is_plain(call: Called) -> bool:
    """Whether a sample runs as a plain call; where it has no gradient (eigenvectors have any phase) it gets none."""
    try:
        results = call()
    except Exception:
        return False
    try:
        torch.autograd.backward(
            [r for r in results if r.requires_grad], [torch.randn_like(r) for r in results if r.requires_grad]
        )
    except RuntimeError:
        call.requires_grad_(False)
    call.zero_grad()
    return True


def _try_one(result: Result, call: Called, captured: Captured, world: int, layouts: dict[str, Layout]) -> None:
    where = f"{world} ranks, {layouts} of {[(n, tuple(getattr(call, n).shape)) for n in call.tensors]}"
    try:
        made = planned(captured, call, Constraints(Mesh((MeshAxis(world),)), AIM, layouts=layouts))
        report = check_program(call, made, made.graph, (), {})
    except ts.ShardError as error:
        return _worse(result, "raised", f"{where}: {type(error).__name__}: {error}")
    _reported(result, report, where, captured, made, layouts)


def _reported(
    result: Result, report: Report, where: str, captured: Captured, made: Program, layouts: dict[str, Layout]
) -> None:
    if not report.ok:
        worst = report.worst
        return _worse(result, "wrong", f"{where}: {worst.kind} {worst.name} {worst.error:.1e}")
    names = {n.name for n in captured.graph.graph.nodes if n.op == "placeholder" and n.meta["path"] in layouts}
    result.split += bool(layouts) and not any(c.value in names for c in made.plan.costs.collectives)


# --- real ranks ------------------------------------------------------------------------------------------------------


def in_rank(names: list[str], most: int) -> dict[str, Result]:
    """What becomes of some ops, as each rank of a group sees it."""
    warnings.filterwarnings("ignore")
    logging.disable()
    ts.distributed.init_process_group()
    return {name: _ranked(name, most) for name in names}


def _ranked(name: str, most: int) -> Result:
    world = dist.get_world_size()
    return _cases(name, [world], most, _try_on_ranks)


def _try_on_ranks(result: Result, call: Called, captured: Captured, world: int, layouts: dict[str, Layout]) -> None:
    where = f"{world} ranks, {layouts} of {[(n, tuple(getattr(call, n).shape)) for n in call.tensors]}"
    rank = dist.get_rank()
    try:
        made = planned(captured, call, Constraints(Mesh((MeshAxis(world),)), AIM, layouts=layouts))
        torch.manual_seed(1)
        expected = unsharded(call, flatten_call(call, (), {}))
    except ts.ShardError as error:
        return _worse(result, "raised", f"{where}: {type(error).__name__}: {error}")
    state = local_state(call, made.held, {MODEL: rank})
    known = {**captured.constants, **state}
    graph = localized(made.graph, MeshAxis(world).coordinate(rank))
    graph.recompile()
    torch.manual_seed(1)
    results = list(graph(*(known[n.meta["path"]] for n in graph.graph.nodes if n.op == "placeholder")))
    backward([results])
    held: list[Any] = [None] * world
    dist.all_gather_object(held, pieces(results, state, {}, made.plan.parameters, made.graph))
    _reported(result, report_of(expected, held), where, captured, made, layouts)


def on_processes(names: list[str], ranks: list[int], most: int) -> Iterator[tuple[str, Result]]:
    """The worst of some ops for all numbers of ranks; a group that fails is tried again, in halves."""
    for start in range(0, len(names), AT_ONCE):
        some = names[start : start + AT_ONCE]
        found = [_launched(some, world, most) for world in ranks]
        for name in some:
            yield name, max((f[name] for f in found), key=lambda r: ORDER.index(r.status))


AT_ONCE = 25
"""Ops that one group of processes tries, one after the other."""


def _launched(names: list[str], world: int, most: int) -> dict[str, Result]:
    try:
        by_rank = launch(in_rank, world, (names, most))
    except Exception as error:
        if len(names) > 1:
            half = len(names) // 2
            return _launched(names[:half], world, most) | _launched(names[half:], world, most)
        return {
            names[0]: Result(names[0], "failed", why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        }
    differing = {n for n in names if len({(r[n].status, r[n].cases) for r in by_rank}) > 1}
    return {n: Result(n, "wrong", why="the ranks disagree") if n in differing else by_rank[0][n] for n in names}


AIM = read_aim({"machine": "cpu-gloo", "split": "all"})
"""Any axis may be split, whatever it is of."""
ORDER = ("none", "right", "raised", "failed", "wrong")


def _worse(result: Result, status: str, why: str) -> None:
    if ORDER.index(status) > ORDER.index(result.status):
        result.status, result.why = status, " ".join(why.split())[:400]


def full_name(op: Any) -> str:
    """The op's name with its variant's."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ops", nargs="+")
    parser.add_argument("--samples", type=int, default=6, help="calls of different shapes of one op")
    parser.add_argument("--processes", action="store_true", help="real ranks, through gloo")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one op")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="results are written here; those that are there already are kept")
    given = parser.parse_args()
    names = given.ops or list(dict.fromkeys(map(full_name, op_db)))
    known = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    todo = [name for name in names if given.ops or name not in known]
    run = functools.partial(tried, ranks=given.ranks, most=given.samples)
    tries: Iterator[tuple[str, Any, float]] = (
        ((name, found, 0.0) for name, found in on_processes(todo, given.ranks, given.samples))
        if given.processes
        else in_processes(run, todo, given.limit, given.jobs)
    )
    for name, found, seconds in tries:
        result = found if isinstance(found, Result) else Result(name, "failed", why=found)
        known[name] = dataclasses.asdict(result) | {"seconds": seconds}
        print(f"{name:40} {result.status:7} {result.split:3} of {result.cases:3} split {seconds:6.1f} s  {result.why}",
              flush=True)  # fmt: skip
        if given.json:
            given.json.write_text(json.dumps(known, indent=1))
    cases, split = (sum(known[name][what] for name in names) for what in ("cases", "split"))
    print(Counter(known[name]["status"] for name in names), f"{split} of {cases} cases stayed split")


if __name__ == "__main__":
    main()
