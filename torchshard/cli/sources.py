"""Finds the command line's models: built-in names, factory functions, Hugging Face configurations.

Each model comes with example inputs, because planning needs a call. Models are made on the meta
device unless a command runs them, so planning a model too large for this machine needs no memory.
Weights in files are checked against the model.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from torchshard.capture.call_arguments import bound_call
from torchshard.cli.folders import has_weights, note, with_weights
from torchshard.core.errors import InputError, ShardError, first_line, in_short
from torchshard.core.user_files import is_user_file
from torchshard.weights.transformers_models import cast_kept, lazy_pretrained

FromTransformers: TypeAlias = Any
"""An object of transformers, whose types mypy does not see."""


@dataclass(frozen=True)
class Source:
    """A model with example inputs."""

    model: nn.Module
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] | None = None


class Example(NamedTuple):
    """Options for building and calling the model of a configuration."""

    batch: int = 2
    sequence: int = 128
    labels: bool = False
    """Whether the call includes labels, so that the results include a loss."""
    dtype: str | None = None
    """The dtype of the parameters; None: the configuration's."""

    @staticmethod
    def of(options: ExampleOptions) -> Example:
        """Returns the example options of a command."""
        return Example(options.batch, options.sequence, options.labels, options.dtype)


class ExampleOptions(Protocol):
    """The command-line options for building and calling a model."""

    batch: int
    sequence: int
    labels: bool
    dtype: str | None


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
    if path.is_dir():
        return _from_config(path / "config.json", example, real, is_pretrained=has_weights(path))
    if path.suffix == ".json" or path.exists():
        return _from_config(path, example, real)
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


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def _from_config(path: Path, example: Example, real: bool, *, is_pretrained: bool = False) -> Source:
    config, build = _configuration(path)
    try:
        with torch.device("cpu" if real else "meta"):
            model = lazy_pretrained(path.parent, example.dtype) if is_pretrained else _random(build, config, example)
    except ShardError:
        raise
    except Exception as error:
        raise _no_configuration(path, in_short(error)) from error
    _turn_off_caches(model)
    return Source(model, (), _inputs(config, model, example, path))


def _configuration(path: Path) -> tuple[FromTransformers, Callable[[FromTransformers], FromTransformers]]:
    """Returns (the configuration in a file, the function that builds its model)."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{os.fspath(path)!r} can't be read", where="MODEL", why=str(error), attempt="a Hugging Face config.json"
        ) from None
    if isinstance(fields, dict) and {"axes", "fingerprint"} <= fields.keys():
        raise InputError(
            f"{os.fspath(path)!r} is a plan",
            where="MODEL",
            why="this command makes plans of a model",
            attempt="torchshard show, draw or whatif, which take a plan's file; or --plan FILE beside the model",
        )
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise _no_configuration(path, "it has no model_type")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise _no_configuration(path, "transformers is not installed") from None
    try:
        config = transformers.AutoConfig.for_model(**fields)
    except Exception as error:  # configurations validate themselves and raise various errors
        raise _no_configuration(path, f"{type(error).__name__}: {' '.join(str(error).split())}") from None
    name = (fields.get("architectures") or [None])[0]
    if name is None:
        return config, transformers.AutoModel.from_config
    model_class: FromTransformers = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not is_model:
        raise _no_configuration(path, f"transformers has no model {name!r}")
    return config, model_class._from_config


def _random(
    build: Callable[[FromTransformers], FromTransformers], config: FromTransformers, example: Example
) -> nn.Module:
    """Builds a configuration's model with random weights, in the dtypes of `from_pretrained`."""
    if example.dtype is not None:
        config.dtype = getattr(torch, example.dtype)
    model = build(config)
    cast_kept(model, model.config.dtype or torch.get_default_dtype())
    result: nn.Module = model
    return result


def _turn_off_caches(model: nn.Module) -> None:
    """Turns off `use_cache`: keys and values are state, and planning does not need them."""
    for module in model.modules():
        config: FromTransformers = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _last_line(error: BaseException) -> str:
    """Returns the user's line that raised an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "MODEL"


def _no_configuration(path: Path, why: str) -> InputError:
    return InputError(
        f"{os.fspath(path)!r} is not a configuration that transformers knows",
        where="MODEL",
        why=why,
        attempt="the config.json of a model, and pip install transformers; or module:factory",
    )


def _inputs(config: object, model: nn.Module, example: Example, path: Path) -> dict[str, Tensor]:
    """Returns example inputs in the configuration's sizes, the same on every rank (a fixed seed).

    Raises:
        InputError: this kind of model is not supported, or its forward takes no labels.
    """
    batch, sequence = example.batch, example.sequence
    if example.labels and "labels" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"a {type(model).__name__} takes no labels",
            where="--labels",
            why="its forward returns no loss",
            attempt="an architecture with a head, such as LlamaForCausalLM, in config.json; or without --labels",
        )
    classes = torch.zeros(batch, dtype=torch.long, device="cpu")
    main = getattr(model, "main_input_name", "input_ids")
    generator, vocabulary = torch.Generator().manual_seed(0), getattr(config, "vocab_size", None) or 2
    ids = torch.randint(0, vocabulary, (batch, sequence), generator=generator, device="cpu")
    if main == "input_ids":
        decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        of_tokens = not type(model).__name__.endswith(("SequenceClassification", "MultipleChoice"))
        return {"input_ids": ids} | ({"labels": ids if of_tokens else classes} if example.labels else decoder)
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if main == "pixel_values" and size is not None:
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", 3)
        pixels = torch.randn(batch, channels, height, width, generator=generator, device="cpu")
        return {"pixel_values": pixels} | ({"labels": classes} if example.labels else {})
    raise InputError(
        f"a {type(model).__name__} is called with {main}, whose size its configuration does not have",
        where=os.fspath(path),
        why="example inputs are made for token ids and images",
        attempt="module:factory, which returns the model and its inputs",
    )
