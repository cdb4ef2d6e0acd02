"""Sends any data between the ranks of the model-parallel group (outside any, this process only).

Tensors, arrays, numbers, strings, bytes and plain containers of them are sent as JSON and raw
memory. Other objects are pickled. Unpickling can run any code of the sender, so use a group of
trusted ranks, or pass `allow_pickle=False`, which makes sender and receiver refuse such objects.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchshard.core.errors import InputError
from torchshard.distributed.consistency import gather_bytes, memory_of
from torchshard.distributed.eager import check_tensor, needs_gradient
from torchshard.distributed.group import own_group, peer
from torchshard.distributed.kernels import as_sent
from torchshard.distributed.wire import collective

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing  # an optional dependency: whoever sends arrays has it

T = TypeVar("T")
_LENGTH = struct.Struct("<q")
_TABLES: Mapping[str, Callable[..., object]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
"""The dict types that are sent without pickle, by name."""


def all_gather_object(data: T, *, allow_pickle: bool = True) -> list[T]:
    """Returns all ranks' data, by rank, on every rank.

    Raises:
        InputError: `allow_pickle` is False, and the data contains an object that needs pickle.
    """
    group = own_group()
    if group.size == 1:
        return [data]
    encoded = gather_bytes(group, "all_gather_object()", lambda: encode(data, allow_pickle=allow_pickle))
    return [decode(rank_data, allow_pickle=allow_pickle) for rank_data in encoded]


def gather_object(data: T, dst: int = 0, *, allow_pickle: bool = True) -> list[T] | None:
    """Returns all ranks' data on rank `dst`, None on the others."""
    group = own_group()
    if group.size == 1 and peer(group, dst, "dst") == 0:
        return [data]

    def own_bytes() -> bytes:
        peer(group, dst, "dst")
        return encode(data, allow_pickle=allow_pickle)

    encoded = gather_bytes(group, f"gather_object(dst={dst})", own_bytes)
    if group.rank != dst:
        return None
    return [decode(rank_data, allow_pickle=allow_pickle) for rank_data in encoded]


def broadcast_object(data: object = None, src: int = 0, *, allow_pickle: bool = True) -> Any:
    """Returns rank `src`'s data on every rank; the other ranks' data is ignored."""
    group = own_group()
    if group.size == 1 and peer(group, src, "src") == 0:
        return data

    def own_bytes() -> bytes:
        return encode(data, allow_pickle=allow_pickle) if group.rank == peer(group, src, "src") else b""

    encoded = gather_bytes(group, f"broadcast_object(src={src})", own_bytes)
    return decode(encoded[src], allow_pickle=allow_pickle)


def all_gather_uneven(x: Tensor) -> list[Tensor]:
    """Returns all ranks' tensors, of any shapes, by rank.

    Raises:
        InputError: the ranks' dtypes differ, or the tensor requires a gradient (use `gather`).
    """
    group = own_group()
    check_tensor(group, "all_gather_uneven", x)
    if group.size == 1:
        _describe(x)
        return [x.clone()]
    described = gather_bytes(group, "all_gather_uneven()", lambda: _describe(x))
    facts = [decode(rank_facts, allow_pickle=False) for rank_facts in described]
    if len({dtype for _, dtype in facts}) > 1:
        raise InputError(
            "the ranks' tensors are of different dtypes",
            where="all_gather_uneven",
            why="; ".join(f"rank {rank}: {dtype}" for rank, (_, dtype) in enumerate(facts)),
            attempt="x.to() one dtype",
        )
    # backends gather pieces of equal size, so each is padded to the largest
    shapes = [torch.Size(shape) for shape, _ in facts]
    sent = x.new_zeros(max(shape.numel() for shape in shapes))
    sent[: x.numel()] = x.flatten()
    received = sent.new_empty(group.size, len(sent))
    if len(sent):
        collective(group, dist.all_gather_single, as_sent(received.flatten()), as_sent(sent))
    return [row[: shape.numel()].reshape(shape).clone() for row, shape in zip(received, shapes, strict=True)]


def _describe(x: Tensor) -> bytes:
    """Returns a tensor's shape and dtype; raises InputError if it requires a gradient."""
    if needs_gradient(x):
        raise InputError(
            "all_gather_uneven has no gradient",
            where="all_gather_uneven",
            why="the tensor requires one",
            attempt="x.detach(), or gather for the slices of a split",
        )
    return encode((list(x.shape), str(x.dtype)), allow_pickle=False)


# --- data as bytes ---------------------------------------------------------------------------------------------------


def encode(data: object, *, allow_pickle: bool) -> bytes:
    """Encodes data: a JSON text, then the memory of tensors and arrays, each after its length.

    Raises:
        InputError: `allow_pickle` is False, and the data contains an object that needs pickle.
    """
    buffers: list[bytes] = []
    text = json.dumps(_to_json(data, buffers, allow_pickle)).encode()
    return b"".join(_LENGTH.pack(len(part)) + part for part in (text, *buffers))


def _to_json(data: object, buffers: list[bytes], allow_pickle: bool) -> list[object]:
    """Returns data as JSON [kind, ...]; appends its raw memory to `buffers`, which JSON indexes."""

    def buffer(memory: bytes) -> int:
        buffers.append(memory)
        return len(buffers) - 1

    # by exact type: a subclass may have more state than its base, so it goes through pickle
    if data is None or type(data) in (bool, int, float, str):
        return ["plain", data]
    if type(data) is bytes:
        return ["bytes", buffer(data)]
    if type(data) is list or type(data) is tuple or type(data) is set:
        return [type(data).__name__, [_to_json(item, buffers, allow_pickle) for item in data]]
    if type(data) in _TABLES.values():
        table = cast(dict[object, object], data)
        pairs = ([_to_json(part, buffers, allow_pickle) for part in pair] for pair in table.items())
        return [type(data).__name__, list(pairs)]
    if type(data) is Tensor and data.layout is torch.strided and not data.is_quantized:
        dense = data.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return ["tensor", str(data.dtype).removeprefix("torch."), list(data.shape), buffer(memory_of(dense))]
    if _is_plain_array(data):
        kind = "array" if type(data).__name__ == "ndarray" else "scalar"
        return [kind, data.dtype.str, list(data.shape), buffer(data.tobytes())]
    if not allow_pickle:
        raise _refused(type(data).__qualname__)
    return ["pickle", buffer(pickle.dumps(data))]


def _is_plain_array(data: object) -> TypeGuard[np.typing.NDArray[np.generic]]:
    """Returns whether it is a numpy array or number: no subclass, structured or object dtype."""
    # by name, because numpy may not be installed
    if type(data).__module__ != "numpy" or type(data).__name__ in ("matrix", "recarray"):
        return False
    dtype = getattr(data, "dtype", None)
    return hasattr(data, "tobytes") and dtype is not None and not dtype.hasobject and dtype.names is None


def decode(encoded: bytes, *, allow_pickle: bool) -> Any:
    """Decodes the bytes of `encode`; tensors are on the CPU.

    Raises:
        InputError: `allow_pickle` is False, and the data contains a pickle.
        ValueError: the bytes are not from `encode`.
    """
    parts, at = [], 0
    while at < len(encoded):
        (length,) = _LENGTH.unpack_from(encoded, at)
        if not 0 <= length <= len(encoded) - at - _LENGTH.size:
            raise ValueError(f"a part of {length} bytes, of {len(encoded) - at - _LENGTH.size} that are left")
        parts.append(encoded[at + _LENGTH.size : at + _LENGTH.size + length])
        at += _LENGTH.size + length
    return _from_json(json.loads(parts[0]), parts[1:], allow_pickle)


def _from_json(described: Sequence[Any], buffers: Sequence[bytes], allow_pickle: bool) -> Any:
    """Returns the data of a `_to_json` description."""
    kind, *rest = described
    if kind == "plain":
        return rest[0]
    if kind == "bytes":
        return buffers[rest[0]]
    if kind in _TABLES:
        pairs = {_from_json(k, buffers, allow_pickle): _from_json(v, buffers, allow_pickle) for k, v in rest[0]}
        return pairs if kind == "dict" else _TABLES[kind](pairs)
    if kind in ("list", "tuple", "set"):
        items = [_from_json(item, buffers, allow_pickle) for item in rest[0]]
        return {"list": list, "tuple": tuple, "set": set}[kind](items)
    if kind == "tensor":
        # frombuffer needs writable memory, and refuses an empty one
        dtype, shape, memory = getattr(torch, rest[0]), rest[1], bytearray(buffers[rest[2]])
        return (
            torch.frombuffer(memory, dtype=dtype).reshape(shape)
            if memory
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
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
        attempt="send the data in it, or allow_pickle=True between ranks that trust each other",
    )
