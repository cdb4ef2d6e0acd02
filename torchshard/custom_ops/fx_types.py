"""Names for the types that torch.fx passes to rules and custom ops, each defined once.

They are defined here because rules must not import torch.fx (`tests/test_architecture.py`): a rule
sees an op, never the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import Proxy

__all__ = ["Args", "Argument", "Kwargs", "Proxy", "Target", "Traced"]

Traced: TypeAlias = Tensor | Proxy
"""A value inside a replacement: an fx.Proxy while a rank's graph is recorded, a tensor in an eager collective."""
Argument: TypeAlias = Any
"""An argument of an op: a tensor in the caller's form (a fake or real tensor, a Proxy, a
TensorType), or an int, float, bool, dtype, None, or a list of these. The op's schema determines its
type, which mypy can't see."""
Args: TypeAlias = tuple[Argument, ...]
"""The positional arguments of an op's call."""
Kwargs: TypeAlias = Mapping[str, Argument]
"""The keyword arguments of an op's call."""
Target: TypeAlias = Callable[..., Any]
"""The target of a graph's node: an OpOverload, a function, or a WholeCall. Called with Proxies it returns a Proxy."""
