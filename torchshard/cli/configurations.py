"""Builds the models of Hugging Face configurations, with example inputs in their sizes."""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from torchshard.compiler.meshes import MeshLike, read_mesh
from torchshard.core.errors import InputError, ShardError, in_short
from torchshard.core.layouts import SEQUENCE
from torchshard.weights.transformers_models import cast_kept, lazy_pretrained

FromTransformers: TypeAlias = Any
"""An object of transformers, whose types mypy does not see."""


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

    def of_rank(self, mesh: MeshLike) -> Example:
        """Returns the example with a rank's part of the sequence.

        Raises:
            InputError: the ranks do not divide its length.
        """
        ranks = 1 if mesh is None else read_mesh(mesh).parts_of_dims.get(SEQUENCE, 1)
        if self.sequence % ranks:
            raise InputError(
                f"a sequence of {self.sequence} can't be divided among {ranks} ranks",
                where="--sequence with --mesh",
                why="each rank takes as many tokens",
                attempt=f"--sequence {ranks * max(self.sequence // ranks, 1)}",
            )
        return self._replace(sequence=self.sequence // ranks)


class ExampleOptions(Protocol):
    """The command-line options for building and calling a model."""

    batch: int
    sequence: int
    labels: bool
    dtype: str | None


def from_configuration(
    path: Path, example: Example, real: bool, *, is_pretrained: bool = False
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns the model of a configuration's file, and example inputs.

    Args:
        real: allocates the model, instead of using the meta device.
        is_pretrained: reads its weights lazily from the file's folder.

    Raises:
        InputError: transformers has no such model, or inputs of its kind are not made here.
    """
    config, build = _configuration(path)
    try:
        with torch.device("cpu" if real else "meta"):
            model = lazy_pretrained(path.parent, example.dtype) if is_pretrained else _random(build, config, example)
    except ShardError:
        raise
    except Exception as error:
        raise _no_configuration(path, in_short(error)) from error
    _turn_off_caches(model)
    return model, _inputs(config, model, example, path)


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
    # `_from_config`: `AutoModel.from_config` calls it; model classes have no public one (transformers 5.24.0).
    return config, model_class._from_config


def _random(
    build: Callable[[FromTransformers], FromTransformers], config: FromTransformers, example: Example
) -> nn.Module:
    """Builds a configuration's model with random weights, in the dtypes of `from_pretrained`."""
    if example.dtype is not None:
        config.dtype = getattr(torch, example.dtype)
    model = build(config)
    cast_kept(model, model.config.dtype or torch.get_default_dtype())
    return model


def _turn_off_caches(model: nn.Module) -> None:
    """Turns off `use_cache`: keys and values are state, and planning does not need them."""
    for module in model.modules():
        config: FromTransformers = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


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
