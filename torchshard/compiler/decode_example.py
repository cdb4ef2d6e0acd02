"""Example inputs of a decode step for transformers' models: one token per sequence and a filled cache.

The cache is the model's own kind, as a call with a prompt fills it: that call is captured, and does
not run.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from torchshard.capture import flatten_call
from torchshard.compiler.prepare import prepared
from torchshard.core.errors import CaptureError, InputError, first_line
from torchshard.core.types import is_count
from torchshard.ir.fake_values import hint
from torchshard.ir.graph import results_of
from torchshard.plans.objective import Aim

CACHES = ("cache", "past_key_values", "cache_params")
"""The names under which versions of transformers pass a cache."""


@dataclass(frozen=True)
class DecodeStep:
    """A decode step of a transformers decoder, in place of example inputs: one token per sequence, and a filled cache.

    ts.plan(model, "auto", ts.DecodeStep(batch=8, length=4096), mesh=8, objective={"mode": "infer"})
    """

    batch: int = 1
    """The number of sequences."""
    length: int = 1
    """The number of tokens per sequence in the cache."""


def decode_example(
    model: nn.Module, step: DecodeStep, kwargs: Mapping[str, object] | None, aim: Aim
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Keyword arguments of a decode step, on the meta device, and the names of the tensors it replaces.

    Args:
        kwargs: the user's example keyword arguments; there must be none.

    Raises:
        InputError: the model is not from transformers or takes no cache, a size is not a positive int, or
            the plan is for training.
    """
    batch, length = step.batch, step.length
    if aim.trains:
        raise InputError(
            "a decode step is an example of a call without gradients",
            where="example_inputs=DecodeStep(...)",
            why="the objective's mode is 'train'",
            attempt='objective={"mode": "infer"}',
        )
    if kwargs:
        raise InputError(
            "a decode step takes no other example arguments",
            where="example_kwargs=",
            why="all arguments of the step are made from its sizes",
            attempt="no example_kwargs; or no DecodeStep, and a cache among the keyword arguments",
        )
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
        f"no decode step of a {type(model).__name__} can be made from its sizes",
        where="DecodeStep(...)",
        why=why,
        attempt="example_kwargs= with the arguments of a step, its cache among them",
    )
