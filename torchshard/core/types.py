"""Types that several rooms need, and type checks for values from files and callers, which may be anything."""

from __future__ import annotations

import math
from typing import Any, TypeAlias, TypeGuard, TypeVar

T = TypeVar("T")
Json: TypeAlias = Any
"""Parsed JSON: mypy can't see its structure, so the code that reads it checks what it finds."""
Context: TypeAlias = Any
"""The `ctx` of an autograd Function: a `FunctionCtx`, on which the Function stores attributes of its own."""
Theirs: TypeAlias = Any
"""An object of transformers or peft, whose types depend on the version that is installed."""


def is_of(kind: type[T], value: object) -> T:
    """Returns a value if its type is exactly `kind`; True is not an int here.

    Raises:
        TypeError: it has another type.
    """
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r:.40}")
    return value


def is_count(value: object) -> TypeGuard[int]:
    """Returns whether a value is an int of 1 or more; True is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a finite int or float of 0 or more; True is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def texts(value: object) -> tuple[str, ...]:
    """Returns the texts of a list.

    Raises:
        TypeError: it is not a list, or has an element that is not a text.
    """
    return tuple(is_of(str, text) for text in is_of(list, value))
