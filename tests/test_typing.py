"""Type checkers report typos in public names and in words from closed sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

RIGHT = """
import torch
import torchshard as ts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel

model, x = nn.Linear(4, 4), torch.randn(2, 4)
ts.plan(model, {"": "column"}, (x,), mesh=2, objective=ts.Objective(split="all", machine="cpu-gloo"))
ts.plan(model, {}, (x,), mesh={"dp": (2, "shard"), "tp": 4}, objective={"split": "all"})
ts.plan(model, "auto", ts.DecodeStep(batch=2, length=8), mesh={"dp": (2, "replicate")}, objective={"mode": "infer"})
ts.shard(model, {"": ColwiseParallel()})
ts.shard(model, {}, (x,), mesh="shard", inputs="global")
ts.shard(model, {}, (x,), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
ts.shard(model, {}, (x,), mesh=(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), {"dp": "shard"}))
ts.from_pretrained("folder", "auto", (x,), mesh=2, dtype="float32", train=True)
ts.distributed.init_process_group()
print(ts.explain(ts.plan(model, mesh=2), level="node"))
"""
WRONG = {
    "ts.nope": 'has no attribute "nope"',
    'ts.plan(model, mesh=2, objective=ts.Objective(split="batch"))': '"split"',
    'ts.plan(model, mesh=2, objective=ts.Objective(machine="h100"))': '"machine"',
    'ts.plan(model, mesh={"dp": (2, "slices"), "tp": 2})': "Dict entry 0",
    'ts.shard(model, mesh="slices")': '"mesh"',
    'ts.plan(model, {"": "colum"}, mesh=2)': "Dict entry 0",
    "ts.plan(model, world_size=2)": '"world_size"',
    'ts.from_pretrained("folder", mesh=2, dtyp="float32")': '"dtyp"',
    'ts.explain(ts.plan(model, mesh=2), level="nodes")': '"level"',
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
