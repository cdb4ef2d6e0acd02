"""The command `env`: versions, backends and devices, for reports of errors."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch


def environment() -> str:
    """Returns versions, backends and devices, one per line."""
    import torch.distributed as dist

    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines = {
        "torchshard": _version("torchshard-fx"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "networkx": _version("networkx"),
        "transformers": _version("transformers"),
        "backends": ", ".join(backends) or "none",
        "cpus": str(os.cpu_count()),
        "gpus": ", ".join(gpus) or "none",
    }
    return "\n".join(f"{name:12} {value}" for name, value in lines.items())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
