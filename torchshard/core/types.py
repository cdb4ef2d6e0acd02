"""Types of what comes from files, which may hold anything."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def is_of(kind: type[T], value: object) -> T:
    """A value, if its type is exactly this one: True is no int here.

    Raises:
        TypeError: it is not.
    """
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r:.40}")
    return value


def texts(value: object) -> tuple[str, ...]:
    """The texts of a list.

    Raises:
        TypeError: it is no list, or holds something else.
    """
    return tuple(is_of(str, text) for text in is_of(list, value))
