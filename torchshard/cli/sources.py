"""Finds the command line's models: built-in names, factory functions, Hugging Face configurations.

Each model comes with example inputs, because planning needs a call. Models are made on the meta
device unless a command runs them, so planning a model too large for this machine needs no memory.
Weights in files are checked against the model.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from torchshard.capture.call_arguments import bound_call
from torchshard.cli.configurations import Example, from_configuration
from torchshard.cli.folders import has_weights, note, with_weights
from torchshard.core.errors import InputError, first_line
from torchshard.core.user_files import is_user_file


@dataclass(frozen=True)
class Source:
    """A model with example inputs."""

    model: nn.Module
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] | None = None


def read_source(name: str, example: Example, weights: str | None = None, *, real: bool = False) -> Source:
    """Returns the model of a name: 'llama-3-8b', `module:factory`, a config.json or its folder.

    Args:
        example: how to build and call a configuration's model.
        weights: a folder of safetensors files that must fit the model; by default the model's own
            folder, if it has some. A line on stderr lists missing and unused names.
        real: allocates the model with these weights, or random ones, instead of using the meta
            device.

    Raises:
        InputError: the model does not exist, the name means something else, or the weights belong
            to another model.
    """
    for option, value in (("--batch", example.batch), ("--sequence", example.sequence)):
        if value < 1:
            what = f"invalid size {str(value)!r}: expected 1 or more"
            raise InputError(what, where=option, why="it is a size of the example inputs", attempt=f"{option} 2")
    if example.dtype is not None and not isinstance(getattr(torch, example.dtype, None), torch.dtype):
        what = f"{example.dtype!r} is no dtype"
        raise InputError(what, where="--dtype", why="it is the name of one of PyTorch's", attempt="--dtype bfloat16")
    name = _located(name)
    source = _unloaded(name, example, real)
    folder = name if weights is None and has_weights(Path(name)) else weights
    if folder is not None:
        return replace(source, model=with_weights(source.model, folder, real=real))
    if real and Path(name).is_dir():
        note(f"random weights: {name} holds no safetensors files")
    return source


def real_source(
    name: str, example: Example, weights: str | None
) -> tuple[nn.Module, tuple[object, ...], Mapping[str, object] | None]:
    """Returns a model with its folder's weights, or random ones, and its example inputs."""
    source = read_source(name, example, weights, real=True)
    return source.model, source.args, source.kwargs


HUB_NAME = r"[\w.-]+/[\w.-]+"
"""A model on the Hugging Face hub: 'meta-llama/Llama-3.1-8B'."""
CONFIGS = {path.stem: path for path in sorted((Path(__file__).parent / "configs").glob("*.json"))}
"""The configurations in this package, by name: 'llama-3-8b'."""


def _located(name: str) -> str:
    """Returns a model's file or folder in this package or in the hub's cache; else the name."""
    if Path(name).exists():
        return name
    if not re.fullmatch(HUB_NAME, name):
        return os.fspath(CONFIGS.get(name, name))
    with contextlib.suppress(ImportError):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str):
            return os.path.dirname(found)
    return name


def _unloaded(name: str, example: Example, real: bool) -> Source:
    """Returns the model before its weights are checked; lazy if its own folder contains them."""
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        file = path / "config.json" if path.is_dir() else path
        model, inputs = from_configuration(file, example, real, is_pretrained=has_weights(path))
        return Source(model, (), inputs)
    if is_factory(name) and (example.labels or example.dtype is not None):
        raise InputError(
            "a factory decides on dtypes and labels",
            where="--labels" if example.labels else "--dtype",
            why="it returns a model that is made, and what it is called with",
            attempt="the option in its code",
        )
    if is_factory(name):
        return _from_factory(name, real)
    near = difflib.get_close_matches(name.lower(), CONFIGS, n=3, cutoff=0.4)
    why = "there is no such file or folder, no factory is named, and the built-in models are " + ", ".join(CONFIGS)
    attempt = f"{' or '.join(map(repr, near))}; or " if near else ""
    if re.fullmatch(HUB_NAME, name):
        why += "; nor is it in the cache of Hugging Face's hub"
        attempt = f"`hf download {name} config.json` before; or "
    attempt += "a Hugging Face config.json, the folder it is in, or module:factory"
    raise InputError(f"{name!r} is not a model", where="MODEL", why=why, attempt=attempt)


def is_factory(name: str) -> bool:
    """Returns whether the name is a factory's: 'package.module:function'."""
    return ":" in name


# --- factories -------------------------------------------------------------------------------------------------------


_FACTORY = "a function that returns `model, (x,)` or `model, (x,), {'mask': mask}`"


def _from_factory(name: str, real: bool) -> Source:
    module, _, attribute = name.partition(":")
    folder = os.getcwd()
    # a console script does not find modules in the current folder by itself
    sys.path.insert(0, folder)
    try:
        factory = getattr(importlib.import_module(module), attribute)
        with torch.device("cpu" if real else "meta"):
            result = factory()
    except Exception as error:
        meta = "" if real else "; it runs on the meta device, where tensors have no values"
        raise InputError(
            f"{name!r} returns no model: {type(error).__name__}",
            where=_last_line(error),
            why=first_line(error),
            attempt=f"package.module:function, without arguments, from the folder in which that can be imported{meta}",
        ) from error
    finally:
        sys.path.remove(folder)
    source = _returned(result)
    if source is None:
        types = ", ".join(type(part).__name__ for part in result) if isinstance(result, tuple) else ""
        raise InputError(
            f"{name!r} returns a {type(result).__name__}" + (f" of {types}" if types else ""),
            where="MODEL",
            why="a factory returns a model, and after it the example inputs in a tuple, a dict or both",
            attempt=_FACTORY,
        )
    try:
        bound_call(source.model, source.args, source.kwargs or {})
    except InputError as error:
        raise InputError(f"{name!r}: {error.what}", where=error.where, why=error.why, attempt=_FACTORY) from None
    return source


def _returned(result: object) -> Source | None:
    """Returns a factory's model and example inputs; None if the result is anything else."""
    match result if isinstance(result, tuple) else (result,):
        case (nn.Module() as model,):
            return Source(model)
        case (nn.Module() as model, tuple() | list() as args):
            return Source(model, tuple(args))
        case (nn.Module() as model, Mapping() as kwargs):
            return Source(model, (), kwargs)
        case (nn.Module() as model, tuple() | list() as args, Mapping() as kwargs):
            return Source(model, tuple(args), kwargs)
    return None


def _last_line(error: BaseException) -> str:
    """Returns the user's line that raised an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "MODEL"
