"""Runs a rank on each of two hosts (network namespaces joined by a cable), as in docs/multi_node.md."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import torchshard as ts
import torchshard.distributed as tsd
from tests.test_examples import EXAMPLES, check_gpt
from torchshard.testing import largest, on_ranks, split

NAMESPACES = [
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"),
    *("bash", "-ec"),
]
HOSTS = """
mount -t tmpfs none /run
ip netns add one; ip netns add two
ip link add cable1 netns one type veth peer name cable2 netns two
for end in "one cable1 10.0.0.1" "two cable2 10.0.0.2"; do
    set -- $end
    ip -n $1 addr add $3/24 dev $2
    ip -n $1 link set $2 up
    ip -n $1 link set lo up
done
"""
RANKS = """
run() {
    GLOO_SOCKET_IFNAME=$2 OMP_NUM_THREADS=1 ip netns exec $1 "$PYTHON" -m torch.distributed.run \\
        --nnodes 2 --node-rank $3 --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 29500 $SCRIPT
}
run two cable2 1 & other=$!
run one cable1 0
wait $other
"""
SECONDS = 240


def _missing() -> str:
    """Returns why namespaces can't be created here; '' if they can."""
    tools = [tool for tool in ("unshare", "ip", "mount") if shutil.which(tool) is None]
    if tools:
        return f"there is no {tools[0]} here"
    made = subprocess.run([*NAMESPACES, HOSTS], capture_output=True, text=True, timeout=60)
    return "" if made.returncode == 0 else f"this process may not make them: {made.stderr.strip()}"


@pytest.mark.nightly
def test_two_hosts() -> None:
    reason = _missing()
    if reason:
        pytest.skip(f"two network namespaces stand for two hosts; {reason}")
    script = f"PYTHON={sys.executable}; SCRIPT='{EXAMPLES / 'train_gpt.py'} --steps 3'"
    command = [*NAMESPACES, f"{HOSTS}\n{script}\n{RANKS}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    check_gpt(done.stdout)


@on_ranks(4)
def test_data_parallel_across_model_parallel_groups(rank: int) -> None:
    """Two groups of two ranks, each with half of the batch, give the unsharded model's gradients."""
    tsd.init_process_group(group_size=2)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4), nn.LayerNorm(4)).double()
    x, y = torch.randn(2, 6, 4, dtype=torch.float64)
    mse_loss(whole(x), y).backward()
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    model = ts.shard(whole, {"0": "column", "2": "row"})
    replicas = DistributedDataParallel(model, process_group=tsd.get_data_parallel_group())
    mine = slice(3 * tsd.get_data_parallel_rank(), 3 * tsd.get_data_parallel_rank() + 3)
    for _ in range(2):
        replicas.zero_grad()
        mse_loss(replicas(x[mine]), y[mine]).backward()
    errors = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and grads[name] is not None
        errors.append((parameter.grad - split(grads[name], model.layouts[name], tsd.get_rank(), 2)).abs().max().item())
    assert tsd.get_rank() == rank % 2 and len(errors) == len(grads)
    assert largest(*errors) < 1e-10
