"""Transforms of torch.func in forward are recorded as the plain ops that they run, and split like these."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import gradient_error, run_ranks

FEATURES, HIDDEN = 5, 8


class _Net(nn.Module):
    """A small network, with its forward as a function."""

    def __init__(self, body: Callable[[_Net, Tensor], Tensor], activation: Callable[[Tensor], Tensor] = torch.tanh):
        super().__init__()
        self.body, self.activation = body, activation
        self.up, self.norm, self.down = nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, FEATURES)

    def net(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _energy(m: _Net, x: Tensor) -> Tensor:
    return m.net(x).square().sum()


def _adapted(m: _Net, x: Tensor) -> Tensor:
    """Applies a layer after one step of MAML."""
    params = dict(m.up.named_parameters())
    loss = lambda p: functional_call(m.up, p, (x,)).tanh().square().mean()  # noqa: E731
    found = grad(loss)(params)
    return functional_call(m.up, {name: p - 0.1 * found[name] for name, p in params.items()}, (x,))  # type: ignore[no-any-return]


def _residual(m: _Net, x: Tensor) -> Tensor:
    """Computes the residual of Poisson's equation, as in the loss of a physics-informed network."""
    u = lambda t: m.net(m.norm.weight[:FEATURES] * t).sum()  # noqa: E731
    return vmap(lambda t: jacrev(jacrev(u))(t).diagonal().sum())(x) - vmap(u)(x)


BODIES: dict[str, Callable[[_Net, Tensor], Tensor]] = {
    "vmap": lambda m, x: vmap(m.net)(x),
    "vmap over columns": lambda m, x: vmap(lambda t: m.up(t).mean(), in_dims=1, out_dims=0)(
        x[..., None].expand(-1, FEATURES, FEATURES)
    ),
    "vmap with dropout": lambda m, x: vmap(lambda t: m.down(F.dropout(m.up(t))), randomness="different")(x),
    "grad": lambda m, x: grad(lambda t: _energy(m, t))(x),
    "grad per sample": lambda m, x: vmap(grad(lambda t: _energy(m, t)))(x),
    "grad and value": lambda m, x: torch.add(*grad_and_value(lambda t: _energy(m, t))(x)),
    "grad of detached": lambda m, x: grad(lambda t: (m.net(t) * m.net(t).detach()).sum())(x),
    "vjp": lambda m, x: vjp(m.net, x)[1](torch.ones_like(x))[0],
    "jvp": lambda m, x: jvp(m.net, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda m, x: vmap(jacrev(m.net))(x),
    "jacfwd": lambda m, x: vmap(jacfwd(m.net))(x),
    "one step of MAML": _adapted,
    "residual of a PDE": _residual,
}


@nightly(but=["grad per sample", "jacrev", "one step of MAML", "vmap *"])
@pytest.mark.parametrize("name", BODIES)
def test_a_transform_in_forward_has_its_gradients(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, FEATURES, dtype=torch.float64).requires_grad_()
    report = ts.check(_Net(BODIES[name]).double(), "auto", example_inputs=(x,), mesh=2)
    assert report.ok, str(report)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: h.softmax(-1), "log_softmax": lambda h: h.log_softmax(-1), "gelu": F.gelu, "exp": torch.exp,
    "silu": F.silu, "sqrt": lambda h: (h * h + 1).sqrt(), "max": lambda h: h * h.amax(-1, keepdim=True),
    "norm": lambda h: h / h.norm(dim=-1, keepdim=True), "layer_norm": lambda h: F.layer_norm(h, h.shape[-1:]),
}  # fmt: skip
"""Functions with a derivative that PyTorch computes from the result, which it saves without its gradient."""


@pytest.mark.nightly
@pytest.mark.parametrize("body", ["grad", "grad per sample", "residual of a PDE"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_gradients(activation: str, body: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, FEATURES, dtype=torch.float64).requires_grad_()
    model = _Net(BODIES[body], ACTIVATIONS[activation]).double()
    report = ts.check(model, "auto", example_inputs=(x,), mesh=3)
    assert report.ok, str(report)


@nightly("of a gradient")
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: jvp(m.norm, (m.up(x),), (m.up(x),))[1],
        lambda m, x: vmap(hessian(lambda t: _energy(m, t)))(x),
    ],
    ids=["of a norm", "of a gradient"],
)
def test_a_forward_mode_that_runs_on_no_fakes_is_refused(body: Callable[[_Net, Tensor], Tensor]) -> None:
    model = _Net(body)
    with pytest.raises(ts.CaptureError, match=r"(?s)differentiates within forward.*jacrev\(jacrev\(f\)\)"):
        ts.plan(model, "auto", example_inputs=(torch.randn(3, FEATURES),), mesh=2)


def test_a_functions_own_error_within_a_forward_mode_is_reported() -> None:
    model = _Net(lambda m, x: jvp(lambda t: m.down(m.down(t)), (m.up(x),), (m.up(x),))[1])
    with pytest.raises(ts.CaptureError, match="must have same reduction dim") as caught:
        ts.plan(model, "auto", example_inputs=(torch.randn(3, FEATURES),), mesh=2)
    assert "reverse mode" not in caught.value.attempt


def test_a_gradient_under_hooks_on_saved_tensors_is_refused_as_by_pytorch() -> None:
    def body(m: _Net, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return grad(lambda t: _energy(m, t))(x)

    x, text = torch.randn(3, FEATURES), "support saved tensor hooks"
    with pytest.raises(RuntimeError, match=text):
        _Net(body)(x)
    with pytest.raises(ts.CaptureError, match=text):
        ts.plan(_Net(body), "auto", example_inputs=(x,), mesh=2)


class _Ensemble(nn.Module):
    """An ensemble with the members' weights in one tensor, as in PyTorch's tutorial."""

    def __init__(self, members: int) -> None:
        super().__init__()
        models = [nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3)) for _ in range(members)]
        stacked, _ = stack_module_state(models)
        self.names, self.stacked = list(stacked), nn.ParameterList(p.detach() for p in stacked.values())
        self.base = [copy.deepcopy(models[0]).to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        params = dict(zip(self.names, self.stacked, strict=True))
        found: Tensor = vmap(lambda p: functional_call(self.base[0], p, (x,)))(params)
        return found.square().mean((0, 2))


def _trained(rank: int) -> dict[str, float]:
    worst, builds = {}, {"ensemble": lambda: _Ensemble(4), "residual": lambda: _Net(_residual)}
    for name, build in builds.items():
        torch.manual_seed(0)
        model = build().double()
        # The number of rows equals the number of members here; the graph must not assume that it always does.
        sharded = ts.shard(
            copy.deepcopy(model), "auto", example_inputs=(torch.randn(4, FEATURES, dtype=torch.float64),)
        )
        for rows in (4, 6):
            x = torch.randn(rows, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
            for m in (model, sharded):
                m.zero_grad()
                m(x).mean().backward()
            worst[f"{name}, {rows} rows"] = gradient_error(sharded, model)
        ts.distributed.destroy_process_group()
    return worst


@pytest.mark.nightly
def test_batches_vary() -> None:
    for worst in run_ranks(_trained, 2):
        assert max(worst.values()) < 1e-10, worst
