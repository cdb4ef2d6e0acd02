"""Habits that raise an error on every rank."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.run import Habit, Net, Run, x_of

REFUSED: dict[str, tuple[str, Habit]] = {}
"""Name -> the error's text, and the habit."""


def _refused(text: str) -> Callable[[Habit], Habit]:
    def add(habit: Habit) -> Habit:
        REFUSED[habit.__name__.strip("_")] = text, habit
        return habit

    return add


@_refused("would treat the ranks of one sharded model as copies of it")
def _statistics_of_the_first_rank_for_all(run: Run) -> Any:
    model = run.make(functools.partial(Net, batch_norm=True))
    model(x_of())
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, 0)


@_refused("the state dict has another slice of 'norm.running_mean'")
def _statistics_of_another_rank(run: Run) -> Any:
    model = run.make(functools.partial(Net, batch_norm=True))
    model(x_of())
    states = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, {"running_mean": model.norm.running_mean})
    model.norm.load_state_dict(states[run.rank - 1], strict=False)  # type: ignore[arg-type]


@_refused("of shape (9,) meets this rank's slice of 'norm.weight'")
def _average_from_before_the_first_call(run: Run) -> Any:
    model = run.make(functools.partial(Net, batch_norm=True))
    average = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model(x_of())
    for name, value in model.state_dict().items():
        average[name].add_(value)


@_refused("an index lies outside of this rank's slice of 'up.weight'")
def _row_of_the_whole(run: Run) -> Any:
    model = run.make()
    model(x_of())
    return model.up.weight[8]


@_refused("takes no batch of gradients at once")
def _gradients_in_a_batch(run: Run) -> Any:
    model = run.make()
    result = model(x_of())
    return torch.autograd.grad(result.sum(0), list(model.parameters()), torch.eye(5).double(), is_grads_batched=True)


@_refused("takes no batch of gradients at once")
def _vectorized_jacobian(run: Run) -> Any:
    model = run.make()
    return torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x_of(), vectorize=True)


@_refused("was tied to '0.up.weight' after sharding")
def _tied_before_the_first_call(run: Run) -> Any:
    """Both weights are still unsharded, and the plan would shard them differently."""
    model = run.make(lambda: nn.Sequential(Net(6), Net(6)), {})
    model[1].up.weight = model[0].up.weight
    return model(x_of())


@_refused("the state dict has the whole of 'up.weight'")
def _whole_state_of_a_part(run: Run) -> Any:
    run.make().up.load_state_dict(Net().up.state_dict())


@_refused("the state dict has another slice of '2.weight'")
def _state_of_another_layer(run: Run) -> Any:
    model = run.make(lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), {"0": "column", "2": "row"})
    model[2].load_state_dict(model[0].state_dict())


@_refused("the state dict has another slice of '0.weight'")
def _state_of_a_part_of_another_rank(run: Run) -> Any:
    model = run.make(lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), {"0": "column", "2": "row"})
    file = io.BytesIO()
    torch.save(model[0].state_dict(), file)
    files = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(files, file.getvalue())
    model[0].load_state_dict(torch.load(io.BytesIO(files[run.rank - 1])))  # type: ignore[arg-type]


class Moving(Net):
    """Subtracts a moving average, which is a view of a buffer."""

    def __init__(self, hold: Callable[[Any], None]) -> None:
        super().__init__()
        self.register_buffer("stats", torch.zeros(2, 6).double())
        hold(self)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.stats[0].lerp_(x.mean(0), 0.5)
        return super().forward(x - self.mean)


@_refused("buffer 'stats' and buffer 'mean' share memory")
def _buffer_in_the_memory_of_another(run: Run) -> Any:
    return run.make(lambda: Moving(lambda m: m.register_buffer("mean", m.stats[0])))(x_of())


@_refused("shares memory with buffer 'stats'")
def _attribute_in_the_memory_of_a_buffer(run: Run) -> Any:
    return run.make(lambda: Moving(lambda m: setattr(m, "mean", m.stats[0])))(x_of())


@_refused("buffer 'norm.running_mean' requires a gradient")
def _gradient_of_a_buffer(run: Run) -> Any:
    model = run.make(functools.partial(Net, batch_norm=True))
    model.eval()(x_of())
    model.norm.running_mean.requires_grad_(True)
    model(x_of()).square().mean().backward()
    return model.norm.running_mean.grad


@_refused("buffer 'norm.running_mean' requires a gradient")
def _gradient_of_a_buffer_by_functional_call(run: Run) -> Any:
    model = run.make(functools.partial(Net, batch_norm=True)).eval()
    mean = model.norm.running_mean.clone().requires_grad_()
    torch.func.functional_call(model, {"norm.running_mean": mean}, (x_of(),)).sum().backward()
    return mean.grad
