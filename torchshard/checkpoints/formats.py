"""Folder formats of other libraries: which tensors go into which files, under which names.

    transformers   model.safetensors, or several and an index; config.json; the library's conversions
                   revert names and shapes (experts separate, as in the original files)
    peft           adapter_model.safetensors and adapter_config.json of each adapter
    any other      model.safetensors, or several and an index

The conversions run on lazy tensors: they are recorded, then run on parts when files are written.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torchshard.capture import model_without_storage
from torchshard.core.errors import InputError
from torchshard.core.types import Theirs
from torchshard.weights.adapters import ADAPTER, adapter_names
from torchshard.weights.safetensors_files import INDEX
from torchshard.weights.transformers_models import is_transformers


@dataclass(frozen=True)
class FolderFormat:
    """The files of a folder."""

    files: Mapping[str, Mapping[str, Tensor]]
    """Path in the folder -> the tensors of the file, by name."""
    write_others: Callable[[Path], None]
    """Writes the other files (configurations, the index) after the tensor files are complete."""


def folder_format(source: nn.Module, state: Mapping[str, Tensor], max_shard_size: int | str) -> FolderFormat:
    """Returns the format in which a model is exported.

    Args:
        source: the unsharded model, without values.
        state: its parameters and buffers by all their names; tied names share one tensor object.
        max_shard_size: the maximum size of a file, as in transformers' `save_pretrained`.

    Raises:
        InputError: the size is invalid, or the model is quantised.
    """
    if _is_peft(source):
        return _adapters(source, state)
    if not is_transformers(source):
        first_names: dict[int, str] = {}
        for name, tensor in state.items():
            first_names.setdefault(id(tensor), name)
        tensors = {name: state[name] for name in first_names.values()}
        return _split(tensors, max_shard_size, sum(p.numel() for p in source.parameters()))
    return _of_transformers(source, state, max_shard_size)


def _split(tensors: Mapping[str, Tensor], max_shard_size: int | str, parameters: int) -> FolderFormat:
    """Splits tensors into files of limited size, with an index if there are several."""
    try:
        from huggingface_hub import split_torch_state_dict_into_shards
    except ImportError as error:
        raise InputError(
            "huggingface_hub is not installed",
            where="save_pretrained",
            why="it says which tensors go into which file",
            attempt="pip install huggingface_hub",
        ) from error
    shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    try:
        split = split_torch_state_dict_into_shards(
            shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
    except (ValueError, TypeError) as error:
        raise InputError(
            f"invalid size {max_shard_size!r}", where="max_shard_size=", why=str(error), attempt='"5GB"'
        ) from error
    files = {file: {name: tensors[name] for name in names} for file, names in split.filename_to_tensors.items()}

    def write_index(folder: Path) -> None:
        for stale in folder.glob("model-*-of-*.safetensors"):
            if stale.name not in files:
                stale.unlink()
        if not split.is_sharded:
            (folder / INDEX).unlink(missing_ok=True)
            return
        (folder / "model.safetensors").unlink(missing_ok=True)
        index = {"metadata": {"total_parameters": parameters, **split.metadata}, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    return FolderFormat(files, write_index)


# --- transformers ----------------------------------------------------------------------------------------------------


def _of_transformers(source: Theirs, state: Mapping[str, Tensor], max_shard_size: int | str) -> FolderFormat:
    """Returns the format of `PreTrainedModel.save_pretrained` in transformers 5, step by step."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    # `_keys_to_ignore_on_save` is a setting of model classes, which `save_pretrained` reads (transformers 5).
    ignored = set(source._keys_to_ignore_on_save or ())
    # on the meta device, it finds tied weights through the model's own parameters
    shapes = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in state.items() if n not in ignored}
    kept = remove_tied_weights_from_state_dict(shapes, source)
    tensors = revert_weight_conversion(source, {name: state[name] for name in kept})
    split = _split(tensors, max_shard_size, source.num_parameters())
    config = copy.deepcopy(source.config)  # the model's own config is watched for changes
    config.dtype = str(source.dtype).removeprefix("torch.")
    config.architectures = [type(source).__name__]

    def write_others(folder: Path) -> None:
        config.save_pretrained(folder)
        if source.can_generate():
            source.generation_config.save_pretrained(folder)
        split.write_others(folder)

    return FolderFormat(split.files, write_others)


# --- peft ------------------------------------------------------------------------------------------------------------


def _is_peft(model: nn.Module) -> bool:
    return any(c.__module__ == "peft.peft_model" for c in type(model).__mro__)


def merged(source: nn.Module, state: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a peft model without its adapters, and its state dict with them merged in.

    Args:
        source: the unsharded model, without values.
        state: its parameters and buffers, mostly lazy, so the merge is recorded.

    Raises:
        InputError: the model has no adapters that can be merged.
    """
    if not _is_peft(source):
        raise _no_merging(source, "it is no model of peft")
    copied: Theirs = model_without_storage(source)
    parameters: dict[int, nn.Parameter] = {}
    for name, tensor in state.items():
        path, _, leaf = name.rpartition(".")
        module = copied.get_submodule(path)
        if leaf in module._parameters:
            parameters.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
            module._parameters[leaf] = parameters[id(tensor)]
        else:
            module._buffers[leaf] = tensor
    try:
        base: nn.Module = copied.merge_and_unload()
    except (ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise _no_merging(source, f"{type(error).__name__}: {error}") from error
    names: dict[int, Tensor] = {}
    found = base.state_dict(keep_vars=True)
    return base, {name: names.setdefault(id(tensor), tensor.data) for name, tensor in found.items()}


def _no_merging(source: nn.Module, why: str) -> InputError:
    return InputError(
        f"a {type(source).__name__} has no adapters to merge",
        where="save_pretrained(..., merge=True)",
        why=why,
        attempt="save_pretrained without merge=",
    )


def _adapters(source: Theirs, state: Mapping[str, Tensor]) -> FolderFormat:
    """Returns the format of `PeftModel.save_pretrained`.

    The adapter "default" is in the folder itself; each other adapter is in a folder of its name.
    """
    files, configs = dict[str, Mapping[str, Tensor]](), dict[str, Theirs]()
    for adapter, config in source.peft_config.items():
        place = "" if adapter == "default" else f"{adapter}/"
        names = adapter_names(source, adapter)
        files[place + ADAPTER] = {name: state[own] for name, own in names.items()}
        configs[place] = copy.deepcopy(config)

    def write_configs(folder: Path) -> None:
        for place, config in configs.items():
            base = source.get_base_model()
            config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
            config.inference_mode = True
            if config.task_type is None:
                config.auto_mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
            config.save_pretrained(folder / place)

    return FolderFormat(files, write_configs)
