"""Graphs that torch.compile compiles: by an objective, by `model.compile()`, and by torch.compile around the model."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree

import torchshard as ts
from tests.helpers import refused, refused_input
from tests.models import CASES
from torchshard.testing import kept_graphs, largest, run_ranks, split

EAGER = {"backend": "eager"}
ALL = [name for name in CASES if name != "recurrent"]
TRAINED = [
    (2, ["fused_gqa", "dense_moe", "writes"]),
    (3, ["mlp_uneven", "conv_columns"]),
    *(pytest.param(world, ALL, marks=pytest.mark.nightly) for world in (2, 3)),
]
"""The number of ranks, and the models that are trained on them."""
HAS_COMPILER = shutil.which("g++") is not None or shutil.which("clang++") is not None


class Counting:
    """A backend that records the ops of the graphs that it compiles."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self.graphs.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        return graph


def _tensors(value: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(vars(value) if dataclasses.is_dataclass(value) else value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _gradients(model: nn.Module, call: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[list[Tensor], Any]:
    """The floating-point results of a call, and the gradients of their mean squares."""
    torch.manual_seed(3)
    model.zero_grad()
    made = [result for result in _tensors(call(*inputs)) if result.is_floating_point()]
    sum(result.square().mean() for result in made).backward()  # type: ignore[union-attr]
    return [result.detach() for result in made], {n: p.grad for n, p in model.named_parameters()}


def _difference(
    model: nn.Module, sharded: ts.ShardedModule, call: Callable[..., Any], inputs: tuple[Any, ...]
) -> float:
    """The largest difference of results and gradients between the unsharded model and calls of the sharded one."""
    expected, whole = _gradients(model, model, inputs)
    made, parts = _gradients(sharded, call, inputs)
    pairs = [*zip(expected, made, strict=True)]
    for name, gradient in parts.items():
        assert (gradient is None) == (whole[name] is None)
        if gradient is not None:
            layout = sharded.layouts[name]
            own = split(whole[name], layout, ts.distributed.get_rank(), ts.distributed.get_group_size())
            pairs.append((own, gradient))
    return largest(*(float((a - b).abs().max()) for a, b in pairs if a.numel()))


def _case(name: str) -> tuple[nn.Module, Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.build().double()
    return model, case.plan, tuple(x.detach().double() if x.is_floating_point() else x for x in case.inputs())


def _mlp() -> tuple[nn.Module, dict[str, str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 6))
    return model.double(), {"0": "column", "3": "row"}


def _trained(rank: int, names: list[str]) -> dict[str, list[float]]:
    ts.distributed.init_process_group()
    found = {}
    for name in names:
        model, plan, inputs = _case(name)
        sharded = ts.shard(model, plan, objective={"compile": {"backend": "aot_eager"}})
        found[name] = [_difference(model, sharded, sharded, inputs) for _ in range(2)]
        model.eval(), sharded.eval()
        with torch.no_grad():
            expected, made = _tensors(model(*inputs)), _tensors(sharded(*inputs))
        found[name] += [float((a - b).abs().max()) for a, b in zip(expected, made, strict=True)]
        assert any(kept.has_step_graphs for kept in kept_graphs(sharded))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "names"), TRAINED)
def test_gradients_are_the_unsharded_models(world: int, names: list[str]) -> None:
    for found in run_ranks(_trained, world, names, seconds=900):
        assert largest(*(largest(*differences) for differences in found.values())) < 1e-12, found


def _doubling(run: Callable[[fx.GraphModule], bool]) -> Callable[[fx.GraphModule], bool]:
    """`lower`, with doubled results of its collectives."""

    def wrong(graph: fx.GraphModule) -> bool:
        changed = run(graph)
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default):
            with graph.graph.inserting_after(node):
                doubled = graph.graph.call_function(torch.ops.aten.mul.Scalar, (node, 2))
            doubled.meta = dict(node.meta)
            node.replace_all_uses_with(doubled)
            doubled.args = (node, 2)
        return changed

    return wrong


def _wrongly_lowered(rank: int) -> float:
    ts.distributed.init_process_group()
    compilation = sys.modules["torchshard.runtime.compilation"]
    pytest.MonkeyPatch().setattr(compilation, "lower", _doubling(compilation.lower))
    model, plan = _mlp()
    sharded = ts.shard(model, plan, objective={"compile": EAGER})
    return _difference(model, sharded, sharded, (torch.randn(3, 6, dtype=torch.float64),))


@pytest.mark.nightly
def test_a_fault_in_lowering_is_seen() -> None:
    assert min(run_ranks(_wrongly_lowered, 2)) > 1e-3


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_COMPILER, reason="Inductor needs a C++ compiler")
def test_inductor_draws_the_same_numbers() -> None:
    assert largest(*run_ranks(_with_inductor, 2)) < 1e-12


def _with_inductor(rank: int) -> float:
    ts.distributed.init_process_group()
    model, plan = _mlp()
    sharded = ts.shard(model, plan, objective={"compile": True})
    return _difference(model, sharded, sharded, (torch.randn(3, 6, dtype=torch.float64),))


WAYS: dict[str, Callable[[ts.ShardedModule, Any], Callable[..., Any]]] = {
    "model.compile()": lambda model, backend: (model.compile(backend=backend), model)[1],
    "torch.compile(model)": lambda model, backend: torch.compile(model, backend=backend),
    "a compiled function": lambda model, backend: torch.compile(lambda x: model(x * 1.0), backend=backend),
}


def _whole(rank: int) -> list[str]:
    ts.distributed.init_process_group()
    wrong = []
    for name, way in WAYS.items():
        model, plan = _mlp()
        backend = Counting()
        sharded = ts.shard(model, plan)
        call = way(sharded, backend)
        for batch in (4, 6, 9, 5):
            inputs = (torch.randn(batch, 6, dtype=torch.float64),)
            if _difference(model, sharded, call, inputs) > 1e-12:
                wrong.append(f"{name}: gradients of a batch of {batch}")
        sent = [[op for op in graph if "all_reduce" in op] for graph in backend.graphs]
        products = [sum(op.startswith("aten.") and "mm" in op for op in graph) for graph in backend.graphs]
        # forward and backward, with fixed and then with dynamic sizes
        if [len(found) for found, count in zip(sent, products, strict=True) if count] != [1, 0] * 2:
            wrong.append(f"{name}: {backend.graphs}")
        if sharded.captures != 1:
            wrong.append(f"{name}: captured {sharded.captures} times")
    return wrong


def test_each_graph_is_compiled_whole_for_any_batch() -> None:
    assert run_ranks(_whole, 2) == [[], []]


def _steps(train: Callable[[Tensor], Any], steps: int = 3) -> None:
    for seed in range(steps):
        torch.manual_seed(seed)
        train(torch.randn(4, 6, dtype=torch.float64))


def _whole_step(rank: int) -> dict[str, float]:
    ts.distributed.init_process_group()
    found = {}
    model, plan = _mlp()
    sharded = ts.shard(copy.deepcopy(model), plan)
    for each, compiled in ((model, False), (sharded, True)):
        optimizer = torch.optim.SGD(each.parameters(), 1e-1, momentum=0.9)

        def train(x: Tensor, each: nn.Module = each, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()

        _steps(train, 1)
        _steps(torch.compile(train, backend="aot_eager") if compiled else train)
        _steps(train, 1)
    states = [state["momentum_buffer"] for p, state in optimizer.state.items() if p.is_split]
    assert states and all(type(state).__name__ == "LocalSlice" for state in states)
    whole = sharded.full_state_dict()
    for name, parameter in model.named_parameters():
        found[name] = float((whole[name] - parameter.detach()).abs().max())
    return found


@pytest.mark.nightly
def test_a_training_step_is_compiled_with_its_optimizer() -> None:
    for found in run_ranks(_whole_step, 2):
        assert largest(*found.values()) < 1e-12, found


def _seen(rank: int) -> tuple[dict[str, int], tuple[int, int]]:
    ts.distributed.init_process_group()
    model, plan, inputs = _case("fused_gqa")
    sharded = ts.shard(model, plan, objective={"compile": EAGER})
    with CommDebugMode():  # this call captures a graph, without the mode's hooks on modules
        sharded(*inputs).sum().backward()
    with CommDebugMode() as seen:
        sharded(*inputs).sum().backward()
    return {str(op): count for op, count in seen.get_comm_counts().items()}, sharded.plan.costs.calls


@pytest.mark.nightly
def test_comm_debug_mode_sees_the_planned_collectives() -> None:
    for counts, (forward, backward) in run_ranks(_seen, 2):
        sent = [count for name, count in counts.items() if name.startswith("c10d_functional.")]
        assert sum(sent) == forward + backward, counts


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def _mistakes(rank: int) -> dict[str, bool]:
    ts.distributed.init_process_group()
    model, plan = _mlp()
    x, found = torch.ones(2, 6, dtype=torch.float64), {}
    for options, text in (
        ("yes", "invalid compile 'yes'"),
        ({"backend": "nope"}, "Invalid backend: 'nope'"),
        ({"backed": "eager"}, "unexpected keyword argument 'backed'"),
        ({"mode": "fast"}, "Unrecognized mode=fast"),
        ({"options": {"foo": 1}}, "Unexpected optimization option foo"),
    ):
        wrong: Any = options
        found[str(options)] = refused_input(lambda w=wrong: ts.shard(model, plan, objective={"compile": w}), text)
    once = torch.compile(copy.deepcopy(model), backend="eager")
    found["compiled before"] = refused_input(lambda: ts.shard(once, plan), '{"compile": True}')  # type: ignore[arg-type]
    one = ts.shard(model, plan, objective={"compile": EAGER if rank else False})
    text = "the ranks would compile the model with different options"
    found["on one rank"] = refused(lambda: one(x), text, ts.DistributedError)

    def fails(graph: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        raise ValueError("this backend can do nothing")

    broken = ts.shard(model, plan, objective={"compile": {"backend": fails}})
    found["a backend that fails"] = refused(lambda: broken(x), "this backend can do nothing", ts.CaptureError)
    plain = ts.shard(_Recurrent(), {"rnn": "column"}, objective={"compile": EAGER})  # its steps don't form a graph
    found["what a compiler does not know"] = bool(plain(torch.randn(2, 3, 4)).isfinite().all())
    none: Mapping[str, Any] = {"backend": fails, "disable": True}
    found["disabled"] = bool(ts.shard(model, plan, objective={"compile": none})(x).isfinite().all())
    return found


def test_mistakes_are_told() -> None:
    for found in run_ranks(_mistakes, 2):
        assert all(found.values()), found


class _Shifted(nn.Module):
    """A loss of the next tokens, with a dynamic number of labels that is computed from their values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        labels = nn.functional.pad(ids, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return nn.functional.cross_entropy(self.head(self.embed(ids)).view(-1, 12), labels)


def _of_parts(rank: int) -> list[float]:
    torch.manual_seed(0)
    model, ids = _Shifted().double(), torch.randint(0, 12, (4, 5))
    sharded = ts.shard(copy.deepcopy(model), {}, mesh="replicate", objective={"compile": {"backend": "aot_eager"}})
    losses = model(ids), sharded(ids[2 * rank : 2 * rank + 2])
    for loss in losses:
        loss.backward()
    pairs = zip(model.parameters(), sharded.parameters(), strict=True)
    return [float((p.grad - own.grad).abs().max()) for p, own in pairs] + [float((losses[0] - losses[1]).abs())]


@pytest.mark.nightly
def test_a_loss_over_parts_of_a_batch_is_compiled() -> None:
    for found in run_ranks(_of_parts, 2):
        assert largest(*found) < 1e-12, found
