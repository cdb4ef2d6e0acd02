"""Communication of ranks on one machine through memory: torch.distributed's backend "memory".

Read the modules bottom-up: `segment` (memory that one process writes and others read), `regions`
(its allocator), `stream` (posts: a rank's calls and data, numbered), `exchanges` (collectives) and
`messages`, `backend`.
"""

from torchshard.distributed.memory.backend import BACKEND, MemoryProcessGroup, reach, register
from torchshard.distributed.memory.board import Call, Different, Stopped, call_of
from torchshard.distributed.memory.exchanges import Numbers, ReduceKind, op_text, start
from torchshard.distributed.memory.segment import Unreachable
from torchshard.distributed.memory.stream import Calls

register()

__all__ = [
    "BACKEND", "Call", "Calls", "Different", "MemoryProcessGroup", "Numbers", "ReduceKind", "Stopped", "Unreachable",
    "call_of", "op_text", "reach", "start",
]  # fmt: skip
