"""Tells the user's files from libraries': errors name the user's lines, and only the user's globals are watched."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path

import torch


def _inside(*folders: object) -> tuple[str, ...]:
    # with the separator: beside the folder torchshard a user may have torchshard_train.py
    return tuple(f"{folder}{os.sep}" for folder in folders)


_PACKAGES = _inside(Path(__file__).parents[1], Path(torch.__file__).parent)
_INSTALLED = _inside(*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_library(path: str) -> bool:
    """Returns whether a file is PyTorch's or TorchShard's, whose lines tell a user nothing."""
    # PyTorch's C++ frames have paths from the root of its repository
    return path.startswith(("<", "torch/", *_PACKAGES))


def is_user_file(path: str | None) -> bool:
    """Returns whether a file is the user's: a script, a notebook's cell or a package that is not installed."""
    return path is not None and not path.startswith(("<frozen", "<eval_with_key>", "<torch", *_PACKAGES, *_INSTALLED))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the user's line that led here, if there is one: Python shows it, and each warning once for each line."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe())]
    level = next((i for i, path in enumerate(files, 1) if is_user_file(path)), 2)
    warnings.warn(text, category, stacklevel=level)
