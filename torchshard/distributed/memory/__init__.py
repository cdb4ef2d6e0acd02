"""Communication of ranks on one machine through memory: torch.distributed's backend "memory".

Read the modules bottom-up: `segment` (memory that one process writes and others read), `regions`
(its allocator), `board` (posts: a rank's calls and data), `stream` (the calls, numbered), `reductions`,
`exchanges` (collectives) and `messages`, `work` (a call under way), `backend`, `groups`.
"""

from torchshard.distributed.memory.backend import BACKEND, MemoryProcessGroup
from torchshard.distributed.memory.board import Call, Different, Stopped, call_of
from torchshard.distributed.memory.exchanges import share, start
from torchshard.distributed.memory.groups import reach, register
from torchshard.distributed.memory.reductions import ReduceKind, op_text
from torchshard.distributed.memory.regions import aligned
from torchshard.distributed.memory.segment import Unreachable
from torchshard.distributed.memory.stream import Calls, Numbers

register()

__all__ = [
    "BACKEND", "Call", "Calls", "Different", "MemoryProcessGroup", "Numbers", "ReduceKind", "Stopped", "Unreachable",
    "aligned", "call_of", "op_text", "reach", "share", "start",
]  # fmt: skip
