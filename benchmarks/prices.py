"""Are the planner's prices true? Predicted and measured times of a training step under several plans, on two ranks.

A stack of GPT blocks (`step_time.py`) is sharded under each plan and trained in turn, round by round; `measure_machine`
measures the machine before (or `--machine` names one), and its prediction for each plan stands beside the median.

    auto            the plan that planning finds by itself, which splits the weights
    fast            the same with so much `memory` that anything fits: the fastest, whatever is split
    Megatron        attention and MLP, column then row
    MLP only        of these the MLP
    column only     each linear layer by its outputs, which are gathered
    whole           nothing is split

    rank corr.      Spearman's, between predicted and measured times of the plans that differ
    auto / best     the time of "auto", and of "fast", over the fastest plan's, round by round: median and quartiles

    python benchmarks/prices.py --widths 128 256 512 1024 --seconds 40
    python benchmarks/prices.py --backend gloo
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from backends import begin
from scipy.stats import spearmanr
from step_time import BATCH, BLOCKS, COLUMN, PLAN, ROW, SEQUENCE, Block, slowest, step, timed
from torch import nn

import torchshard as ts

MLP = {name: style for name, style in PLAN.items() if name in ("*.up", "*.down")}
WHOLE = {f"*.{name}": "replicate" for name in (*COLUMN, *ROW)}
PLANS: dict[str, Any] = {
    "auto": "auto",
    "fast": "auto",
    "Megatron": PLAN,
    "MLP only": WHOLE | MLP,
    "column only": dict.fromkeys(PLAN, "column"),
    "whole": WHOLE,
}
ENOUGH = "1TiB"
"""Memory that anything fits."""
RANKS, WARM_UP_ROUNDS = 2, 2


def measure(width: int, seconds: float, machine: ts.Machine) -> dict[str, Any]:
    """Predicted and measured seconds of each plan, of one width."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
    x, target = torch.randn(BATCH, SEQUENCE, width), torch.randn(BATCH, SEQUENCE, width)
    memory = {"fast": ENOUGH}
    models = {
        name: ts.shard(model, plan, (x,), objective={"machine": machine, "memory": memory.get(name)})
        for name, plan in PLANS.items()
    }
    runs = {name: partial(step, sharded, x, target) for name, sharded in models.items()}
    one_round = lambda: [timed(runs[name], models[name]) for name in PLANS]  # noqa: E731
    warm = slowest([one_round() for _ in range(WARM_UP_ROUNDS)])
    rounds = max(5, int(seconds / sum(warm[-1])))
    plans = {name: sharded.plan for name, sharded in models.items()}
    return {
        "width": width,
        "machine": repr(machine),
        "predicted": {name: plan.costs.seconds for name, plan in plans.items()},
        "choices": {name: plan.to_json().partition('"costs"')[0] for name, plan in plans.items()},
        "rounds": slowest([one_round() for _ in range(rounds)]),
    }


def rank_main(options: argparse.Namespace) -> list[dict[str, Any]]:
    begin(options.backend)
    machine = ts.MACHINES[options.machine] if options.machine else ts.measure_machine()
    return [measure(width, options.seconds, machine) for width in options.widths]


# --- the table -------------------------------------------------------------------------------------------------------


def shown(result: dict[str, Any]) -> list[str]:
    """The lines of one width."""
    medians = dict(zip(PLANS, map(statistics.median, zip(*result["rounds"], strict=True)), strict=True))
    distinct = {text: name for name, text in reversed(result["choices"].items())}.values()
    lines = [f"width {result['width']}, {len(result['rounds'])} rounds"]
    for name in PLANS:
        same = next(n for n in PLANS if result["choices"][n] == result["choices"][name])
        note = f"   the plan of {same}" if same != name else ""
        lines.append(f"  {name:12} predicted {result['predicted'][name] * 1e3:8.2f} ms, measured "
                     f"{medians[name] * 1e3:8.2f} ms{note}")  # fmt: skip
    found = spearmanr([result["predicted"][n] for n in distinct], [medians[n] for n in distinct]).statistic
    best = min(medians, key=lambda name: medians[name])
    ratios = [f"{name} / best {quartiles_of(result, name, best)}" for name in ("auto", "fast")]
    lines.append(f"  rank corr. {found:.2f} of {len(distinct)} plans; best: {best}; {', '.join(ratios)}")
    return lines


def quartiles_of(result: dict[str, Any], name: str, best: str) -> str:
    """A plan's time over another's, round by round."""
    a, b = (list(PLANS).index(n) for n in (name, best))
    if a == b or result["choices"][name] == result["choices"][best]:
        return "1 (it is that plan)"
    low, middle, high = statistics.quantiles([times[a] / times[b] for times in result["rounds"]], n=4)
    return f"{middle:.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--seconds", type=float, default=40.0, help="of timed rounds per width")
    parser.add_argument("--machine", choices=ts.MACHINES, help="in place of the measured one")
    parser.add_argument("--backend", default=None, help="of the ranks; by default memory, as torchshard chooses")
    parser.add_argument("--json", type=Path, help="write all rounds to this file")
    options = parser.parse_args()
    results = ts.distributed.launch(rank_main, RANKS, (options,))[0]
    print(f"{RANKS} ranks, 1 thread each; {BLOCKS} blocks, {BATCH} x {SEQUENCE}, float32")
    print(results[0]["machine"])
    for result in results:
        print(*shown(result), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
