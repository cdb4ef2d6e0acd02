"""Builds models without allocating memory: `with lazy():` records a constructor's tensor ops on a tape.

    w = torch.empty(8, 4)      a `LazyTensor`, which has a shape, a dtype and a device, but no memory
    nn.init.normal_(w)         recorded: `lazy.compute` replays the tape to get the values of w
    w.tolist()                 reads values, so they are computed at once

The values are bit-equal to those of an ordinary constructor: random numbers are drawn in the same order, from the RNG
state at the entry of the block. `file_tensor` records the read of a file in place of calls.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard.custom_ops.fx_types import Args, Kwargs
from torchshard.weights.lazy import LazyTensor, call_on_lazies, draw_recorded, record
from torchshard.weights.stored_tensors import StoredTensor
from torchshard.weights.tape import Entry, Tape


class _Recording(TorchDispatchMode):
    """Records the calls that create tensors on the CPU."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        if any(isinstance(leaf, LazyTensor) for leaf in leaves):
            return call_on_lazies(func, args, kwargs)
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            return self._call_on_values(func, args, kwargs)
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        if device.type != "cpu" or "device" not in {a.name for a in func._schema.arguments}:
            return func(*args, **kwargs)
        return record(self._tape, func, args, kwargs, device)

    def _call_on_values(self, func: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """Runs a call on ordinary tensors, after the recorded draws that precede it."""
        draw_recorded(self._tape, func, args, kwargs)
        return func(*args, **kwargs)


_LATEST: list[weakref.ref[Tape]] = []
"""The latest tape. A later block continues it, in the order of draws, if no other code drew in between."""


@contextlib.contextmanager
def lazy() -> Iterator[None]:
    """Builds models without memory: records constructors' tensor ops inside the block, to run them later.

        with ts.lazy():
            model = AnyModel(config)
        model = ts.shard(model, "auto", (x,))      # each rank gets its slices, one parameter at a time

    The parameters' values are bit-equal to those of a model built outside the block. This includes a
    model built in a later block, if no random numbers were drawn in between. Random numbers drawn after
    the block differ from those without it.
    """
    tape = _LATEST[0]() if _LATEST else None
    if tape is None or not tape.is_latest:
        tape = Tape()
    _LATEST[:] = [weakref.ref(tape)]
    with _Recording(tape):
        yield


def file_tensor(tape: Tape, file: StoredTensor) -> LazyTensor:
    """Returns a lazy tensor with the values of a tensor in a file."""
    slot = tape.new_slot(torch.empty(file.shape, dtype=file.dtype, device="meta"), None)
    nothing = frozenset[int]()
    tape.add(Entry(file, (), {}, (), (slot,), nothing, nothing, False, torch.get_default_dtype()))
    return LazyTensor(tape, slot, torch.device("cpu"))
