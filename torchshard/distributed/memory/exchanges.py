"""Collectives: what a rank posts, and what it makes of all ranks' posts.

Each begins at once and returns an `Exchange`, whose `wait` ends it. Sums go in the order of the ranks, whoever comes
first: all ranks get the same bits, and the same bits in each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from torchshard.distributed.memory.regions import aligned
from torchshard.distributed.memory.segment import below_autograd
from torchshard.distributed.memory.stream import Call, Calls, Post, call_of

Finish = Callable[[list[Post]], None]
ReduceKind = ReduceOp | ReduceOp.RedOpType

_COMBINED: dict[ReduceOp.RedOpType, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_HALVES = (torch.float16, torch.bfloat16)


class Exchange:
    """A collective that this rank has begun."""

    def __init__(self, calls: Calls, call: Call, sent: Sequence[Tensor], finish: Finish, values: Sequence[int] = ()):
        """Begins it.

        Args:
            finish: makes the result of all ranks' posts.
            values: numbers of this rank's own, for the others.
        """
        self._calls, self._finish = calls, finish
        self._number, self._call = calls.begin(call, sent, values)
        self._ended = False

    def __del__(self) -> None:
        """Its result must come even if nobody waits: a backend with threads ends what it has begun."""
        if not getattr(self, "_ended", True):
            self._calls.leave(self)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ended or self._calls.is_complete(self._number)

    def wait(self, seconds: float | None = None) -> None:
        """Ends it.

        Raises:
            Stopped: a rank did not come.
            Different: a rank makes another call.
        """
        if self._ended:
            return
        self._ended = True
        posts = self._calls.posts(self._number, self._call, seconds)
        try:
            below_autograd(self._finish, posts)
        finally:
            self._calls.end(self._number)


def all_reduce(calls: Calls, tensors: Sequence[Tensor], op: ReduceKind) -> Exchange:
    """Puts the combined tensors of all ranks in the place of this rank's."""

    def finish(posts: list[Post]) -> None:
        for x, at in zip(tensors, _places(tensors), strict=True):
            combine(x, [calls.board.data(post, x.dtype, x.shape, at) for post in posts], op)

    return Exchange(calls, _call(f"all_reduce {op_text(op)}", tensors), tensors, finish)


def reduce(calls: Calls, tensor: Tensor, root: int, op: ReduceKind) -> Exchange:
    """As `all_reduce`, on one rank."""

    def finish(posts: list[Post]) -> None:
        if calls.board.rank == root:
            combine(tensor, [calls.board.data(post, tensor.dtype, tensor.shape) for post in posts], op)

    return Exchange(calls, _call(f"reduce {op_text(op)} to rank {root}", [tensor]), [tensor], finish)


def broadcast(calls: Calls, tensors: Sequence[Tensor], root: int) -> Exchange:
    """Puts the tensors of one rank in the place of all others'."""
    sends = calls.board.rank == root

    def finish(posts: list[Post]) -> None:
        if not sends:
            for x, at in zip(tensors, _places(tensors), strict=True):
                _fill(x, calls, posts[root], at)

    return Exchange(calls, _call(f"broadcast from rank {root}", tensors), tensors if sends else (), finish)


def all_gather(calls: Calls, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Exchange:
    """Copies the tensors of all ranks.

    Args:
        outputs: for each input one tensor for each rank.
    """

    def finish(posts: list[Post]) -> None:
        for found, at in zip(outputs, _places(inputs), strict=True):
            for x, post in zip(found, posts, strict=True):
                _fill(x, calls, post, at)

    return Exchange(calls, _call("all_gather", inputs), inputs, finish)


def gather(calls: Calls, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Exchange:
    """As `all_gather`, on one rank; the others have no outputs."""

    def finish(posts: list[Post]) -> None:
        if calls.board.rank == root:
            for x, post in zip(outputs, posts, strict=True):
                _fill(x, calls, post, 0)

    return Exchange(calls, _call(f"gather to rank {root}", [tensor]), [tensor], finish)


def scatter(calls: Calls, output: Tensor, inputs: Sequence[Tensor], root: int) -> Exchange:
    """Copies one rank's tensor for this rank; the others have no inputs."""

    def finish(posts: list[Post]) -> None:
        _fill(output, calls, posts[root], calls.board.rank * aligned(output.nbytes))

    return Exchange(calls, _call(f"scatter from rank {root}", [output]), inputs, finish)


def reduce_scatter(
    calls: Calls, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: ReduceKind
) -> Exchange:
    """Combines the ranks' tensors for this rank.

    Args:
        inputs: for each output one tensor for each rank.
    """
    sent = [x for found in inputs for x in found]

    def finish(posts: list[Post]) -> None:
        at = 0
        for x in outputs:
            begin = at + calls.board.rank * aligned(x.nbytes)
            combine(x, [calls.board.data(post, x.dtype, x.shape, begin) for post in posts], op)
            at += calls.board.size * aligned(x.nbytes)

    return Exchange(calls, _call(f"reduce_scatter {op_text(op)}", outputs), sent, finish)


def all_to_all(calls: Calls, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Exchange:
    """Copies the ranks' tensors for this rank, which may differ in size.

    Args:
        outputs, inputs: one for each rank.
    """
    lengths = [x.numel() for x in inputs]
    places = _places(inputs)
    like = [] if not inputs else [inputs[0].new_empty(0)]

    def finish(posts: list[Post]) -> None:
        rank, size = calls.board.rank, calls.board.size
        for x, post in zip(outputs, posts, strict=True):
            length, at = post.values[rank], post.values[size + rank]
            if length != x.numel():
                raise RuntimeError(f"rank {post.rank} sends {length} elements to rank {rank}, which takes {x.numel()}")
            _fill(x, calls, post, at)

    return Exchange(calls, _call("all_to_all", like), inputs, finish, [*lengths, *places])


def barrier(calls: Calls) -> Exchange:
    """Waits for all ranks."""
    return Exchange(calls, call_of("barrier"), (), lambda posts: None)


def numbers(calls: Calls, call: Call, own: Sequence[int]) -> tuple[Exchange, list[list[int]]]:
    """Tells the others some numbers.

    Returns:
        the exchange, and a list in which all ranks' numbers stand when it has ended.
    """
    found = list[list[int]]()
    return Exchange(calls, call, (), lambda posts: found.extend(post.values for post in posts), own), found


_START: dict[Callable[..., Any], Callable[..., Exchange]] = {
    dist.all_reduce: lambda calls, x, op=ReduceOp.SUM: all_reduce(calls, [x], op),
    dist.reduce: lambda calls, x, op=ReduceOp.SUM, *, group_dst: reduce(calls, x, group_dst, op),
    dist.broadcast: lambda calls, x, *, group_src: broadcast(calls, [x], group_src),
    dist.all_gather_single: lambda calls, out, x: all_gather(calls, [out.view(calls.board.size, *x.shape)], [x]),
    dist.reduce_scatter_single: lambda calls, out, x: reduce_scatter(
        calls, [out], [x.chunk(calls.board.size)], ReduceOp.SUM
    ),
    dist.gather: lambda calls, x, out, *, group_dst: gather(calls, out or (), x, group_dst),
    dist.scatter: lambda calls, out, xs, *, group_src: scatter(calls, out, xs or (), group_src),
    dist.all_to_all_single: lambda calls, out, x, lengths=(), sent=(): all_to_all(
        calls, cut(out, lengths, calls.board.size), cut(x, sent, calls.board.size)
    ),
    dist.barrier: barrier,
}


def start(fn: Callable[..., Any], calls: Calls, /, *args: object, **kwargs: object) -> Exchange:
    """Begins the collective that a function of torch.distributed would begin with these arguments."""
    return below_autograd(_START[fn], calls, *args, **kwargs)


def cut(x: Tensor, lengths: Sequence[int], ranks: int) -> list[Tensor]:
    """A tensor's pieces along dim 0, one for each rank; no lengths: equal ones."""
    return list(x.split(list(lengths) or x.shape[0] // ranks or 1)) if x.numel() or lengths else [x] * ranks


def combine(x: Tensor, parts: Sequence[Tensor], op: ReduceKind) -> None:
    """Combines tensors, in their order, into one that shares no memory with them."""
    kind = _kind(op)
    if kind not in _COMBINED:
        raise RuntimeError(f"ranks that talk through memory do not reduce by {op_text(op)}")
    if not x.numel():
        return
    fn = _COMBINED[kind]
    rounds_once = x.dtype in _HALVES and (len(parts) > 2 or kind == ReduceOp.AVG)
    first, *rest = parts
    if rounds_once or not rest or not x.is_contiguous():
        total = first.to(torch.float32 if rounds_once else x.dtype, copy=True)
    else:
        total = fn(first, rest.pop(0), out=x)
    for part in rest:
        fn(total, part, out=total)
    if kind == ReduceOp.AVG:
        total.div_(len(parts))
    if total is not x:
        x.copy_(total)


def op_text(op: ReduceKind) -> str:
    """'SUM' of torch.distributed's ReduceOp.SUM."""
    return _name(_kind(op))


@lru_cache
def _name(kind: ReduceOp.RedOpType) -> str:
    return str(kind).rpartition(".")[2]


def _kind(op: Any) -> ReduceOp.RedOpType:
    kind: ReduceOp.RedOpType = getattr(op, "op", op)
    return kind


def _fill(x: Tensor, calls: Calls, post: Post, at: int) -> None:
    if x.numel():
        x.copy_(calls.board.data(post, x.dtype, x.shape, at))


def _call(what: str, tensors: Sequence[Tensor]) -> Call:
    return _call_of(what, *[(x.dtype, x.shape) for x in tensors])


@lru_cache(maxsize=4096)
def _call_of(what: str, *types: tuple[torch.dtype, torch.Size]) -> Call:
    return call_of(what + "".join([f" {dtype}{list(shape)}" for dtype, shape in types]))


def _places(tensors: Sequence[Tensor]) -> list[int]:
    """The bytes at which tensors begin that are posted together."""
    places, at = list[int](), 0
    for x in tensors:
        places.append(at)
        at += aligned(x.nbytes)
    return places
