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

SHARED = "num_key_value_heads"
"""The setting with the number of heads that several ranks may share."""
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
    """The setting with the number of heads that ranks split."""
    unit: int = 1
    """The ranks split a size padded to a multiple of it."""


RULES: Mapping[str, _Rule] = {
    "q_proj": _Rule("qkv_proj", 0, "num_attention_heads"),
    "k_proj": _Rule("qkv_proj", 0, SHARED),
    "v_proj": _Rule("qkv_proj", 0, SHARED),
    "o_proj": _Rule("o_proj", 1),
    "gate_proj": _Rule("gate_up_proj", 0),
    "up_proj": _Rule("gate_up_proj", 0),
    "down_proj": _Rule("down_proj", 1),
    "embed_tokens": _Rule("embed_tokens", 0, unit=VOCABULARY_UNIT),
    "lm_head": _Rule("lm_head", 0, unit=VOCABULARY_UNIT),
}
"""A decoder's module -> its layout; fused parameters are in this order.

Parameters of norms are replicated.
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
        found: dict[str, dict[str, Tensor]] = {}
        for name, x in full.items():
            module, _, leaf = name.rpartition(".")
            parent, _, last = module.rpartition(".")
            rule = RULES.get(last)
            if rule is None and not (last.endswith("norm") and x.ndim == 1):
                _refuse(name, tuple(x.shape), "its module is not one of a decoder's: norms, " + ", ".join(RULES))
            fused = name if rule is None else ".".join(filter(None, (parent, rule.fused, leaf)))
            found.setdefault(fused, {})[last] = x if rule is None else _cut(name, x, rule, config, rank, size)
        return {name: _joined(name, parts) for name, parts in found.items()}

    return make


def _joined(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """Returns an engine's parameter of the model's modules that form it, in the engine's order."""
    rule = RULES.get(next(iter(parts)))
    modules = list(parts) if rule is None else [module for module, other in RULES.items() if other.fused == rule.fused]
    if missing := [module for module in modules if module not in parts]:
        _refuse(name, (), f"it joins {', '.join(modules)}, and {', '.join(missing)} is missing")
    return parts[modules[0]] if len(modules) == 1 else torch.cat([parts[module] for module in modules])


def _cut(name: str, x: Tensor, rule: _Rule, config: DecoderConfig, rank: int, size: int) -> Tensor:
    """Returns one rank's part of a parameter."""
    if rule.dim >= x.ndim > 0:  # the bias of a layer whose ranks add up their results
        return x
    extent = x.shape[rule.dim] if x.ndim else 0
    padded, units, shared = -(-extent // rule.unit) * rule.unit, extent, 1
    if rule.heads:
        units = getattr(config, rule.heads)
        shared = max(size // units, 1) if rule.heads == SHARED else 1  # ranks that have the same head
    pieces = size // shared
    if not extent or extent % units or padded % pieces or (rule.heads and units % pieces) or size % shared:
        of = f"{units} heads" if rule.heads else f"{padded} rows"
        _refuse(name, tuple(x.shape), f"{of} can't be split evenly over {size} ranks")
    start, stop = (min(at * padded // pieces, extent) for at in (rank // shared, rank // shared + 1))
    return x.narrow(rule.dim, start, stop - start)


def _refuse(name: str, shape: tuple[int, ...], why: str) -> NoReturn:
    raise InputError(
        f"no engine's layout is known for {name!r}",
        where=f"engine_slices, {shape}",
        why=why,
        attempt="a function of your own for model.named_slices(...), or model.named_full_parameters(), which engines "
        "load by name",
    )
