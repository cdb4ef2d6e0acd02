"""Habits with the unsharded model's results: losses and loops, and changes of states and settings in a run."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.run import Habit, Net, Run, into, sgd, trained, x_of

EQUAL: dict[str, Habit] = {}

# --- losses and loops ------------------------------------------------------------------------------------------------


def _labels(seed: int = 0, rows: int = 12) -> Tensor:
    return torch.randint(5, (rows,), generator=torch.Generator().manual_seed(seed))


@into(EQUAL)
def _preferences_against_a_reference(run: Run) -> Any:
    """Direct preference optimization, both samples in one batch."""
    policy, reference = run.make(), run.make(seed=3).eval().requires_grad_(False)
    both = torch.cat([x_of(0), x_of(1)])
    with torch.no_grad():
        expected = reference(both).log_softmax(-1)[:, 0]
    chosen, rejected = (policy(both).log_softmax(-1)[:, 0] - expected).chunk(2)
    (-F.logsigmoid(0.1 * (chosen - rejected)).mean()).backward()
    return chosen


@into(EQUAL)
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


@into(EQUAL)
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
        sgd(model).step()
        for p, q in zip(mean.parameters(), model.parameters(), strict=True):
            p.data.sub_(0.1 * (p.data - q.data))
    return mean(x_of())


@into(EQUAL)
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
        sgd(model).step()
        queue[:, 12 * step : 12 * step + 12] = positive.T


@into(EQUAL)
def _two_passes_with_dropout(run: Run) -> Any:
    model = run.make(lambda: Net(dropout=0.3))
    a, b = model(x_of()).log_softmax(-1), model(x_of()).log_softmax(-1)
    (F.kl_div(a, b, log_target=True) + F.kl_div(b, a, log_target=True)).backward()
    return a, b


@into(EQUAL)
def _batch_with_nan(run: Run) -> Any:
    model = run.make()
    for step in range(3):
        x = x_of(step)
        x[0] = math.nan if step == 1 else 0.0
        model.zero_grad()
        model(x).square().mean().backward()
        for p in model.parameters():
            torch.nan_to_num_(p.grad, nan=0.0)
        sgd(model).step()


@into(EQUAL)
def _actor_and_critic_frozen_in_turn(run: Run) -> Any:
    """Freezes the critic while the actor trains, like Lightning's `toggle_optimizer`."""
    actor, critic = run.make(lambda: Net(6)), run.make(lambda: Net(1), seed=3)
    for step in range(2):
        critic.requires_grad_(False)
        (-critic(actor(x_of(step)))).mean().backward()
        sgd(actor).step()
        critic.requires_grad_(True)
        actor.zero_grad()
        F.softplus(critic(actor(x_of(step)).detach()) - critic(x_of(step + 5))).mean().backward()
        sgd(critic).step()
        critic.zero_grad()


# --- states and settings in the middle of a run ----------------------------------------------------------------------


@into(EQUAL)
def _rates_found_and_all_restored(run: Run) -> Any:
    model = run.make()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for step in range(2):
        trained(model, optimizer, 1, step)
        optimizer.param_groups[0]["lr"] *= 10
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    trained(model, optimizer)


@into(EQUAL)
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
    sgd(model).step()


@into(EQUAL)
def _copy_between_forward_and_backward(run: Run) -> Any:
    model = run.make()
    loss = model(x_of()).square().mean()
    copied, optimizer = copy.deepcopy(model), sgd(model)
    loss.backward()
    optimizer.step()
    again, its_optimizer = copy.deepcopy((model, optimizer))
    trained(again, its_optimizer)
    return copied(x_of()), again(x_of())


@into(EQUAL)
def _values_of_two_models_swapped(run: Run) -> Any:
    models = run.make(), run.make(seed=3)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        p.data, q.data = q.data, p.data
    for m, own in zip(models, reversed(models), strict=True):
        m(x_of()).square().mean().backward()
        sgd(own).step()


@into(EQUAL)
def _evaluation_between_forward_and_backward(run: Run) -> Any:
    model = run.make(lambda: Net(batch_norm=True))
    loss = model(x_of()).square().mean()
    with torch.inference_mode():
        found = model.eval()(x_of(3))
    model.train()
    loss.backward()
    sgd(model).step()
    return found


@into(EQUAL)
def _half_and_back(run: Run) -> Any:
    model = run.make()
    state = copy.deepcopy(model.state_dict())
    model.half()(x_of().half())
    model.double().load_state_dict(state)
    trained(model, sgd(model))


@into(EQUAL)
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


@into(EQUAL)
def _gradients_joined_by_elements(run: Run) -> Any:
    """Combines three gradients by median and common sign, and makes a cautious step."""
    model = run.make()
    found = [torch.autograd.grad(model(x_of(seed)).sum(), list(model.parameters())) for seed in range(3)]
    for p, *gradients in zip(model.parameters(), *found, strict=True):
        agree = torch.stack([g.sign() for g in gradients]).mean(0).abs() > 0.5
        p.grad = torch.stack(gradients).median(0).values * agree
        p.data.add_(p.grad * ((p.grad * p.data) > 0), alpha=-0.1)


@into(EQUAL)
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


@into(EQUAL)
def _fast_weights(run: Run) -> Any:
    """Differentiates an inner step of meta learning."""
    model = run.make()
    own = dict(model.named_parameters())
    loss = torch.func.functional_call(model, own, (x_of(),)).square().mean()
    gradients = torch.autograd.grad(loss, list(own.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(own.items(), gradients, strict=True)}
    torch.func.functional_call(model, fast, (x_of(1),)).square().mean().backward()


@into(EQUAL)
def _weights_moved_outside_of_optimizers(run: Run) -> Any:
    """Updates weights element by element: Lookahead, Reptile, SWAG's moments, elastic weights."""
    model = run.make()
    slow = [p.detach().clone() for p in model.parameters()]
    squares = [torch.zeros_like(p) for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(2):
        trained(model, sgd(model), 1, step)
        for p, q, s in zip(model.parameters(), slow, squares, strict=True):
            s.mul_(step / (step + 1)).add_(p.data**2 / (step + 1))
            q.add_(p.data - q, alpha=0.5)
            p.data.copy_(q + torch.clamp(s - q**2, min=1e-30).sqrt() * 0.1)
    model.load_state_dict({name: before[name] + 0.5 * (v - before[name]) for name, v in model.state_dict().items()})
