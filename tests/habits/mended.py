"""Habits that failed in an earlier version, and now have the unsharded model's results."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.habits.run import Habit, Net, Run, into, sgd, trained, x_of

MENDED: dict[str, Habit] = {}


@into(MENDED)
def _layers_by_the_name_of_their_class(run: Run) -> Any:
    """Monte Carlo dropout finds layers by class name; transformers' label smoothing reads the model's class name."""
    model = run.make(lambda: Net(dropout=0.4)).eval()
    for m in model.modules():
        if m.__class__.__name__.startswith("Dropout"):
            m.train()
    names = [type(model).__name__, model._get_name(), *(type(m).__name__ for m in model.modules())]
    return model(x_of()), torch.tensor([float(name in "NetLinearDropoutLayerNorm") for name in names])


@into(MENDED)
def _copies_from_before_the_first_call(run: Run) -> Any:
    """timm's ModelEmaV2 and PyTorch's average with buffers, created before the first call, which splits the norm."""
    model = run.make(lambda: Net(batch_norm=True))
    ema = copy.deepcopy(model).eval()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for step in range(2):
        trained(model, sgd(model), 1, step)
        average.update_parameters(model)
        with torch.no_grad():
            for mean, value in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(mean * 0.9 + value * 0.1 if mean.is_floating_point() else value)
    return ema(x_of()), average.eval()(x_of())


@into(MENDED)
def _functional_call_as_the_first_call(run: Run) -> Any:
    model = run.make(lambda: Net(batch_norm=True))
    return torch.func.functional_call(model, model.state_dict(), (x_of(),)), model(x_of(1))


@into(MENDED)
def _stacked_models(run: Run) -> Any:
    models = [run.make(seed=0), run.make(seed=1)]
    parameters, _ = torch.func.stack_module_state(models)
    return torch.func.functional_call(models[0], {n: p[1] for n, p in parameters.items()}, (x_of(),))


@into(MENDED)
def _state_of_a_part(run: Run) -> Any:
    model = run.make()
    state = pickle.loads(pickle.dumps(model.up.state_dict()))
    with torch.no_grad():
        model.up.weight.mul_(2)
    model.up.load_state_dict(state)
    model.load_state_dict({**model.state_dict(), **model.up.state_dict(prefix="up.")})
    return model(x_of())


@into(MENDED)
def _hooks_on_the_nodes_of_parameters(run: Run) -> Any:
    """Megatron-LM's hooks that count gradients, and PyTorch's hook on several tensors."""
    model, counts, nodes = run.make(), [0, 0], []

    def count(i: int, given: Any) -> None:
        counts[i] += 1

    for p in model.parameters():
        nodes.append(p.expand_as(p).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *given: count(0, given))
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), functools.partial(count, 1))
    for _ in range(3):
        model(x_of()).sum().backward()
    return torch.tensor(counts)


@into(MENDED)
def _tied_after_a_call(run: Run) -> Any:
    """Two weights with equal shardings may be tied."""
    model = run.make(lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), {"0": "column", "2": "column"})
    model(x_of())
    model[2].weight = model[0].weight
    trained(model, sgd(model))


@functools.lru_cache(None)
def _slopes(size: int) -> Tensor:
    return torch.arange(size).double()


class _Cached(Net):
    """Caches tensors in functions; a capture must not leave its own tensors in these caches."""

    @functools.lru_cache(None)  # noqa: B019  (people do)
    def of_method(self, size: int) -> Tensor:
        return torch.arange(size).double()

    @staticmethod
    @functools.cache
    def of_static(size: int) -> Tensor:
        return torch.arange(size).double() + 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * _slopes(5) * self.of_method(5) * self.of_static(5)


@into(MENDED)
def _tensors_in_caches_of_functions(run: Run) -> Any:
    _slopes.cache_clear()
    _Cached.of_static.cache_clear()
    model = run.make(_Cached)
    return model(x_of()), model.eval()(x_of()), _slopes(5), _Cached.of_static(5)


@into(MENDED)
def _collectives_of_slices(run: Run) -> Any:
    model = run.make(lambda: nn.Linear(6, 6), {"": "column"})
    weight = model.state_dict()["weight"]
    if run.options is None or isinstance(run.options.get("mesh"), dict):  # a mesh makes slices of two sizes
        return weight if run.options is None else model.full_state_dict()["weight"]
    whole = torch.zeros(6, 6).double()
    torch.distributed.all_gather_single(whole, weight, group=torch.distributed.group.WORLD)
    return whole


@into(MENDED)
def _statistics_computed_again(run: Run) -> Any:
    """`update_bn` as in PyTorch's tutorial on averaged weights: all batches of the loader weigh the same."""
    model = run.make(functools.partial(Net, batch_norm=True))
    model(x_of()).square().mean().backward()
    update_bn([x_of(seed) for seed in range(3)], model)
    return model.norm.num_batches_tracked


@into(MENDED)
def _clipping_within_steps(run: Run) -> Any:
    """Clips gradients in hooks, in a closure, and after a step that raised."""
    model, norms = run.make(), list[Tensor]()
    optimizer = sgd(model)

    def clip(*ignored: object) -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1 / (1 + len(norms))))

    def closure() -> Tensor:
        clip()
        loss: Tensor = model(x_of(len(norms))).square().mean() * 5
        optimizer.zero_grad()
        loss.backward()
        clip()
        return loss

    def failing(*ignored: object) -> None:
        raise ArithmeticError

    closure()
    hooks = [optimizer.register_step_pre_hook(clip), optimizer.register_step_post_hook(clip)]
    hooks += [register_optimizer_step_pre_hook(clip), register_optimizer_step_post_hook(clip)]
    try:
        optimizer.step(closure)
        optimizer.step(closure=closure)
    finally:
        for hook in hooks:
            hook.remove()
    for fails in (
        lambda: optimizer.register_step_pre_hook(failing),
        lambda: optimizer.register_step_post_hook(failing),
    ):
        hook = fails()
        with contextlib.suppress(ArithmeticError):
            optimizer.step()
        hook.remove()
        clip()
    with contextlib.suppress(ArithmeticError):
        optimizer.step(failing)
    clip()
    return norms


@into(MENDED)
def _clipping_a_set(run: Run) -> Any:
    """One call clips the parameters of two models, in an order that differs between ranks."""
    models = [run.make(seed=seed) for seed in range(2)]
    for model in models:
        model(x_of()).square().mean().backward()
    parameters = [p for model in models for p in model.parameters()]
    return nn.utils.clip_grad_norm_(parameters[:: 1 if run.rank % 2 else -1], 0.1)
