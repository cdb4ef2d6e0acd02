"""Types of what comes from files and callers, which may be anything."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

T = TypeVar("T")


def is_of(kind: type[T], value: object) -> T:
    """A value, if its type is exactly this one: True is no int here.

    Raises:
        TypeError: it is not.
    """
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r:.40}")
    return value


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is an int of 1 or more; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def texts(value: object) -> tuple[str, ...]:
    """The texts of a list.

    Raises:
        TypeError: it is no list, or holds something else.
    """
    return tuple(is_of(str, text) for text in is_of(list, value))
