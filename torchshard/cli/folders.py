"""Weights for the command line: safetensors files.

Their headers are checked against a model; values are read only if the model runs.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from torchshard.capture import model_without_storage, shared_names
from torchshard.distributed.group import is_initialized
from torchshard.weights.folder import Weights, read_folder
from torchshard.weights.materialize import for_each_whole
from torchshard.weights.safetensors_files import INDEX

Folder = str | os.PathLike[str]
SHOWN_NAMES = 3
"""The maximum number of missing or unused names that are printed."""


def has_weights(folder: Path) -> bool:
    """Returns whether a folder contains safetensors files or an index of some."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def with_weights(model: nn.Module, folder: Folder, *, real: bool) -> nn.Module:
    """Returns the model after checking a folder's files against it.

    A line on stderr lists missing and unused names.

    Args:
        real: returns a copy in memory with the files' values, instead of the model itself.

    Raises:
        InputError: the files can't be read, or contain another model's weights.
    """
    with warnings.catch_warnings():
        # The note below lists missing names on stderr, without a warning's file and line.
        warnings.simplefilter("ignore", UserWarning)
        weights = read_folder(model_without_storage(model), shared_names(model), folder)
    note(f"weights of {os.fspath(folder)}: {_summary(model, weights)}")
    return _in_memory(model, weights.tensors) if real else model


def note(text: str) -> None:
    """Prints a line on stderr, except on one of several ranks, each of which would print it."""
    if not is_initialized():
        print(text, file=sys.stderr)


def _summary(model: nn.Module, weights: Weights) -> str:
    parts = [f"{len(weights.tensors)} tensors used"]
    parts += [_some(names, what) for names, what in ((weights.missing, "missing"), (weights.unused, "unused")) if names]
    in_model = {tensor.dtype for tensor in model.state_dict().values()}
    cast = [dtype for dtype in weights.dtypes - in_model if dtype.is_floating_point]
    if cast:
        own = [dtype for dtype in in_model if dtype.is_floating_point]
        parts.append(f"{_listed(cast)} in the files, cast to the model's {_listed(own)}")
    return ", ".join(parts)


def _some(names: Sequence[str], what: str) -> str:
    # a name comes from a file and may contain line breaks and terminal codes
    shown = [name if name.isprintable() else repr(name) for name in names[:SHOWN_NAMES]]
    dots = ["..."] if len(names) > SHOWN_NAMES else []
    return f"{len(names)} {what} ({', '.join([*shown, *dots])})"


def _listed(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _in_memory(model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy of a model, lazy or not, with `weights`, and its own values for the rest."""
    values = dict[str, Tensor]((*model.named_parameters(), *model.named_buffers())) | dict(weights)
    result = model_without_storage(model)
    empty = dict((*result.named_parameters(), *result.named_buffers()))

    def use(name: str, value: Tensor) -> None:
        # a clone: converted tensors may be views of one tensor, and parameters must not share memory
        empty[name].data = value.detach().clone(memory_format=torch.contiguous_format)

    for_each_whole(values, use)
    return result
