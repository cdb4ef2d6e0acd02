"""Training on a batch that is split across ranks, compared with the full batch; global inputs; and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchshard as ts
from tests.helpers import nightly, refused, refused_input
from tests.test_batches import KINDS, PART, WAYS, Sizes, _batch, _model, _model_of, _own, _train_both
from torchshard.testing import (
    gradient_error,
    largest,
    on_ranks,
    run_ranks,
)


def _trained(rank: int, data: Any, kinds: tuple[str, ...]) -> dict[str, float]:
    """Kind of training -> the largest difference of a parameter after steps of AdamW."""
    world, worst = torch.distributed.get_world_size(), {}
    for kind in kinds:
        model = _model_of(kind)
        sharded = ts.shard(copy.deepcopy(model), {}, _own(_batch(world), rank), mesh=data)
        worst[kind], _ = _train_both(kind, model, sharded, world, rank, (12, 12, 24, 7))
    return worst


@nightly("2-replicate")
@pytest.mark.parametrize("data", [*WAYS, pytest.param("shard_grad_op", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        pytest.param(2, ("outside", "accumulated"), id="2"),
        pytest.param(2, ("inside", "frozen"), marks=pytest.mark.nightly, id="2, others"),
        pytest.param(3, KINDS, marks=pytest.mark.nightly, id="3"),
    ],
)
def test_training_is_that_on_the_whole_batch(world: int, kinds: tuple[str, ...], data: Any) -> None:
    for worst in run_ranks(_trained, world, data, kinds):
        assert largest(*worst.values()) < 1e-10, worst


@on_ranks(2)
def test_a_loss_outside_is_averaged_as_ddp_does(rank: int) -> None:
    """Gradients of a loss outside of the model equal DistributedDataParallel's."""
    model, own = _model(p=0.0), _own(_batch(2), rank)
    sharded = ts.shard(copy.deepcopy(model), {}, own, mesh="replicate")
    wrapped = DistributedDataParallel(model)
    for m in (wrapped, sharded):
        m(*own)[1].square().mean().backward()
    assert gradient_error(sharded, model) < 1e-12


def _whole(rank: int, mesh: Any) -> dict[str, float]:
    """Case -> the largest difference of results and gradients from the unsharded model, with global inputs."""
    worst = {}
    cases: dict[str, tuple[nn.Module, list[tuple[Tensor, ...]]]] = {
        "GPT": (_model(), [_batch(4), _batch(4, 7), tuple(t[:8] for t in _batch(8))]),
        "sizes": (Sizes().double(), [(torch.randn(8, 5, 4).double(), torch.randn(5, 4).double()) for _ in range(3)]),
        # the mask has the row count of a rank's part of the batch, but is not batched
        "rows": (Sizes().double(), [(torch.randn(8, 4, 4).double(), torch.randn(4, 4).double())] * 2),
    }
    for name, (model, batches) in cases.items():
        sharded = ts.shard(copy.deepcopy(model), {}, batches[0], mesh=mesh, inputs="global")
        for batch in batches:
            losses, inputs = [], [[t.clone().requires_grad_(t.is_floating_point()) for t in batch] for _ in range(2)]
            for m, given in zip((model, sharded), inputs, strict=True):
                m.zero_grad()
                torch.manual_seed(3)
                results = m(*given)
                losses.append(torch.stack([(r.square() * (i + 1)).mean() for i, r in enumerate(results)]))
                losses[-1].sum().backward()
                losses[-1] = torch.cat([losses[-1].detach(), *(r.detach().flatten() for r in results)])
            found = [(losses[0] - losses[1]).abs().max().item()]
            found += [(a.grad - b.grad).abs().max().item() for a, b in zip(*inputs, strict=True) if a.grad is not None]
            worst[name] = largest(worst.get(name, 0.0), *found, gradient_error(sharded, model))
    norms = []
    model, ((x, mask), *_) = cases["sizes"]
    for m in (model, ts.shard(copy.deepcopy(model), {}, (x, mask), mesh=mesh, inputs="global")):
        (given,) = inputs_ = (x.clone().requires_grad_(),)
        (gradient,) = torch.autograd.grad(m(given, mask)[2].pow(3).sum(), inputs_, create_graph=True)
        norms.append(torch.autograd.grad(gradient.square().sum(), inputs_)[0])
    worst["twice"] = ((norms[0] - norms[1]).abs().max() / norms[0].abs().max()).item()
    ids, labels = _batch(4)
    told = "the ranks were called with inputs of the same shape but different values"
    gpt = ts.shard(_model(), {}, (ids, labels), mesh=mesh, inputs="global")
    worst["other batches"] = 1.0 - refused_input(lambda: gpt(ids.roll(rank, 0), labels), told)
    worst["not divided"] = 1.0 - refused_input(lambda: gpt(ids[:5], labels[:5]), "a batch of 5 can't be divided among")
    return worst


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world", "mesh"),
    [
        (2, "shard"),
        (4, {"dp": 2, "tp": 2}),
        *(pytest.param(4, mesh, marks=pytest.mark.nightly) for mesh in ("replicate", {"dp": (2, "shard"), "tp": 2})),
    ],
)
def test_ranks_may_pass_whole_batches(world: int, mesh: Any) -> None:
    for worst in run_ranks(_whole, world, mesh, seconds=300):
        assert largest(*worst.values()) < 1e-10, worst


def test_other_inputs_than_local_and_global_are_refused() -> None:
    with pytest.raises(ts.InputError, match="'all' is no kind of inputs"):
        ts.shard(_model(), {}, _batch(2), mesh="replicate", inputs="all")  # type: ignore[arg-type]


def _reading(target: Tensor) -> Any:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(super().forward(x), target[:, 0])

    return ts.shard(Model(4, 97), {}, mesh="replicate")


def _wrong(rank: int) -> list[bool]:
    model, own = _model(), _own(_batch(2), rank)
    sharded = ts.shard(copy.deepcopy(model), {}, own, mesh="replicate")
    return [
        refused_input(lambda: sharded(*(t[: PART - rank] for t in own)), "the ranks were called with different"),
        refused_input(lambda: sharded(*(t[:0] for t in own)), "a rank's part of the batch is empty"),
        refused(
            lambda: _reading(own[0])(torch.ones(PART, 4)), "target is this rank's part of a batch, pass it as an arg"
        ),
    ]


def test_parts_that_differ_are_refused_on_every_rank() -> None:
    for found in run_ranks(_wrong, 2):
        assert all(found), found


class Scaled(nn.Linear):
    """Has an argument of one element, which is not batched."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (super().forward(x) * scale.sum()).square().mean()


class Placed(nn.Linear):
    """Adds one value to each sample, and drops the dims of size 1."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.place = nn.Parameter(torch.randn(1, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x[:, None] + self.place).relu()).squeeze().logsumexp(1).square().mean()


def _of_one(rank: int, data: Any) -> list[Any]:
    """The largest error of a gradient, and whether a guess is reported: as a warning, and as an error."""
    torch.manual_seed(0)
    world, worst, scale = torch.distributed.get_world_size(), list[float](), torch.full((1,), 3.0).double()

    def sharded(model: nn.Module, part: int, *args: Tensor) -> Any:
        return ts.shard(copy.deepcopy(model), {}, (torch.ones(part, 4).double(), *args), mesh=data)

    for model, start, args in ((Scaled(4, 3).double(), 2, [scale]), (Placed().double(), 1, [])):
        trained = sharded(model, start, *args)
        for part in (1, 2, 1, 3, 1):
            x = torch.randn(world * part, 4, generator=torch.Generator().manual_seed(part)).double()
            for m, given in ((model, x), (trained, x.chunk(world)[rank])):
                m.zero_grad()
                m(given, *args).backward()
            worst.append(gradient_error(trained, model))
    with pytest.warns(UserWarning, match="'scale' count as parts of the batch"):
        guessing = sharded(Scaled(4, 3).double(), 1, scale)
    told = refused_input(lambda: guessing(torch.ones(1, 4).double(), scale.clone().requires_grad_()), "is not clear")
    return [max(worst), told]


@pytest.mark.parametrize("data", WAYS)
def test_parts_may_have_one_element(data: Any) -> None:
    for worst, told in run_ranks(_of_one, 2, data):
        assert worst < 1e-10 and told, (worst, told)


def test_a_batch_that_the_ranks_do_not_divide_is_refused() -> None:
    ids, labels = _batch(2)
    with pytest.raises(ts.InputError, match="a batch of 5 can't be divided among 2 ranks"):
        ts.check(_model(), {}, example_inputs=(ids[:5], labels[:5]), mesh={"dp": (2, "replicate")})
    part: dict[str, Any] = {"example_inputs": (ids, labels), "mesh": {"dp": (2, "replicate")}}
    with pytest.raises(ts.PlanError, match="the ranks divide the batch, and the plan splits weights"):
        ts.plan(_model(), {"*.q": "column"}, **part)
    with pytest.raises(ts.InputError, match="the ranks divide the batch, and nothing else"):
        ts.plan(_model(), {}, objective={"split": "all"}, **part)
    with pytest.raises(ts.InputError, match="'slice' is no use of a mesh's axis"):
        ts.plan(_model(), {}, example_inputs=(ids, labels), mesh={"dp": (2, "slice")})  # type: ignore[arg-type]
    plan = ts.plan(_model(), {}, example_inputs=(ids[:PART], labels[:PART]), mesh={"dp": (2, "replicate")})
    with pytest.raises(ts.PlanError, match=r"(?s)divides something else.*made for an axis that holds 'replicate'"):
        ts.check(_model(), plan, example_inputs=(ids, labels), mesh={"dp": (2, "shard")})
