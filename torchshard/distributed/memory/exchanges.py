"""Collectives: the data that a rank posts, and the result that it computes from all ranks' posts.

Each begins at once and returns an `Exchange`; its `wait` ends it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from torchshard.distributed.memory.board import Call, Post, Refused, call_of
from torchshard.distributed.memory.reductions import ReduceKind, check_reduces, combine, op_text
from torchshard.distributed.memory.regions import aligned
from torchshard.distributed.memory.segment import below_autograd
from torchshard.distributed.memory.stream import Calls

Finish = Callable[[list[Post]], None]


class Exchange:
    """A collective that this rank has begun."""

    def __init__(self, calls: Calls, call: Call, sent: Sequence[Tensor], finish: Finish, values: Sequence[int] = ()):
        """Begins it.

        Args:
            finish: computes the result from all ranks' posts.
            values: numbers of this rank for the others.
        """
        self._calls, self._begun = calls, calls.begin(call, sent, finish, values)

    def __del__(self) -> None:
        """Lets a dropped exchange complete; if it fails, the next wait raises its error."""
        begun = getattr(self, "_begun", None)
        if begun is not None:
            begun.is_dropped = True

    def is_completed(self) -> bool:
        """Returns whether it has ended, so `wait` would return at once."""
        self._begun.end(blocking=False)
        return self._begun.is_done

    def wait(self, seconds: float | None = None) -> None:
        """Ends it, and other calls that all ranks have begun.

        Raises:
            Stopped: a rank timed out or ended.
            Different: a rank makes another call.
            RuntimeError: an earlier dropped call has failed.
        """
        self._begun.end(seconds)
        self._calls.end_complete()
        if self._begun.failure is not None:
            raise self._begun.failure
        if self._calls.untold:
            raise self._calls.untold.pop(0)


def all_reduce(calls: Calls, tensors: Sequence[Tensor], op: ReduceKind) -> Exchange:
    """Replaces this rank's tensors with the combination of all ranks'."""
    for x in tensors:
        check_reduces(x, op)

    def finish(posts: list[Post]) -> None:
        for x, at in zip(tensors, _places(tensors), strict=True):
            combine(x, [calls.board.data(post, x.dtype, x.shape, at) for post in posts], op)

    return Exchange(calls, _call(f"all_reduce {op_text(op)}", tensors), tensors, finish)


def reduce(calls: Calls, tensor: Tensor, root: int, op: ReduceKind) -> Exchange:
    """Replaces one rank's tensor with the combination of all ranks'."""
    check_reduces(tensor, op)

    def finish(posts: list[Post]) -> None:
        if calls.board.rank == root:
            combine(tensor, [calls.board.data(post, tensor.dtype, tensor.shape) for post in posts], op)

    return Exchange(calls, _call(f"reduce {op_text(op)} to rank {root}", [tensor]), [tensor], finish)


def broadcast(calls: Calls, tensors: Sequence[Tensor], root: int) -> Exchange:
    """Replaces all ranks' tensors with one rank's."""
    sends = calls.board.rank == root

    def finish(posts: list[Post]) -> None:
        if not sends:
            for x, at in zip(tensors, _places(tensors), strict=True):
                _fill(x, calls, posts[root], at)

    return Exchange(calls, _call(f"broadcast from rank {root}", tensors), tensors if sends else (), finish)


def all_gather(calls: Calls, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Exchange:
    """Copies the tensors of all ranks.

    Args:
        outputs: for each input, one tensor per rank.
    """
    for found, x in zip(outputs, inputs, strict=True):
        _check_pieces(calls, found, x)

    def finish(posts: list[Post]) -> None:
        for found, at in zip(outputs, _places(inputs), strict=True):
            for x, post in zip(found, posts, strict=True):
                _fill(x, calls, post, at)

    return Exchange(calls, _call("all_gather", inputs), inputs, finish)


def share(
    calls: Calls,
    what: str,
    sent: Sequence[Tensor],
    types: Sequence[Sequence[tuple[Sequence[int], torch.dtype]]],
    take: Callable[[int, int, Tensor], None],
) -> Exchange:
    """Shows this rank's tensors to all ranks.

    Args:
        what: a description of the call.
        types: for each rank, the shapes and dtypes of its tensors.
        take: is called with each rank, number of a tensor, and tensor, which is valid during the call.
    """

    def begin() -> Exchange:
        own = [(tuple(shape), dtype) for shape, dtype in types[calls.board.rank]]
        if own != [(tuple(x.shape), x.dtype) for x in sent]:
            raise Refused(f"{what}: the tensors are not of the types {own}")
        return Exchange(calls, call_of(what), sent, finish)

    def finish(posts: list[Post]) -> None:
        for rank, post in enumerate(posts):
            at = 0
            for number, (shape, dtype) in enumerate(types[rank]):
                part = calls.board.data(post, dtype, torch.Size(shape), at)
                take(rank, number, part)
                at += aligned(part.nbytes)

    return begun(calls, begin)


def gather(calls: Calls, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Exchange:
    """Copies the tensors of all ranks on one rank; the others have no outputs."""
    if calls.board.rank == root:
        _check_pieces(calls, outputs, tensor)

    def finish(posts: list[Post]) -> None:
        if calls.board.rank == root:
            for x, post in zip(outputs, posts, strict=True):
                _fill(x, calls, post, 0)

    return Exchange(calls, _call(f"gather to rank {root}", [tensor]), [tensor], finish)


def scatter(calls: Calls, output: Tensor, inputs: Sequence[Tensor], root: int) -> Exchange:
    """Copies one rank's tensor for this rank; the other ranks have no inputs."""
    if calls.board.rank == root:
        _check_pieces(calls, inputs, output)

    def finish(posts: list[Post]) -> None:
        _fill(output, calls, posts[root], calls.board.rank * aligned(output.nbytes))

    return Exchange(calls, _call(f"scatter from rank {root}", [output]), inputs, finish)


def reduce_scatter(
    calls: Calls, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: ReduceKind
) -> Exchange:
    """Combines the ranks' tensors for this rank.

    Args:
        inputs: for each output, one tensor per rank.
    """
    for found, x in zip(inputs, outputs, strict=True):
        _check_pieces(calls, found, x)
        check_reduces(x, op)
    sent = [x for found in inputs for x in found]

    def finish(posts: list[Post]) -> None:
        at = 0
        for x in outputs:
            begin = at + calls.board.rank * aligned(x.nbytes)
            combine(x, [calls.board.data(post, x.dtype, x.shape, begin) for post in posts], op)
            at += calls.board.size * aligned(x.nbytes)

    return Exchange(calls, _call(f"reduce_scatter {op_text(op)}", outputs), sent, finish)


def all_to_all(calls: Calls, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Exchange:
    """Copies the ranks' tensors for this rank; sizes may differ.

    Args:
        outputs, inputs: one per rank, of one dtype.
    """
    ranks, rank = calls.board.size, calls.board.rank
    dtypes = {x.dtype for x in (*outputs, *inputs)}
    if len(outputs) != ranks or len(inputs) != ranks or len(dtypes) != 1:
        raise Refused(
            f"{len(outputs)} outputs and {len(inputs)} inputs of {dtypes} are not one for each of {ranks} ranks"
        )
    sent, taken = [x.numel() for x in inputs], [x.numel() for x in outputs]

    def finish(posts: list[Post]) -> None:
        for a, b in itertools.product(posts, posts):
            if a.values[b.rank] != b.values[ranks + a.rank]:
                sizes = f"sends {a.values[b.rank]} elements to rank {b.rank}, which takes {b.values[ranks + a.rank]}"
                raise RuntimeError(f"all_to_all: rank {a.rank} {sizes}")
        for x, post in zip(outputs, posts, strict=True):
            _fill(x, calls, post, post.values[2 * ranks + rank])

    call = _call("all_to_all", [inputs[0].new_empty(0)])
    return Exchange(calls, call, inputs, finish, [*sent, *taken, *_places(inputs)])


def _check_pieces(calls: Calls, pieces: Sequence[Tensor], like: Tensor) -> None:
    """Raises Refused unless there is one tensor per rank, with the size and dtype of `like`."""
    if len(pieces) != calls.board.size or any(x.numel() != like.numel() or x.dtype is not like.dtype for x in pieces):
        given = ", ".join(dict.fromkeys(f"{x.dtype}{list(x.shape)}" for x in pieces))
        raise Refused(
            f"{len(pieces)} tensors ({given}) are not one for each of {calls.board.size} ranks like {like.dtype}"
            f"{list(like.shape)}"
        )


def barrier(calls: Calls) -> Exchange:
    """Waits for all ranks."""
    return Exchange(calls, call_of("barrier"), (), lambda posts: None)


_START: dict[Callable[..., object], Callable[..., Exchange]] = {
    dist.all_reduce: lambda calls, x, op=ReduceOp.SUM: all_reduce(calls, [x], op),
    dist.reduce: lambda calls, x, op=ReduceOp.SUM, *, group_dst: reduce(calls, x, group_dst, op),
    dist.broadcast: lambda calls, x, *, group_src: broadcast(calls, [x], group_src),
    dist.all_gather_single: lambda calls, out, x: all_gather(calls, [pieces(out, x, calls.board.size)], [x]),
    dist.reduce_scatter_single: lambda calls, out, x: reduce_scatter(
        calls, [out], [pieces(x, out, calls.board.size)], ReduceOp.SUM
    ),
    dist.gather: lambda calls, x, out, *, group_dst: gather(calls, out or (), x, group_dst),
    dist.scatter: lambda calls, out, xs, *, group_src: scatter(calls, out, xs or (), group_src),
    dist.all_to_all_single: lambda calls, out, x, lengths=(), sent=(): all_to_all(
        calls, cut(out, lengths, calls.board.size), cut(x, sent, calls.board.size)
    ),
    dist.barrier: barrier,
}


def start(fn: Callable[..., object], calls: Calls, /, *args: object, **kwargs: object) -> Exchange:
    """Begins the collective of a torch.distributed function with these arguments.

    Raises:
        RuntimeError: the arguments are invalid; the other ranks fail too.
    """
    return begun(calls, lambda: _START[fn](calls, *args, **kwargs))


def begun(calls: Calls, begin: Callable[[], Exchange]) -> Exchange:
    """Begins a collective; if this rank can't, the others fail too."""
    try:
        return below_autograd(begin)
    except Refused as error:
        calls.refuse(str(error))
        raise


def cut(x: Tensor, lengths: Sequence[int], ranks: int) -> list[Tensor]:
    """Returns a tensor's pieces along dim 0, one per rank; without lengths, equal pieces."""
    rows = x.shape[0] if x.ndim else 0
    given = list(lengths) or [rows // ranks] * ranks
    if len(given) != ranks or sum(given) != rows:
        raise Refused(f"{rows} rows are not {given} for {ranks} ranks")
    return list(x.split(given))


def pieces(whole: Tensor, part: Tensor, ranks: int) -> list[Tensor]:
    """Returns views of a tensor's consecutive pieces, one per rank, shaped like `part`."""
    if whole.numel() != ranks * part.numel() or whole.dtype is not part.dtype:
        given = f"{whole.dtype}{list(whole.shape)}"
        raise Refused(f"{given} does not have the parts of {ranks} ranks, each {part.dtype}{list(part.shape)}")
    if not part.numel():
        return [part.new_empty(part.shape)] * ranks
    if whole.shape == (ranks, *part.shape):
        return list(whole.unbind(0))
    if part.ndim and whole.shape == (ranks * part.shape[0], *part.shape[1:]):
        return list(whole.chunk(ranks))
    if not whole.is_contiguous():
        raise Refused(f"{list(whole.shape)}, which is not contiguous, is not {ranks} times {list(part.shape)}")
    return [piece.view(part.shape) for piece in whole.view(-1).chunk(ranks)]


def _fill(x: Tensor, calls: Calls, post: Post, at: int) -> None:
    if x.numel():
        x.copy_(calls.board.data(post, x.dtype, x.shape, at))


def _call(what: str, tensors: Sequence[Tensor]) -> Call:
    return _call_of(what, *[(x.dtype, x.shape) for x in tensors])


@lru_cache(maxsize=4096)
def _call_of(what: str, *types: tuple[torch.dtype, torch.Size]) -> Call:
    return call_of(what + "".join([f" {dtype}{list(shape)}" for dtype, shape in types]))


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the byte offsets of tensors that are posted together."""
    places, at = list[int](), 0
    for x in tensors:
        places.append(at)
        at += aligned(x.nbytes)
    return places
