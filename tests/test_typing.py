"""Type checkers report typos in public names and in words from closed sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

RIGHT = """
import torch
import torchshard as ts
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

model, x = nn.Linear(4, 4), torch.randn(2, 4)
ts.plan(model, {"": "column"}, world_size=2, example_inputs=(x,), axes="all", machine="cpu-gloo")
ts.shard(model, {"": ColwiseParallel()})
ts.distributed.init_process_group()
print(ts.explain(ts.plan(model, world_size=2), level="node"))
"""
WRONG = {
    "ts.nope": 'has no attribute "nope"',
    'ts.plan(model, world_size=2, axes="batch")': '"axes"',
    'ts.plan(model, world_size=2, machine="h100")': '"machine"',
    'ts.plan(model, {"": "colum"}, world_size=2)': "Dict entry 0",
    'ts.explain(ts.plan(model, world_size=2), level="nodes")': '"level"',
    "ts.distributed.nope": 'has no attribute "nope"',
}


@pytest.mark.nightly
def test_typos_are_type_errors(tmp_path: Path) -> None:
    file, lines = tmp_path / "user.py", RIGHT.splitlines()
    file.write_text("\n".join([*lines, *WRONG]) + "\n")
    text, _, _ = api.run(["--config-file", str(Path(__file__).parents[1] / "pyproject.toml"), str(file)])
    errors = {int(line.split(":")[1]): line for line in text.splitlines() if ": error:" in line}
    assert errors.keys() == {len(lines) + 1 + i for i in range(len(WRONG))}, text
    for line, expected in zip(sorted(errors), WRONG.values(), strict=True):
        assert expected in errors[line], errors[line]
