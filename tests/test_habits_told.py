"""Code that treats a slice as the full parameter warns or raises."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import torchshard as ts
import torchshard.distributed as tsd
from tests.helpers import nightly, refused_input
from tests.test_habits import PLAN, Habit, _loss, _model, _pair, _x
from torchshard.testing import run_ranks

# --- warnings ---------------------------------------------------------------------------------------------------------


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
"""Text of the warning, up to any comma -> function of a model and one of its parameters."""


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
    """Updates slices and unsharded parameters in one list, as schedule-free optimizers do."""
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


# --- errors -----------------------------------------------------------------------------------------------------------


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
"""Text of the InputError -> function of a sharded model. `(assigned)` and `(per sample)` only name the case."""


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
    state = optimizers[0].state_dict()
    for of_parameter in state["state"].values():
        of_parameter["exp_avg"] = of_parameter["exp_avg"][..., :1]
    optimizers[1].load_state_dict(state)


# --- ranks that diverge -----------------------------------------------------------------------------------------------


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
"""Text of the DistributedError, up to the colon -> function of a model and a rank.

The error is raised at once, at the next call, or by the state dict.
"""


def _on_the_first(rank: int, call: Callable[[], Any]) -> None:
    if rank == 0:
        call()


def _in_turn(model: Any, rank: int) -> list[list[nn.Parameter]]:
    """Returns the parameters one by one, in a different order on each rank, as iteration over a set may."""
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


def _said(habit: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as held:
        warnings.simplefilter("always")
        habit()
    return [str(w.message) for w in held if w.filename == __file__ or "hooks on all" in str(w.message)]


def _warns(rank: int, text: str) -> bool:
    """Whether a habit warns with the sharded model, and only with it unless gradients or hooks cause the warning."""
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
        ):  # False is NCCL's behaviour
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
