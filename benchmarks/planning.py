"""Time and memory to capture, plan and rewrite a model on meta tensors, by the number of its layers.

The shapes are those of Llama 3 8B and 405B; each depth runs in a process of its own, with a peak memory of its own.
Of equal layers the first and the last are captured, as `ts.plan` does; with `--every-layer` all, as `ts.shard` does.

    python benchmarks/planning.py --layers 2 4 8 16 32 --model 8B --ranks 8
    python benchmarks/planning.py --layers 4 126 --model 405B
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
}
LAYERS = {"8B": 32, "405B": 126}


def build(model: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model in bfloat16 without memory, and a call of 2 x 2048 tokens."""
    config = transformers.LlamaConfig(
        **SHAPES[model], num_hidden_layers=layers, num_key_value_heads=8, vocab_size=128256, use_cache=False
    )
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return made, {"input_ids": torch.zeros(2, 2048, dtype=torch.long, device="meta")}


def measure(model: str, layers: int, ranks: int, *, every_layer: bool) -> dict[str, float]:
    """Seconds of each part, and the process' peak memory in bytes."""
    from torchshard.capture.facts import ModelFacts
    from torchshard.compiler import planning, prepare, program
    from torchshard.compiler.constraints import read_constraints
    from torchshard.core.mesh import Mesh, MeshAxis

    spent: dict[str, float] = {}

    def timed(name: str, module: Any, function: str) -> None:
        original = getattr(module, function)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

        setattr(module, function, run)

    timed("capture", prepare, "capture")
    timed("plan", planning, "plan_graph")
    timed("rewrite", program, "rewrite")
    made, kwargs = build(model, layers)
    start = time.perf_counter()
    constraints = read_constraints(ModelFacts.of(made), "auto", Mesh((MeshAxis(ranks),)))
    found = program.program(made, constraints, (), kwargs, repeating=not every_layer)
    spent["all"] = time.perf_counter() - start
    spent["collectives"] = float(len(found.plan.costs.collectives))
    spent["peak memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="8B")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--every-layer", action="store_true", help="capture every layer, as ts.shard does")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help="measure the first depth in this process, as JSON")
    given = parser.parse_args()
    if given.one:
        torch.set_num_threads(1)
        print(json.dumps(measure(given.model, given.layers[0], given.ranks, every_layer=given.every_layer)))
        return
    found = {}
    print(f"Llama 3 {given.model}, {given.ranks} ranks: seconds")
    print("layers   capture      plan   rewrite       all   collectives   peak memory")
    for layers in given.layers:
        command = [sys.executable, __file__, "--one", "--model", given.model, "--layers", str(layers)]
        command += ["--ranks", str(given.ranks), *(["--every-layer"] if given.every_layer else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = found[layers] = json.loads(done.stdout.splitlines()[-1])
        times = "  ".join(f"{row[name]:8.2f}" for name in ("capture", "plan", "rewrite", "all"))
        print(f"{layers:6}  {times}   {row['collectives']:11.0f}   {row['peak memory'] / 1e9:8.2f} GB", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
