"""Files are written whole or not at all: beside their place, then renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torchshard.errors import InputError


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file.

    Raises:
        InputError: it can't be written; what was there before is left as it was.
    """
    target = Path(path)
    beside = None
    try:
        number, name = tempfile.mkstemp(".part", dir=target.parent)
        beside = Path(name)
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
        beside.chmod(0o666 & ~_umask())
        beside.replace(target)
    except OSError as error:
        if beside is not None:
            beside.unlink(missing_ok=True)
        raise InputError(
            f"{os.fspath(path)!r} can't be written",
            where=str(target.parent),
            why=f"{type(error).__name__}: {error.strerror or error}",
            attempt="a path in a folder that exists and may be written to",
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
