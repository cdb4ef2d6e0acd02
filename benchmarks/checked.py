"""What `ts.check` says of the tests' models in each floating dtype: all are exact, in each.

`benchmarks/mutants.py --check` runs it in a library that has been made wrong: a fault that float64 sees must be seen in
every dtype.

    python benchmarks/checked.py
    python benchmarks/checked.py --models gpt conv --ranks 2
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import torchshard as ts
from torchshard.capture import flatten
from torchshard.checking import in_dtype

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def verdict(case: Any, dtype: torch.dtype, world_size: int) -> str:
    """'exact', 'wrong' or 'raised'."""
    torch.manual_seed(0)
    model, args, kwargs = in_dtype(case.build(), flatten(case.inputs()).tensors, case.kwargs, dtype)
    try:
        report = ts.check(
            model, case.plan, world_size=world_size, example_inputs=args, example_kwargs=kwargs, dtype=None
        )
    except Exception as error:
        return f"raised {type(error).__name__}"
    return "exact" if report.ok else f"wrong {report.worst.kind} {report.worst.name} {report.worst.error:.0e}"


def main() -> None:
    from tests.models import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3])
    given = parser.parse_args()
    torch.set_num_threads(1)
    seen = Counter[str]()
    for name in given.models:
        for world_size in given.ranks:
            found = {str(dtype).removeprefix("torch."): verdict(CASES[name], dtype, world_size) for dtype in DTYPES}
            seen.update(dtype for dtype, text in found.items() if text != "exact")
            print(f"{name:24} {world_size} ranks  " + "  ".join(f"{d} {text}" for d, text in found.items()), flush=True)
    print(f"not exact: {dict(seen)}")
    sys.exit(bool(seen))


if __name__ == "__main__":
    main()
