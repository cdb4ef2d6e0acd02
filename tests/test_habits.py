"""Common training code from PyTorch's tutorials and recipes gives the unsharded model's results, or raises.

Each habit is code that knows nothing of sharding. It runs with the unsharded model and with the sharded one, which
splits all parameters. The returned tensors and the parameters after it are compared in float64.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchshard as ts
import torchshard.distributed as tsd
from tests import habits
from tests.helpers import nightly, refused
from torchshard.testing import largest, on_ranks, run_ranks

TOLERANCE = 1e-10
PLAN = {"0": "column", "3": "row"}


def _x(seed: int = 0) -> Tensor:
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 5, bias=False)).double()


def _pair() -> tuple[Any, Any]:
    model = _model()
    return model, ts.shard(copy.deepcopy(model), PLAN, example_inputs=(_x(),))


def _loss(model: Any, seed: int = 0) -> Tensor:
    loss: Tensor = model(_x(seed)).square().mean()
    return loss


Habit = Callable[[Any], Any]
EQUAL: dict[str, Habit] = {}
"""Name -> function of a model. Tests compare its returned tensors, and the parameters after it."""


def _equal(habit: Habit) -> Habit:
    EQUAL[habit.__name__.strip("_")] = habit
    return habit


# --- updates ---------------------------------------------------------------------------------------------------------


def _trained(model: Any, update: Callable[[Any], Any], steps: int = 3) -> list[Any]:
    given = []
    for step in range(steps):
        model.zero_grad()
        _loss(model, step).backward()
        given.append(update(model))
    return given


@_equal
def _step_by_hand(model: Any) -> Any:
    @torch.no_grad()
    def update(m: Any) -> None:
        for p in m.parameters():
            p -= 0.1 * p.grad

    return _trained(model, update)


@_equal
def _step_through_data(model: Any) -> Any:
    def update(m: Any) -> None:
        for i, p in enumerate(m.parameters()):
            if i:
                p.data.sub_(p.grad.data * 0.1)
            else:
                p.data = p.data - p.grad * 0.1

    return _trained(model, update)


@_equal
def _optimizer_in_the_backward(model: Any) -> Any:
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        _loss(model, seed).backward()


@_equal
def _gradient_hooks_by_elements(model: Any) -> Any:
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _trained(model, lambda m: optimizer.step())


@_equal
def _clipping(model: Any) -> Any:
    clips: list[Callable[[Any], Any]] = [
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01),
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=math.inf, foreach=False),
        lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.001),
        lambda m: nn.utils.get_total_norm([p.grad for p in m.parameters()]),
        lambda m: nn.utils.clip_grads_with_norm_(
            m.parameters(), 0.01, nn.utils.get_total_norm([p.grad for p in m.parameters()])
        ),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    for clip in clips:
        found += _trained(model, lambda m: (clip(m), optimizer.step())[0], steps=1)  # noqa: B023
    return found


@_equal
def _master_weights(model: Any) -> Any:
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.5)

    def update(m: Any) -> Any:
        for master, p in zip(masters, m.parameters(), strict=True):
            master.grad = p.grad.detach().clone()
        norm = nn.utils.clip_grad_norm_(masters, 0.01)
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, m.parameters(), strict=True):
                p.copy_(master)
        return norm

    return _trained(model, update)


@_equal
def _accumulated_gradients(model: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for step in range(2):
        for part in range(3):
            (_loss(model, 10 * step + part) / 3).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@_equal
def _autograd_grad(model: Any) -> Any:
    gradients = torch.autograd.grad(_loss(model), list(model.parameters()))
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@_equal
def _groups_by_type_and_by_dims(model: Any) -> Any:
    linear = [p for m in model.modules() if type(m) == nn.Linear for p in m.parameters()]  # noqa: E721
    flat = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": linear, "weight_decay": 0.5}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    return _trained(model, lambda m: optimizer.step())


@_equal
def _freezing_midway(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _trained(model, lambda m: optimizer.step(), steps=1)
    model[0].weight.requires_grad_(False)
    return _trained(model, lambda m: optimizer.step(), steps=1)


# --- autograd ---------------------------------------------------------------------------------------------------------


@_equal
def _siamese(model: Any) -> Any:
    F.pairwise_distance(model(_x(1)), model(_x(2))).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@_equal
def _graph_retained(model: Any) -> Any:
    result = model(_x())
    loss = result.square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    result.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@_equal
def _gradient_penalty_on_inputs(model: Any) -> Any:
    x = _x().requires_grad_()
    result = model(x)
    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    (result.mean() + ((gradient.norm(2, dim=1) - 1) ** 2).mean()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@_equal
def _adversarial_example(model: Any) -> Any:
    x = _x().requires_grad_()
    model(x).square().mean().backward()
    return model(x.detach() + 0.1 * x.grad.sign())  # type: ignore[union-attr]


@_equal
def _checkpoint_around_the_call(model: Any) -> Any:
    for reentrant in (False, True):
        x = _x().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@_equal
def _functional_call(model: Any) -> Any:
    parameters = {name: p.detach() * 2 for name, p in model.named_parameters()}
    return torch.func.functional_call(model, parameters, (_x(),))


@_equal
def _hooks_on_results(model: Any) -> Any:
    result = model(_x())
    result.register_hook(lambda g: g * 2)
    result.square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


# --- copies and state dicts -------------------------------------------------------------------------------------------


@_equal
def _averaged_weights(model: Any) -> Any:
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(m: Any) -> Any:
        optimizer.step()
        for name, p in m.named_parameters():
            shadow[name].lerp_(p.detach(), 0.1)
        average.update_parameters(m)
        return average(_x())

    given = _trained(model, update)
    model.load_state_dict(model.state_dict() | shadow)
    return given


@_equal
def _target_network(model: Any) -> Any:
    target = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _trained(model, lambda m: optimizer.step())
    with torch.no_grad():
        for p, q in zip(target.parameters(), model.parameters(), strict=True):
            p.lerp_(q, 0.5)
    soft = target(_x())
    target.load_state_dict(model.state_dict())
    return soft, target(_x())


@_equal
def _best_state_kept(model: Any) -> Any:
    best = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _trained(model, lambda m: optimizer.step())
    model.load_state_dict(best, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _trained(model, lambda m: (nn.utils.clip_grad_norm_(m.parameters(), 0.01), optimizer.step())[0])


@_equal
def _parameter_replaced(model: Any) -> Any:
    model[0].weight = nn.Parameter(model[0].weight.data * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _trained(model, lambda m: (nn.utils.clip_grad_norm_(m.parameters(), 0.01), optimizer.step())[0])


@_equal
def _apply_by_type(model: Any) -> Any:
    def fill(m: nn.Module) -> None:
        if type(m) == nn.Linear:  # noqa: E721  (the example of nn.Module.apply)
            m.weight.data.fill_(0.5)

    model.apply(fill)
    return model(_x())


@_equal
def _cast_and_back(model: Any) -> Any:
    model.float()(_x().float())
    return model.double()(_x())


# --- tests of the habits above ----------------------------------------------------------------------------------------


def _flat(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given.detach()
    elif isinstance(given, (list, tuple)):
        for item in given:
            yield from _flat(item)


def _difference(habit: Habit) -> float:
    model, sharded = _pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ts.SliceWarning)
        expected, got = list(_flat(habit(model))), list(_flat(habit(sharded)))
    full = sharded.full_state_dict()
    pairs = [*zip(expected, got, strict=True), *((p, full[name]) for name, p in model.state_dict().items())]
    return largest(*(float((a - b).abs().max()) for a, b in pairs))


def _equals(rank: int, name: str) -> float:
    tsd.init_process_group()
    return _difference(EQUAL[name])


@nightly(but=["autograd_grad", "gradient_hooks_by_elements", "hooks_on_results"])
@pytest.mark.parametrize("name", EQUAL)
def test_habits_have_the_results_of_the_unsharded_model(name: str) -> None:
    assert largest(*run_ranks(_equals, 2, name)) < TOLERANCE


# --- further habits, several per run ----------------------------------------------------------------------------------


def _outcomes(rank: int, options: dict[str, Any], names: list[str]) -> dict[str, float]:
    found = {}
    for name in names:
        if name in habits.REFUSED:
            text, habit = habits.REFUSED[name]
            found[name] = float(not refused(functools.partial(habit, habits.Run(rank, options)), text))
        else:
            found[name] = habits.difference((habits.MENDED | habits.EQUAL)[name], rank, options)
        tsd.destroy_process_group()
    return found


BY_DAY = (
    "layers_by_the_name_of_their_class",
    "hooks_on_the_nodes_of_parameters",
    "state_of_a_part",
    "statistics_computed_again",
    "clipping_within_steps",
    "clipping_a_set",
)
"""Fast habits that failed once. The nightly test runs all of them on several meshes."""


def test_recipes_have_the_results_of_the_unsharded_model_or_are_refused() -> None:
    for found in run_ranks(_outcomes, 2, {}, [*BY_DAY, *habits.REFUSED]):
        assert {name: value for name, value in found.items() if not value < TOLERANCE} == {}


@on_ranks(2)
def test_anomaly_mode_finds_none_in_what_torchshard_records(rank: int) -> None:
    """Recording step graphs under anomaly mode must not search fake tensors for NaNs."""
    tsd.init_process_group()
    _, sharded = _pair()
    with warnings.catch_warnings(record=True) as held, torch.autograd.detect_anomaly():
        warnings.simplefilter("always")
        for seed in range(3):
            _loss(sharded, seed).backward()
    assert all("Anomaly Detection has been enabled" in str(w.message) for w in held)


MESHES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {}),
    (2, {"mesh": "shard", "inputs": "global"}),
    (4, {"mesh": {"dp": (2, "shard"), "tp": 2}, "inputs": "global"}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "options"), MESHES)
def test_recipes_on_meshes(ranks: int, options: dict[str, Any]) -> None:
    for found in run_ranks(_outcomes, ranks, options, [*habits.MENDED, *habits.EQUAL], seconds=600):
        assert {name: value for name, value in found.items() if not value < TOLERANCE} == {}
