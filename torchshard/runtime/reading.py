"""Reads a model's slices from files on all ranks, and compares the values that the ranks have read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from torchshard.core.errors import DistributedError, InputError
from torchshard.core.hashing import hash_tensor, spread
from torchshard.core.layouts import Shard
from torchshard.distributed.consistency import gather_bytes
from torchshard.runtime.digests import SAMPLED
from torchshard.runtime.shardings import Shardings
from torchshard.weights.folder import Weights
from torchshard.weights.materialize import ReadSlices, read_slices

_LOG = logging.getLogger(__name__)


def read_weights(weights: Weights, shardings: Shardings, put: Callable[[str, Tensor], None]) -> None:
    """Reads this rank's slices from files: a collective call.

    Args:
        put: stores the slice of a parameter or buffer.

    Raises:
        InputError: a file can't be read on some rank.
    """

    def read() -> ReadSlices:
        held = {name: shardings.of(name) for name in weights.tensors}
        return read_slices(weights.tensors, held, shardings.ranks.place, put)

    weights.read = shardings.ranks.run_on_all(read, InputError, "a rank can't read its weights")
    _LOG.info("%s", weights)


def compare_read(tensors: Mapping[str, Tensor], shardings: Shardings) -> None:
    """Compares tensors that each rank has read from files, and notes which slices differ between ranks.

    Raises:
        DistributedError: replicas differ, because the ranks have read different files.
    """
    of, what = {name: shardings.of(name) for name in tensors}, "the ranks read different weights"
    hashes = [hash_tensor(spread(t, SAMPLED) if of[name].is_split else t) for name, t in tensors.items()]
    for axis, group in shardings.ranks.groups.items():
        gathered = gather_bytes(group, "shard", lambda: json.dumps(hashes).encode())
        everyone = [json.loads(data) for data in gathered]
        found = {name: [of_rank[i] for of_rank in everyone] for i, name in enumerate(tensors)}
        split = {name for name in tensors if isinstance(of[name].over(axis), Shard)}
        differs = {name: name in split and len(set(here[:2])) == 2 for name, here in found.items()}
        shardings.note_distinct_along(axis, differs)
        whole = {name: here for name, here in found.items() if name not in split}
        shardings.ranks.run_on_all(partial(_check_read, whole), DistributedError, what)


def _check_read(whole: Mapping[str, Sequence[object]]) -> None:
    """Checks that the ranks' hashes of replicated tensors are equal.

    Raises:
        DistributedError: they differ.
    """
    for name, here in whole.items():
        if len(set(here)) > 1:
            raise DistributedError(
                "the ranks read different weights",
                where=name,
                why=f"its values are {len(set(here))} different ones on {len(here)} ranks",
                attempt="the same files on every rank",
            )
