"""Trains a small Llama to name the larger of two digits, by GRPO: sharded, and unsharded for comparison.

    python examples/grpo.py                                 # starts its two ranks itself
    torchrun --nproc-per-node 2 examples/grpo.py

In each step every rank samples answers to its part of the prompts, with an unsharded copy of the model, as an engine
would. The ranks exchange the answers and their rewards, train the sharded model on all of them, and stream its weights
into their copies.

Source: GRPO, section 4.1 of DeepSeekMath (Shao et al., 2024), with one update per step.
"""

import copy
import os
from argparse import ArgumentParser
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import torchshard as ts

PROMPTS, SAMPLES, BETA, LEARNING_RATE = 8, 16, 0.01, 3e-3
"""The prompts of a step, the answers to each, the weight of the KL divergence, and AdamW's rate."""
CONFIG = LlamaConfig(
    vocab_size=12, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=8, bos_token_id=None, eos_token_id=None, pad_token_id=11,
)  # fmt: skip
"""Tokens 0 to 9 are digits, 10 ends a prompt."""
PLAN = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.[qkv]_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "lm_head": "vocab",
}


def prompts_of(step: int) -> Tensor:
    """The prompts of a step: i64[PROMPTS, 3]."""
    digits = torch.randint(10, (PROMPTS, 2), generator=torch.Generator().manual_seed(step))
    return torch.cat([digits, torch.full((PROMPTS, 1), 10)], 1)


def sample(sampler: LlamaForCausalLM, prompts: Tensor, seed: int) -> Tensor:
    """Prompts with answers: i64[prompts * SAMPLES, 4]."""
    torch.manual_seed(seed)
    return sampler.generate(prompts, do_sample=True, top_k=0, max_new_tokens=1, num_return_sequences=SAMPLES)


def reward(ids: Tensor) -> Tensor:
    """1 for the larger digit, 0 for other answers."""
    return (ids[:, 3] == ids[:, :2].amax(1)).double()


def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """Of the answers."""
    logits = model(input_ids=ids, use_cache=False).logits[:, -2]
    return torch.log_softmax(logits, -1).gather(1, ids[:, 3:]).squeeze(1)


def loss_of(model: nn.Module, reference: nn.Module, ids: Tensor) -> Tensor:
    """GRPO's loss: the advantage of each answer among those to its prompt, and the divergence from the reference."""
    rewards = reward(ids).view(-1, SAMPLES)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    own = log_probabilities(model, ids)
    with torch.no_grad():
        others = log_probabilities(reference, ids)
    ratio = (own - own.detach()).exp()  # 1, with the gradient of the policy
    divergence = (others - own).exp() - (others - own) - 1
    return (BETA * divergence - ratio * advantages.flatten()).mean()


def refit(sampler: nn.Module, model: nn.Module) -> None:
    """Copies the model's weights into the sampler."""
    full = model.named_full_parameters() if isinstance(model, ts.ShardedModule) else model.named_parameters()
    with torch.no_grad():
        for name, weight in full:
            sampler.get_parameter(name).copy_(weight)


def train(model: nn.Module, steps: int, ranks: Sequence[int]) -> list[tuple[float, float]]:
    """The loss and the mean reward of each step.

    Args:
        ranks: whose prompts this process samples answers to: its own, or all.
    """
    torch.manual_seed(0)
    reference = LlamaForCausalLM(CONFIG).double()
    sampler, optimizer = copy.deepcopy(reference), torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    found = []
    for step in range(steps):
        parts = prompts_of(step).chunk(ts.distributed.get_world_size())
        answered = torch.cat([sample(sampler, parts[rank], seed=step * len(parts) + rank) for rank in ranks])
        if len(ranks) < len(parts):
            answered = torch.cat(ts.distributed.all_gather_object(answered))
        loss = loss_of(model, reference, answered)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        refit(sampler, model)
        found.append((loss.item(), reward(answered).mean().item()))
    return found


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    ts.distributed.init_process_group()
    rank, world = ts.distributed.get_rank(), ts.distributed.get_world_size()
    say = print if rank == 0 else lambda *_: None

    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).double()
    ids = torch.zeros(PROMPTS * SAMPLES, 4, dtype=torch.long)
    sharded = ts.shard(copy.deepcopy(model), PLAN, example_kwargs={"input_ids": ids, "use_cache": False})
    split = train(sharded, steps, [rank])
    whole = train(model, steps, range(world))
    for step, ((loss, own), (expected, _)) in enumerate(zip(split, whole, strict=True)):
        if step % 10 == 0 or step == steps - 1:
            say(f"step {step:3}   reward {own:.3f}   loss {loss:+.8f}   unsharded {expected:+.8f}")
    worst = max(abs(a - b) for pair in zip(split, whole, strict=True) for a, b in zip(*pair, strict=True))
    say(f"largest difference of a loss or a reward: {worst:.1e}")
    assert worst < 1e-8
    ts.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        ts.distributed.launch(main, 2)
