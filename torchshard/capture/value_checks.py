"""Lets checks of a tensor's values pass: `if (variance < 0).any(): raise ValueError(...)`.

A graph can't contain a branch on a value. If one side of it only raises, as in the losses and
distributions of PyTorch and in `assert`, the graph contains the other side, and the check is lost.
`passes.normalize` drops `torch._assert_async` in the same way.

The bytecode after the branch shows which side raises. A check within a `try`, of any function up to
the model, is left alone, because the model may compute something else when it raises.

Export in PyTorch 2.13 refuses such a branch, because a fake tensor's `bool` has no value
(`GuardOnDataDependentSymNode`). So `Tensor.__bool__` is replaced during captures. This is needed as
long as export refuses a branch with one side that only raises.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType

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
# A side of a branch with one of these does more than raise.
_LEAVES = (*_RETURNS, "STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_ATTR")


def _bool(original: Callable[[Tensor], bool], tensor: Tensor) -> bool:
    if is_fake(tensor):
        passed = _passed(sys._getframe(2))  # skips the frame of `in_captures`
        known = known_number(tensor, bool) if passed is None else passed
        if known is not None:
            return bool(known)
    return original(tensor)


VALUE_CHECKS = Patches(Patch(Tensor, "__bool__", in_captures(_bool)))
"""Lets checks of values pass, in threads that capture.

A TorchFunctionMode would not work: it is off within PyTorch's functions that are written in Python,
such as its losses.
"""


def _passed(frame: FrameType) -> bool | None:
    """The truth value with which a frame does not raise; None if the branch is not just a check."""
    answer = _side_that_goes_on(frame.f_code, frame.f_lasti)
    caller: FrameType | None = frame
    while answer is not None and caller is not None and caller.f_globals.get("__name__") not in _RUN_FORWARD:
        # PyTorch's own frames around a call re-raise the exceptions that they handle
        if (caller is frame or not is_library(caller.f_code.co_filename)) and _is_caught(caller.f_code, caller.f_lasti):
            return None
        caller = caller.f_back
    return answer


def _instructions(code: CodeType) -> tuple[dict[int, dis.Instruction], dict[int, int]]:
    """Offset -> instruction, and offset -> offset of the next instruction."""
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
    start: int, instructions: dict[int, dis.Instruction], following: dict[int, int], leaves: Sequence[str] = _LEAVES
) -> bool:
    """Whether all paths from an instruction end in a `raise` and avoid those in `leaves`."""
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
    """Whether the function itself may handle an exception, apart from ending a `with`."""
    instructions, following = _instructions(code)
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    targets = [entry.target for entry in entries if entry.start <= offset < entry.end]
    ends = [at for at in targets if instructions[following[at]].opname != "WITH_EXCEPT_START"]
    # A `finally` only raises again.
    return not all(_only_raises(target, instructions, following, _RETURNS) for target in ends)
