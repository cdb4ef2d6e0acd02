"""Optimizers as users write them, for comparisons of steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer

STEPS = 20
"""The steps of a comparison: `Late` changes before the last one."""


class Own(Optimizer):
    """An optimizer of a user's: `update` changes a parameter."""

    def __init__(self, parameters: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Updates all parameters that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_gradients = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.look(with_gradients)
        for p in with_gradients:
            self.update(p, self.state[p])
        return loss

    def look(self, parameters: list[Tensor]) -> None:
        """Looks at all parameters before the first is changed."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Signs(Own):
    """Reads single elements."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        p.add_(state["average"].sign(), alpha=-1e-3)


class Trust(Own):
    """Reads a parameter's norm, as a number."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.add_(p.grad, alpha=-0.1 * p.norm().item() / (p.grad.norm().item() + 1e-3) / state["step"])


class Factors(Own):
    """Has state of other shapes than the parameter's, in a list that is longer after the first step."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        sums = state.setdefault("sums", [torch.zeros(n, n, dtype=p.dtype) for n in p.shape] + [None])
        for dim, size in enumerate(p.shape):
            rows = p.grad.movedim(dim, 0).reshape(size, -1)
            sums[dim].add_(rows @ rows.T)
        sums[-1] = sums[0].sum(0) if sums[-1] is None else sums[-1] + sums[0].sum(0)
        p.add_(torch.linalg.solve(torch.eye(p.shape[0], dtype=p.dtype) + sums[0], p.grad), alpha=-1e-2)


class Clipping(Own):
    """Reads the gradients of all parameters."""

    def look(self, parameters: list[Tensor]) -> None:
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        self.param_groups[0]["scale"] = 1 / (1 + norm.item())

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-0.1 * self.param_groups[0]["scale"])


class Noise(Own):
    """Draws random numbers, in the order of the parameters."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        p.add_(p.grad + 0.01 * torch.randn_like(p), alpha=-1e-2)


class Shapes(Own):
    """Reads a parameter's shape, in ops that are elementwise."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        p.add_(p.grad.sign(), alpha=-1e-2 / (p.numel() + p.shape[-1]))


class Counting(Own):
    """Counts the parameters that have gradients."""

    def look(self, parameters: list[Tensor]) -> None:
        self.count = 0

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        self.count += 1
        p.add_(p.grad / (1 + p.grad.norm()), alpha=-self.param_groups[0]["lr"] / self.count)


class Divided(Own):
    """Divides the parameters over the ranks itself, and broadcasts them, as optimizers for DDP do."""

    def look(self, parameters: list[Tensor]) -> None:
        self.count = 0

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        owner, self.count = self.count % world, self.count + 1
        if world == 1 or dist.get_rank() == owner:
            p.add_(p.grad / (1 + p.grad.norm()), alpha=-0.1)
        if world > 1:
            dist.broadcast(p, owner)


class Late(Own):
    """Reads single elements in its first steps, and then a parameter's mean."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.add_(p.grad if state["step"] < STEPS // 2 + 5 else p.grad - p.grad.mean(), alpha=-1e-2)


@torch.compile(fullgraph=True, backend="eager")
def _orthogonal(x: Tensor) -> Tensor:
    """A Newton-Schulz iteration, compiled, as Muon's users do."""
    x = x / x.norm()
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


class Parts(Own):
    """Makes the update of each third of a fused matrix orthogonal."""

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        parts = average.chunk(3) if p.shape[0] == 3 * p.shape[1] else [average]
        p.add_(torch.cat([_orthogonal(part) for part in parts]), alpha=-1e-2)


class Coded(Own):
    """Has its state in a tensor that wraps codes and their scales."""

    state_type: type[Codes]

    def update(self, p: Tensor, state: dict[str, Any]) -> None:
        if not state:
            codes, scales = torch.zeros(p.shape, dtype=torch.int8), torch.zeros(p.numel() // 4, dtype=p.dtype)
            state["average"] = self.state_type(codes, scales, p.dtype)
        average = state["average"]
        average.copy_(torch.lerp(average, p.grad, 0.1))
        p.add_(average * -0.1)


class Codes(Tensor):
    """A tensor as integers, and a scale for each four of them, as 8-bit optimizers have their states."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)  # type: ignore[attr-defined]
        made.codes, made.scales = codes, scales
        return made

    @classmethod
    def of(cls, values: Tensor) -> Codes:
        """Rounds values."""
        rows = values.reshape(-1, 4)
        scales = rows.abs().amax(1).clamp(min=1e-12) / 100
        return cls((rows / scales[:, None]).round().to(torch.int8).view(values.shape), scales, values.dtype)

    def values(self) -> Tensor:
        """The rounded values."""
        return (self.codes.reshape(-1, 4) * self.scales[:, None]).view(self.codes.shape)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scales"], {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Codes:
        assert (tuple(size), tuple(stride)) == (tuple(parts["codes"].shape), parts["codes"].stride())
        return cls(parts["codes"], parts["scales"], context["dtype"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own: Codes = args[0]
        if func is torch.ops.aten.copy_.default:
            new = cls.of(args[1])
            own.codes.copy_(new.codes), own.scales.copy_(new.scales)
            return own
        if func in (torch.ops.aten.lerp.Scalar, torch.ops.aten.mul.Tensor):
            return func(own.values(), *args[1:])
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(own.codes.clone(), own.scales.clone(), (kwargs or {}).get("dtype") or own.dtype)
        raise NotImplementedError(func)


Coded.state_type = Codes
