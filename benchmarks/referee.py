"""An independent referee: the type system of `spmd_types` judges every op of the graphs that torchshard makes.

`passes/verify.py` holds a graph against torchshard's own rules, so it can't see that a rule is wrong. This program
holds it against rules that others wrote: `spmd_types` 0.3 (Meta, https://github.com/meta-pytorch/spmd_types), where a
tensor is R, I, V or P on an axis of a mesh as a layout is here (V is a Shard), with the gradient's type by the same
duals. It takes what one rank runs, types parameters and inputs as their layouts say, and lets the strict checker type
each op; each collective is the primitive that `judging.COLLECTIVES` names. Nothing runs on ranks: tensors are fake, and
so is the process group.

    judged     the checker gives the type that torchshard recorded, and this rank's shape
    type only  of these: it did not say along which dim a value is split (its rules come from DTensor, which has fewer)
    declared   it can't know: an entry of `judging.DECLARED` stands. The last lines list these by op
    faults     anything else
    left out   each collective that a result depends on is replaced by its operand in turn, and so many of these are
               seen: by a type; where types agree by a size; or by a dim, of which the checker now refuses to say what
               it said before

    python benchmarks/referee.py                            the tests' models, under their own plan and under "auto"
    python benchmarks/referee.py --zoo                      Hugging Face's architectures, each tiny (zoo.py)
    python benchmarks/referee.py --zoo --models llama t5 --verbose
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import operator
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from alone import in_processes
from judging import (
    BY_DECLARATION,
    BY_DIM,
    BY_TYPE,
    DECLARED,
    judged,
    mesh,
    subject_of,
    tensors_in,
    without,
    wrong_duals,
)
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchshard.compiler.program import Program
from torchshard.core.mesh import MeshAxis
from torchshard.ops import is_collective
from torchshard.passes import localized
from torchshard.testing import capture

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.models import CASES


@dataclasses.dataclass
class Verdict:
    """What the referee says of a model."""

    levels: Counter[str] = dataclasses.field(default_factory=Counter)
    """How much was judged -> number of nodes."""
    faults: list[str] = dataclasses.field(default_factory=list)
    seen: Counter[str] = dataclasses.field(default_factory=Counter)
    """Left-out collectives in which a fault is found, by its kind: type, size or dim."""
    unseen: list[str] = dataclasses.field(default_factory=list)
    """Those in which none is."""
    reasons: Counter[tuple[str, str, str]] = dataclasses.field(default_factory=Counter)
    """(level, op, why no more) -> number of nodes."""
    seconds: float = 0.0
    """Of the judging alone."""

    def __add__(self, other: Verdict) -> Verdict:
        names = [field.name for field in dataclasses.fields(self)]
        return Verdict(*(getattr(self, name) + getattr(other, name) for name in names))


def verdict(model: nn.Module, made: Program, world: int) -> Verdict:
    """Judges one program, and its graph without each of its collectives."""
    start = time.perf_counter()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    inputs = [n for n in made.captured.graph.graph.nodes if n.op == "placeholder" and n.meta["kind"] == "input"]
    trainable |= {n.meta["path"] for n in inputs if getattr(n.meta["val"], "requires_grad", False)}
    graphs = [localized(made.graph, MeshAxis(world).simulated()[rank]) for rank in range(world)]
    with FakeTensorMode():
        subject = subject_of(graphs, trainable)
        values, found = judged(subject)
        taken = needed(subject.graph.graph)
        left_out = {n: without(n, subject, values, found) for n in found if is_collective(n.target) and n in taken}
    counted = {n: j for n, j in found.items() if n.target is not operator.getitem and (tensors_in(j.value) or j.fault)}
    return Verdict(
        Counter(j.level for j in counted.values()),
        [f"{n.format_node()}: {j.fault}" for n, j in found.items() if j.fault],
        Counter(fault.partition(":")[0] for fault in left_out.values() if fault),
        [f"{n.format_node()}, {n.meta.get('note', '')}" for n, fault in left_out.items() if not fault],
        Counter((j.level, str(n.target), j.why) for n, j in counted.items() if j.level != BY_DIM),
        time.perf_counter() - start,
    )


def needed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes on which more depends than random numbers that nobody takes: those are drawn all the same, since the
    next ones depend on them."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if found.intersection(node.users) or not (node.users or draws(node)):
            found.add(node)
    return found


def draws(node: fx.Node) -> bool:
    """Whether an op takes random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


# --- models ----------------------------------------------------------------------------------------------------------


def of_case(name: str, plan: str, world: int) -> Verdict:
    """One of the tests' models."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    made = capture(model, case.inputs(), case.kwargs).plan({} if plan == "auto" else case.plan, world)
    return verdict(model, made.program, world)


def of_architecture(kind: str, world: int) -> Verdict:
    """One of Hugging Face's, in a process of its own."""
    from zoo import built

    model, args, kwargs = built(kind)
    with mesh(world):
        return verdict(model, capture(model, args, kwargs).plan({}, world).program, world)


def cases(given: argparse.Namespace) -> Iterator[tuple[str, Verdict | str]]:
    """The tests' models, each under two plans."""
    with mesh(given.ranks):
        for name, plan in itertools.product(given.models or CASES, ("own", "auto")):
            yield f"{name}, {plan} plan", of_case(name, plan, given.ranks)


def architectures(given: argparse.Namespace) -> Iterator[tuple[str, Verdict | str]]:
    """(model type, verdict or the reason why there is none)."""
    from zoo import PARTS

    kinds = PARTS["Hugging Face transformers"][0]
    run = partial(of_architecture, world=given.ranks)
    for kind, found, _ in in_processes(run, given.models or kinds, given.limit, given.jobs):
        yield kind, found


# --- the table -------------------------------------------------------------------------------------------------------

HEAD = f"{'':36} {'nodes':>6} {'judged':>7} {BY_TYPE:>10} {BY_DECLARATION:>9} {'faults':>7}   left out, seen   judging"


def row(name: str, v: Verdict) -> str:
    """A line of the table."""
    nodes, declared = v.levels.total(), v.levels[BY_DECLARATION]
    seen = f"{v.seen.total():4} of {v.seen.total() + len(v.unseen)}"
    counts = f"{nodes:6} {nodes - declared:7} {v.levels[BY_TYPE]:10} {declared:9} {len(v.faults):7}"
    return f"{name:36} {counts}   {seen:14} {v.seconds:7.1f} s"


def details(v: Verdict, *, verbose: bool) -> Iterator[str]:
    """What a line of the table counts."""
    yield from (f"fault: {fault}" for fault in v.faults)
    yield from (f"left out, not seen: {node}" for node in v.unseen)
    if verbose:
        yield from (f"{count:4} {' '.join(key)}" for key, count in v.reasons.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", action="store_true", help="Hugging Face's architectures in place of the tests' models")
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one architecture")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--verbose", action="store_true", help="list what is judged by type only, or declared")
    given = parser.parse_args()
    logging.disable()
    warnings.filterwarnings("ignore")
    total, graphs, skipped, duals = Verdict(), 0, 0, wrong_duals()
    print(*(f"fault: {fault}\n" for fault in duals), HEAD, sep="", flush=True)
    for name, found in (architectures if given.zoo else cases)(given):
        if isinstance(found, str):
            skipped += 1
            print(f"{name:36} no graph: {found[:200]}", flush=True)
            continue
        total, graphs = total + found, graphs + 1
        print(
            row(name, found), *(f"    {text}" for text in details(found, verbose=given.verbose)), sep="\n", flush=True
        )
    for (level, op, why), count in total.reasons.most_common():
        if level == BY_DECLARATION:
            print(f"declared {count:5} {op}: {DECLARED[why]}")
    print("left out, seen by:", ", ".join(f"{kind} {count}" for kind, count in total.seen.most_common()))
    print(row(f"{graphs} graphs ({skipped} without)", total))
    sys.exit(bool(duals or total.faults or total.unseen))


if __name__ == "__main__":
    main()
