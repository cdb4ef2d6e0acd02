"""Custom autograd functions and gradient hooks become ops of the graph, with the model's forward and backward."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import changed_rule, largest, run_ranks

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Reversal(Function):
    """Gradient reversal, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float = 1.0) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -ctx.alpha * grad, None


reverse = Reversal.apply


class StraightThrough(Function):
    """Rounds, with a straight-through gradient where |x| < 1."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (ctx.saved_tensors[0].abs() < 1)


class Several(Function):
    """Takes a size, a list and a dict; returns two tensors and None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, pair: list[Tensor], scale: dict[str, float], y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y * rows, None, x.sum(0) * scale["by"]

    @staticmethod
    def backward(ctx: Any, product: Tensor, none: Any, total: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return product * y * 5 + total, None, None, None, product * x * 5


class Scan(Function):
    """A linear recurrence with its own backward, as in state-space models."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor) -> Tensor:
        h = [x[:, 0]]
        for t in range(1, x.shape[1]):
            h.append(a[:, t] * h[-1] + x[:, t])
        out = torch.stack(h, 1)
        ctx.save_for_backward(a, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, out = ctx.saved_tensors
        held = [grad[:, -1]]
        for t in range(a.shape[1] - 2, -1, -1):
            held.append(a[:, t + 1] * held[-1] + grad[:, t])
        dx = torch.stack(held[::-1], 1)
        return torch.cat([torch.zeros_like(out[:, :1]), dx[:, 1:] * out[:, :-1]], 1), dx


class Noisy(Function):
    """Draws random numbers in the forward, and uses them in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = torch.rand_like(x)
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.mask


class Recomputed(Function):
    """Runs modules in the forward and again in the backward, which adds to their gradients, like reversible layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers, ctx.x = layers, x.detach()
        for layer in layers:
            layer.seed = torch.seed()
            x = torch.dropout(layer(x), 0.0, True)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = h = ctx.x.requires_grad_()
            for layer in ctx.layers:
                torch.manual_seed(layer.seed)
                h = layer(h)
            torch.autograd.backward(h, grad)
        return x.grad, None


class _Body(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(6, 8), nn.Linear(8, 6), body
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.reverse, self.grads = Reversal.apply, []

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self, self.up(x)).relu())


def _in_no_grad(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        target = reverse(h)
    return h * target


def _hooks(m: Any, h: Tensor) -> Tensor:
    before = h * 2
    for hook in (lambda g: g * 0.5, lambda g: g + 0.1, m.grads.append):
        h.register_hook(hook)
    return before + h


def _hook_then_write(m: Any, h: Tensor) -> Tensor:
    y = h * 2
    y.register_hook(lambda g: g * 3)
    y += 1
    return y * h


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bound at import": lambda m, h: reverse(h, 0.5),
    "by its class": lambda m, h: Reversal.apply(h),
    "in a closure": (lambda f: lambda m, h: f(h))(Reversal.apply),
    "in an attribute": lambda m, h: m.reverse(h, 2.0),
    "straight through": lambda m, h: StraightThrough.apply(h * 2),
    "several": lambda m, h: (lambda r: r[0] + r[2])(Several.apply(h, h.shape[0] + 2, [h], {"by": 2.0}, h.tanh())),
    "scan": lambda m, h: Scan.apply(h.sigmoid().view(3, 4, 2), h.view(3, 4, 2)).flatten(1),
    "within no_grad": _in_no_grad,
    "twice": lambda m, h: reverse(reverse(h, 2.0), 3.0),
    "random": lambda m, h: Noisy.apply(h),
    "modules": lambda m, h: Recomputed.apply(h, m.layers),
    "hooks": _hooks,
    "a hook, then a write": _hook_then_write,
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("body", BODIES)
def test_modules_kept_whole_are_exact(body: str, world_size: int) -> None:
    torch.manual_seed(0)
    model, x = _Body(BODIES[body]), X.double().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = {"up": "column", "down": "row"}
        report = ts.check(model, plan, example_inputs=(x,), mesh=world_size)
    assert report.ok, str(report)


def test_a_dropped_backward_would_be_seen() -> None:
    """The function's own backward determines the gradients that the check compares."""
    model = _Body(BODIES["bound at import"]).double()
    plain = _Body(lambda m, h: h * 1.0).double()
    plain.load_state_dict(model.state_dict())
    for m in (model, plain):
        m(X.double()).sum().backward()
    assert torch.equal(model.up.bias.grad * -2, plain.up.bias.grad)


def _steps(rank: int, body: str) -> list[float]:
    ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = _Body(BODIES[body]).double()
    sharded = ts.shard(model, {"up": "column", "down": "row"})
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, sharded)]
    for seed in range(3):
        for m, optimizer in zip((model, sharded), optimizers, strict=True):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            m(X.double()).square().sum().backward()
            optimizer.step()
    full = sharded.full_state_dict()
    return [float((full[name] - value).abs().max()) for name, value in model.state_dict().items()]


@nightly(but=["modules"])
@pytest.mark.parametrize("body", ["modules", "hooks", "random"])
def test_training_with_real_ranks(body: str) -> None:
    assert largest(*(largest(*errors) for errors in run_ranks(_steps, 2, body))) < 1e-12


def test_a_rule_may_split_one() -> None:
    model, plan = _Body(BODIES["bound at import"]), {"up": "column", "down": "row"}
    with pytest.warns(UserWarning, match=r"gathered per step for .*Reversal.*no sharding rule"):
        ts.check(model, plan, example_inputs=(X,), mesh=2)

    def reversal(call: Any) -> Any:
        assert call["alpha"] == 0.5
        return call.row("... -> ...")

    with changed_rule(Reversal, None):
        ts.rule(Reversal)(reversal)
        report = ts.check(model, plan, example_inputs=(X,), mesh=2)
        made = ts.plan(model, plan, example_inputs=(X,), mesh=2)
    assert report.ok, str(report)
    assert made.choices["Reversal"].name.startswith("split")


def _writes(ctx: Any, x: Tensor) -> Tensor:
    x.add_(1)
    return x * 1


def _appends(ctx: Any, x: Tensor, seen: list[Any]) -> Tensor:
    seen.append(None)
    return x * 1


def _reads_values(ctx: Any, x: Tensor) -> Tensor:
    return x * float(x.sum())


@pytest.mark.parametrize(
    "forward, args, text",
    [
        (_writes, (), "writes to a tensor, list or dict"),
        (_appends, ([],), "writes to a tensor, list or dict"),
        (_reads_values, (), "depend on the values of a tensor"),
    ],
)
def test_what_cannot_be_repeated_is_refused(forward: Any, args: Any, text: str) -> None:
    kind: Any = type("Odd", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(lambda c, g: g)})
    with pytest.raises(ts.CaptureError, match=text):
        ts.shard(_Body(lambda m, h: kind.apply(h * 1, *args)), {}, example_inputs=(X,))
    ts.distributed.destroy_process_group()


def _hook_of_a_value(m: Any, h: Tensor) -> Tensor:
    mask = h.detach() > 0
    h.register_hook(lambda g: g * mask)
    return h


def _hook_removed(m: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda g: g * 2).remove()
    return h


@pytest.mark.parametrize("body, text", [(_hook_of_a_value, "another at each call"), (_hook_removed, "removes a gradi")])
def test_hooks_that_a_graph_cannot_hold_are_refused(body: Any, text: str) -> None:
    with pytest.raises(ts.CaptureError, match=text):
        ts.shard(_Body(body), {}, example_inputs=(X,))
    ts.distributed.destroy_process_group()


def test_backward_hooks_of_modules_are_refused() -> None:
    model = _Body(lambda m, h: h)
    model.up.register_full_backward_hook(lambda module, before, after: (before[0] * 2,))
    with pytest.raises(ts.CaptureError, match="has backward hooks"):
        ts.shard(model, {}, example_inputs=(X,))
    ts.distributed.destroy_process_group()


# --- random numbers, seeds, checkpoints ------------------------------------------------------------------------------


class _Owner(_Body):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(body)
        self.python, self.numpy, self.torch = random.Random(0), np.random.default_rng(0), torch.Generator()


RANDOM: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "random": lambda m, h: h if random.random() < 2 else h * 2,
    "numpy": lambda m, h: h * torch.as_tensor(np.random.rand(8), dtype=h.dtype),
    "shuffle": lambda m, h: h[:, random.sample(range(8), 8)],
    "random.Random": lambda m, h: h * m.python.random(),
    "numpy's Generator": lambda m, h: h * m.numpy.random(),
    "random.seed": lambda m, h: (random.seed(1), h)[1],
    "torch.manual_seed": lambda m, h: (torch.manual_seed(1), h)[1],
    "torch.default_generator": lambda m, h: (torch.default_generator.manual_seed(1), h)[1],
    "set_rng_state": lambda m, h: (torch.set_rng_state(torch.get_rng_state().flip(0)), h)[1],
}


@pytest.mark.parametrize("body", RANDOM)
def test_random_numbers_that_a_graph_would_freeze_are_refused(body: str) -> None:
    states = random.getstate(), torch.get_rng_state()
    with pytest.raises(ts.CaptureError, match=r"draws random numbers from|seeds the random numbers|changes .* again"):
        ts.shard(_Owner(RANDOM[body]), {}, example_inputs=(X,))
    ts.distributed.destroy_process_group()
    random.setstate(states[0])
    torch.set_rng_state(states[1])


def test_another_thread_seeds_and_applies_while_one_captures() -> None:
    failures: list[Exception] = []
    done = threading.Event()

    def other() -> None:
        try:
            while not done.wait(0.2):
                torch.manual_seed(time.monotonic_ns())
                assert Reversal.apply(torch.ones(2, requires_grad=True)).grad_fn is not None
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        ts.plan(_Body(BODIES["twice"]).eval(), {}, example_inputs=(X,), mesh=2)
    finally:
        done.set()
        thread.join()
    assert not failures and "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def _doubling(*, ruled: bool) -> type[torch.autograd.Function]:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    if ruled:
        ts.rule(Double)(lambda call: call.row("... -> ..."))
    return Double


class _Layer(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.function.apply(self.up(x)))


@pytest.mark.parametrize("plan", [{"*.up": "column", "*.down": "row"}, "auto"], ids=["dict", "auto"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_functions_of_one_name_in_repeated_layers(plan: Any) -> None:
    ruled, other = _doubling(ruled=True), _doubling(ruled=False)
    model = nn.Sequential(*[_Layer(other if i == 5 else ruled) for i in range(8)])
    report = ts.check(model, plan, example_inputs=(torch.randn(3, 8),), mesh=2)
    assert report.ok, str(report)
