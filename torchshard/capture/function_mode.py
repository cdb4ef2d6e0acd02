"""The TorchFunctionMode of a captured forward: it handles calls on tensors that export gets wrong.

h.register_hook(f)          kept whole (see `whole_calls`)
nn.LSTM, nn.GRU, nn.RNN     kept whole, so that a rule can split them by hidden units
x.data                      detach() and copy_(), which a graph can hold
another model's parameter   refused: as a constant of the graph it would lose its gradient

Export in PyTorch 2.13 drops hooks of tensors without an error. For `x.data` it records no node, and
then refuses the fake tensor as a constant of the graph. This module is needed as long as export
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import GetSetDescriptorType
from typing import cast

from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torchshard.capture.recording import Recording
from torchshard.capture.user_code import calling_line
from torchshard.capture.whole_calls import keep_hook, keep_whole
from torchshard.core.errors import CaptureError
from torchshard.core.modules import TensorDict
from torchshard.custom_ops.recurrent import RecurrentCall, is_recurrent
from torchshard.custom_ops.whole import state_of

Slots = dict[int, tuple[TensorDict, str]]
"""id of a parameter or buffer -> the dict of its module that stores it, and its name there."""


def slots_of(model: nn.Module) -> Slots:
    """Where each parameter and buffer of a model is stored."""
    return {id(tensor): (tensor_dict, name) for tensor_dict, name, tensor in state_of([model])}


class CaptureMode(TorchFunctionMode):
    """The mode of one captured forward.

    Export replaces parameters and buffers with fake tensors in the dicts of their modules. If another
    object (a cache object, a list) also refers to one, forward finds the real tensor there, and the
    mode replaces it.
    """

    def __init__(self, recording: Recording, slots: Slots) -> None:
        super().__init__()
        self._recording, self._slots = recording, slots

    def _stored_now(self, value: object) -> object:
        slot = self._slots.get(id(value))
        return value if slot is None else slot[0].get(slot[1], value)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        if any(id(leaf) in self._slots for leaf in leaves):
            args, kwargs = pytree.tree_map(self._stored_now, (args, kwargs))
            leaves = pytree.arg_tree_leaves(*args, **kwargs)
        _refuse_foreign_parameters(leaves)
        if isinstance(args[0] if args else None, Tensor) and func in (_DATA.__get__, _DATA.__set__):
            return _call_data(func, *cast(Sequence[Tensor], args))
        if self._recording.inside_call:
            return func(*args, **kwargs)
        if func is Tensor.register_hook and cast(Tensor, args[0]).requires_grad:
            tensor, hook = cast(tuple[Tensor, Callable[[Tensor], object]], (*args, *kwargs.values()))
            return keep_hook(self._recording, tensor, hook)
        if is_recurrent(func, args):
            return keep_whole(self._recording, func, args, kwargs, RecurrentCall)
        return func(*args, **kwargs)


def _refuse_foreign_parameters(leaves: Sequence[object]) -> None:
    for leaf in leaves:
        # Export has replaced the model's own parameters with fake ones, so a real one is foreign.
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            if not is_fake(leaf):
                raise CaptureError(
                    "the model uses a parameter that is not its own",
                    where=calling_line(),
                    why=f"{tuple(leaf.shape)}, requires_grad: as a constant of the graph its gradient would be lost",
                    attempt="register it: assign the parameter or its module to an attribute of the model",
                )


# --- .data -----------------------------------------------------------------------------------------------------------


_DATA = cast(GetSetDescriptorType, Tensor.data)


def _call_data(func: Callable[..., object], tensor: Tensor, value: Tensor | None = None) -> object:
    """Computes `x.data` or `x.data = y`; on fake tensors by ops that a graph can express."""
    if not is_fake(tensor):
        return func(tensor) if value is None else func(tensor, value)
    return tensor.detach() if value is None else _set_data(tensor, value)


def _set_data(tensor: Tensor, value: Tensor) -> Tensor:
    """Computes `x.data = y` by copying y into x: equivalent if shape, dtype and device match."""
    if (tensor.shape, tensor.dtype, tensor.device) != (value.shape, value.dtype, value.device):
        raise CaptureError(
            "the model assigns a tensor of another shape, dtype or device to .data",
            where=calling_line(),
            why=f"{tuple(tensor.shape)}, {tensor.dtype} becomes {tuple(value.shape)}, {value.dtype}",
            attempt="a new tensor, under a name of its own",
        )
    return tensor.detach().copy_(value)
