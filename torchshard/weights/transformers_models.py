"""transformers models: builds them lazily from a folder's configuration, and converts names and shapes in files."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from torchshard.core.errors import InputError
from torchshard.core.modules import named_tensors
from torchshard.core.patches import Patch, Patches
from torchshard.core.types import Theirs
from torchshard.custom_ops.fx_types import Args, Kwargs
from torchshard.weights.lazy import LazyTensor
from torchshard.weights.recording import lazy
from torchshard.weights.safetensors_files import tensors_of


def lazy_pretrained(
    folder: str | os.PathLike[str], dtype: torch.dtype | str | None, *, train: bool = False, initialise: bool = True
) -> nn.Module:
    """Builds the lazy model of a folder's config.json, like `from_pretrained` of transformers.

    Args:
        dtype: the dtype of its parameters; None for the config's, or else the files'.
        initialise: False leaves parameters uninitialised; buffers that a constructor computes get values.

    Raises:
        InputError: transformers is not installed; the config can't be read, names a model unknown to
            transformers, or has quantised weights.
    """
    try:
        import transformers
    except ImportError as error:
        raise _no_model(folder, "transformers is not installed", "pip install transformers") from error
    if not Path(folder).is_dir():
        raise _no_model(folder, "there is no such folder", "a folder on this machine; of a model of the hub, a copy")
    try:
        # without trust_remote_code=False it would ask on the terminal whether to run the folder's code
        config: Theirs = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # configurations raise errors of any class
        raise _no_model(folder, f"its config.json can't be used: {' '.join(str(error).split())}", _ATTEMPT) from error
    name = next(iter(config.architectures or ()), None)
    cls: Theirs = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise _no_model(folder, f"transformers {transformers.__version__} has no model {name!r}", _ATTEMPT)
    if getattr(config, "quantization_config", None) is not None:
        raise _no_model(folder, "its weights are quantised, and their slices can't be cut", "the weights before that")
    wanted = _dtype(dtype if dtype not in (None, "auto") else config.dtype, folder)
    with lazy(), nullcontext() if initialise else _without_initialising():
        # `_from_config`: `AutoModel.from_config` calls it; model classes have no public one (transformers 5.24.0).
        model: Theirs = cls._from_config(config, dtype=wanted)
        cast_kept(model, wanted)
    if model.can_generate() and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = type(model).generation_config_class.from_pretrained(folder)
    made: nn.Module = model.train(train)
    return made


def cast_kept(model: Theirs, dtype: torch.dtype) -> None:
    """Casts the parameters that a transformers model keeps in a dtype different from the loaded one."""
    # `_get_dtype_plan`: `from_pretrained` loads by this plan; it has no public name (transformers 5.24.0).
    kept = model._get_dtype_plan(dtype)
    for name, parameter in model.named_parameters():
        own = next((d for key, d in kept.items() if key in name.split(".")), None)
        if own is not None:
            parameter.data = parameter.data.to(own)


@contextmanager
def _without_initialising() -> Iterator[None]:
    """Skips parameter initialisation in transformers models that this thread builds.

    Unlike `transformers.initialization.no_init_weights`, it does not affect other threads, and ties weights.
    """
    _builds.without_initialising = True
    try:
        with _uninitialised(), _NoDraws():
            yield
    finally:
        _builds.without_initialising = False


_builds = threading.local()


class _NoDraws(TorchFunctionMode):
    """Skips the draws of a layer's constructor into parameters, but not into buffers."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        given = kwargs or {}
        if func in _DRAWS:
            into = args[0] if args else given["tensor"]
            if isinstance(into, nn.Parameter):
                return into
        return func(*args, **given)


_DRAWS: Final = frozenset([
    Tensor.uniform_, Tensor.normal_, init.uniform_, init.normal_, init.trunc_normal_, init.kaiming_uniform_,
    init.kaiming_normal_, init.xavier_uniform_, init.xavier_normal_,
])  # fmt: skip
"""Functions that initialise layers. A mode intercepts only the outermost call, so `nn.init` is listed too."""


@functools.cache
def _uninitialised() -> Patches:
    from transformers import PreTrainedModel

    def replace(original: Theirs) -> Callable[..., None]:
        def initialize_weights(model: nn.Module, *args: object, **kwargs: object) -> None:
            if not getattr(_builds, "without_initialising", False):
                original(model, *args, **kwargs)

        return initialize_weights

    return Patches(Patch(PreTrainedModel, "initialize_weights", replace))


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


def is_transformers(model: nn.Module) -> bool:
    """Returns whether a model is a transformers model."""
    return any(c.__module__ == "transformers.modeling_utils" for c in type(model).__mro__)


def converted(
    shell: Theirs, lazies: Mapping[str, LazyTensor], folder: object
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Runs transformers' conversions on the files' tensors; returns them by model name, and the unused names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Theirs = get_model_conversion_mapping(shell)
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
    found = {name: tensor for name, tensor in named_tensors(shell).items() if isinstance(tensor, LazyTensor)}
    return found, sorted(told.unexpected_keys)


@contextmanager
def _in_order() -> Iterator[None]:
    """Runs transformers' conversions in this thread, so all ranks record the same order; hides its progress bar."""
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
