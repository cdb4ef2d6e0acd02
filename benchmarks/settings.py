"""Models of transformers as people set them up: attention kernels, labels, padding, checkpoints, outputs, LoRA, dtypes.

`MODELS` names each model in each setting, as `others.MODELS` does; `AS_IT_IS` those that are tried in their own dtypes,
`AROUND` what a call is made in.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from architectures import Made, built
from torch import Tensor, nn

KINDS = ("llama", "gpt2", "qwen3", "phi3", "bert (other)", "t5 (other)")
Setting = Callable[[nn.Module, dict[str, Any]], tuple[nn.Module, dict[str, Any]]]
"""A model and the arguments of a call -> the same, set up."""


def _arguments(**changes: Any) -> Setting:
    return lambda model, kwargs: (model, kwargs | changes)


def _attention(kind: str) -> Setting:
    def setting(model: nn.Module, kwargs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        model.set_attn_implementation(kind)
        return model, kwargs

    return setting


def _attentions(model: nn.Module, kwargs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return _attention("eager")(model, kwargs | {"output_attentions": True})


def _labelled(model: nn.Module, kwargs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    labels = kwargs.get("decoder_input_ids", kwargs["input_ids"]).clone()
    labels[:, :3] = -100
    return model, kwargs | {"labels": labels}


def _padded(first: bool) -> Setting:
    def setting(model: nn.Module, kwargs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        mask: Tensor = torch.ones_like(kwargs["input_ids"])
        mask[0, slice(None, 3) if first else slice(-3, None)] = 0
        return model, kwargs | {"attention_mask": mask}

    return setting


def _checkpointed(model: nn.Module, kwargs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    model.gradient_checkpointing_enable()
    return model, kwargs


def _tuned(model: nn.Module, kwargs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
    return peft.get_peft_model(model, config), kwargs


def _in_bfloat16(model: nn.Module, kwargs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return model.to(torch.bfloat16), kwargs


class _Autocast(nn.Module):
    """A model that is called in autocast by another, as in a wrapper that computes the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            found = self.model(**kwargs)
        return found.logits.float() if "logits" in found else found.last_hidden_state.float()


SETTINGS: dict[str, Setting] = {
    "eager": _attention("eager"),
    "sdpa": _attention("sdpa"),
    "labels": _labelled,
    "padded left": _padded(first=True),
    "padded right": _padded(first=False),
    "checkpointing": _checkpointed,
    "hidden states": _arguments(output_hidden_states=True),
    "attentions": _attentions,
    "tuples": _arguments(return_dict=False),
    "LoRA": _tuned,
    "bfloat16": _in_bfloat16,
    "autocast around": _arguments(),
    "autocast within": lambda model, kwargs: (_Autocast(model), kwargs),
}
AS_IT_IS = ("bfloat16", "autocast around", "autocast within")
"""Settings that say in which dtypes a model computes."""
AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast around": lambda: torch.autocast("cpu", torch.bfloat16),
}


def _made(kind: str, setting: str) -> Made:

    model, args, kwargs = built(kind)
    model, kwargs = SETTINGS[setting](model, kwargs)
    return model.train(), args, kwargs


MODELS: dict[str, Callable[[], Made]] = {
    f"{kind}, {setting}": partial(_made, kind, setting) for kind in KINDS for setting in SETTINGS
}
