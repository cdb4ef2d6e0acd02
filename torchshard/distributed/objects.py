"""Any data between the ranks of the model-parallel group. Alone, or outside any group, the group is this process.

Tensors, arrays, numbers, strings, bytes and the plain containers of them travel as JSON and raw memory. Other objects
are pickled: unpickling runs code that the sender chose, so let only ranks that you trust into the group, or pass
`allow_pickle=False`, which refuses such objects on the way out and on the way in.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.distributed.consistency import gather_bytes, memory_of
from torchshard.distributed.eager import needs_gradient
from torchshard.distributed.group import own_group, peer
from torchshard.distributed.wire import collective

_LENGTH = struct.Struct("<q")


def all_gather_object(data: Any, *, allow_pickle: bool = True) -> list[Any]:
    """All ranks' data, in the order of the ranks, on every rank.

    Raises:
        InputError: data would have to be pickled, and may not be.
    """
    group = own_group()
    if group.size == 1:
        return [data]
    held = gather_bytes(group, "all_gather_object()", lambda: encode(data, allow_pickle=allow_pickle))
    return [decode(one, allow_pickle=allow_pickle) for one in held]


def gather_object(data: Any, dst: int = 0, *, allow_pickle: bool = True) -> list[Any] | None:
    """All ranks' data on rank `dst`, None on the others."""
    group = own_group()
    if group.size == 1 and peer(group, dst, "dst") == 0:
        return [data]

    def encoded() -> bytes:
        peer(group, dst, "dst")
        return encode(data, allow_pickle=allow_pickle)

    held = gather_bytes(group, f"gather_object(dst={dst})", encoded)
    return [decode(one, allow_pickle=allow_pickle) for one in held] if group.rank == dst else None


def broadcast_object(data: Any = None, src: int = 0, *, allow_pickle: bool = True) -> Any:
    """Rank `src`'s data, on every rank; what the others pass is not looked at."""
    group = own_group()
    if group.size == 1 and peer(group, src, "src") == 0:
        return data

    def encoded() -> bytes:
        return encode(data, allow_pickle=allow_pickle) if group.rank == peer(group, src, "src") else b""

    return decode(gather_bytes(group, f"broadcast_object(src={src})", encoded)[src], allow_pickle=allow_pickle)


def all_gather_uneven(x: Tensor) -> list[Tensor]:
    """All ranks' tensors, of any shapes, in the order of the ranks: padded to the largest, sent, and cut back.

    Raises:
        InputError: the ranks' dtypes differ, or a gradient is asked: this has none (`gather` has).
    """
    group = own_group()

    def fact() -> bytes:
        if needs_gradient(x):
            raise InputError(
                "all_gather_uneven has no gradient",
                where="all_gather_uneven",
                why="the tensor requires one",
                attempt="x.detach(), or gather for the slices of a split",
            )
        return encode((list(x.shape), str(x.dtype)), allow_pickle=False)

    if group.size == 1:
        fact()
        return [x.clone()]
    facts = [decode(held, allow_pickle=False) for held in gather_bytes(group, "all_gather_uneven()", fact)]
    if len({dtype for _, dtype in facts}) > 1:
        raise InputError(
            "the ranks' tensors are of different dtypes",
            where="all_gather_uneven",
            why="; ".join(f"rank {rank}: {dtype}" for rank, (_, dtype) in enumerate(facts)),
            attempt="x.to() one dtype",
        )
    shapes = [torch.Size(shape) for shape, _ in facts]
    sent = x.new_zeros(max(shape.numel() for shape in shapes))
    sent[: x.numel()] = x.flatten()
    got = sent.new_empty(group.size, len(sent))
    if len(sent):
        collective(group, dist.all_gather_single, got.flatten(), sent)
    return [row[: shape.numel()].reshape(shape).clone() for row, shape in zip(got, shapes, strict=True)]


# --- data as bytes ---------------------------------------------------------------------------------------------------


def encode(data: Any, *, allow_pickle: bool) -> bytes:
    """Data as bytes: a JSON text, then the memory of tensors and arrays, each with its length before it.

    Raises:
        InputError: something in it would have to be pickled, and may not be.
    """
    buffers: list[bytes] = []
    text = json.dumps(_described(data, buffers, allow_pickle)).encode()
    return b"".join(_LENGTH.pack(len(part)) + part for part in (text, *buffers))


def _described(data: Any, buffers: list[bytes], allow_pickle: bool) -> list[Any]:
    def kept(held: bytes) -> int:
        buffers.append(held)
        return len(buffers) - 1

    if data is None or type(data) in (bool, int, float, str):
        return ["plain", data]
    if type(data) is bytes:
        return ["bytes", kept(data)]
    if type(data) in (list, tuple, set):
        return [type(data).__name__, [_described(item, buffers, allow_pickle) for item in data]]
    if type(data) is dict:
        return ["dict", [[_described(part, buffers, allow_pickle) for part in pair] for pair in data.items()]]
    if type(data) is Tensor and data.layout is torch.strided and not data.is_quantized:
        held = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return ["tensor", str(data.dtype).removeprefix("torch."), list(data.shape), kept(memory_of(held))]
    if _is_plain_array(data):
        kind = "array" if type(data).__name__ == "ndarray" else "scalar"
        return [kind, data.dtype.str, list(data.shape), kept(data.tobytes())]
    if not allow_pickle:
        raise _refused(type(data).__qualname__)
    return ["pickle", kept(pickle.dumps(data))]


def _is_plain_array(data: Any) -> bool:
    """A numpy array or number, no subclass of it, whose dtype is neither structured nor of objects."""
    ours = (
        type(data).__module__ == "numpy"
        and hasattr(data, "tobytes")
        and type(data).__name__ not in ("matrix", "recarray")
    )
    return ours and not data.dtype.hasobject and data.dtype.names is None


def decode(held: bytes, *, allow_pickle: bool) -> Any:
    """The data that `encode` made bytes of; tensors come on the CPU.

    Raises:
        InputError: something in it was pickled, and may not be.
    """
    parts, at = [], 0
    while at < len(held):
        (length,) = _LENGTH.unpack_from(held, at)
        parts.append(held[at + 8 : at + 8 + length])
        at += 8 + length
    return _made(json.loads(parts[0]), parts[1:], allow_pickle)


def _made(described: Sequence[Any], buffers: Sequence[bytes], allow_pickle: bool) -> Any:
    kind, *rest = described
    if kind == "plain":
        return rest[0]
    if kind == "bytes":
        return buffers[rest[0]]
    if kind == "dict":
        return {_made(k, buffers, allow_pickle): _made(v, buffers, allow_pickle) for k, v in rest[0]}
    if kind in ("list", "tuple", "set"):
        items = [_made(item, buffers, allow_pickle) for item in rest[0]]
        return {"list": list, "tuple": tuple, "set": set}[kind](items)
    if kind == "tensor":
        dtype, shape, buffer = getattr(torch, rest[0]), rest[1], bytearray(buffers[rest[2]])
        return torch.frombuffer(buffer, dtype=dtype).reshape(shape) if buffer else torch.empty(shape, dtype=dtype)
    if kind in ("array", "scalar"):
        import numpy as np

        array = np.frombuffer(bytearray(buffers[rest[2]]), np.dtype(rest[0])).reshape(rest[1])
        return array if kind == "array" else array[()]
    if not allow_pickle:
        raise _refused("pickled object")
    return pickle.loads(buffers[rest[0]])


def _refused(what: str) -> InputError:
    return InputError(
        f"a {what} would have to travel as a pickle",
        where="allow_pickle=False",
        why="only tensors, arrays, numbers, strings, bytes and plain containers travel without",
        attempt="send what it is made of, or allow_pickle=True between ranks that trust each other",
    )
