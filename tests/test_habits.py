"""What people do around a model, from PyTorch's tutorials and recipes: as with the unsharded model, or told.

Each habit is code that knows nothing of sharding. It is run with the unsharded model and with the sharded one, whose
parameters are all split; what it gives and the parameters after it are compared, in float64.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

import torchshard as ts
import torchshard.distributed as tsd
from tests import habits
from tests.helpers import nightly, refused, refused_input
from torchshard.testing import largest, run_ranks

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
"""Name -> what is done with a model; the tensors that it gives are compared, and the parameters that it leaves."""


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


# --- the graph -------------------------------------------------------------------------------------------------------


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


# --- copies and states -----------------------------------------------------------------------------------------------


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


# --- told: warnings --------------------------------------------------------------------------------------------------


WARNED: dict[str, Callable[[Any, Tensor], Any]] = {
    "norm()": lambda m, p: p.norm(),
    "linalg_norm()": lambda m, p: torch.linalg.norm(p),
    "sum()": lambda m, p: sum(q.pow(2).sum() for q in m.parameters()),
    "std()": lambda m, p: p.data.std(),
    "max()": lambda m, p: p.detach().abs().max(),
    "mean()": lambda m, p: p.grad.mean(),  # type: ignore[union-attr]
    "any()": lambda m, p: torch.isnan(p.grad).any(),  # type: ignore[arg-type]
    "quantile()": lambda m, p: p.detach().abs().flatten().quantile(0.5),
    "renorm()": lambda m, p: p.data.copy_(torch.renorm(p.data, 2, 1, 0.5)),
    "normalize()": lambda m, p: F.normalize(p, dim=0),
    "mse_loss()": lambda m, p: F.mse_loss(p, p.detach() * 2),
    "matmul()": lambda m, p: p @ p.t(),
    "linear()": lambda m, p: F.linear(torch.ones(2, p.shape[0]).double(), p.t()),
    "an index": lambda m, p: p[0],
    "an index, written": lambda m, p: p.grad.__setitem__(0, 0.0),  # type: ignore[union-attr]
    "randn_like()": lambda m, p: p.grad.add_(torch.randn_like(p.grad)),  # type: ignore[arg-type,union-attr]
    "fill_diagonal_()": lambda m, p: p.data.fill_diagonal_(0.0),
    "norm(), of a state dict's": lambda m, p: m.state_dict()["0.weight"].norm(),
    "norm(), of all together": lambda m, p: nn.utils.parameters_to_vector(m.parameters()).norm(),
    "norm(), in a hook": lambda m, p: (p.register_hook(lambda g: g / g.norm()), _loss(m).backward()),
    "norm(), in a hook of autograd.grad": lambda m, p: (
        p.register_hook(lambda g: g / g.norm()),
        torch.autograd.grad(_loss(m), list(m.parameters())),
    ),
    "norm(), in a hook of a slice's backward": lambda m, p: (
        p.register_hook(lambda g: g / g.norm()),
        (p * 2).backward(torch.ones_like(p)),
    ),
    "norm(), in a hook of several": lambda m, p: (_with_multi_hook(m, "all"), _loss(m).backward()),
    "norm(), in a hook of any": lambda m, p: (_with_multi_hook(m, "any"), _loss(m).backward()),
    "norm(), in a hook of a result": lambda m, p: (
        (w := p * 1).register_hook(lambda g: g / g.norm()),
        torch.func.functional_call(m, {"0.weight": w}, (_x(),)).sum().backward(),
    ),
    "norm(), clipping by hand": lambda m, p: torch.stack([q.grad.detach().norm() for q in m.parameters()]).norm(),
    "sum(), a penalty of gradients": lambda m, p: sum(
        g.pow(2).sum() for g in torch.autograd.grad(_loss(m), list(m.parameters()), create_graph=True)
    ),
    "norm(), before a step": lambda m, p: _stepped(m, "register_step_pre_hook", lambda *ignored: _norm(p)),
    "norm(), after a step": lambda m, p: _stepped(m, "register_step_post_hook", lambda *ignored: _norm(p.data)),
    "norm(), in a closure": lambda m, p: torch.optim.SGD(m.parameters()).step(lambda: _norm(p.grad)),
    "norm(), after a step that raised": lambda m, p: (_stepped(m, "register_step_pre_hook", _failing), p.norm()),
    "norm(), of a new state": lambda m, p: _stepped(
        m, "register_step_post_hook", lambda optimizer, *ignored: _norm(optimizer.state[p]["exp_avg"])
    ),
    "hooks on all modules": lambda m, p: _with_a_hook_on_all(m),
    "gradients that the parameters hold already": lambda m, p: _sharded_with_gradients(),
}
"""What a warning says -> what is done with a model and a parameter of it."""


def _norm(tensor: Any) -> None:
    tensor.norm()


def _failing(*ignored: object) -> None:
    raise ArithmeticError


def _stepped(model: Any, register: str, hook: Callable[..., None]) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    getattr(optimizer, register)(hook)
    with contextlib.suppress(ArithmeticError):
        optimizer.step()


def _with_multi_hook(model: Any, mode: Any) -> None:
    def norms(gradients: Any) -> None:
        [g.norm() for g in gradients if g is not None] if mode == "all" else gradients.norm()

    register_multi_grad_hook(list(model.parameters()), norms, mode=mode)


def _with_a_hook_on_all(model: Any) -> None:
    handle = nn.modules.module.register_module_forward_hook(_doubled)
    model(_x())
    handle.remove()


def _doubled(module: nn.Module, args: Any, result: Any) -> Any:
    return result * 2 if isinstance(module, nn.GELU) else None


def _sharded_with_gradients() -> None:
    model = _model()
    _loss(model).backward()
    ts.shard(model, PLAN)


@torch.no_grad()
def _step_by_lists(parameters: list[nn.Parameter]) -> None:
    """As schedule-free optimizers step: slices and parameters that are whole in one list."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    averages = torch._foreach_mul(gradients, 0.1)
    torch._foreach_lerp_(averages, gradients, 0.5)
    torch._foreach_add_(parameters, averages, alpha=-0.1)
    torch._foreach_addcdiv_(parameters, gradients, torch._foreach_exp(averages))
    torch._foreach_mul_(parameters, 0.9)


QUIET: dict[str, Callable[[Any, Tensor], Any]] = {
    "by elements": lambda m, p: (p.data.mul_(0.9), p.grad.clamp_(-1, 1), (p - p.detach()).square()),  # type: ignore
    "looking": lambda m, p: (p.shape, p.dtype, p.numel(), p.stride(), p.is_leaf, repr(p), {p: 0}),
    "copies": lambda m, p: (p.detach().clone(), torch.zeros_like(p), copy.deepcopy(p), copy.deepcopy(p.data)),
    "PyTorch's own": lambda m, p: (nn.utils.clip_grad_norm_(m.parameters(), 1.0), nn.utils.get_total_norm([p.grad])),
    "an optimizer": lambda m, p: torch.optim.AdamW(m.parameters(), amsgrad=True, foreach=True).step(),
    "a step of one's own, by lists": lambda m, p: _step_by_lists(list(m.parameters())),
    "a call": lambda m, p: m(_x()),
    "undefined gradients of results": lambda m, p: torch.autograd.gradcheck(
        m, (_x().requires_grad_(),), fast_mode=True
    ),
}


# --- told: errors ----------------------------------------------------------------------------------------------------


REFUSED: dict[str, Habit] = {
    "a transform of torch.func": lambda m: torch.vmap(m)(_x()[:, None]),
    "a transform of torch.func (per sample)": lambda m: torch.func.grad(
        lambda p: torch.func.functional_call(m, p, (_x(),)).sum()
    )(dict(m.named_parameters())),
    "within torch.jit.trace": lambda m: torch.jit.trace(m, (_x(),)),
    "within torch.fx.symbolic_trace": lambda m: torch.fx.symbolic_trace(nn.Sequential(m)),
    "within torch.jit.script": lambda m: torch.jit.script(nn.Sequential(m)),
    "within torch.export": lambda m: torch.export.export(m, (_x(),)),
    "dual_level": lambda m: _forward_mode(m),
    "is sparse_coo": lambda m: m(_x().to_sparse()),
    "is nested": lambda m: m(torch.nested.nested_tensor([_x()], layout=torch.jagged)),
    "can't be initialised by uniform_()": lambda m: m[0].reset_parameters(),
    "takes no values of shape (8, 6)": lambda m: m[0].weight.data.copy_(_model()[0].weight.data),
    "takes no values of shape (8, 6) (assigned)": lambda m: setattr(m[0].weight, "data", _model()[0].weight.data),
    "of shape (8, 1) meets this rank's slice": lambda m: _loss_with_hook(m, lambda g: g * torch.ones(8, 1)),
    "of shape (8,) meets this rank's slice": lambda m: _loss_with_hook(m, lambda g: g[torch.ones(8) > 0]),
    "matmul fits the whole, not": lambda m: torch.ones(3, 8) @ m[0].weight,
    "view fits the whole, not": lambda m: m[0].weight.view(2, 4, 6),
    "layer_norm fits the whole, not": lambda m: F.layer_norm(torch.ones(3, 8), (8,), m.state_dict()["0.weight"][:, 0]),
    "has another shape than this rank's slice": lambda m: _foreign_state(m),
    "no shallow copy": lambda m: copy.copy(m),
    "can't be replaced": lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, inplace=True),
    "can't be pickled": lambda m: torch.save(m, "/dev/null"),
}
"""What an InputError says -> what is done with a sharded model."""


def _forward_mode(model: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(_x(), _x(1)))


def _loss_with_hook(model: Any, hook: Callable[[Tensor], Tensor]) -> None:
    model[0].weight.register_hook(hook)
    _loss(model).backward()


def _foreign_state(model: Any) -> None:
    other = _model()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (other, model)]
    _loss(other).backward()
    _loss(model).backward()
    for optimizer in optimizers:
        optimizer.step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())


# --- told: ranks that differ -----------------------------------------------------------------------------------------


def _label(rank: int) -> Tensor:
    return torch.tensor([0, 1, 2]).roll(rank)


DIFFERENT: dict[str, Callable[[Any, int], Any]] = {
    "losses differ: labels": lambda m, rank: F.cross_entropy(m(_x()), _label(rank)).backward(),
    "losses differ: noise": lambda m, rank: (m(_x()) * (1 + 0.1 * rank)).sum().backward(),
    "losses differ: a head": lambda m, rank: m(_x())[:, rank].sum().backward(),
    "losses differ: no backward": lambda m, rank: _on_the_first(rank, _loss(m).backward),
    "different steps: none": lambda m, rank: _on_the_first(rank, torch.optim.SGD(m.parameters()).step),
    "as copies of it: averaged gradients": lambda m, rank: _averaged(m),
    "about to do different things: clipping": lambda m, rank: _clipped(_in_turn(m, rank), nn.utils.clip_grad_norm_),
    "about to do different things: ts's": lambda m, rank: _clipped(_in_turn(m, rank), ts.clip_grad_norm_),
    "about to do different things: models": lambda m, rank: _clipped(
        [list(each.parameters()) for each in (m, _pair()[1])][:: 1 - 2 * rank], nn.utils.clip_grad_norm_
    ),
    "about to do different things: overflows": lambda m, rank: _unscaled(_in_turn(m, rank)),
}
"""What a DistributedError says -> what the ranks do; it comes at once, at the next call, or with the state dict."""


def _on_the_first(rank: int, call: Callable[[], Any]) -> None:
    if rank == 0:
        call()


def _in_turn(model: Any, rank: int) -> list[list[nn.Parameter]]:
    """The parameters one by one, in another order on each rank, as a set gives them."""
    return [[p] for p in model.parameters()][:: 1 - 2 * rank]


def _clipped(in_turn: list[list[nn.Parameter]], clip: Callable[..., Tensor]) -> None:
    for parameters in in_turn:
        for p in parameters:
            p.grad = torch.ones_like(p)
        clip(parameters, 0.1)


def _unscaled(in_turn: list[list[nn.Parameter]]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for parameters in in_turn:
        scaler.scale(sum((p * 2).sum() for p in parameters)).backward()
        scaler.unscale_(torch.optim.SGD(parameters))


def _averaged(model: Any) -> None:
    _loss(model).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad.data)
        p.grad.data /= 2


# --- running them ----------------------------------------------------------------------------------------------------


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


def _said(habit: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as held:
        warnings.simplefilter("always")
        habit()
    return [str(w.message) for w in held if w.filename == __file__ or "hooks on all" in str(w.message)]


def _warns(rank: int, text: str) -> bool:
    """Whether a habit warns with the sharded model, and not with the unsharded one."""
    tsd.init_process_group()
    model, sharded = _pair()
    for m in (model, sharded):
        _loss(m).backward()
    habit, said = WARNED[text], text.partition(",")[0]
    quiet_before = not _said(functools.partial(habit, model, model[0].weight))
    found = any(said in line for line in _said(functools.partial(habit, sharded, sharded[0].weight)))
    return found and (quiet_before or "gradients" in text or "hooks" in text)


@nightly(
    but=[
        "gradients that the parameters hold already",
        "norm(), after *",
        "norm(), in a hook of a *",
        "norm(), in a hook of autograd.grad",
        "norm(), of a state dict's",
        "norm(), of all together",
    ]
)
@pytest.mark.parametrize("text", WARNED)
def test_results_of_slices_used_as_the_whole_give_a_warning(text: str) -> None:
    assert all(run_ranks(_warns, 2, text))


def _is_quiet(rank: int, text: str) -> bool:
    tsd.init_process_group()
    sharded = _pair()[1]
    _loss(sharded).backward()
    return not _said(functools.partial(QUIET[text], sharded, sharded[0].weight))


@nightly("PyTorch's own", "a call", "an optimizer")
@pytest.mark.parametrize("text", QUIET)
def test_correct_uses_of_slices_give_no_warning(text: str) -> None:
    assert all(run_ranks(_is_quiet, 2, text))


def _refuses(rank: int, text: str) -> bool:
    tsd.init_process_group()
    return refused_input(lambda: REFUSED[text](_pair()[1]), text.partition(" (assigned")[0].partition(" (per")[0])


@nightly(
    but=[
        "*trace",
        "a transform of torch.func",
        "is *",
        "layer_norm fits the whole, not",
        "of shape (8, 1) meets this rank's slice",
        "view fits the whole, not",
        "within torch.jit.script",
    ]
)
@pytest.mark.parametrize("text", REFUSED)
def test_what_slices_cannot_do_is_refused(text: str) -> None:
    assert all(run_ranks(_refuses, 2, text))


def _differs(rank: int, text: str, ending: str) -> str:
    tsd.init_process_group()
    _, sharded = _pair()
    sharded(_x())
    try:
        DIFFERENT[text](sharded, rank)
        sharded(_x()) if ending == "call" else sharded.full_state_dict()
    except ts.DistributedError as error:
        return error.what
    return "nothing"


@nightly(
    but=[
        "about to do different things: clipping-call",
        "about to do different things: models-state dict",
        "about to do different things: overflows-call",
        "about to do different things: ts's-call",
        "losses differ: a head-call",
        "losses differ: labels-state dict",
    ]
)
@pytest.mark.parametrize("ending", ["call", "state dict"])
@pytest.mark.parametrize("text", DIFFERENT)
def test_ranks_that_train_on_different_losses_are_told(text: str, ending: str) -> None:
    for said in run_ranks(_differs, 2, text, ending):
        assert text.partition(":")[0] in said


def _clips_in_another_order(rank: int, verifies_each: bool) -> str:
    tsd.init_process_group()
    _, sharded = _pair()
    sharded(_x())
    try:
        with mock.patch(
            "torchshard.distributed.group.Group.aborts_on_mismatch", return_value=verifies_each
        ):  # False, as of NCCL
            _clipped(_in_turn(sharded, rank), nn.utils.clip_grad_norm_)
            sharded(_x())
    except ts.DistributedError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("verifies_each", [True, False])
def test_ranks_that_clip_in_another_order_hear_of_which_parameters(verifies_each: bool) -> None:
    for said in run_ranks(_clips_in_another_order, 2, verifies_each):
        assert "norms of 0.weight of model 0" in said
        assert "norms of 3.weight of model 0" in said
        assert "the collectives since the last call" in said or "in one order on every rank, which no set has" in said


# --- more of them, several in one run --------------------------------------------------------------------------------


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
"""The quick ones of the habits that have failed once; all run by night, on several meshes."""


def test_recipes_have_the_results_of_the_unsharded_model_or_are_refused() -> None:
    for found in run_ranks(_outcomes, 2, {}, [*BY_DAY, *habits.REFUSED]):
        assert {name: value for name, value in found.items() if not value < TOLERANCE} == {}


def _in_anomaly_mode(rank: int) -> list[str]:
    """What is said while steps look for NaNs, in calls of a graph with a backward of its own."""
    tsd.init_process_group()
    _, sharded = _pair()
    with warnings.catch_warnings(record=True) as held, torch.autograd.detect_anomaly():
        warnings.simplefilter("always")
        for seed in range(3):
            _loss(sharded, seed).backward()
    return [str(w.message) for w in held if "Anomaly Detection has been enabled" not in str(w.message)]


def test_anomaly_mode_finds_none_in_what_torchshard_records() -> None:
    assert run_ranks(_in_anomaly_mode, 2) == [[], []]


MESHES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {}),
    (2, {"data": "shard", "inputs": "global"}),
    (4, {"mesh": {"dp": 2, "tp": 2}, "data": "shard", "inputs": "global"}),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "options"), MESHES)
def test_recipes_on_meshes(ranks: int, options: dict[str, Any]) -> None:
    for found in run_ranks(_outcomes, ranks, options, [*habits.MENDED, *habits.EQUAL], seconds=600):
        assert {name: value for name, value in found.items() if not value < TOLERANCE} == {}
