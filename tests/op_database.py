"""PyTorch's operator database: its operators, and calls of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch


def operators(part: int, parts: int) -> Iterator[Any]:
    """Every `parts`-th operator from number `part` on, without operators that return undefined values."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes 5 s

    return (op for op in op_db[part::parts] if "empty" not in op.name)


def calls(op: Any, dtype: torch.dtype, stop: int, step: int = 1) -> list[Any]:
    """Some of the database's first `stop` calls of an operator: each has an `input`, `args` and `kwargs`."""
    if dtype not in op.dtypes:
        return []
    return list(itertools.islice(op.sample_inputs("cpu", dtype), 0, stop, step))
