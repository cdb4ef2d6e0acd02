"""What the ranks hold after a step, beside what the unsharded model gave: one error per tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchshard.core.layouts import I, Layout, is_whole, join

KINDS = ("output", "buffer", "input gradient", "parameter gradient")
"""What is compared."""
Place = tuple[str, str]
"""(kind, name) of a tensor that is compared."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error relative to the largest value of a tensor, by the narrowest floating dtype in the graph."""
_EPSILONS = {tolerance: torch.finfo(dtype).eps for dtype, tolerance in TOLERANCES.items()}
NOISE_MARGIN = 16.0
"""How many times the rounding noise of the unsharded run two correct runs may lie apart."""
NOISE_EPSILONS = 256
"""How many machine epsilons of the largest output, buffer or gradient may pass for noise at most."""


@dataclass(frozen=True)
class Comparison:
    """One tensor, sharded beside unsharded."""

    kind: str
    """One of KINDS; buffers are those after the call."""
    name: str
    error: float
    """Largest difference over the largest absolute value of the unsharded one; where that value is itself rounding
    noise, over as much as makes the tolerance NOISE_MARGIN times the noise."""


@dataclass(frozen=True)
class Results:
    """What an unsharded step gave."""

    outputs: Sequence[Any]
    output_names: Sequence[str]
    input_grads: Mapping[str, Tensor]
    parameter_grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class Ranks(Protocol):
    """What a sharded step gave, rank by rank; gradients are those of the tensors."""

    @property
    def outputs(self) -> Sequence[Sequence[Any]]:
        """The results."""

    @property
    def states(self) -> Sequence[Mapping[str, Tensor]]:
        """Parameters and buffers by name."""

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        """The call's tensors by name."""


def gradients(leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    """The gradients of some tensors by name, dense; zeros where none came."""
    return {
        name: leaf.grad.to_dense() if leaf.grad is not None else torch.zeros_like(leaf)
        for name, leaf in leaves.items()
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }


def compare(
    expected: Results,
    got: Ranks,
    layouts: Mapping[str, Layout],
    tolerance: float,
    noise: Callable[[], Mapping[Place, float]],
    *,
    flips: bool = False,
) -> tuple[Comparison, ...]:
    """Every tensor beside the unsharded one.

    Args:
        layouts: of parameters and buffers, by name.
        tolerance: the largest error that counts as equal.
        noise: gives the absolute rounding noise of the unsharded tensors; called only where a difference may be noise.
        flips: noise may be of any size, as where rounding flips a comparison; for what is exact in a wider dtype.
    """
    found = _compare(expected, got, layouts, {})
    if all(c.error <= tolerance for c in found):
        return found
    ceilings = dict.fromkeys(KINDS, math.inf) if flips else _ceilings(expected, tolerance)
    highest = {(c.kind, c.name): ceilings[c.kind] for c in found}
    if any(c.error > tolerance for c in _compare(expected, got, layouts, highest)):
        return found
    floors = {place: NOISE_MARGIN * n / tolerance for place, n in noise().items()}
    return _compare(expected, got, layouts, {place: min(floors.get(place, 0.0), n) for place, n in highest.items()})


def _ceilings(expected: Results, tolerance: float) -> dict[str, float]:
    """The highest floor by kind. Noise counts up to NOISE_EPSILONS of the largest value of its kind: where rounding
    flips a comparison, all that depends on it would pass for noise."""
    values = (expected.outputs, expected.buffers.values())
    grads = [*expected.input_grads.values(), *expected.parameter_grads.values()]
    return {
        kind: noise_ceiling(tensors, tolerance) for kind, tensors in zip(KINDS, (*values, grads, grads), strict=True)
    }


def noise_ceiling(tensors: Iterable[Any], tolerance: float) -> float:
    """The scale below which a tensor may be rounding noise of the others; never more than their largest value.

    A float32 gradient is as noisy as the bfloat16 in which autocast has computed it.
    """
    narrowest = _EPSILONS.get(tolerance, 0.0)
    floats = [t for t in tensors if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.numel()]
    largest = ((float(_dense(t).abs().max()), max(torch.finfo(t.dtype).eps, narrowest)) for t in floats)
    return max((value * min(NOISE_EPSILONS * eps / tolerance, 1.0) for value, eps in largest), default=0.0)


def _compare(
    expected: Results, got: Ranks, layouts: Mapping[str, Layout], floors: Mapping[Place, float]
) -> tuple[Comparison, ...]:
    found: list[Comparison] = []

    def add(kind: str, name: str, value: Any, pieces: Sequence[Any], layout: Layout) -> None:
        error = error_of_pieces(value, pieces, layout, floors.get((kind, name), 0.0))
        found.append(Comparison(kind, name, error))

    for i, (name, value) in enumerate(zip(expected.output_names, expected.outputs, strict=True)):
        add("output", name or "result", value, [outputs[i] for outputs in got.outputs], I)
    for name, buffer in expected.buffers.items():
        add("buffer", name, buffer, [state[name] for state in got.states], layouts.get(name, I))
    for name, grad in expected.input_grads.items():
        add("input gradient", name, grad, [gradients(inputs)[name] for inputs in got.inputs], I)
    grads = [gradients(state) for state in got.states]
    for name, grad in expected.parameter_grads.items():
        add("parameter gradient", name, grad, [held[name] for held in grads], layouts.get(name, I))
    frozen = {name for state in got.states for name in _with_other_grads(state, expected.parameter_grads)}
    found += [Comparison("parameter gradient", name, math.inf) for name in sorted(frozen)]
    return tuple(found)


def _with_other_grads(state: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> list[str]:
    """The names of a rank's tensors that got a gradient, but the model's did not."""
    trained = {id(state[name]) for name in grads}
    return [name for name, tensor in state.items() if tensor.grad is not None and id(tensor) not in trained]


def error_of(expected: Any, got: Any, floor: float = 0.0) -> float:
    """Largest difference over the largest absolute value (at least `floor`); infinite where shapes or kinds differ."""
    if not isinstance(expected, Tensor) or not isinstance(got, Tensor):
        return 0.0 if expected == got else float("inf")
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    a = _dense(expected)
    difference = largest_difference(expected, got)
    finite = a[a.isfinite()].abs()
    scale = max(float(finite.max()) if finite.numel() else 0.0, floor)
    return difference / (scale if scale > 0 else 1.0)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference of two tensors; infinite where one is not a number and the other is."""
    left, right = _dense(a), _dense(b)
    same = (left == right) | (left.isnan() & right.isnan())
    difference = torch.where(same, 0.0, (left - right).abs())
    if difference.isnan().any():
        return float("inf")
    return float(difference.max()) if difference.numel() else 0.0


def _dense(tensor: Tensor) -> Tensor:
    """Its values, dense and in the widest precision."""
    held = tensor.detach()
    held = held if held.layout == torch.strided else held.to_dense()
    return held.to(torch.complex128 if held.is_complex() else torch.float64)


def error_of_pieces(expected: Any, pieces: Sequence[Any], layout: Layout, floor: float = 0.0) -> float:
    """The error of what the ranks hold together; values that every rank holds are compared on every rank."""
    if not isinstance(expected, Tensor):
        return max(error_of(expected, p) for p in pieces)
    if is_whole(layout):
        return max(error_of(expected, p, floor) for p in pieces)
    return error_of(expected, join([p.detach() for p in pieces], layout), floor)
