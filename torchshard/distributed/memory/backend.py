"""The backend "memory" of torch.distributed: process groups whose ranks are on one machine and talk through memory.

    import torchshard.distributed.memory                         # registers it
    dist.init_process_group("memory")                            # or dist.new_group(ranks, backend="memory")

Whatever calls torch.distributed with tensors on the CPU runs on it: DistributedDataParallel, `fully_shard`, DTensor,
functional collectives. A call begins at once and ends in its Work's `wait`; there are no threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from torchshard.distributed.memory import exchanges
from torchshard.distributed.memory.messages import Letters
from torchshard.distributed.memory.segment import Address, OtherSegment, OwnSegment, Unreachable
from torchshard.distributed.memory.stream import Board, Calls

BACKEND = "memory"
_NO_TIMEOUT = timedelta(0)


class _Communication(Protocol):
    def is_completed(self) -> bool: ...

    def wait(self, seconds: float | None) -> None: ...


class MemoryWork(dist.Work):
    """A communication that has begun."""

    def __init__(self, communication: _Communication | None, results: Sequence[Tensor]) -> None:
        """Names the communication; None: there is nothing to wait for.

        Args:
            results: what a future holds when it has ended.
        """
        super().__init__()
        self._communication, self._results = communication, results

    def is_completed(self) -> bool:
        """Whether it has ended, and `wait` would return at once."""
        return self._communication is None or self._communication.is_completed()

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        if not self.is_completed():
            return False
        try:
            return self.wait()
        except RuntimeError:
            return False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Ends it.

        Raises:
            RuntimeError: another rank does something else, has ended, or did not come in time.
        """
        if self._communication is not None:
            self._communication.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that it filled."""
        return list(self._results)

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is done: it ends the communication first, for no thread would."""
        future = torch.futures.Future[Any]()
        try:
            self.wait()
            future.set_result(list(self._results))
        except Exception as error:
            future.set_exception(error)
        return future

    def source_rank(self) -> int:
        """The rank that has sent what was received from any."""
        return int(getattr(self._communication, "rank", -1))

    _source_rank = source_rank


class MemoryProcessGroup(dist.ProcessGroup):
    """A process group whose ranks talk through memory; `torch.distributed` makes it."""

    def __init__(self, board: Board) -> None:
        """Takes the segments of its ranks."""
        super().__init__(board.rank, board.size)  # type: ignore[call-arg]
        self.board = board
        self.calls = Calls(board)
        self.letters = Letters(board)
        self.calls.others.append(self.letters.deliver)
        self._name = ""

    _device_types = [torch.device("cpu")]

    # --- what torch.distributed asks of a group ----------------------------------------------------------------------

    def getBackendName(self) -> str:
        """The name by which it was asked for."""
        return BACKEND

    def getRank(self) -> int:
        """This process's rank."""
        return self.board.rank

    def getSize(self) -> int:
        """How many ranks there are."""
        return self.board.size

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def setGroupName(self, name: str) -> None:
        """Names the group."""
        self._name = name

    def getGroupName(self) -> str:
        """The name under which torch.distributed knows the group."""
        return self._name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which torch.distributed knows the group."""
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long following calls wait at most."""
        self.board.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_backend(self, device: torch.device) -> MemoryProcessGroup:  # type: ignore[override]
        """What sends the tensors of a device: this group itself."""
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self.calls.begun

    def shutdown(self) -> None:
        """Ends this rank's waits; the memory goes when no rank has it."""
        self.board.close(self.calls.begun)

    def abort(self) -> None:
        """Ends the other ranks' waits for this one."""
        self.board.give_up(self.calls.begun, "aborted")

    # --- collectives -------------------------------------------------------------------------------------------------

    def _all_reduce(self, tensors: list[Tensor], opts: Any = None) -> MemoryWork:
        """dist.all_reduce."""
        return self._begun(tensors, tensors, lambda: exchanges.all_reduce(self.calls, tensors, _op(opts)))

    def _reduce(self, tensors: list[Tensor], opts: Any) -> MemoryWork:
        """dist.reduce."""
        (x,) = tensors
        return self._begun(tensors, tensors, lambda: exchanges.reduce(self.calls, x, opts.rootRank, _op(opts)))

    def _broadcast(self, tensors: list[Tensor], opts: Any) -> MemoryWork:
        """dist.broadcast."""
        return self._begun(tensors, tensors, lambda: exchanges.broadcast(self.calls, tensors, opts.rootRank))

    def _all_gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MemoryWork:
        """dist.all_gather."""
        results = outputs[0] if len(outputs) == 1 else outputs
        return self._begun(inputs, results, lambda: exchanges.all_gather(self.calls, outputs, inputs))

    def _all_gather_single(self, output: Tensor, sent: Tensor, opts: Any = None) -> MemoryWork:
        """dist.all_gather_into_tensor."""
        return self._all_gather_singles([output], [sent], opts)

    def _all_gather_singles(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MemoryWork:
        """Several of these at once."""
        return self._begun(
            inputs, outputs, lambda: exchanges.all_gather(self.calls, self._pieces(outputs, inputs), inputs)
        )

    def _all_gather_by_rank(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MemoryWork:
        """Several all-gathers at once; `outputs` by rank."""
        by_input = [list(found) for found in zip(*outputs, strict=True)]
        return self._begun(inputs, outputs, lambda: exchanges.all_gather(self.calls, by_input, inputs))

    def _gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MemoryWork:
        """dist.gather."""
        (x,), found = inputs, outputs[0] if outputs else []
        return self._begun(inputs, found, lambda: exchanges.gather(self.calls, found, x, opts.rootRank))

    def _scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MemoryWork:
        """dist.scatter."""
        (x,), sent = outputs, inputs[0] if inputs else []
        return self._begun([x, *sent], outputs, lambda: exchanges.scatter(self.calls, x, sent, opts.rootRank))

    def _reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MemoryWork:
        """dist.reduce_scatter."""
        return self._begun(outputs, outputs, lambda: exchanges.reduce_scatter(self.calls, outputs, inputs, _op(opts)))

    def _reduce_scatter_single(self, output: Tensor, sent: Tensor, opts: Any = None) -> MemoryWork:
        """dist.reduce_scatter_tensor."""
        return self._reduce_scatter_singles([output], [sent], opts)

    def _reduce_scatter_singles(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MemoryWork:
        """Several of these at once."""
        return self._begun(
            outputs,
            outputs,
            lambda: exchanges.reduce_scatter(self.calls, outputs, self._pieces(inputs, outputs), _op(opts)),
        )

    def _all_to_all(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MemoryWork:
        """dist.all_to_all."""
        return self._begun(inputs, outputs, lambda: exchanges.all_to_all(self.calls, outputs, inputs))

    def _all_to_all_single(
        self, output: Tensor, sent: Tensor, output_lengths: list[int], lengths: list[int], opts: Any = None
    ) -> MemoryWork:
        """dist.all_to_all_single; no lengths: equal ones."""
        size = self.board.size
        return self._begun(
            [sent],
            [output],
            lambda: exchanges.all_to_all(
                self.calls, exchanges.cut(output, output_lengths, size), exchanges.cut(sent, lengths, size)
            ),
        )

    def _barrier(self, opts: Any = None) -> MemoryWork:
        """dist.barrier."""
        return self._begun((), (), lambda: exchanges.barrier(self.calls))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> MemoryWork:
        """dist.send."""
        (x,) = tensors
        _check(tensors)
        self.letters.send(x, rank, tag, _letter_text(x))
        return MemoryWork(None, tensors)

    def _receive(self, tensors: list[Tensor], rank: int, tag: int = 0) -> MemoryWork:
        """dist.recv."""
        (x,) = tensors
        _check(tensors)
        return MemoryWork(self.letters.receive(x, rank, tag, _letter_text(x)), tensors)

    def _receive_from_any(self, tensors: list[Tensor], tag: int = 0) -> MemoryWork:
        """dist.recv without a rank."""
        (x,) = tensors
        _check(tensors)
        return MemoryWork(self.letters.receive(x, None, tag, _letter_text(x)), tensors)

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
"""The names by which torch.distributed asks for each, in its versions before and after 2.13."""
for _name, _names in _ASKED_BY.items():
    for _asked in _names:
        setattr(MemoryProcessGroup, _asked, getattr(MemoryProcessGroup, _name))


def _check(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if x.device.type != "cpu" or x.layout != torch.strided:
            raise RuntimeError(
                f"ranks that talk through memory send dense tensors on the CPU, got {x.layout}, {x.device}"
            )


def _op(opts: Any) -> ReduceOp:
    return ReduceOp(ReduceOp.SUM) if opts is None else opts.reduceOp


def _letter_text(x: Tensor) -> str:
    return f"a message of {x.dtype}, {x.numel()} elements"


# --- how ranks find each other's segments ----------------------------------------------------------------------------


def make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> MemoryProcessGroup:
    """Makes the group of these ranks; torch.distributed calls it.

    Raises:
        Unreachable: not all of them can read each other's memory; on every rank.
    """
    own, others, refusals = _opened(store, rank, size, timeout)
    if own is None or any(map(any, refusals)):
        raise Unreachable("; ".join(dict.fromkeys(refusal for each in refusals for refusal in each if refusal)))
    return MemoryProcessGroup(Board(own, others, rank, timeout.total_seconds()))


def reach(store: dist.Store, rank: int, size: int, timeout: timedelta) -> list[set[int]]:
    """Tries which ranks' memory each rank can read: a list by rank, the same on all."""
    _, _, refusals = _opened(store, rank, size, timeout)
    return [{other for other, refusal in enumerate(each) if not refusal} for each in refusals]


def _opened(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> tuple[OwnSegment | None, dict[int, OtherSegment], list[list[str]]]:
    """Makes a segment, and opens the others'.

    Returns:
        these, and for each rank why it can't open those of all ranks ('': it can).
    """
    own: OwnSegment | None = None
    mine: object
    try:
        own = OwnSegment()
        mine = own.found_at
    except Unreachable as error:
        mine = str(error)
    others, refusals = dict[int, OtherSegment](), list[str]()
    for other, found in enumerate(exchanged_by_store(store, "address", rank, size, mine, timeout)):
        refusals.append(f"rank {other}: {found}" if isinstance(found, str) else "")
        if other != rank and not refusals[other]:
            try:
                others[other] = OtherSegment(Address(*found))
            except Unreachable as error:
                refusals[other] = f"rank {rank}: {error}"
    everyone = exchanged_by_store(store, "opened", rank, size, refusals, timeout)
    store.set(f"{BACKEND}/done/{rank}", "")
    if rank == 0:  # whose process often has the store, and may end where this fails
        store.wait([f"{BACKEND}/done/{other}" for other in range(size)], timeout)
    return own, others, everyone


def exchanged_by_store(
    store: dist.Store, key: str, rank: int, size: int, mine: object, timeout: timedelta
) -> list[Any]:
    """What all ranks say, in their order."""
    store.set(f"{BACKEND}/{key}/{rank}", json.dumps(mine))
    keys = [f"{BACKEND}/{key}/{other}" for other in range(size)]
    store.wait(keys, timeout)
    return [json.loads(store.get(found)) for found in keys]


def register() -> None:
    """Makes "memory" a backend of torch.distributed."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, make_group, devices=["cpu"])
