"""Files are written whole or not at all: beside their place, then renamed."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from torchshard.core.errors import InputError


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file; what is no plain file (a pipe, /dev/stdout) is written to as it is.

    Raises:
        InputError: it can't be written; what was there before is left as it was.
    """
    target = Path(path)
    try:
        data = text.encode("utf-8")
        target = Path(os.path.realpath(target))
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(target, data)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{os.fspath(path)!r} can't be written",
            where=str(target.parent),
            why=f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}",
            attempt="a path in a folder that exists and may be written to",
        ) from None


def _replace(target: Path, data: bytes) -> None:
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    number, name = tempfile.mkstemp(".part", dir=target.parent)
    beside = Path(name)
    try:
        with open(number, "wb") as file:
            file.write(data)
        beside.chmod(mode)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
