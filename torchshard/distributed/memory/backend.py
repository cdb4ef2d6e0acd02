"""The backend "memory" of torch.distributed: ranks of one machine communicate through memory.

    import torchshard.distributed.memory                         # registers it
    dist.init_process_group("memory")                            # or dist.new_group(ranks, backend="memory")

Any user of torch.distributed with CPU tensors runs on it: DistributedDataParallel, `fully_shard`,
DTensor, functional collectives. A call begins at once and ends in its Work's `wait`; there are no
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from torchshard.distributed.memory import exchanges
from torchshard.distributed.memory.board import Board
from torchshard.distributed.memory.messages import Letters
from torchshard.distributed.memory.stream import Calls
from torchshard.distributed.memory.work import MemoryWork

BACKEND = "memory"


class _Options(Protocol):
    """A call's options, such as PyTorch's `ReduceOptions`; other collectives' options have one of these, or neither."""

    reduceOp: ReduceOp
    rootRank: int


class MemoryProcessGroup(dist.ProcessGroup):
    """A process group of ranks that communicate through memory; `torch.distributed` creates it."""

    def __init__(self, board: Board) -> None:
        """Stores the segments of its ranks."""
        super().__init__(board.rank, board.size)  # type: ignore[call-arg]
        self.board = board
        self.calls = Calls(board)
        self.letters = Letters(board)
        self.calls.others.append(self.letters.deliver)
        self._name = ""

    _device_types = [torch.device("cpu")]

    # --- what torch.distributed asks of a group ----------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Returns the name of the backend."""
        return BACKEND

    def getRank(self) -> int:
        """Returns this process's rank."""
        return self.board.rank

    def getSize(self) -> int:
        """Returns the number of ranks."""
        return self.board.size

    # `_set_group_name`: torch.distributed calls it after it makes a group (PyTorch 2.13.0).
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def setGroupName(self, name: str) -> None:
        """Names the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Returns the group's name in torch.distributed."""
        return self._name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The group's name in torch.distributed."""
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time-out of later calls."""
        self.board.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # `_get_backend`: torch.distributed asks a group for the backend of a device (PyTorch 2.13.0).
    def _get_backend(self, device: torch.device) -> MemoryProcessGroup:  # type: ignore[override]
        """Returns the backend for a device: this group itself."""
        return self

    # `_set_sequence_number_for_group`: torch.distributed calls it after it makes a group (PyTorch 2.13.0).
    def _set_sequence_number_for_group(self) -> None:
        pass

    # `_get_sequence_number_for_group`: a debug level of torch.distributed compares it (PyTorch 2.13.0).
    def _get_sequence_number_for_group(self) -> int:
        return self.calls.begun

    def shutdown(self) -> None:
        """Ends this rank's waits; memory is freed when all ranks have released it."""
        self.board.close(self.calls.begun)

    def abort(self) -> None:
        """Ends the other ranks' waits for this one."""
        self.board.give_up(self.calls.begun, "aborted")

    # --- collectives -------------------------------------------------------------------------------------------------

    def _all_reduce(self, tensors: list[Tensor], opts: _Options | None = None) -> MemoryWork:
        """Implements dist.all_reduce."""
        return self._begun(tensors, tensors, lambda: exchanges.all_reduce(self.calls, tensors, _op(opts)))

    def _reduce(self, tensors: list[Tensor], opts: _Options) -> MemoryWork:
        """Implements dist.reduce."""
        (x,) = tensors
        return self._begun(tensors, tensors, lambda: exchanges.reduce(self.calls, x, opts.rootRank, _op(opts)))

    def _broadcast(self, tensors: list[Tensor], opts: _Options) -> MemoryWork:
        """Implements dist.broadcast."""
        return self._begun(tensors, tensors, lambda: exchanges.broadcast(self.calls, tensors, opts.rootRank))

    def _all_gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> MemoryWork:
        """Implements dist.all_gather."""
        results = outputs[0] if len(outputs) == 1 else outputs
        return self._begun(inputs, results, lambda: exchanges.all_gather(self.calls, outputs, inputs))

    def _all_gather_single(self, output: Tensor, sent: Tensor, opts: object = None) -> MemoryWork:
        """Implements dist.all_gather_into_tensor."""
        return self._all_gather_singles([output], [sent], opts)

    def _all_gather_singles(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> MemoryWork:
        """Runs several all_gather_into_tensor at once."""
        return self._begun(
            inputs, outputs, lambda: exchanges.all_gather(self.calls, self._pieces(outputs, inputs), inputs)
        )

    def _all_gather_by_rank(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> MemoryWork:
        """Runs several all-gathers at once; `outputs` is indexed by rank."""
        by_input = [list(found) for found in zip(*outputs, strict=True)]
        return self._begun(inputs, outputs, lambda: exchanges.all_gather(self.calls, by_input, inputs))

    def _gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: _Options) -> MemoryWork:
        """Implements dist.gather."""
        (x,), found = inputs, outputs[0] if outputs else []
        return self._begun(inputs, found, lambda: exchanges.gather(self.calls, found, x, opts.rootRank))

    def _scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _Options) -> MemoryWork:
        """Implements dist.scatter."""
        (x,), sent = outputs, inputs[0] if inputs else []
        return self._begun([x, *sent], outputs, lambda: exchanges.scatter(self.calls, x, sent, opts.rootRank))

    def _reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: _Options | None = None
    ) -> MemoryWork:
        """Implements dist.reduce_scatter."""
        return self._begun(outputs, outputs, lambda: exchanges.reduce_scatter(self.calls, outputs, inputs, _op(opts)))

    def _reduce_scatter_single(self, output: Tensor, sent: Tensor, opts: _Options | None = None) -> MemoryWork:
        """Implements dist.reduce_scatter_tensor."""
        return self._reduce_scatter_singles([output], [sent], opts)

    def _reduce_scatter_singles(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: _Options | None = None
    ) -> MemoryWork:
        """Runs several reduce_scatter_tensor at once."""
        return self._begun(
            outputs,
            outputs,
            lambda: exchanges.reduce_scatter(self.calls, outputs, self._pieces(inputs, outputs), _op(opts)),
        )

    def _all_to_all(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> MemoryWork:
        """Implements dist.all_to_all."""
        return self._begun(inputs, outputs, lambda: exchanges.all_to_all(self.calls, outputs, inputs))

    def _all_to_all_single(
        self, output: Tensor, sent: Tensor, output_lengths: list[int], lengths: list[int], opts: object = None
    ) -> MemoryWork:
        """Implements dist.all_to_all_single; empty lengths mean equal pieces."""
        size = self.board.size
        return self._begun(
            [sent],
            [output],
            lambda: exchanges.all_to_all(
                self.calls, exchanges.cut(output, output_lengths, size), exchanges.cut(sent, lengths, size)
            ),
        )

    def _barrier(self, opts: object = None) -> MemoryWork:
        """Implements dist.barrier."""
        return self._begun((), (), lambda: exchanges.barrier(self.calls))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> MemoryWork:
        """Implements dist.send."""
        (x,) = tensors
        _check(tensors)
        self.letters.send(x, rank, tag, _letter_text(x))
        return MemoryWork(None, tensors)

    def _receive(self, tensors: list[Tensor], rank: int | None, tag: int = 0) -> MemoryWork:
        """Implements dist.recv."""
        (x,) = tensors
        _check(tensors)
        return MemoryWork(self.letters.receive(x, rank, tag, _letter_text(x)), tensors)

    def _receive_from_any(self, tensors: list[Tensor], tag: int = 0) -> MemoryWork:
        """Implements dist.recv without a source rank."""
        return self._receive(tensors, None, tag)

    def _pieces(self, whole: list[Tensor], parts: list[Tensor]) -> list[list[Tensor]]:
        return [exchanges.pieces(x, part, self.board.size) for x, part in zip(whole, parts, strict=True)]

    def _begun(
        self, tensors: Sequence[Tensor], results: Sequence[Any], begin: Callable[[], exchanges.Exchange]
    ) -> MemoryWork:
        _check(tensors)
        return MemoryWork(exchanges.begun(self.calls, begin), results)


_ASKED_BY = {
    "_all_reduce": ("allreduce", "allreduce_coalesced"),
    "_reduce": ("reduce",),
    "_broadcast": ("broadcast",),
    "_all_gather": ("allgather",),
    "_all_gather_by_rank": ("allgather_coalesced",),
    # `_allgather_base`, `_reduce_scatter_base`: names before PyTorch 2.13.0, which ProcessGroup still has.
    "_all_gather_single": ("all_gather_single", "_allgather_base"),
    "_all_gather_singles": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    "_gather": ("gather",),
    "_scatter": ("scatter",),
    "_reduce_scatter": ("reduce_scatter",),
    "_reduce_scatter_single": ("reduce_scatter_single", "_reduce_scatter_base"),
    "_reduce_scatter_singles": ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    "_all_to_all": ("alltoall",),
    "_all_to_all_single": ("all_to_all_single", "alltoall_base"),
    "_barrier": ("barrier",),
    "_send": ("send",),
    "_receive": ("recv",),
    "_receive_from_any": ("recv_anysource",),
}
"""Method -> the names that torch.distributed calls, in versions before and after 2.13."""
for _name, _names in _ASKED_BY.items():
    for _asked in _names:
        setattr(MemoryProcessGroup, _asked, getattr(MemoryProcessGroup, _name))


def _check(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if x.device.type != "cpu" or x.layout != torch.strided:
            raise RuntimeError(
                f"ranks that talk through memory send dense tensors on the CPU, got {x.layout}, {x.device}"
            )


def _op(opts: _Options | None) -> ReduceOp:
    return ReduceOp(ReduceOp.SUM) if opts is None else opts.reduceOp


def _letter_text(x: Tensor) -> str:
    return f"a message of {x.dtype}, {x.numel()} elements"
