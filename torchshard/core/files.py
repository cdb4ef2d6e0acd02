"""Writes files atomically: a reader sees either the old file or the complete new one, even if the process is killed.

The text goes to a temporary file in the same folder, which is then renamed onto the target.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from torchshard.core.errors import InputError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Checks that the target's folder, or an existing pipe or device, may be written to.

    Raises:
        InputError: it may not, or the folder does not exist.
    """
    target = Path(os.path.realpath(path))
    held = target if target.exists() and not target.is_file() else target.parent
    if not held.exists() or not os.access(held, os.W_OK):
        raise _unwritable(path, held, "it may not be written to" if held.exists() else "there is no such folder")


def _unwritable(path: str | os.PathLike[str], where: Path, why: str) -> InputError:
    return InputError(
        f"{os.fspath(path)!r} can't be written",
        where=str(where),
        why=why,
        attempt="a path in a folder that exists and may be written to",
    )


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file's content atomically.

    A pipe or a device such as /dev/stdout can't be renamed onto, so it is written to directly.

    Raises:
        InputError: the file can't be written; a previous file is left unchanged.
    """
    target = Path(path)
    try:
        data = text.encode("utf-8")
        target = Path(os.path.realpath(target))  # renaming onto a symlink would replace the link, not its target
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            _replace(target, data)
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        raise _unwritable(path, target.parent, why) from None


def _replace(target: Path, data: bytes) -> None:
    # mkstemp creates files with mode 0600, so set the mode that open() would have given
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    # a rename needs only the folder's permission; refuse a read-only file explicitly, as open()
    # does
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    # in the target's folder: a rename is atomic only within one file system
    descriptor, name = tempfile.mkstemp(".part", dir=target.parent)
    temporary = Path(name)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        temporary.chmod(mode)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)  # POSIX can read the mask only by setting it
    os.umask(mask)
    return mask
