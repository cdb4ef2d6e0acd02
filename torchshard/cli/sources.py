"""Where the command line's models come from: a factory, a Hugging Face configuration, a model's folder."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchshard.checking.check import Report, check
from torchshard.checking.processes import check_processes
from torchshard.core.errors import InputError
from torchshard.plans.machine import objective


@dataclass(frozen=True)
class Source:
    """A model with a call."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


def read_source(name: str, batch: int, sequence: int, *, real: bool = False) -> Source:
    """The model of that name: `module:factory`, a config.json, or a folder with one.

    Args:
        batch, sequence: of the example inputs that a configuration's model is called with.
        real: whether it has memory, with random weights; else it is on the meta device.

    Raises:
        InputError: there is no such model, or what is there is none.
    """
    for knob, value in (("--batch", batch), ("--sequence", sequence)):
        if value < 1:
            raise InputError(f"{value} is no size", where=knob, why="it is 1 or more", attempt=f"{knob} 2")
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.exists():
        return _from_config(path, batch, sequence, real)
    if ":" in name:
        return _from_factory(name, real)
    raise InputError(
        f"{name!r} is no model",
        where="MODEL",
        why="there is no such file or folder, and no factory is named",
        attempt="a Hugging Face config.json, the folder it is in, or module:factory",
    )


# --- factories -------------------------------------------------------------------------------------------------------


def _from_factory(name: str, real: bool) -> Source:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), attribute)
        with torch.device("cpu" if real else "meta"):
            made = factory()
    except Exception as error:
        raise InputError(
            f"{name!r} gives no model: {type(error).__name__}",
            where=_last_line(error),
            why=_first_line(error),
            attempt="package.module:function, without arguments, from the folder in which that can be imported"
            + ("" if real else "; it runs on the meta device, where tensors have no values"),
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    parts = made if isinstance(made, tuple) else (made,)
    if not parts or not isinstance(parts[0], nn.Module) or len(parts) > 3:
        raise InputError(
            f"{name!r} gives a {type(made).__name__}",
            where="MODEL",
            why="a factory gives a model and how it is called",
            attempt="return model, (x,) or model, (x,), {'mask': mask}",
        )
    return Source(parts[0], tuple(parts[1]) if len(parts) > 1 else (), parts[2] if len(parts) > 2 else None)


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def _from_config(path: Path, batch: int, sequence: int, real: bool) -> Source:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{os.fspath(path)!r} can't be read", where="MODEL", why=str(error), attempt="a Hugging Face config.json"
        ) from None
    if not isinstance(said, dict) or "model_type" not in said:
        raise _no_configuration(path, "it has no model_type")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise _no_configuration(path, "transformers is not installed") from None
    try:
        config = transformers.AutoConfig.for_model(**said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _no_configuration(path, _first_line(error)) from None
    config.use_cache = False
    named = (said.get("architectures") or [None])[0]
    kind: Any = getattr(transformers, named, None) if isinstance(named, str) else transformers.AutoModel
    if not isinstance(kind, type) or (named and not issubclass(kind, transformers.PreTrainedModel)):
        raise _no_configuration(path, f"transformers has no model {named!r}")
    try:
        with torch.device("cpu" if real else "meta"):
            model = kind(config) if named else transformers.AutoModel.from_config(config)
    except Exception as error:
        raise _no_configuration(path, f"{type(error).__name__}: {_first_line(error)}") from error
    return Source(model, (), _example(config, model, batch, sequence, path))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _last_line(error: BaseException) -> str:
    """Where an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _no_configuration(path: Path, why: str) -> InputError:
    return InputError(
        f"{os.fspath(path)!r} is no configuration that transformers knows",
        where="MODEL",
        why=why,
        attempt="the config.json of a model, and pip install transformers; or module:factory",
    )


def _example(config: Any, model: nn.Module, batch: int, sequence: int, path: Path) -> dict[str, Tensor]:
    """A call of a model by what its configuration says that it takes."""
    main = getattr(model, "main_input_name", "input_ids")
    draw, vocabulary = torch.Generator().manual_seed(0), getattr(config, "vocab_size", None) or 2
    ids = torch.randint(0, vocabulary, (batch, sequence), generator=draw)
    if main == "input_ids":
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {})
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if main == "pixel_values" and size is not None:
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {"pixel_values": torch.randn(batch, getattr(vision, "num_channels", 3), height, width, generator=draw)}
    raise InputError(
        f"a {type(model).__name__} is called with {main}, of which a configuration says no size",
        where=os.fspath(path),
        why="example inputs are made for token ids and images",
        attempt="module:factory, which returns the model and its inputs",
    )


# --- other commands --------------------------------------------------------------------------------------------------


def check_source(given: Any) -> Report:
    """The report of `torchshard.check`, on simulated ranks, or of real ones."""
    place = (given.model, given.batch, given.sequence)
    if not given.processes:
        model, args, kwargs = real_source(*place)
        return check(
            model,
            given.plan,
            world_size=given.ranks,
            example_inputs=args,
            example_kwargs=kwargs,
            memory=given.memory,
            machine=given.machine,
            axes=given.axes,
        )
    aim = objective(given.machine, given.memory, given.axes, "cpu")
    return check_processes(real_source, place, given.plan, given.ranks, aim)


def real_source(name: str, batch: int, sequence: int) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any] | None]:
    """A model with random weights, and a call of it."""
    source = read_source(name, batch, sequence, real=True)
    return source.model, source.args, source.kwargs


def environment() -> str:
    """Versions, backends and devices, a line each."""
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = {
        "torchshard": _version("torchshard-fx"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "networkx": _version("networkx"),
        "transformers": _version("transformers"),
        "backends": ", ".join(backends) or "none",
        "cpus": str(os.cpu_count()),
        "gpus": ", ".join(gpus) or "none",
    }
    return "\n".join(f"{name:12} {value}" for name, value in found.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
