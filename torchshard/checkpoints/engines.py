"""The layouts in which inference engines store decoders: which rows or columns of which parameters form theirs.

    q_proj.weight, k_proj.weight, v_proj.weight      qkv_proj.weight: this rank's heads of each, by rows
    o_proj.weight                                    this rank's columns
    embed_tokens.weight                              this rank's rows, of a vocabulary padded to a multiple of 64

Sources: vLLM's QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding; SGLang has
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from torchshard.core.errors import InputError

VOCABULARY_UNIT = 64
"""The engines pad the number of tokens to a multiple of it."""


class DecoderConfig(Protocol):
    """A configuration of transformers, as far as engines' layouts depend on it."""

    @property
    def num_attention_heads(self) -> int:
        """The number of query heads."""

    @property
    def num_key_value_heads(self) -> int:
        """The number of key and value heads."""


class _Rule(NamedTuple):
    """An engine's layout of a module's parameters."""

    fused: str
    """The engine's module."""
    dim: int
    """The dim of the weight that its ranks split."""
    heads: str = ""
    """The setting with the number of heads that ranks split, or share if there are fewer."""
    unit: int = 1
    """The ranks split a size padded to a multiple of it."""


RULES: Mapping[str, _Rule] = {
    "q_proj": _Rule("qkv_proj", 0, "num_attention_heads"),
    "k_proj": _Rule("qkv_proj", 0, "num_key_value_heads"),
    "v_proj": _Rule("qkv_proj", 0, "num_key_value_heads"),
    "o_proj": _Rule("o_proj", 1),
    "gate_proj": _Rule("gate_up_proj", 0),
    "up_proj": _Rule("gate_up_proj", 0),
    "down_proj": _Rule("down_proj", 1),
    "embed_tokens": _Rule("embed_tokens", 0, unit=VOCABULARY_UNIT),
    "lm_head": _Rule("lm_head", 0, unit=VOCABULARY_UNIT),
}
"""A decoder's module -> its layout; fused parameters are in this order.

Parameters of one dim in other modules, such as norms, are replicated.
"""


def engine_slices(config: DecoderConfig, rank: int, size: int) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Returns a function for `named_slices` that cuts out the parameters of one rank of vLLM or SGLang.

    For decoders with the module names of Llama, Mistral and Qwen. Rows that an engine adds to its vocabulary are not
    among them, so a rank's embedding may have fewer rows than the engine's parameter.

    Args:
        config: the model's; `num_attention_heads` and `num_key_value_heads` are read.
        rank: the number of the engine's rank.
        size: the number of the engine's ranks.

    Raises:
        InputError: the engine's ranks can't split the heads evenly; from the function, that a parameter has no rule or
            can't be split evenly.
    """
    if not 0 <= rank < size:
        raise InputError(f"rank {rank} is not one of {size} ranks", where="engine_slices", attempt="0 <= rank < size")

    def make(full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, x in full.items():
            module, _, leaf = name.rpartition(".")
            parent, _, last = module.rpartition(".")
            rule = RULES.get(last)
            if rule is None and x.ndim != 1:
                _refuse(name, tuple(x.shape), "its module is not one of a decoder's: " + ", ".join(RULES))
            fused = name if rule is None else ".".join(filter(None, (parent, rule.fused, leaf)))
            parts.setdefault(fused, {})[last] = x if rule is None else _cut(name, x, rule, config, rank, size)
        order = {module: number for number, module in enumerate(RULES)}  # models make theirs in other orders too
        ordered = {name: [of[last] for last in sorted(of, key=lambda n: order.get(n, 0))] for name, of in parts.items()}
        return {name: of[0] if len(of) == 1 else torch.cat(of) for name, of in ordered.items()}

    return make


def _cut(name: str, x: Tensor, rule: _Rule, config: DecoderConfig, rank: int, size: int) -> Tensor:
    """Returns one rank's part of a parameter."""
    if rule.dim >= x.ndim:  # the bias of a layer whose ranks add up their results
        return x
    pieces = getattr(config, rule.heads) if rule.heads else size
    if pieces < size:  # several ranks have the same head
        pieces, rank = (pieces, rank // (size // pieces)) if size % pieces == 0 else (0, 0)
    elif rule.heads:
        pieces = size if pieces % size == 0 else 0
    extent = x.shape[rule.dim]
    padded = -(-extent // rule.unit) * rule.unit
    if not pieces or padded % pieces:
        why = f"{getattr(config, rule.heads)} heads" if rule.heads else f"{padded} rows"
        _refuse(name, tuple(x.shape), f"{why} can't be split evenly over {size} ranks")
    start, stop = (min(at * padded // pieces, extent) for at in (rank, rank + 1))
    return x.narrow(rule.dim, start, stop - start)


def _refuse(name: str, shape: tuple[int, ...], why: str) -> NoReturn:
    raise InputError(
        f"no engine's layout is known for {name!r}",
        where=f"engine_slices, {shape}",
        why=why,
        attempt="a function of your own for model.named_slices(...), or model.named_full_parameters(), which engines "
        "load by name",
    )
