"""Tells the user's files from libraries' files.

Errors name the user's lines, and only the user's globals are watched. A library is code that a
package manager has installed: in the folders of Python, in any `site-packages` or `dist-packages`,
or next to its metadata in a folder of `sys.path` (`pip install --target`, a `.pth`, `PYTHONPATH`).
A project that is installed editable belongs to the user, unless an installed library requires it: a
library never requires a user's own project.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import site
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch


def _inside(*folders: object) -> tuple[str, ...]:
    # with the separator: next to the folder torchshard a user may have torchshard_train.py
    return tuple(f"{folder}{os.sep}" for folder in folders)


_PACKAGES = _inside(Path(__file__).parents[1], Path(torch.__file__).parent)
_OF_PYTHON = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_INSTALLED = _inside(*_OF_PYTHON, *site.getsitepackages(), site.getusersitepackages())
_STDLIB = _inside(sysconfig.get_path("stdlib"))
_OURS = "torchshard-fx"
_SITES = _inside(f"{os.sep}site-packages", f"{os.sep}dist-packages")
"""Common names of the folder into which packages are installed; `_INSTALLED` has this Python's own."""


def is_library(path: str) -> bool:
    """Returns whether a file is PyTorch's or TorchShard's; its lines would not help a user."""
    # PyTorch's C++ frames have paths relative to the root of its repository
    return path.startswith(("<", "torch/", *_PACKAGES))


def is_of_python(path: str) -> bool:
    """Returns whether a file is part of Python, such as `contextlib`."""
    return path.startswith(_STDLIB) and not any(folder in path for folder in _SITES)


def is_user_file(path: str | None) -> bool:
    """Returns whether a file is the user's: a script, a notebook's cell or a package that is not installed."""
    return path is not None and _is_user_file(path, tuple(sys.path))


@functools.lru_cache(maxsize=16384)
def _is_user_file(path: str, search_path: tuple[str, ...]) -> bool:
    if path.startswith(("<frozen", "<eval_with_key>", "<torch", *_PACKAGES)) or _is_in_site(path):
        return False
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    roots = dict.fromkeys(_libraries(search_path), False) | {os.path.dirname(os.path.abspath(script)): True}
    # the nearest root decides: examples in a library's repository are the user's if run as the
    # script
    return next((roots[folder] for folder in (path, *map(str, Path(path).parents)) if folder in roots), True)


def _is_in_site(path: str) -> bool:
    return path.startswith(_INSTALLED) or any(folder in path for folder in _SITES)


@functools.lru_cache(maxsize=4)
def _libraries(search_path: tuple[str, ...]) -> frozenset[str]:
    """Returns the files and folders of libraries outside `site-packages`."""
    found = [(one, _project_folder(one)) for one in importlib.metadata.distributions(path=list(search_path))]
    projects = {folder: one for one, folder in found if folder}  # setuptools also leaves an egg-info of the project
    installed = [one for one, folder in found if not folder]
    roots = {root for distribution in installed for root in _roots(distribution)}
    if not projects:
        return frozenset(roots)
    names = {folder: _names("Name", one)[0] for folder, one in projects.items()}
    requiring = installed + [one for folder, one in projects.items() if names[folder] == _OURS]
    required = {name for one in requiring for name in _names("Requires-Dist", one)} - {_OURS}
    return frozenset(roots.union(folder for folder, name in names.items() if name in required))


def _project_folder(distribution: Distribution) -> str:
    """Returns the folder of an editable install's project; '' if the distribution is a copy."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return url2pathname(urlparse(origin["url"]).path)
    root = str(distribution.locate_file(""))
    is_copy = distribution.read_text("METADATA") is not None or _is_in_site(root + os.sep)
    return "" if is_copy else root  # setuptools leaves an egg-info in a project's folder


def _roots(distribution: Distribution) -> Iterable[str]:
    if _is_in_site(f"{distribution.locate_file('')}{os.sep}"):
        return ()
    names = {file.parts[0] for file in distribution.files or ()}
    return [str(distribution.locate_file(name)) for name in names]


def _names(key: str, distribution: Distribution) -> list[str]:
    """Returns the distributions listed under a key of the metadata, even those for extras only."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    found = re.findall(rf"^{key}: *([\w.-]+)", text, re.MULTILINE)  # the `metadata` property would parse the whole text
    return [re.sub(r"[-_.]+", "-", name).lower() for name in found] or [""]


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the user's line that led here, if any, so Python shows each warning once per line."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe())]
    level = next((i for i, path in enumerate(files, 1) if is_user_file(path)), 2)
    warnings.warn(text, category, stacklevel=level)
