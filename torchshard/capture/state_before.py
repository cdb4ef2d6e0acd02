"""Handles changes that forward makes to its modules.

An assigned buffer is written to at the end of forward. Other changes are refused.

    self.mean = self.mean + 0.1 * (x.mean(0) - self.mean)      ..., mean.copy_(add)

Export in PyTorch 2.13 does this for the outermost module only, and finds buffers by their position
in `_buffers` (`_export_to_aten_ir_make_fx` in `torch/export/_trace.py`, with
`register_buffer_assignment_hook`). This module writes the buffers of all modules, and removes
export's hook. It is needed as long as export ignores inner modules.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from torchshard.capture.namespaces import Place
from torchshard.core.errors import CaptureError
from torchshard.core.modules import TensorDict, storage_id


class StateBefore:
    """The parameters, buffers, submodules and modes of a model's modules before a call."""

    def __init__(self, model: nn.Module) -> None:
        dicts = {id(d): d for module in model.modules() for d in (module._parameters, module._buffers)}
        self._held: list[tuple[TensorDict, TensorDict]] = [(d, dict(d)) for d in dicts.values()]
        self._modules = [(module._modules, dict(module._modules)) for module in model.modules()]
        self._modes = [(path, module, module.training) for path, module in model.named_modules()]
        self._trained = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
        self._cls = type(model).__name__

    def modes_changed(self) -> list[Place]:
        """The modules with a different mode now."""
        return [(path, "training") for path, module, mode in self._modes if module.training != mode]

    def assigned(self) -> list[tuple[str, Any, Any]]:
        """(name, value before, value now) of each parameter or buffer assigned or removed."""
        return [
            (name, before.get(name), now.get(name))
            for now, before in self._held
            for name in dict.fromkeys([*before, *now])
            if before.get(name) is not now.get(name)
        ]

    def restore(self) -> None:
        """Restores parameters, buffers, submodules, modes and requires_grad."""
        for now, before in (*self._held, *self._modules):
            now.clear()
            now.update(before)
        for _, module, mode in self._modes:
            module.training = mode
        for _, parameter, is_trained in self._frozen():
            parameter.requires_grad_(is_trained)

    def write_assigned(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Writes assigned buffers into the tensors that the model had before.

        Returns:
            The results; those that share memory with such a tensor become copies of its old values.

        Raises:
            CaptureError: a parameter or module was replaced or frozen, or a graph can't do the
                assignment.
        """
        self._check_modules()
        assigned = self.assigned()
        names = Counter(id(tensor) for _, before in self._held for tensor in before.values())
        for name, tensor, value in assigned:
            self._check(name, tensor, value, is_tied=names[id(tensor)] > 1)
        # Results and values may share memory with a buffer: they are copied before any write.
        written = {storage_id(tensor) for _, tensor, _ in assigned}

        def kept(value: Tensor) -> Tensor:
            is_old = isinstance(value, Tensor) and storage_id(value) in written  # a result may be a SymInt
            return value.clone() if is_old else value

        results = [kept(result) for result in results] if assigned else list(results)
        for (_, tensor, _), value in zip(assigned, [kept(value) for *_, value in assigned], strict=True):
            tensor.copy_(value)
        return results

    def _frozen(self) -> list[tuple[str, Tensor, bool]]:
        """Leaf parameters with a changed requires_grad; writes may change it, on a non-leaf."""
        return [each for each in self._trained if each[1].is_leaf and each[1].requires_grad != each[2]]

    def _check_modules(self) -> None:
        replaced = [
            name for now, before in self._modules for name, module in before.items() if now.get(name) is not module
        ]
        frozen = [name for name, *_ in self._frozen()]
        if replaced or frozen:
            what = f"replaces the module {replaced[0]}" if replaced else f"changes requires_grad of {frozen[0]}"
            raise CaptureError(
                f"forward {what}",
                where=f"{self._cls}.forward",
                why="the next call of the model would compute something else, and a graph computes the same",
                attempt="an argument or attribute that says which module to call"
                if replaced
                else "requires_grad_() outside of forward; detach() of what forward computes",
            )

    def _check(self, name: str, tensor: object, value: object, *, is_tied: bool) -> None:
        where = f"{self._cls}.forward"
        if isinstance(tensor, nn.Parameter):
            raise CaptureError(
                f"forward replaces the parameter {name}",
                where=where,
                why="a graph writes to the parameters that the model has; a new one would be lost after the call",
                attempt=f"under torch.no_grad() self.{name}.copy_(value)",
            )
        before, now = _described(tensor), _described(value)
        if tensor is None:
            raise CaptureError(
                f"forward makes the buffer {name}",
                where=where,
                why=f"it is {now} after the call, and before it there is none that a graph could write to",
                attempt=f'register_buffer("{name}", torch.zeros(...)) of its shape in __init__',
            )
        if before != now or is_tied:
            changed = f"it is {before} before the call and {now} after it"
            raise CaptureError(
                f"forward replaces the buffer {name} by one that it can't write",
                where=where,
                why="the model holds it in several places, and the others keep the old one" if is_tied else changed,
                attempt=f"self.{name}.copy_(value), of one shape and dtype in all calls; or pass it in and return it",
            )


@contextlib.contextmanager
def without_exports_own() -> Iterator[None]:
    """Removes export's own hook, which notes the buffers assigned to the outermost module."""
    # `_map_assigned_buffer` is export's hook, without a handle (PyTorch 2.13.0, by pytorch/pytorch#137240).
    hooks = torch_module._global_buffer_registration_hooks
    off = {number: hook for number, hook in hooks.items() if "_map_assigned_buffer" in getattr(hook, "__name__", "")}
    for number in off:
        del hooks[number]
    try:
        yield
    finally:
        hooks.update(off)


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return "gone" if value is None else f"a {type(value).__name__}"
    return f"{value.dtype} of shape {tuple(value.shape)} on {value.device.type}".removeprefix("torch.")
