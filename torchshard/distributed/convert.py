"""Runs a conversion on this rank: verifies it with the other ranks, calls its kernel, and sends the kernel's data.

An exchange runs through torch.distributed (`start`), or through the functional collectives that compilers know
(`functional`). `distributed.kernels` defines the kernels and their exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import DistributedError
from torchshard.core.layouts import I, Layout, Shard, parts_of, type_text, whole_shape, with_parts
from torchshard.distributed.consistency import announces, verify_following_call
from torchshard.distributed.group import Group
from torchshard.distributed.kernels import KERNELS, Exchange, Result, as_sent, copied, dense
from torchshard.distributed.memory import Call, call_of
from torchshard.distributed.wire import Pending, note


def convert(kernel: str, x: Tensor, source: Layout, target: Layout, group: Group, of: str = "") -> Tensor:
    """Runs one conversion on this rank and waits."""
    return start(kernel, x, source, target, group, of).wait()


def gathered(x: Tensor, shard: Shard, shape: Sequence[int], group: Group) -> Tensor:
    """Gathers the full tensor of global `shape` from all ranks' slices."""
    return convert("all_gather", x, Shard(shard.dim, parts_of(shape[shard.dim], shard)), I, group)


def refuse_simulated(group: Group) -> None:
    """Checks that a group has processes.

    Raises:
        DistributedError: the group is simulated.
    """
    if group.simulated:
        raise DistributedError(
            "a graph that was made for simulated ranks can't communicate",
            where=f"rank {group.rank} of {group.size}",
            attempt="run it with torchshard.check, or shard the model in a process group",
        )


def start(
    kernel: str, x: Tensor, source: Layout, target: Layout, group: Group, of: str = "", *, eager: bool = False
) -> Pending:
    """Starts one conversion on this rank.

    Args:
        of: the call site of the forward conversion, if this is a gradient.
        eager: whether this is the gradient of an eager call.

    Raises:
        DistributedError: the group is simulated, or the ranks' calls differ.
    """
    refuse_simulated(group)
    source, target = with_parts(source, target, x.shape, group.size)
    if not announces(group):
        device = x.device if eager else None
        verify_following_call(group, lambda: _signature(kernel, x.dtype, x.shape, source, target), of, eager=device)
    made = KERNELS[kernel](x, source, target, group)
    if isinstance(made, Tensor):
        return Pending(lambda: made)
    if group.memory is not None:
        note(group, _announced(kernel, x.dtype, x.shape, source, target))
    return begun(made, group)


def own_part(kernel: str, x: Tensor, source: Layout, target: Layout, group: Group) -> Tensor | Exchange:
    """Runs a conversion's kernel: returns the result, or an exchange that computes it."""
    source, target = with_parts(source, target, x.shape, group.size)
    return KERNELS[kernel](x, source, target, group)


def functional(kernel: str, x: Tensor, source: Layout, target: Layout, group: Group) -> tuple[Tensor, Result]:
    """Starts one conversion through PyTorch's functional collectives, without verification.

    Returns:
        the tensor for `wait_tensor`, and the function from its result to the conversion's result.
    """
    in_place = "all_reduce_" if kernel == "all_reduce" else kernel  # the functional collective copies its input
    made = own_part(in_place, x, source, target, group)
    if isinstance(made, Tensor):
        return made, lambda received: received
    # `_c10d_functional`: compilers know these operators, which have no public namespace (PyTorch 2.13.0).
    op = getattr(torch.ops._c10d_functional, _FUNCTIONAL[made.collective])
    sent, dtype, name = made.sent, made.sent.dtype, _group_name(group)
    if made.collective == "all_reduce":
        return op(sent, "sum", name), made.result
    if made.collective == "reduce_scatter_single":
        return op(sent, "sum", group.size, name), made.result
    more = (group.size,) if made.lengths is None else made.lengths
    return op(as_sent(sent), *more, name), lambda received: made.result(_of_dtype(received, dtype))


def functional_max(x: Tensor, group: Group) -> Tensor:
    """Starts the elementwise maximum over the ranks through PyTorch's functional collectives."""
    if group.size == 1:
        return copied(x)
    # `_c10d_functional`: an operator, so a compiler's graph can have it (PyTorch 2.13.0).
    return torch.ops._c10d_functional.all_reduce(dense(x), "max", _group_name(group))


def _group_name(group: Group) -> str:
    return group.name if group.process_group is None else group.process_group.group_name


def _of_dtype(received: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns received data in its own dtype instead of the one of `as_sent`."""
    return received if received.dtype is dtype else received.view(dtype)


def _signature(kernel: str, dtype: torch.dtype, shape: torch.Size, source: Layout, target: Layout) -> str:
    """Returns a conversion's text with the global shape, which is equal on all ranks."""
    what = {"none": "no communication", "slice": "own slice", "pad": "zeros around"}.get(kernel, kernel)
    return f"{what}, {source} -> {target}, of {type_text(dtype, whole_shape(shape, source))}"


@lru_cache(maxsize=4096)
def _announced(kernel: str, dtype: torch.dtype, shape: torch.Size, source: Layout, target: Layout) -> Call:
    return call_of(_signature(kernel, dtype, shape, source, target))


_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_to_all_single": "all_to_all_single",
}
"""A torch.distributed function -> its functional operator."""


def begun(exchange: Exchange, group: Group) -> Pending:
    """Starts a collective of torch.distributed."""
    sent, received = exchange.sent, exchange.received(group.size)
    result, fn = partial(exchange.result, received), getattr(dist, exchange.collective)
    if exchange.collective == "all_reduce":
        return Pending.of(result, group, fn, sent)
    if exchange.collective == "reduce_scatter_single":
        return Pending.of(result, group, fn, received, sent)
    return Pending.of(result, group, fn, as_sent(received), as_sent(sent), *(exchange.lengths or ()))
