"""More habits, each a function of `Run`: its models and results are compared with the unsharded run's.

Apart from `run.make`, a habit is code without any sharding. `tests/test_habits.py` runs them on several meshes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import torchshard as ts
from torchshard.testing import full_gradient, largest

Habit = Callable[["Run"], Any]
MENDED: dict[str, Habit] = {}
"""Habits that failed in an earlier version."""
EQUAL: dict[str, Habit] = {}
REFUSED: dict[str, tuple[str, Habit]] = {}
"""Name -> the error's text, and the habit."""


def _in(table: dict[str, Habit]) -> Callable[[Habit], Habit]:
    def add(habit: Habit) -> Habit:
        table[habit.__name__.strip("_")] = habit
        return habit

    return add


def _refused(text: str) -> Callable[[Habit], Habit]:
    def add(habit: Habit) -> Habit:
        REFUSED[habit.__name__.strip("_")] = text, habit
        return habit

    return add


class Net(nn.Module):
    """A block with one norm and nine hidden units, which split evenly over three ranks but not over two or four."""

    def __init__(self, results: int = 5, *, batch_norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 9), nn.Dropout(dropout), nn.Linear(9, results)
        self.norm = nn.BatchNorm1d(9) if batch_norm else nn.LayerNorm(9)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(F.gelu(self.norm(self.up(x)))))
        return y


class Run:
    """One run of a habit: with unsharded models, or with sharded ones."""

    def __init__(self, rank: int, options: dict[str, Any] | None) -> None:
        """Creates a run on one rank.

        Args:
            options: arguments of `ts.shard`; None for the unsharded run.
        """
        self.rank, self.options = rank, options
        self.models: list[Any] = []

    @property
    def is_sharded(self) -> bool:
        """Whether the models are sharded."""
        return self.options is not None

    def make(self, build: Callable[[], nn.Module] = Net, plan: Any = None, seed: int = 0) -> Any:
        """Builds a float64 model; its state and gradients are compared after the run."""
        torch.manual_seed(seed)
        model: Any = build().double()
        torch.manual_seed(seed + 1)
        if self.options is not None:
            is_batch = self.options.get("mesh") == "shard"
            plan = {"up": "column", "down": "row"} if plan is None else plan
            model = ts.shard(model, {} if is_batch else plan, **self.options)
        self.models.append(model)
        return model


def difference(habit: Habit, rank: int, options: dict[str, Any]) -> float:
    """The largest difference of a result, gradient or state tensor from the unsharded run; NaN if shapes differ."""
    found: list[list[Tensor | None]] = []
    for run in (Run(rank, None), Run(rank, options)):
        torch.manual_seed(7)
        tensors = [t.detach() for t in torch.utils._pytree.tree_leaves(habit(run)) if isinstance(t, Tensor)]
        own: list[Tensor | None] = [*tensors]
        for model in run.models:
            own += (model.full_state_dict() if run.is_sharded else model.state_dict()).values()
            own += [full_gradient(p) if run.is_sharded else p.grad for p in model.parameters()]
        found.append(own)
    pairs = list(zip(*found, strict=True))
    if any((a is None) != (b is None) or (a is not None and b is not None and a.shape != b.shape) for a, b in pairs):
        return math.nan
    apart = [(a.double() - b.double()).abs().max() for a, b in pairs if a is not None and b is not None and a.numel()]
    return largest(0.0, *map(float, apart))


def x_of(seed: int = 0, rows: int = 12) -> Tensor:
    """Samples that are equal on every rank."""
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _trained(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 0) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(x_of(seed + step)).square().mean().backward()
        optimizer.step()


def _sgd(model: Any, lr: float = 0.1, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, **settings)


# --- mended ----------------------------------------------------------------------------------------------------------


@_in(MENDED)
def _layers_by_the_name_of_their_class(run: Run) -> Any:
    """Monte Carlo dropout finds layers by class name; transformers' label smoothing reads the model's class name."""
    model = run.make(lambda: Net(dropout=0.4)).eval()
    for m in model.modules():
        if m.__class__.__name__.startswith("Dropout"):
            m.train()
    names = [type(model).__name__, model._get_name(), *(type(m).__name__ for m in model.modules())]
    return model(x_of()), torch.tensor([float(name in "NetLinearDropoutLayerNorm") for name in names])


@_in(MENDED)
def _copies_from_before_the_first_call(run: Run) -> Any:
    """timm's ModelEmaV2 and PyTorch's average with buffers, created before the first call, which splits the norm."""
    model = run.make(lambda: Net(batch_norm=True))
    ema = copy.deepcopy(model).eval()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for step in range(2):
        _trained(model, _sgd(model), 1, step)
        average.update_parameters(model)
        with torch.no_grad():
            for mean, value in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(mean * 0.9 + value * 0.1 if mean.is_floating_point() else value)
    return ema(x_of()), average.eval()(x_of())


@_in(MENDED)
def _functional_call_as_the_first_call(run: Run) -> Any:
    model = run.make(lambda: Net(batch_norm=True))
    return torch.func.functional_call(model, model.state_dict(), (x_of(),)), model(x_of(1))


@_in(MENDED)
def _stacked_models(run: Run) -> Any:
    models = [run.make(seed=0), run.make(seed=1)]
    parameters, _ = torch.func.stack_module_state(models)
    return torch.func.functional_call(models[0], {n: p[1] for n, p in parameters.items()}, (x_of(),))


@_in(MENDED)
def _state_of_a_part(run: Run) -> Any:
    model = run.make()
    state = pickle.loads(pickle.dumps(model.up.state_dict()))
    with torch.no_grad():
        model.up.weight.mul_(2)
    model.up.load_state_dict(state)
    model.load_state_dict({**model.state_dict(), **model.up.state_dict(prefix="up.")})
    return model(x_of())


@_in(MENDED)
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


@_in(MENDED)
def _tied_after_a_call(run: Run) -> Any:
    """Two weights with equal shardings may be tied."""
    model = run.make(lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)), {"0": "column", "2": "column"})
    model(x_of())
    model[2].weight = model[0].weight
    _trained(model, _sgd(model))


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


@_in(MENDED)
def _tensors_in_caches_of_functions(run: Run) -> Any:
    _slopes.cache_clear()
    _Cached.of_static.cache_clear()
    model = run.make(_Cached)
    return model(x_of()), model.eval()(x_of()), _slopes(5), _Cached.of_static(5)


@_in(MENDED)
def _collectives_of_slices(run: Run) -> Any:
    model = run.make(lambda: nn.Linear(6, 6), {"": "column"})
    weight = model.state_dict()["weight"]
    if run.options is None or isinstance(run.options.get("mesh"), dict):  # a mesh makes slices of two sizes
        return weight if run.options is None else model.full_state_dict()["weight"]
    whole = torch.zeros(6, 6).double()
    torch.distributed.all_gather_single(whole, weight, group=torch.distributed.group.WORLD)
    return whole


@_in(MENDED)
def _statistics_computed_again(run: Run) -> Any:
    """`update_bn` as in PyTorch's tutorial on averaged weights: all batches of the loader weigh the same."""
    model = run.make(functools.partial(Net, batch_norm=True))
    model(x_of()).square().mean().backward()
    update_bn([x_of(seed) for seed in range(3)], model)
    return model.norm.num_batches_tracked


@_in(MENDED)
def _clipping_within_steps(run: Run) -> Any:
    """Clips gradients in hooks, in a closure, and after a step that raised."""
    model, norms = run.make(), list[Tensor]()
    optimizer = _sgd(model)

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


@_in(MENDED)
def _clipping_a_set(run: Run) -> Any:
    """One call clips the parameters of two models, in an order that differs between ranks."""
    models = [run.make(seed=seed) for seed in range(2)]
    for model in models:
        model(x_of()).square().mean().backward()
    parameters = [p for model in models for p in model.parameters()]
    return nn.utils.clip_grad_norm_(parameters[:: 1 if run.rank % 2 else -1], 0.1)


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


# --- losses and loops ------------------------------------------------------------------------------------------------


def _labels(seed: int = 0, rows: int = 12) -> Tensor:
    return torch.randint(5, (rows,), generator=torch.Generator().manual_seed(seed))


@_in(EQUAL)
def _preferences_against_a_reference(run: Run) -> Any:
    """Direct preference optimization, both samples in one batch."""
    policy, reference = run.make(), run.make(seed=3).eval().requires_grad_(False)
    both = torch.cat([x_of(0), x_of(1)])
    with torch.no_grad():
        expected = reference(both).log_softmax(-1)[:, 0]
    chosen, rejected = (policy(both).log_softmax(-1)[:, 0] - expected).chunk(2)
    (-F.logsigmoid(0.1 * (chosen - rejected)).mean()).backward()
    return chosen


@_in(EQUAL)
def _clipped_policy_with_old_probabilities(run: Run) -> Any:
    policy, value = run.make(), run.make(lambda: Net(1), seed=3)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer, x, actions = torch.optim.SGD(parameters, 0.05), x_of(rows=24), _labels(rows=24)
    with torch.no_grad():
        old = torch.distributions.Categorical(logits=policy(x)).log_prob(actions)
        advantage = x[:, 0] - value(x)[:, 0]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for epoch in range(2):
        for rows in torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).split(12):
            now = torch.distributions.Categorical(logits=policy(x[rows]))
            ratio = (now.log_prob(actions[rows]) - old[rows]).exp()
            gain = torch.min(ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows]).mean()
            optimizer.zero_grad()
            (F.mse_loss(value(x[rows])[:, 0], x[rows, 0]) - gain - 0.01 * now.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()


@_in(EQUAL)
def _noise_prediction_weighed_by_its_level(run: Run) -> Any:
    """Diffusion with min-SNR weights and a moving average by `sub_`, as in diffusers' EMAModel."""
    model = run.make(lambda: Net(6))
    mean, levels = copy.deepcopy(model).eval().requires_grad_(False), torch.linspace(0.99, 0.01, 5).double()
    for step in range(2):
        kept = levels[_labels(step)]
        noisy = kept.sqrt()[:, None] * x_of(step) + (1 - kept).sqrt()[:, None] * x_of(step + 5)
        weight = torch.stack([kept / (1 - kept), torch.full_like(kept, 5.0)], 1).min(1)[0] / (kept / (1 - kept))
        model.zero_grad()
        (F.mse_loss(model(noisy), x_of(step + 5), reduction="none").mean(1) * weight).mean().backward()
        _sgd(model).step()
        for p, q in zip(mean.parameters(), model.parameters(), strict=True):
            p.data.sub_(0.1 * (p.data - q.data))
    return mean(x_of())


@_in(EQUAL)
def _queue_of_keys(run: Run) -> Any:
    """Momentum contrast: the loop writes a queue of keys from an averaged encoder."""
    model, keys = run.make(), run.make().requires_grad_(False)
    queue = F.normalize(torch.randn(5, 24, generator=torch.Generator().manual_seed(3)).double(), dim=0)
    for step in range(2):
        with torch.no_grad():
            for p, q in zip(keys.parameters(), model.parameters(), strict=True):
                p.data = p.data * 0.9 + q.data * 0.1
            positive = F.normalize(keys(x_of(step + 7)), dim=1)
        query = F.normalize(model(x_of(step)), dim=1)
        logits = torch.cat([(query * positive).sum(1, keepdim=True), query @ queue.clone()], 1) / 0.07
        model.zero_grad()
        F.cross_entropy(logits, torch.zeros(12, dtype=torch.long)).backward()
        _sgd(model).step()
        queue[:, 12 * step : 12 * step + 12] = positive.T


@_in(EQUAL)
def _two_passes_with_dropout(run: Run) -> Any:
    model = run.make(lambda: Net(dropout=0.3))
    a, b = model(x_of()).log_softmax(-1), model(x_of()).log_softmax(-1)
    (F.kl_div(a, b, log_target=True) + F.kl_div(b, a, log_target=True)).backward()
    return a, b


@_in(EQUAL)
def _batch_with_nan(run: Run) -> Any:
    model = run.make()
    for step in range(3):
        x = x_of(step)
        x[0] = math.nan if step == 1 else 0.0
        model.zero_grad()
        model(x).square().mean().backward()
        for p in model.parameters():
            torch.nan_to_num_(p.grad, nan=0.0)
        _sgd(model).step()


@_in(EQUAL)
def _actor_and_critic_frozen_in_turn(run: Run) -> Any:
    """Freezes the critic while the actor trains, like Lightning's `toggle_optimizer`."""
    actor, critic = run.make(lambda: Net(6)), run.make(lambda: Net(1), seed=3)
    for step in range(2):
        critic.requires_grad_(False)
        (-critic(actor(x_of(step)))).mean().backward()
        _sgd(actor).step()
        critic.requires_grad_(True)
        actor.zero_grad()
        F.softplus(critic(actor(x_of(step)).detach()) - critic(x_of(step + 5))).mean().backward()
        _sgd(critic).step()
        critic.zero_grad()


# --- states and settings in the middle of a run ----------------------------------------------------------------------


@_in(EQUAL)
def _rates_found_and_all_restored(run: Run) -> Any:
    model = run.make()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for step in range(2):
        _trained(model, optimizer, 1, step)
        optimizer.param_groups[0]["lr"] *= 10
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    _trained(model, optimizer)


@_in(EQUAL)
def _settings_changed_while_gradients_accumulate(run: Run) -> Any:
    model = run.make()
    state = copy.deepcopy(model.state_dict())
    model(x_of(0)).square().mean().backward()
    model.up.requires_grad_(False)
    model(x_of(1)).square().mean().backward()
    model.up.requires_grad_(True)
    with torch.no_grad():
        model.up.weight.mul_(1.5)
    model(x_of(2)).square().mean().backward()
    model.load_state_dict(state)
    model(x_of(3)).square().mean().backward()
    _sgd(model).step()


@_in(EQUAL)
def _copy_between_forward_and_backward(run: Run) -> Any:
    model = run.make()
    loss = model(x_of()).square().mean()
    copied, optimizer = copy.deepcopy(model), _sgd(model)
    loss.backward()
    optimizer.step()
    again, its_optimizer = copy.deepcopy((model, optimizer))
    _trained(again, its_optimizer)
    return copied(x_of()), again(x_of())


@_in(EQUAL)
def _values_of_two_models_swapped(run: Run) -> Any:
    models = run.make(), run.make(seed=3)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        p.data, q.data = q.data, p.data
    for m, own in zip(models, reversed(models), strict=True):
        m(x_of()).square().mean().backward()
        _sgd(own).step()


@_in(EQUAL)
def _evaluation_between_forward_and_backward(run: Run) -> Any:
    model = run.make(lambda: Net(batch_norm=True))
    loss = model(x_of()).square().mean()
    with torch.inference_mode():
        found = model.eval()(x_of(3))
    model.train()
    loss.backward()
    _sgd(model).step()
    return found


@_in(EQUAL)
def _half_and_back(run: Run) -> Any:
    model = run.make()
    state = copy.deepcopy(model.state_dict())
    model.half()(x_of().half())
    model.double().load_state_dict(state)
    _trained(model, _sgd(model))


@_in(EQUAL)
def _saved_tensors_packed(run: Run) -> Any:
    model = run.make()
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            loss = model(x_of()).square().mean()
        loss.backward()
        with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = model(x_of())
            loss = y.square().mean()
            y.mul_(0)
            loss.backward()


@_in(EQUAL)
def _gradients_joined_by_elements(run: Run) -> Any:
    """Combines three gradients by median and common sign, and makes a cautious step."""
    model = run.make()
    found = [torch.autograd.grad(model(x_of(seed)).sum(), list(model.parameters())) for seed in range(3)]
    for p, *gradients in zip(model.parameters(), *found, strict=True):
        agree = torch.stack([g.sign() for g in gradients]).mean(0).abs() > 0.5
        p.grad = torch.stack(gradients).median(0).values * agree
        p.data.add_(p.grad * ((p.grad * p.data) > 0), alpha=-0.1)


@_in(EQUAL)
def _hooks_on_the_model(run: Run) -> Any:
    model, x = run.make(), x_of().requires_grad_()
    model.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.register_forward_hook(lambda m, args, result: result * 3, prepend=True)
    model.register_full_backward_pre_hook(lambda m, given: (given[0] * 5,))
    handle = model.register_full_backward_hook(lambda m, found, given: (found[0] * 7,))
    model(x).sum().backward()
    handle.remove()
    model(x).sum().backward()
    return x.grad


@_in(EQUAL)
def _fast_weights(run: Run) -> Any:
    """Differentiates an inner step of meta learning."""
    model = run.make()
    own = dict(model.named_parameters())
    loss = torch.func.functional_call(model, own, (x_of(),)).square().mean()
    gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(own.items(), gradients, strict=True)}
    torch.func.functional_call(model, fast, (x_of(1),)).square().mean().backward()


@_in(EQUAL)
def _weights_moved_outside_of_optimizers(run: Run) -> Any:
    """Updates weights element by element: Lookahead, Reptile, SWAG's moments, elastic weights."""
    model = run.make()
    slow = [p.detach().clone() for p in model.parameters()]
    squares = [torch.zeros_like(p) for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(2):
        _trained(model, _sgd(model), 1, step)
        for p, q, s in zip(model.parameters(), slow, squares, strict=True):
            s.mul_(step / (step + 1)).add_(p.data**2 / (step + 1))
            q.add_(p.data - q, alpha=0.5)
            p.data.copy_(q + torch.clamp(s - q**2, min=1e-30).sqrt() * 0.1)
    model.load_state_dict({name: before[name] + 0.5 * (v - before[name]) for name, v in model.state_dict().items()})
