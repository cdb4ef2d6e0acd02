"""How long kernels take: products by their shape, other ops by their bytes, collectives by ranks and hosts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torchshard as ts
from torchshard.core.mesh import MeshAxis
from torchshard.ir.graph import is_tensor_op, whole_choice
from torchshard.planner.costs import CostModel
from torchshard.planner.kernels import kernels_of, moved_bytes, note_fusion, product_seconds
from torchshard.planner.properties import Op
from torchshard.plans.machine import TILE, Transfer
from torchshard.testing import capture

PLAIN = ts.Machine("plain", flops=1e12)
TILED = dataclasses.replace(PLAIN, tiles=4)
SIDES = st.integers(1, 4000)


# --- products --------------------------------------------------------------------------------------------------------


@given(SIDES, SIDES, SIDES)
def test_no_shape_is_faster_than_the_rate_or_than_its_transpose(rows: int, columns: int, depth: int) -> None:
    ideal = 2 * rows * columns * depth / 1e12
    assert product_seconds(PLAIN, rows, columns, depth) == pytest.approx(ideal)
    found = product_seconds(TILED, rows, columns, depth)
    assert found >= ideal * (1 - 1e-12)
    assert found == pytest.approx(product_seconds(TILED, columns, rows, depth))


def test_full_waves_of_full_tiles_run_at_the_rate_and_one_tile_more_adds_a_wave() -> None:
    rows, columns = TILE[0] * 2, TILE[1] * 4
    full = product_seconds(TILED, rows, columns, 512)
    assert full == pytest.approx(2 * rows * columns * 512 / 1e12)
    more = product_seconds(TILED, TILE[0], TILE[1] * 9, 512)  # 9 tiles of the same size: three waves
    assert more == pytest.approx(full * 3 / 2)
    assert product_seconds(TILED, rows, columns, 512, batch=3) == pytest.approx(3 * full)


def test_few_columns_and_shallow_sums_are_slower() -> None:
    started = dataclasses.replace(TILED, start_up=512)
    assert product_seconds(started, 1024, 1024, 512) == pytest.approx(2 * product_seconds(TILED, 1024, 1024, 512))
    narrow, wide = (product_seconds(TILED, 1024, columns, 512) / columns for columns in (16, 128))
    assert narrow == pytest.approx(wide * math.sqrt(128 / 16))


def test_wide_numbers_have_a_rate_of_their_own() -> None:
    machine = dataclasses.replace(PLAIN, float32_flops=1e11)
    assert product_seconds(machine, 8, 8, 8, itemsize=4) == pytest.approx(10 * product_seconds(machine, 8, 8, 8))
    assert product_seconds(PLAIN, 8, 8, 8, itemsize=4) == product_seconds(PLAIN, 8, 8, 8)


# --- bytes -----------------------------------------------------------------------------------------------------------


class _Gated(nn.Module):
    """Two products, three ops between them, and a residual that passes by."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(x)
        return h + self.down(F.gelu(self.up(h)) * 2)


def _ops(model: nn.Module, *inputs: Tensor) -> dict[str, Op]:
    graph = capture(model, inputs).graph.graph
    note_fusion(graph)
    return {node.name: Op.of(node) for node in graph.nodes if is_tensor_op(node)}


def _bytes(op: Op, compiled: bool) -> tuple[float, float]:
    read, written = ([float(v.nbytes) for v in values] for values in (op.operands, op.results))
    return moved_bytes(op, read, written, compiled=compiled)


def test_an_eager_op_moves_its_operands_and_results_and_their_gradients() -> None:
    ops, size = _ops(_Gated(), torch.randn(4, 8, requires_grad=True)), 4 * 8 * 4
    assert _bytes(ops["relu"], False) == (2 * size, 3 * size)
    assert _bytes(ops["gelu"], False) == (2 * size, 3 * size)
    assert _bytes(ops["mul"], False) == (2 * size, 2 * size)  # by a number: linear, so backward needs no operand
    # relu's result has two users, and their gradients are added: each pays for half of that
    assert _bytes(ops["add"], False) == (3 * size, 1.5 * size)
    assert [kernels_of(ops[name], compiled=False) for name in ("relu", "mul", "add")] == [(1, 1), (1, 1), (1, 0)]


def test_ops_between_products_are_one_kernel() -> None:
    ops, size = _ops(_Gated(), torch.randn(4, 8, requires_grad=True)), 4 * 8 * 4
    groups = {name: op.node.meta.get("fused") for name, op in ops.items()}
    assert groups["gelu"] == groups["mul"] is not None and groups["add"] != groups["mul"] != groups["relu"]
    assert groups["up"] is None is groups["down"]
    moved = {name: _bytes(op, True) for name, op in ops.items()}
    near = lambda forward, backward: pytest.approx((forward * size, backward * size), rel=0.01)  # noqa: E731
    assert moved["gelu"] == near(1, 2)  # reads the product's result; in backward again, and writes its gradient
    assert moved["mul"] == near(1, 1)  # writes for the next product, and reads what comes back
    assert moved["add"] == near(1 + 2 + 1, 1 + 2)  # a product's result, and what relu wrote for it
    assert [kernels_of(ops[name], compiled=True) for name in ("gelu", "mul")] == [(0, 0), (1, 1)]


class _Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = F.gelu(x).chunk(2, -1)
        return a * b


def test_views_and_parts_belong_to_the_kernel_of_what_they_view() -> None:
    graph = capture(_Halves(), (torch.randn(4, 8),)).graph.graph
    note_fusion(graph)
    assert {node.meta.get("fused") for node in graph.nodes if node.op == "call_function" and is_tensor_op(node)} == {0}


def test_a_norm_computes_all_its_gradients_in_one_kernel() -> None:
    ops = _ops(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), torch.randn(32, 64))
    norm, size = next(op for op in ops.values() if "layer_norm" in str(op.node.target)), 32 * 64 * 4
    assert kernels_of(norm, compiled=False) == (1, 1)
    assert _bytes(norm, False) == pytest.approx((2 * size, 3 * size), rel=0.1)


class _Attends(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=self.causal)


def test_causal_attention_has_half_of_the_operations() -> None:
    costs, x = CostModel(PLAIN, MeshAxis(1)), torch.randn(2, 4, 8, 16)
    full, half = (
        sum(costs.flops(op, whole_choice(op.node)) for op in _ops(_Attends(causal), x).values())
        for causal in (False, True)
    )
    assert full == 2 * half == 2 * (2 * 2 * 4 * 8 * 8 * 16)  # two products


# --- collectives -----------------------------------------------------------------------------------------------------

NEAR = ts.Machine("near", link_bandwidth=1e9, latency=1e-6, launch=1e-5, domain=8, network_bandwidth=1e8,
                  network_latency=1e-5)  # fmt: skip
MEASURED = dataclasses.replace(
    NEAR, transfers=(("all_reduce", 2, 1e-5, 4e9), ("all_reduce", 8, 3e-5, 2e9), ("all_gather", 8, 2e-5, 1e9))
)


def test_measured_collectives_replace_rings_and_lie_between_their_neighbours() -> None:
    assert NEAR.begins("all_reduce", 8) == pytest.approx(1e-5 + 14e-6) and NEAR.begins(
        "all_gather", 8
    ) == pytest.approx(1e-5 + 7e-6)
    assert MEASURED.begins("all_reduce", 8) == 3e-5 and MEASURED.begins("all_reduce", 2) == 1e-5
    assert MEASURED.begins("all_reduce", 4) == pytest.approx(2e-5)
    assert MEASURED.sends("all_reduce", 2e9, 7e9, 8) == pytest.approx(1.0)
    assert MEASURED.begins("reduce_scatter", 8) == MEASURED.begins("all_gather", 8) == 2e-5
    assert MEASURED.begins("all_to_all", 8) == NEAR.begins("all_to_all", 8)
    assert MEASURED.begins("all_gather", 4) == NEAR.begins("all_gather", 4)  # outside of what was measured


@pytest.mark.parametrize("hosts", [2, 16])
def test_between_hosts_an_all_reduce_goes_up_a_tree_and_a_gather_around_a_ring(hosts: int) -> None:
    within = NEAR.begins("all_reduce", 8)
    assert NEAR.begins("all_reduce", 8 * hosts) == pytest.approx(within + 2 * math.log2(hosts) * 1e-5)
    within = NEAR.begins("all_gather", 8)
    assert NEAR.begins("all_gather", 8 * hosts) == pytest.approx(within + (hosts - 1) * 1e-5)
    assert NEAR.sends("all_gather", 1e8, 1e8, 8 * hosts) == pytest.approx(1.0)  # the network's bytes


@pytest.mark.parametrize(
    "given", [("all", 2, 1.0, 1.0), ("all_reduce", 0, 1.0, 1.0), ("all_reduce", 2, -1.0, 1.0), ("all_reduce", 2, 1.0)]
)
def test_other_transfers_are_refused(given: Any) -> None:
    with pytest.raises(ts.InputError, match="is no measured collective") as caught:
        ts.Machine("mine", transfers=(given,))
    assert "attempt" not in str(caught.value) and "all_gather" in str(caught.value)


# --- a step ----------------------------------------------------------------------------------------------------------


def test_a_step_has_an_optimizer_and_waits_for_its_host() -> None:
    model, x = nn.Linear(64, 64, bias=False), torch.randn(4, 64)

    def parts(machine: ts.Machine, model: nn.Module = model, x: Tensor = x, **more: Any) -> dict[str, float]:
        return ts.plan(model, {}, (x,), mesh=1, objective={"machine": machine, **more}).step_seconds

    machine = ts.Machine("m", memory_bandwidth=1e6)
    found, numbers = parts(machine), 64 * 64
    assert found["the optimizer"] == pytest.approx(
        numbers * (4 + 4 + 4 + 2 * 8) / 1e6
    )  # reads p, g, m, v; writes p, m, v
    assert found["waiting for the host"] == 0.0
    half = parts(machine, nn.Linear(64, 64, bias=False).bfloat16(), x.bfloat16())
    assert half["the optimizer"] == pytest.approx(numbers * (2 + 2 + 3 * 8) / 1e6)  # a copy in float32 too
    slow = parts(dataclasses.replace(machine, host_overhead=1.0))
    assert sum(slow.values()) == pytest.approx(
        found["the optimizer"] + 2.0, rel=0.05
    )  # two products of forward and backward
    assert parts(machine, mode="infer")["the optimizer"] == 0.0


def test_transfers_have_names() -> None:
    assert MEASURED.transfers[0] == Transfer("all_reduce", 2, 1e-5, 4e9) and MEASURED.transfers[0].ranks == 2
