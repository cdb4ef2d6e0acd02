"""The short notation that cases of ops are written in: an argument by its kind and shape, and a call."""

from __future__ import annotations

from typing import Any

from tests.oracle import Case, T


def f(*shape: int) -> T:
    """Normal floats with a gradient."""
    return T(shape)


def pos(*shape: int) -> T:
    """Positive floats with a gradient."""
    return T(shape, "positive")


def apart(*shape: int) -> T:
    """Floats that are all different, with a gradient."""
    return T(shape, "apart")


def ids(high: int, *shape: int) -> T:
    """Integers from 0 to high - 1."""
    return T(shape, "int", high)


def flags(*shape: int) -> T:
    """Booleans."""
    return T(shape, "bool")


def buffer(kind: str, *shape: int) -> T:
    """A buffer of the model."""
    return T(shape, kind, buffer=True)


def plain(*shape: int) -> T:
    """Floats without a gradient."""
    return T(shape, grad=False)


def spd(*shape: int) -> T:
    """Symmetric positive definite matrices."""
    return T(shape, "definite")


def c(*shape: int) -> T:
    """Complex numbers with a gradient."""
    return T(shape, "complex")


def case(target: Any, splits: str | None, *args: Any, hints: tuple[Any, ...] = (), **kwargs: Any) -> Case:
    """A call; `splits`: the factors that its row can split, '+' joins factors that split together, None: no row."""
    return Case(target, splits, args, kwargs, hints)
