"""Loads peft adapters (LoRA and others with tensors inside the layers of a model) into lazy models.

Source: `peft.PeftModel.from_pretrained`, which reads values at once and can't run on lazy models.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import nn

from torchshard.core.errors import InputError
from torchshard.core.types import Theirs
from torchshard.weights.folder import Weights, fitting
from torchshard.weights.lazy import LazyTensor
from torchshard.weights.recording import file_tensor, lazy
from torchshard.weights.safetensors_files import tensors_of
from torchshard.weights.tape import Tape

ADAPTER: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"


def adapter_names(model: Theirs, adapter: str) -> dict[str, str]:
    """Returns a dict: name in an adapter's file -> name in the model."""
    from peft import get_peft_model_state_dict
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    targets = model.peft_config[adapter].target_modules or ()
    has_embeddings = any(name in targets for name in EMBEDDING_LAYER_NAMES)
    names = {name: name for name in model.state_dict()}
    # "auto" would ask the hub for the base model's configuration
    found: dict[str, str] = get_peft_model_state_dict(
        model, names, adapter_name=adapter, save_embedding_layers=has_embeddings
    )
    return found


def with_adapter(
    model: nn.Module, weights: Weights, folder: str | os.PathLike[str], *, is_trainable: bool
) -> tuple[nn.Module, Weights]:
    """Adds an adapter to a lazy model, like `PeftModel.from_pretrained`; returns it and all weights.

    Args:
        model: modified in place.
        weights: the model's.
        folder: the adapter's folder, written by `PeftModel.save_pretrained`.

    Raises:
        InputError: peft is not installed, the folder has no adapter, or its tensors do not fit the model.
    """
    place = Path(folder)
    try:
        import peft
    except ImportError as error:
        raise _no_adapter(place, "peft is not installed", "pip install peft") from error
    if not (place / CONFIG).is_file():
        raise _no_adapter(place, f"it has no {CONFIG}", "the folder that PeftModel.save_pretrained wrote")
    files, tape = tensors_of(place / ADAPTER), Tape()
    before = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    try:
        config: Theirs = peft.PeftConfig.from_pretrained(str(place))
        config.inference_mode = not is_trainable
        with lazy():
            adapted: Theirs = peft.get_peft_model(model, config)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise _no_adapter(place, f"{type(error).__name__}: {error}", "the adapter of this model") from error
    own, names = dict(adapted.state_dict(keep_vars=True)), adapter_names(adapted, "default")
    wrong = sorted({*files} ^ {*names})
    if wrong:
        whose = "the model" if wrong[0] in files else "the file"
        raise _no_adapter(place, f"{whose} has no {wrong[0]!r}, one of {len(wrong)}", "the adapter of this model")
    named = (*adapted.named_parameters(), *adapted.named_buffers())
    tensors: dict[str, LazyTensor] = {
        name: weights.tensors[before[id(tensor)]] for name, tensor in named if before.get(id(tensor)) in weights.tensors
    }
    for name, file in files.items():
        tensors[names[name]] = fitting(name, file_tensor(tape, file), own[names[name]], place)
    samples = weights.samples | {f"bytes of {name} of the adapter": file.sample().hex() for name, file in files.items()}
    size = weights.file_bytes + sum(file.bytes_ for file in files.values())
    dtypes = weights.dtypes | {file.dtype for file in files.values()}
    result: nn.Module = adapted.train(is_trainable)
    changed = replace(weights, tensors=tensors, file_bytes=size, dtypes=dtypes, samples=samples, conversions=None)
    return result, changed


def _no_adapter(place: Path, why: str, attempt: str) -> InputError:
    return InputError("the adapter can't be used", where=str(place), why=why, attempt=attempt)
