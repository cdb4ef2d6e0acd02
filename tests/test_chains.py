"""Chains of sharded models with a split batch: gradients equal the unsharded chain's on the full batch."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchshard as ts
from tests.helpers import holding, nightly
from torchshard.testing import gradient_error, largest, run_ranks

ROWS = 4
MESHES: list[tuple[dict[str, int], Any]] = [
    ({"dp": 2}, "replicate"),
    ({"dp": 3}, "shard"),
    ({"dp": 2, "tp": 2}, "shard"),
    ({"hosts": 2, "fsdp": 2}, {"hosts": "replicate", "fsdp": "shard"}),
]


class Block(nn.Module):
    def __init__(self, inputs: int, results: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 8), nn.Linear(8, results)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Loss(Block):
    """Computes its own loss, with sample weights that depend on the full batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y.square().sum(1) * y.sum(1).softmax(0)).sum()


class Chain(NamedTuple):
    """The models of a chain, and this rank's part of its input."""

    body: Any
    head: Any
    loss: Any
    plain: Any
    """A model that is never sharded."""
    x: Tensor
    is_sharded: bool


def _two(chain: Chain) -> None:
    chain.head(chain.body(chain.x)).square().mean().backward()


def _loss_inside(chain: Chain) -> None:
    chain.loss(chain.body(chain.x)).backward()


def _three(chain: Chain) -> None:
    middle = chain.head(chain.body(chain.x))
    (chain.loss(middle) + middle.square().mean()).backward()


def _twice(chain: Chain) -> None:
    chain.head(chain.body(chain.body(chain.x))).square().mean().backward()


def _siamese(chain: Chain) -> None:
    (chain.body(chain.x) * chain.head(chain.x.flip(1))).mean().backward()


def _frozen(chain: Chain) -> None:
    chain.head.requires_grad_(False)
    chain.loss(chain.head(chain.body(chain.x))).backward()
    chain.head.requires_grad_(True)


def _autoencoder(chain: Chain) -> None:
    F.mse_loss(chain.head(chain.body(chain.x)), chain.x).backward()


def _adversarial(chain: Chain) -> None:
    """Both steps of a GAN: the body generates, the head judges."""
    made = chain.body(chain.x)
    (chain.head(chain.x).exp().mean() - chain.head(made.detach()).mean()).backward()
    chain.head.requires_grad_(False)
    chain.head(made).mean().backward()
    chain.head.requires_grad_(True)


def _penalty(chain: Chain) -> None:
    """A penalty on each sample's gradient (WGAN-GP), at samples between the given and the generated ones."""
    mixed = (0.3 * chain.x + 0.7 * chain.body(chain.x)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(chain.head(mixed).sum(), mixed, create_graph=True)
    (gradient.norm(dim=1) - 1).square().mean().backward()


def _in_chunks(chain: Chain) -> None:
    """Computes losses of detached features, and passes the features' gradients on by hand."""
    features = chain.body(chain.x)
    cut = features.detach().requires_grad_()
    copied = features.detach().clone().requires_grad_()
    (chain.loss(cut) / 2).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns, since a copy might be any other input
        (chain.loss(copied) / 2).backward()
    features.backward(cut.grad + copied.grad)


def _cached(chain: Chain) -> None:
    """GradCache: features without a graph, their gradients, and a second forward that backpropagates them."""
    with torch.no_grad():
        features = chain.body(chain.x)
    features = features.detach().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns, since the features might be optimized themselves
        chain.head(features).square().mean().backward()
    chain.body(chain.x).backward(features.grad)
    (chain.body(chain.x) * features.grad).sum().backward()


def _copied(chain: Chain) -> None:
    """A hand-written pipeline: features are copied, and their gradients kept in a list."""
    parts = chain.x.detach().chunk(2)
    with torch.no_grad():
        copies = [chain.body(part).clone().requires_grad_() for part in parts]
    for copied in copies:
        chain.head(copied).square().mean().backward()
    gradients = [copied.grad for copied in copies]
    del copied, copies
    for part, gradient in zip(parts, gradients, strict=True):
        chain.body(part).flatten().backward(gradient.flatten())


def _outside(chain: Chain) -> None:
    """Features with gradients from a loss of the head, then from a loss outside of the models."""
    x = chain.x.detach()
    with torch.no_grad():
        features = chain.body(x).clone()
    for forget in (lambda f: setattr(f, "grad", None), lambda f: f.grad.zero_()):
        copied = features.clone().requires_grad_()
        chain.head(copied).square().mean().backward()
        forget(copied)
        copied.square().mean().backward()
        chain.body(x).backward(copied.grad)
    for _ in range(3):
        copied.grad = None
        chain.head(copied).square().mean().backward()
    assert not chain.is_sharded or len(copied._post_accumulate_grad_hooks) == 1


def _checkpointed(chain: Chain) -> None:
    """Two models in one checkpoint, which recomputes both."""
    checkpoint(lambda x: chain.head(chain.body(x)), chain.x, use_reentrant=False).square().mean().backward()


def _again(chain: Chain) -> None:
    """Reentrant checkpoints cut the chain at the inputs of each model."""
    middle = checkpoint(chain.body, chain.x, use_reentrant=True)
    chain.loss(checkpoint(chain.head, middle, use_reentrant=True)).backward()


def _between(chain: Chain) -> None:
    """An unsharded model, trained by DistributedDataParallel, between two sharded models."""
    chain.loss(chain.plain(chain.body(chain.x))).backward()


def _accumulated(chain: Chain) -> None:
    for is_last in (False, True):
        with contextlib.ExitStack() as stack:
            for model in (chain.body, chain.head, chain.loss) if chain.is_sharded and not is_last else ():
                stack.enter_context(model.no_sync())
            loss = chain.loss(chain.head(chain.body(chain.x)))
        loss.backward()


CHAINS = (
    _two, _loss_inside, _three, _twice, _siamese, _frozen, _autoencoder, _adversarial, _penalty, _in_chunks, _cached,
    _copied, _outside, _checkpointed, _again, _between, _accumulated,
)  # fmt: skip


def _models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(6, 6).double(), Block(6, 6).double(), Loss(6, 6).double(), Block(6, 6).double()]


def _errors(rank: int, mesh: dict[str, int], data: Any) -> dict[str, float]:
    """Chain and step -> the largest error of a gradient."""
    parts, place = math.prod(mesh.values()) // mesh.get("tp", 1), rank // mesh.get("tp", 1)
    groups = [
        torch.distributed.new_group([tp + part * mesh.get("tp", 1) for part in range(parts)])
        for tp in range(mesh.get("tp", 1))
    ]
    x = torch.randn(parts * ROWS, 6, generator=torch.Generator().manual_seed(1)).double()
    own = slice(place * ROWS, (place + 1) * ROWS)
    pins = {"up": "column", "down": "row"} if "tp" in mesh else {}
    *ours, between = _models()
    wrapped = DistributedDataParallel(between, process_group=groups[rank % len(groups)])
    sharded = [ts.shard(model, pins, mesh=holding(mesh, data)) for model in ours]
    chains = Chain(*_models(), x, False), Chain(*sharded, wrapped, x[own], True)
    found = {}
    for step, run in itertools.product(range(2), CHAINS):
        whole, split = (chain._replace(x=chain.x.clone().requires_grad_()) for chain in chains)
        for chain in (whole, split):
            for model in chain[:4]:
                model.zero_grad()
            run(chain)
        errors = [gradient_error(a, b) for a, b in zip(split[:3], whole[:3], strict=True)]
        if run is _between:
            pairs = zip(between.parameters(), whole.plain.parameters(), strict=True)
            errors += [float((a.grad - b.grad).abs().max()) for a, b in pairs]
        if (whole.x.grad is None) != (split.x.grad is None):
            errors.append(math.inf)
        elif whole.x.grad is not None:
            errors.append(float((split.x.grad - whole.x.grad[own]).abs().max()))
        found[f"{run.__name__}, step {step}"] = largest(*errors)
    return found


@nightly(but=["mesh0-replicate"])
@pytest.mark.parametrize(("mesh", "data"), MESHES)
def test_a_chain_has_the_gradients_of_the_unsharded_chain(mesh: dict[str, int], data: Any) -> None:
    for found in run_ranks(_errors, math.prod(mesh.values()), mesh, data):
        assert len(found) == 2 * len(CHAINS) and largest(*found.values()) < 1e-10, found
