"""Ranks of one machine talk through memory: the backend "memory" of torch.distributed.

Read the modules from the bottom: `segment` (memory that one process writes and others read), `regions` (which of it is
taken), `stream` (posts: what a rank does and sends, numbered), `exchanges` (collectives) and `messages`, `backend`.
"""

from torchshard.distributed.memory.backend import BACKEND, MemoryProcessGroup, reach, register
from torchshard.distributed.memory.exchanges import Numbers, ReduceKind, op_text, start
from torchshard.distributed.memory.segment import Unreachable
from torchshard.distributed.memory.stream import Call, Calls, Different, Stopped, call_of

register()

__all__ = [
    "BACKEND", "Call", "Calls", "Different", "MemoryProcessGroup", "Numbers", "ReduceKind", "Stopped", "Unreachable",
    "call_of", "op_text", "reach", "start",
]  # fmt: skip
