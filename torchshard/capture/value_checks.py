"""Checks of a tensor's values that only raise: `if (variance < 0).any(): raise ValueError(...)`.

A graph can't hold a branch on a value. Where one side of it only raises, as in the losses and distributions of PyTorch
and in `assert`, the graph holds the other side: as with `torch._assert_async`, what it checks is not checked.

The side is found in the bytecode behind the branch. A check within a `try`, of any function up to the model, is left
alone, for the model may compute something else when it raises.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torchshard.capture.known_numbers import known_number
from torchshard.capture.recording import in_captures
from torchshard.core.patches import Patch, Patches
from torchshard.core.user_files import is_library

_JUMPS_IF = {"TRUE": True, "FALSE": False}
_RUN_FORWARD = ("torchshard.capture.trace", "torchshard.capture.rehearsal")
"""The modules that call a model's forward."""
_RAISES = ("RAISE_VARARGS", "RERAISE")
_RETURNS = ("RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE")
_LEAVES = (*_RETURNS, "STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_ATTR")


def _bool(original: Callable[[Tensor], bool], tensor: Tensor) -> bool:
    if is_fake(tensor):
        passed = _passed(sys._getframe(2))  # behind the frame of what `in_captures` makes of this function
        known = known_number(tensor, bool) if passed is None else passed
        if known is not None:
            return bool(known)
    return original(tensor)


VALUE_CHECKS = Patches(Patch(Tensor, "__bool__", in_captures(_bool)))
"""While it is entered, checks of values pass in threads that capture.

A TorchFunctionMode would not do: it is off within PyTorch's functions that are written in Python, such as its losses.
"""


def _passed(frame: FrameType) -> bool | None:
    """The truth of a value with which a frame that asks for it does not raise; None if that is more than a check."""
    answer = _side_that_goes_on(frame.f_code, frame.f_lasti)
    caller: FrameType | None = frame
    while answer is not None and caller is not None and caller.f_globals.get("__name__") not in _RUN_FORWARD:
        # PyTorch's own frames around a call handle exceptions by raising them again
        if (caller is frame or not is_library(caller.f_code.co_filename)) and _is_caught(caller.f_code, caller.f_lasti):
            return None
        caller = caller.f_back
    return answer


def _instructions(code: CodeType) -> tuple[dict[int, Any], dict[int, int]]:
    """Offset -> instruction, and the offset of the next one."""
    instructions = {one.offset: one for one in dis.get_instructions(code)}
    return instructions, dict(itertools.pairwise(sorted(instructions)))


@functools.lru_cache(maxsize=4096)
def _side_that_goes_on(code: CodeType, offset: int) -> bool | None:
    instructions, following = _instructions(code)
    if offset in instructions and instructions[offset].opname == "TO_BOOL":  # Python 3.13
        offset = following[offset]
    if offset not in instructions:
        return None
    jump = instructions[offset]
    truth = next((value for name, value in _JUMPS_IF.items() if jump.opname.endswith(f"_IF_{name}")), None)
    if truth is None:
        return None
    sides = jump.argval, following[offset]
    target_raises, next_raises = (_only_raises(start, instructions, following) for start in sides)
    if target_raises == next_raises:
        return None
    return not truth if target_raises else truth


def _only_raises(
    start: int, instructions: dict[int, Any], following: dict[int, int], leaves: Sequence[str] = _LEAVES
) -> bool:
    """Whether all ways on from an instruction end in a `raise`, without one of some other instructions."""
    seen, waiting, raises = set[int](), [start], False
    while waiting:
        offset = waiting.pop()
        if offset in seen:
            continue
        seen.add(offset)
        one = instructions[offset]
        if one.opname in _RAISES:
            raises = True
            continue
        if one.opname in leaves or offset not in following:
            return False
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            waiting.append(one.argval)
            if one.opname.startswith("JUMP"):
                continue
        waiting.append(following[offset])
    return raises


@functools.lru_cache(maxsize=4096)
def _is_caught(code: CodeType, offset: int) -> bool:
    """Whether an exception at an instruction may end in the same function, by more than the end of a `with`."""
    instructions, following = _instructions(code)
    entries: Any = getattr(dis.Bytecode(code), "exception_entries", ())
    targets = [entry.target for entry in entries if entry.start <= offset < entry.end]
    ends = [at for at in targets if instructions[following[at]].opname != "WITH_EXCEPT_START"]
    return not all(_only_raises(target, instructions, following, _RETURNS) for target in ends)  # a `finally` does
