"""The call site of a collective, for errors on all ranks: the user's line or a graph node."""

from __future__ import annotations

import itertools
import linecache
import sys
from pathlib import Path
from types import FrameType

from torchshard.core.user_files import is_library
from torchshard.distributed.group import CheckLevel, Group


def call_site(*, column: bool = False) -> str:
    """Returns the running graph node, or the line of the caller's own code.

    Args:
        column: adds the column, which distinguishes two calls on one line.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        # torch.fx gives generated code this file name
        if name.startswith("<eval_with_key>"):
            return f"node {linecache.getline(name, frame.f_lineno).partition(' = ')[0].strip()}"
        if not is_library(name):
            break
        frame = frame.f_back
    at = f":{_column(frame)}" if column else ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}{at} in {frame.f_code.co_name}"


def verified_site(group: Group) -> str:
    """Returns the call site that a group's ranks verify; level ALL adds the column."""
    return call_site(column=group.level is CheckLevel.ALL)


def _column(frame: FrameType) -> int:
    # co_positions has one entry for each instruction, which takes two bytes
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    return position[2] or 0
