"""Loads the weights in a folder as lazy tensors with a model's names and shapes.

files         lists the tensors of the folder, without reading them
converted     renames them; for a transformers model, runs the library's own conversions (experts
              fused, a qkv split) on lazy tensors, which read the files when slices are cut
checked       checks shapes, kinds of dtypes and tied parameters; reports missing and unused tensors
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from torchshard.core.errors import InputError
from torchshard.core.modules import named_tensors
from torchshard.core.user_files import warn
from torchshard.weights.checkpoint_files import is_checkpoint, model_tensors
from torchshard.weights.lazy import LazyTensor
from torchshard.weights.materialize import ReadSlices
from torchshard.weights.recording import file_tensor
from torchshard.weights.safetensors_files import tensors_of
from torchshard.weights.stored_tensors import StoredTensor
from torchshard.weights.tape import Tape
from torchshard.weights.transformers_models import converted, is_transformers


@dataclass
class Weights:
    """The weights to load into a model, with a summary of the files."""

    tensors: dict[str, LazyTensor]
    """First name of a parameter or buffer -> its value."""
    file_bytes: int
    """The total size of the tensors in the files."""
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    tied: tuple[str, ...]
    """The model's aliases of tied tensors: all names except the first."""
    dtypes: frozenset[torch.dtype]
    """The dtypes of the tensors in the files."""
    samples: dict[str, str]
    """A few bytes of each tensor in the files; ranks compare them to detect different files."""
    conversions: object = None
    """The conversions of names and shapes that transformers applied; its `save_pretrained` reverses them."""
    read: ReadSlices = field(default_factory=ReadSlices)
    """Statistics of this rank's partial reads."""

    def __str__(self) -> str:
        told = (("missing", self.missing), ("unused", self.unused), ("tied", self.tied))
        others = [f"{len(names)} {what}" for what, names in told]
        whole = len(self.tensors) - len(self.read.names)
        return ", ".join([
            f"read {self.read.bytes_read / 2**20:.1f} of {self.file_bytes / 2**20:.1f} MiB for slices of "
            f"{self.read.bytes_kept / 2**20:.1f} MiB",
            *([f"{self.read.bytes_over / 2**20:.1f} MiB between them"] if self.read.bytes_over else []),
            f"largest buffer {self.read.largest_buffer / 2**20:.1f} MiB",
            f"{len(self.tensors)} tensors used",
            *others,
            *([f"{whole} read whole"] if whole else []),
        ])  # fmt: skip


def read_folder(shell: nn.Module, names: Mapping[str, tuple[str, ...]], folder: str | os.PathLike[str]) -> Weights:
    """Loads the weights of a folder for a model.

    Args:
        shell: a copy of the model without values; modified in place.
        names: name of a parameter or buffer -> all its names.

    Raises:
        InputError: the files can't be read, have no tensor of this model, or one with another shape.
    """
    of_checkpoint = is_checkpoint(Path(folder))
    files: Mapping[str, StoredTensor]
    files, tape = model_tensors(Path(folder)) if of_checkpoint else tensors_of(folder), Tape()
    lazies = {name: file_tensor(tape, file) for name, file in files.items()}
    own = named_tensors(shell)
    persistent = set(shell.state_dict())
    converts = is_transformers(shell) and not of_checkpoint
    found, unused = converted(shell, lazies, folder) if converts else _by_name(persistent, lazies)
    tensors, missing, tied = dict[str, LazyTensor](), list[str](), list[str]()
    for first, *others in dict.fromkeys(names.values()):
        given = [name for name in (first, *others) if name in found]
        tied += others
        if not given:
            missing += [first] * (first in persistent)
            continue
        _check_tied(given, files, folder)
        tensors[first] = fitting(given[0], found[given[0]], own[given[0]], folder)
    if not tensors and persistent:
        raise InputError(
            "the weights are another model's",
            where=str(folder),
            why=f"none of the model's {len(persistent)} names is among its {len(files)}, as {[*files][:1]}",
            attempt="the folder of this model; or rename the tensors",
        )
    if missing:
        warn(f"{len(missing)} tensors are missing in {folder}, and keep the model's values: {', '.join(missing[:5])}")
    samples = {f"bytes of {name}": file.sample().hex() for name, file in files.items()}
    size = sum(file.bytes_ for file in files.values())
    dtypes = frozenset(file.dtype for file in files.values())
    # `_weight_conversions` is where transformers keeps the conversions that it applied (transformers 5.24.0).
    conversions = getattr(shell, "_weight_conversions", None) if converts else None
    return Weights(tensors, size, tuple(missing), tuple(unused), tuple(tied), dtypes, samples, conversions)


def check_missing(model: nn.Module, weights: Weights, folder: object) -> None:
    """Checks that tensors missing in the files have values in the model.

    Raises:
        InputError: a missing tensor is on the meta device.
    """
    own = named_tensors(model)
    unknown = [name for name in weights.missing if own[name].is_meta]
    if unknown:
        raise InputError(
            f"{len(unknown)} of the model's tensors have no values",
            where=str(folder),
            why=f"they are on the meta device, and the files lack them: {', '.join(unknown[:5])}",
            attempt="with torchshard.lazy(): to build the model, which then has its own values; or files with them",
        )


def _by_name(persistent: set[str], lazies: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], list[str]]:
    found = {name: lazy for name, lazy in lazies.items() if name in persistent}
    return found, [name for name in lazies if name not in found]


def _check_tied(given: list[str], files: Mapping[str, StoredTensor], folder: object) -> None:
    """Checks that the names of one tied parameter have equal values in the files."""
    held = [files[name] for name in given if name in files]
    different = next(
        (f for f in held if (f.shape, f.dtype, f.sample()) != (held[0].shape, held[0].dtype, held[0].sample())), None
    )
    if different is not None:
        raise InputError(
            f"{given[0]!r} and {different.name!r} are one parameter of the model, and two in the files",
            where=str(folder),
            why="their values differ",
            attempt="untie them in the model (transformers: config.tie_word_embeddings=False), or leave one out",
        )


def fitting(name: str, lazy: LazyTensor, own: Tensor, folder: object) -> LazyTensor:
    """Returns a file's tensor, cast to the dtype of the model's tensor `own`.

    Raises:
        InputError: the shapes differ, or one is floating-point or complex and the other is not.
    """
    if lazy.shape != own.shape:
        what, why = "shape", f"it is {tuple(lazy.shape)} in the files, {tuple(own.shape)} in the model"
    elif lazy.is_floating_point() != own.is_floating_point() or lazy.is_complex() != own.is_complex():
        what, why = "dtype", f"it is {lazy.dtype} in the files, {own.dtype} in the model"
    else:
        return cast(LazyTensor, lazy.detach().to(own.dtype))
    raise InputError(
        f"{name!r} has another {what} than the model's",
        where=f"{folder}: {name}",
        why=why,
        attempt="the weights of this model, or a model with the configuration of these weights",
    )
