"""The weights in a folder, as lazy tensors under the names and in the shapes of a model.

files         the tensors of a folder, none of them read
converted     under the model's names; of transformers' models by its own conversions (experts fused, a qkv split),
              which run on lazy tensors and are carried out when slices are read
checked       shapes, kinds of dtypes, tied parameters; what is missing or left over is told
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from torchshard.core.errors import InputError
from torchshard.weights.checkpoint_files import is_checkpoint, model_tensors
from torchshard.weights.lazy import LazyTensor, file_tensor, lazy
from torchshard.weights.materialize import ReadSlices
from torchshard.weights.safetensors_files import StoredTensor, tensors_of
from torchshard.weights.tape import Tape


@dataclass
class Weights:
    """Weights that a model is to get."""

    tensors: dict[str, LazyTensor]
    """By the first name of a parameter or buffer."""
    file_bytes: int
    """The size of all tensors in the files."""
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    tied: tuple[str, ...]
    """Names of the model for a tensor that has another name before."""
    samples: dict[str, str]
    """A few bytes of each tensor in the files, by which ranks tell files apart."""
    read: ReadSlices = field(default_factory=ReadSlices)
    """What this rank has read part by part."""

    def __str__(self) -> str:
        told = (("missing", self.missing), ("unused", self.unused), ("tied", self.tied))
        others = [f"{len(names)} {what}" for what, names in told]
        whole = len(self.tensors) - len(self.read.names)
        return ", ".join([
            f"read {self.read.bytes_read / 2**20:.1f} of {self.file_bytes / 2**20:.1f} MiB for slices of "
            f"{self.read.bytes_kept / 2**20:.1f} MiB",
            f"largest buffer {self.read.largest_buffer / 2**20:.1f} MiB",
            f"{len(self.tensors)} tensors used",
            *others,
            *([f"{whole} read whole"] if whole else []),
        ])  # fmt: skip


def read_folder(shell: nn.Module, names: Mapping[str, tuple[str, ...]], folder: str | os.PathLike[str]) -> Weights:
    """The weights of a folder for a model.

    Args:
        shell: a copy of the model without values, which is changed.
        names: name of a parameter or buffer -> all names of it.

    Raises:
        InputError: the files can't be read, hold nothing of this model, or tensors of other shapes.
    """
    of_checkpoint = is_checkpoint(Path(folder))
    files: Mapping[str, StoredTensor]
    files, tape = model_tensors(Path(folder)) if of_checkpoint else tensors_of(folder), Tape()
    lazies = {name: file_tensor(tape, file) for name, file in files.items()}
    own = dict((*shell.named_parameters(remove_duplicate=False), *shell.named_buffers(remove_duplicate=False)))
    persistent = set(shell.state_dict())
    converts = _is_transformers(shell) and not of_checkpoint
    found, unused = _converted(shell, lazies, folder) if converts else _by_name(persistent, lazies)
    tensors, missing, tied = dict[str, LazyTensor](), list[str](), list[str]()
    for first, *others in dict.fromkeys(names.values()):
        given = [name for name in (first, *others) if name in found]
        tied += others
        if not given:
            missing += [first] * (first in persistent)
            continue
        _check_tied(given, files, folder)
        tensors[first] = _fitting(given[0], found[given[0]], own[given[0]], folder)
    if not tensors and persistent:
        raise InputError(
            "the weights are another model's",
            where=str(folder),
            why=f"none of the model's {len(persistent)} names is among its {len(files)}, as {[*files][:1]}",
            attempt="the folder of this model; or rename the tensors",
        )
    if missing:
        warnings.warn(
            f"{len(missing)} tensors are missing in {folder}, and keep the model's values: {', '.join(missing[:5])}",
            stacklevel=5,
        )
    samples = {f"bytes of {name}": file.sample().hex() for name, file in files.items()}
    size = sum(file.bytes_ for file in files.values())
    return Weights(tensors, size, tuple(missing), tuple(unused), tuple(tied), samples)


def _by_name(persistent: set[str], lazies: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], list[str]]:
    found = {name: lazy for name, lazy in lazies.items() if name in persistent}
    return found, [name for name in lazies if name not in found]


def _check_tied(given: list[str], files: Mapping[str, StoredTensor], folder: object) -> None:
    """Names of one parameter must not have different values in the files."""
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


def _fitting(name: str, lazy: LazyTensor, own: Tensor, folder: object) -> LazyTensor:
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


# --- models of transformers ------------------------------------------------------------------------------------------


def lazy_pretrained(folder: str | os.PathLike[str], dtype: torch.dtype | str | None) -> nn.Module:
    """The model that a folder's config.json names, lazy, as `from_pretrained` of transformers would make it.

    Args:
        dtype: of its parameters; None: that of its config, or of the files.

    Raises:
        InputError: transformers is not installed; the config can't be read, names a model that transformers does not
            have, or weights that are quantised.
    """
    try:
        import transformers
    except ImportError as error:
        raise _no_model(folder, "transformers is not installed", "pip install transformers") from error
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise _no_model(folder, f"its config.json can't be used: {error}", _ATTEMPT) from error
    name = next(iter(config.architectures or ()), None)
    cls: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise _no_model(folder, f"transformers {transformers.__version__} has no model {name!r}", _ATTEMPT)
    if getattr(config, "quantization_config", None) is not None:
        raise _no_model(folder, "its weights are quantised, and their slices can't be cut", "the weights before that")
    wanted = _dtype(dtype if dtype not in (None, "auto") else config.dtype, folder)
    with lazy():
        model: Any = cls._from_config(config, dtype=wanted)
        for name, parameter in model.named_parameters():
            kept = next((d for key, d in model._get_dtype_plan(wanted).items() if key in name.split(".")), None)
            if kept is not None:
                parameter.data = parameter.data.to(kept)
    if model.can_generate() and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = type(model).generation_config_class.from_pretrained(folder)
    made: nn.Module = model.eval()
    return made


_ATTEMPT: Final = "build the model with ts.lazy(), and ts.shard(model, plan, example, weights=folder)"


def _no_model(folder: object, why: str, attempt: str) -> InputError:
    return InputError(
        "the folder's model can't be built", where=f"from_pretrained({str(folder)!r})", why=why, attempt=attempt
    )


def _dtype(dtype: torch.dtype | str | None, folder: str | os.PathLike[str]) -> torch.dtype:
    if dtype is None:
        in_files = (file.dtype for file in tensors_of(folder).values())
        return next((d for d in in_files if d.is_floating_point), torch.get_default_dtype())
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise InputError(
            f"invalid dtype {dtype!r}",
            where="from_pretrained",
            why="parameters have a floating-point dtype",
            attempt='dtype=torch.bfloat16, or "bfloat16"; None for that of the config',
        )
    return found


def _is_transformers(model: nn.Module) -> bool:
    return any(c.__module__ == "transformers.modeling_utils" for c in type(model).__mro__)


def _converted(shell: Any, lazies: Mapping[str, LazyTensor], folder: object) -> tuple[dict[str, LazyTensor], list[str]]:
    """What transformers makes of the files' tensors, by name, and the names that it has no use for."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(shell)
    config = LoadStateDictConfig(weight_mapping=mapping)
    with _in_order():
        told, _ = convert_and_load_state_dict_in_model(shell, dict(lazies), config)
    unfit = {
        name: f"it is {tuple(here)} in the files, {tuple(there)} in the model"
        for name, here, there in sorted(told.mismatched_keys)
    } | told.conversion_errors
    for name, why in unfit.items():
        raise InputError(
            f"{name!r} does not fit the model",
            where=f"{folder}: {name}",
            why=str(why),
            attempt="the weights of this model, or a model with the configuration of these weights",
        )
    named = (*shell.named_parameters(remove_duplicate=False), *shell.named_buffers(remove_duplicate=False))
    found = {name: tensor for name, tensor in named if isinstance(tensor, LazyTensor)}
    return found, sorted(told.unexpected_keys)


@contextmanager
def _in_order() -> Iterator[None]:
    """transformers' conversions in this thread, so that all ranks record them in one order, and without its bar."""
    from transformers.utils import logging

    key, shown = "HF_DEACTIVATE_ASYNC_LOAD", logging.is_progress_bar_enabled()
    before = os.environ.get(key)
    os.environ[key] = "1"
    logging.disable_progress_bar()
    try:
        yield
    finally:
        os.environ.pop(key)
        if before is not None:
            os.environ[key] = before
        if shown:
            logging.enable_progress_bar()
