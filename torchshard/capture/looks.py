"""What Python code sees of a tensor besides its values: a class of the user's own, and attributes.

A captured forward, a copy of a model and a sharded parameter replace tensors by others. They keep both, so that
`isinstance(self.weight, Codebook)`, `self.weight.infshape` and `p._no_weight_decay` give what they gave before.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from torchshard.weights.lazy import LazyTensor


def is_stand_in(tensor: Tensor) -> bool:
    """Whether a tensor's class is PyTorch's or ours for tensors that are used in place of ordinary ones."""
    return isinstance(tensor, FakeTensor) or type(tensor).__module__.startswith("torchshard.")


def own_class(tensor: Tensor) -> type[Tensor] | None:
    """The class of a tensor, if the user has chosen it."""
    return None if type(tensor) in (Tensor, nn.Parameter) or is_stand_in(tensor) else type(tensor)


def own_attributes(tensor: Tensor) -> dict[str, object]:
    """The attributes that users or libraries have set on a tensor."""
    if not vars(tensor) or (is_stand_in(tensor) and not isinstance(tensor, LazyTensor)):
        return {}
    found = vars(tensor).items()
    return {name: value for name, value in found if name not in _OF_LAZY and not name.startswith("_torchshard")}


_OF_LAZY = frozenset(LazyTensor.__annotations__)


def look_like(tensor: Tensor, replacement: Tensor) -> Tensor:
    """Gives a replacement the class and the attributes of a tensor, and returns it."""
    cls = own_class(tensor)
    if cls is not None:
        made = type(replacement)
        replacement.__class__ = type(cls.__name__, (made, cls), {}) if is_stand_in(replacement) else cls
    copy_attributes(tensor, replacement)
    return replacement


def copy_attributes(tensor: Tensor, replacement: Tensor) -> None:
    """Gives a replacement the attributes of a tensor that it does not have."""
    vars(replacement).update({n: v for n, v in own_attributes(tensor).items() if n not in vars(replacement)})
