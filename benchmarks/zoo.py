"""Models with no annotation: is what `ts.shard(model, "auto")` computes exact, and how much of it is split?

Of each architecture of transformers a tiny one (two layers, width 64, random weights), and models of other libraries
(others.py), go through `ts.check` in float64, each in a process of its own with a time limit: outputs and every
parameter gradient beside the unsharded model's, at a relative 1e-10.

    exact      they are equal, at all numbers of ranks
    refused    a typed error says why the model can't be sharded
    wrong      they differ
    failed     anything else: an error that is not ours, or no end within the limit
    not built  the library itself does not build or run the tiny model

    python benchmarks/zoo.py --json zoo.json --write docs/models.md
    python benchmarks/zoo.py --models llama "timm convnext_atto" --ranks 2 3
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import architectures
import others
import settings
import torch
import transformers
from alone import in_processes
from architectures import OTHERS, Made
from torch.utils._pytree import tree_map_only
from transformers.models.auto import modeling_auto

import torchshard as ts
from torchshard.capture.facts import ModelFacts
from torchshard.checking.check import check_program
from torchshard.checking.processes import check_processes
from torchshard.compiler.constraints import read_constraints
from torchshard.compiler.prepare import prepared
from torchshard.compiler.program import planned
from torchshard.core.layouts import I
from torchshard.core.mesh import Mesh, MeshAxis
from torchshard.plans.objective import read_aim


def built(kind: str) -> Made:
    """A tiny model with a call of it."""
    torch.manual_seed(0)
    if kind in settings.MODELS:
        return settings.MODELS[kind]()
    if kind in others.MODELS:
        model, args, kwargs = others.MODELS[kind]()
        return model.train(), args, kwargs
    return architectures.built(kind)


# --- one model -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What became of one model."""

    kind: str
    status: str
    split: dict[int, float] = dataclasses.field(default_factory=dict)
    """Ranks -> the share of the parameters' bytes that is split."""
    why: str = ""
    error: float = 0.0
    """The largest, relative to the largest value of its tensor."""
    seconds: float = 0.0


def tried(kind: str, ranks: list[int]) -> Result:
    """Builds, shards and checks."""
    setting = kind.rpartition(", ")[2]
    with settings.AROUND.get(setting, contextlib.nullcontext)():
        return _tried(kind, ranks, (None,) if setting in settings.AS_IT_IS else DTYPES)


DTYPES = (torch.float64, torch.float32)
"""Some models make tensors of float32 whatever they are cast to."""


def _tried(kind: str, ranks: list[int], dtypes: Sequence[torch.dtype | None]) -> Result:
    for dtype in dtypes:
        try:
            model, args, kwargs = built(kind)
            if dtype is not None:
                args, kwargs = tree_map_only(torch.Tensor, partial(_as, dtype=dtype), (args, kwargs))
                model.to(dtype)
            model(*args, **kwargs)
            break
        except Exception as error:
            why = " ".join(str(error).split())[:400]
    else:
        return Result(kind, "not built", why=why)
    split, error = dict[int, float](), 0.0
    try:
        captured = prepared(model, args, kwargs)
        for world in ranks:
            constraints = read_constraints(ModelFacts.of(model), {}, Mesh((MeshAxis(world),)))
            made = planned(captured, model, constraints)
            split[world] = split_share(model, made.plan)
            report = check_program(model, made, made.graph, args, kwargs, by_graphs=True)
            error = max(error, report.worst.error)
            if not report.ok:
                worst = report.worst
                text = f"{world} ranks: {worst.kind} {worst.name} {worst.error:.1e} {report.diverges_at}"
                return Result(kind, "wrong", split, text)
    except ts.ShardError as refusal:
        return Result(kind, "refused", split, " ".join(f"{type(refusal).__name__}: {refusal}".split())[:400])
    return Result(kind, "exact", split, error=error)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def on_processes(kind: str, world: int) -> str:
    """'exact', or what differs, on processes that send through gloo."""
    report = check_processes(built, (kind,), {}, world, read_aim({"machine": "cpu-gloo"}))
    worst = report.worst
    return "exact" if report.ok else f"wrong: {worst.kind} {worst.name} {worst.error:.1e}"


def split_share(model: torch.nn.Module, plan: ts.Plan) -> float:
    """The part of the parameters' bytes that lies in slices."""
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    return sum(size for name, size in sizes.items() if plan.parameters.get(name, I) != I) / max(sum(sizes.values()), 1)


# --- the page --------------------------------------------------------------------------------------------------------

PAGE = """# Models

Models with no annotation, each tiny and with random weights, through `ts.check` at {ranks} ranks: outputs and every
parameter gradient beside the unsharded model's, in float64, at a relative 1e-10 (1e-5 where the model itself computes
in float32). To regenerate this page, in about two hours on two cores: `make sweep`.

On real ranks, processes that send through gloo (`--processes 2`): {processes}.
"""
PART = """
## {title}

{counts}

Of the exact ones {split} have at least 80 % of their parameters' bytes split at {most} ranks, and the largest error of
{close} is below 1e-10. {note}

| model | result | split at {ranks} ranks | |
|---|---|---|---|
"""
SECTION = "## Generation"
"""The title of what `generation.py` adds to the page."""
PARTS = {
    "Hugging Face transformers": (
        [*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(f"{kind} (other)" for kind in OTHERS)],
        f"Architectures of transformers {transformers.__version__}, two layers of width 64; what is tried as something "
        "else than a causal language model is marked (other).",
    ),
    "Other libraries": (
        [*others.MODELS],
        "In train mode, with their dropout and stochastic depth.",
    ),
    "Settings of Hugging Face's models": (
        [*settings.MODELS],
        "As people set them up; those in bfloat16 and in autocast are compared as they are and widened.",
    ),
}
"""Title -> the models, and a note."""


def page(results: dict[str, dict[str, Any]], ranks: list[int]) -> str:
    """All results as Markdown."""
    tried_on = ", ".join(f"{r['kind']} on {r['processes']}" for r in results.values() if "processes" in r)
    text = PAGE.format(ranks=" and ".join(map(str, ranks)), processes=tried_on or "none tried")
    found = {title: [results[kind] for kind in kinds if kind in results] for title, (kinds, _) in PARTS.items()}
    return text + "".join(_part(title, rows, ranks) for title, rows in found.items() if rows)


def _part(title: str, results: list[dict[str, Any]], ranks: list[int]) -> str:
    counts = Counter(result["status"] for result in results)
    exact = [result for result in results if result["status"] == "exact"]
    split = sum(list(result["split"].values())[-1] >= 0.8 for result in exact)
    rows = []
    for r in sorted(results, key=lambda r: (STATUSES.index(r["status"]), r["kind"])):
        why = f"{r['error']:.0e}" if r["status"] == "exact" else shown(r["why"])
        rows.append(f"| {r['kind']} | {r['status']} | {' '.join(f'{s:.0%}' for s in r['split'].values())} | {why} |")
    return PART.format(
        title=title,
        note=PARTS[title][1],
        ranks=" and ".join(map(str, ranks)),
        most=max(ranks),
        split=split,
        close=sum(result["error"] < 1e-10 for result in exact),
        counts=", ".join(f"{counts[status]} {status}" for status in STATUSES),
    ) + "\n".join([*rows, ""])


SAMPLE = [
    "llama", "gpt2", "mixtral", "qwen3", "gemma2", "mamba", "bert (other)", "t5 (other)", "vit (other)",
    "whisper (other)", "resnet (other)",
]  # fmt: skip
"""Models that are tried on real ranks too."""


def shown(why: str) -> str:
    """A reason without the folders of this machine."""
    return re.sub(r"\S*/site-packages/", "", why).replace("|", "\\|")[:240]


STATUSES = ("exact", "refused", "failed", "wrong", "not built")


# --- all of them -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--part", default="", help=f"a part of the title of one of {', '.join(PARTS)}")
    parser.add_argument("--processes", type=int, metavar="N", help="a sample again, on so many real ranks")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for one model")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="results are written here; those that are there already are kept")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a page about all results")
    given = parser.parse_args()
    kinds = given.models or [kind for title, (kinds, _) in PARTS.items() for kind in kinds if given.part in title]
    known = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    todo = [kind for kind in kinds if given.models or kind not in known]
    for kind, found, seconds in in_processes(partial(tried, ranks=given.ranks), todo, given.limit, given.jobs):
        result = found if isinstance(found, Result) else Result(kind, "failed", why=found)
        known[kind] = dataclasses.asdict(result) | {"seconds": seconds}
        split = " ".join(f"{share:.0%}" for share in result.split.values())
        print(f"{kind:28} {result.status:10} {split:10} {seconds:6.1f} s  {result.why[:300]}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(known, indent=1))
    if given.processes:
        for kind in given.models or SAMPLE:
            known[kind]["processes"] = f"{given.processes}: {on_processes(kind, given.processes)}"
            print(f"{kind:28} on real ranks, {known[kind]['processes']}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(known, indent=1))
    if given.write:
        earlier = given.write.read_text() if given.write.exists() else ""
        generation = "".join(earlier.partition(f"\n{SECTION}")[1:])
        given.write.write_text(page({kind: known[kind] for kind in kinds}, given.ranks) + generation)
    print(Counter(known[kind]["status"] for kind in kinds))


if __name__ == "__main__":
    main()
