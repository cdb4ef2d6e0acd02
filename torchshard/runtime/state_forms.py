"""Forms of optimizers' states: their structure, with the types of tensors that ranks have slices of.

A rank that steps a full parameter sends the form of its state to the others, which have never seen it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchshard.core.errors import InputError

State = dict[str, Any]


def is_split(leaf: object) -> bool:
    """Returns whether ranks have slices of a leaf of a state: numbers are the same on all."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def split_tensors(state: State | None) -> list[Tensor]:
    """Returns the tensors of a state that ranks have slices of."""
    return [leaf for leaf in pytree.tree_leaves(state) if is_split(leaf)]


class Sliced(NamedTuple):
    """A leaf of a state that is a tensor in slices."""

    whole: tuple[int, ...]
    dtype: torch.dtype


class Form(NamedTuple):
    """The structure of a parameter's state; leaves are values, or `Sliced`."""

    leaves: tuple[object, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, state: State) -> Form:
        """Returns the form of a state, with copies of its numbers, which a step may change in place."""
        leaves, spec = pytree.tree_flatten(state)
        return cls(tuple(map(cls._leaf, leaves)), spec)

    @staticmethod
    def _leaf(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if hasattr(leaf, "__tensor_flatten__"):
            name = type(leaf).__name__
            raise InputError(
                f"an optimizer's state of type {name} can't be split over the ranks",
                where="optimizer.step()",
                why="it consists of several tensors, and between steps each rank stores a part of each state",
                attempt="an optimizer whose state is plain tensors; or mesh='replicate', which splits no parameters",
            )
        return Sliced(tuple(leaf.shape), leaf.dtype) if leaf.ndim else leaf.clone()

    def data(self) -> list[object]:
        """Returns the form as data that ranks send each other."""
        sent = [[list(x.whole), str(x.dtype)] if isinstance(x, Sliced) else [x] for x in self.leaves]
        return [sent, pytree.treespec_dumps(self.spec)]

    @classmethod
    def read(cls, data: list[Any]) -> Form:
        """Returns the form that `data` describes."""
        sent, spec = data
        leaves = (Sliced(tuple(x[0]), getattr(torch, x[1][6:])) if len(x) > 1 else x[0] for x in sent)
        return cls(tuple(leaves), _spec(spec))

    @property
    def sliced(self) -> list[Sliced]:
        """The leaves that are tensors in slices."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Sliced)]

    def filled(self, slices: Iterator[Tensor]) -> State:
        """Returns a state of this form."""
        leaves = [next(slices) if isinstance(leaf, Sliced) else leaf for leaf in self.leaves]
        return cast(State, pytree.tree_unflatten(leaves, self.spec))


_spec = functools.lru_cache(pytree.treespec_loads)
