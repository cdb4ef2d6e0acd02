"""If ranks diverge, the sharded model's next call raises on every rank, without an extra message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import BACKENDS, nightly
from tests.models import MLP
from torchshard.testing import run_ranks

PLAN = {"up": "column", "down": "row"}
X = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))


class _Split(nn.Module):
    """A model with only split parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20, bias=False), nn.Linear(20, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y


class _Shifted(_Split):
    """A model that reads a tensor other than its arguments, parameters and buffers."""

    def __init__(self, shift: Tensor) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def _made(build: Callable[[], nn.Module] = MLP) -> Any:
    torch.manual_seed(0)
    return ts.shard(build(), PLAN, example_inputs=(X,))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, *, skipped: bool = False) -> None:
    optimizer.zero_grad()
    model(X).square().mean().backward()
    if not skipped:
        optimizer.step()


def _optimizes(odd: bool, build: Callable[[], nn.Module], how: str) -> None:
    model = _made(build)
    optimizer = torch.optim.SGD(model.parameters(), 0.2 if odd and how == "learning rate" else 0.1)
    for i in range(3):
        _step(model, optimizer, skipped=odd and how == "skipped" and i == 1)


def _updates_by_hand(odd: bool) -> None:
    """Changes parameters by hand, differently on one rank. Calls compare them in turn, so this takes several calls."""
    model = _made()
    for _ in range(8):
        model(X).square().mean().backward()
        for p in model.parameters():
            p.data -= p.grad * (0.2 if odd else 0.1)
        model.zero_grad()


def _broadcasts(odd: bool) -> None:
    """Broadcasts the first rank's parameters, as PyTorch's tutorial does."""
    model = _made()
    for p in model.parameters():
        dist.broadcast(torch.from_numpy(p.detach().numpy()), 0)  # a plain tensor that shares memory
    model(X)


def _models_in_another_order(odd: bool) -> None:
    a, b = _made(), _made()
    for model in (b, a) if odd else (a, b):
        model(X)


def _backwards_in_another_order(odd: bool, *, of_one: bool) -> None:
    a = _made()
    b = a if of_one else _made()
    x = X.clone().requires_grad_()  # its gradient is summed over the ranks
    first, second = a(x).sum(), b(x).square().sum()
    for loss in (second, first) if odd else (first, second):
        loss.backward(retain_graph=True)
    a(X)


def _backward_twice(odd: bool) -> None:
    """Runs the first loss's backward twice on one rank; the others run the second loss's instead."""
    model, x = _made(), X.clone().requires_grad_()
    one, two, three = (model(x).sum() for _ in range(3))
    for loss in (one, one, three) if odd else (one, two, three):
        loss.backward(retain_graph=True)
    model(X)


def _large(odd: bool, change: Callable[[Tensor], Tensor]) -> None:
    model = _made()
    x = torch.randn(1 << 17, 12, generator=torch.Generator().manual_seed(1))
    for i in range(2):
        model(change(x) if odd and i else x)


def _trains_two(odd: bool) -> None:
    """Trains two models with different gradients, and calls them in a different order on one rank, as threads might."""
    a, b = _made(), _made()
    for model, factor in ((a, 1.0), (b, 2.0)):
        (model(X).sum() * factor).backward()
    for model in (b, a) if odd else (a, b):
        model(X)


FAULTS: dict[str, tuple[Callable[[bool], Any], str]] = {
    "rows in another order": (lambda odd: _twice(_made(), X.flip(0) if odd else X), "different values"),
    "rows rolled": (lambda odd: _twice(_made(), X.roll(1, 0) if odd else X), "different values"),
    "a large input's rows": (lambda odd: _large(odd, lambda x: x.flip(0)), "different values"),
    "a large input's values": (lambda odd: _large(odd, lambda x: x + 1), "different values"),
    "a step skipped": (lambda odd: _optimizes(odd, MLP, "skipped"), "optimizers have taken different steps"),
    "a step skipped, all split": (lambda odd: _optimizes(odd, _Split, "skipped"), "different steps"),
    "another learning rate": (lambda odd: _optimizes(odd, MLP, "learning rate"), "different steps"),
    "another learning rate, all split": (lambda odd: _optimizes(odd, _Split, "learning rate"), "different steps"),
    "updates by hand": (_updates_by_hand, "weights have drifted apart"),
    "a broadcast of parameters": (_broadcasts, "all ranks hold the same slice"),
    "models in another order": (_models_in_another_order, "have called different models"),
    "training of two models in another order": (_trains_two, "have called different models"),
    "backwards of two models": (lambda odd: _backwards_in_another_order(odd, of_one=False), "different backwards"),
    "backwards of one model": (lambda odd: _backwards_in_another_order(odd, of_one=True), "different backwards"),
    "backward twice": (_backward_twice, "different backwards"),
    "another tensor of forward's own": (
        lambda odd: _made(lambda: _Shifted(X.flip(0) if odd else X)),
        "the ranks' forwards read different tensors",
    ),
    "another checkpoint": (lambda odd: _loads(odd), "load different state dicts"),
    "a save beside a call": (lambda odd: _saves(odd), "the ranks do different things"),
}


def _twice(model: nn.Module, x: Tensor) -> None:
    model(X)
    model(x)


def _loads(odd: bool) -> None:
    model = _made()
    state = {name: value + odd for name, value in model.full_state_dict().items()}
    model.load_full_state_dict(state)


def _saves(odd: bool) -> None:
    model = _made()
    model(X)
    if odd:  # e.g. a signal reaches the ranks a step apart
        ts.save("never written", model)
    model(X)


def _outcomes(rank: int, elsewhere: bool) -> dict[str, str]:
    if elsewhere:  # as if all tensors were on an asynchronous device
        pytest.MonkeyPatch().setattr("torchshard.runtime.digests.is_here", lambda tensor: False)
    found = {}
    for name, (fault, _) in FAULTS.items():
        dist.barrier()
        tsd.init_process_group(timeout_seconds=20)
        try:
            fault(rank == dist.get_world_size() - 1)
            if elsewhere:
                _made()  # not reached if the next call reports the fault
            found[name] = "silent"
        except ts.ShardError as error:
            found[name] = str(error)
        finally:
            tsd.destroy_process_group()
    return found


@nightly("4-*")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [2, 4])
def test_each_fault_is_one_error_on_every_rank(world: int, backend: str) -> None:
    """On the memory backend, the first differing collective raises, before the ranks compare their histories."""
    ranks = run_ranks(_outcomes, world, False, backend=backend)
    for name, (_, text) in FAULTS.items():
        said = {found[name] for found in ranks}
        if any("about to do different things" in found for found in said):
            assert backend == "memory" and len({found[found.index("why:") :] for found in said}) == 1, f"{name}: {said}"
        else:
            assert len(said) == 1 and text in ranks[0][name], f"{name}: {said}"


def _on_another_device(rank: int) -> list[str]:
    """Reads digests one call later, as on a GPU."""
    pytest.MonkeyPatch().setattr("torchshard.runtime.digests.is_here", lambda tensor: False)
    ts.distributed.init_process_group()
    found = []
    for change in (lambda x: x.flip(0), lambda x: x + 1e-3):
        model = _made()
        model(X)
        model(change(X) if rank else X)
        found.append(_text(lambda: model(X)))  # noqa: B023
    model = _made()
    model.down.bias.data += rank
    found.append(_text(lambda: [model(X) for _ in range(4)]))
    return found


def _text(fn: Callable[[], Any]) -> str:
    try:
        fn()
    except ts.ShardError as error:
        return str(error)
    return "silent"


@pytest.mark.nightly
def test_differences_on_a_device_are_reported_one_call_later() -> None:
    first, second = run_ranks(_on_another_device, 2)
    assert first == second
    assert all("different values" in text for text in first[:2]) and "drifted apart" in first[2], first


def _fine(rank: int) -> list[bool]:
    """Runs unusual steps that are consistent across ranks; none may raise."""
    ts.distributed.init_process_group()
    found = []
    twins = _Split()
    for p in twins.parameters():
        nn.init.constant_(p, 0.1)
    with torch.no_grad():  # experts initialised as copies: the ranks' slices are equal, and not constant
        twins.up.weight.copy_(torch.arange(12.0).expand(20, 12))
    model = ts.shard(twins, PLAN, example_inputs=(X,))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for _ in range(4):
        _step(model, optimizer)
    found.append(True)
    model, count = _made(), _Messages()
    with count:
        model(X)
    found.append(count.sent == 1 + 1)  # one comparison, and the all-reduce of the row-split product
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for _ in range(6):
        model(X)
    if rank:
        torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1).step()  # a parameter outside the model
    model(X)
    return found


class _Messages:
    """Counts all-reduces."""

    def __enter__(self) -> None:
        self.sent, self._original = 0, dist.all_reduce
        dist.all_reduce = self._counted

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.sent += 1
        return self._original(*args, **kwargs)

    def __exit__(self, *exc: object) -> None:
        dist.all_reduce = self._original


def test_equal_calls_pass_with_one_message_each() -> None:
    assert run_ranks(_fine, 2, backend="gloo") == [[True, True]] * 2
