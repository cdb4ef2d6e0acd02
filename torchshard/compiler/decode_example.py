"""Example inputs of a decode step for transformers' models: one token per sequence and a filled cache.

The cache is the model's own kind, as a call with a prompt fills it: that call is captured, and does
not run.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchshard.capture import flatten_call
from torchshard.compiler.prepare import prepared
from torchshard.core.errors import CaptureError, InputError, first_line
from torchshard.core.types import is_count
from torchshard.ir.graph import hint, results_of

CACHES = ("cache", "past_key_values", "cache_params")
"""The names under which versions of transformers pass a cache."""


def decode_example(model: nn.Module, batch: int, length: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Keyword arguments of a decode step, on the meta device, and the names of the tensors it replaces.

    Args:
        batch: the number of sequences.
        length: the number of tokens per sequence in the cache.

    Raises:
        InputError: the model is not from transformers or takes no cache, or a size is not a
            positive int.
    """
    for option, size in (("batch", batch), ("length", length)):
        if not is_count(size):
            what = f"{size!r} is no size of a decode step"
            raise InputError(what, where=f"{option}=", why="it is an int of 1 or more", attempt=f"{option}=8")
    parameters = inspect.signature(model.forward).parameters
    taken = [name for name in CACHES if name in parameters]
    config = getattr(model, "config", None)
    if not taken or config is None or "input_ids" not in parameters or getattr(config, "is_encoder_decoder", False):
        raise _no_decoder(model, "its forward takes no input_ids and cache, as those of transformers' decoders do")
    cache = importlib.import_module("transformers").DynamicCache(config=config)
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    prompt = {"input_ids": ids, taken[0]: cache}
    with torch.no_grad():
        try:
            captured = prepared(model, (), prompt, dynamic=False, trains=False)
        except CaptureError as error:
            raise _no_decoder(model, first_line(error)) from error
    captured.finish(list(map(_shaped, results_of(captured.graph.graph))), flatten_call(model, (), prompt).arguments)
    return {"input_ids": ids[:, :1], taken[0]: cache}, captured.changes.names


def _shaped(result: object) -> object:
    """A result of a call as a tensor on the meta device."""
    value = result.meta["val"] if isinstance(result, fx.Node) else result
    if not isinstance(value, Tensor):
        return value
    return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")


def _no_decoder(model: nn.Module, why: str) -> InputError:
    return InputError(
        f"no decode step of a {type(model).__name__} can be made from batch= and length=",
        where="batch=, length=",
        why=why,
        attempt="example_kwargs= with the arguments of a step, its cache among them",
    )
