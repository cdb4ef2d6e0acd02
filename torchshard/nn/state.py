"""State dicts of models with split modules, with the unsharded parameters of PyTorch's modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from torchshard.core.layouts import I, Shard, split, whole_shape
from torchshard.distributed.convert import convert
from torchshard.distributed.group import own_group
from torchshard.nn.modules import Sliced
from torchshard.runtime.state_dicts import check_full_state


def split_parameters(model: nn.Module) -> dict[str, Shard]:
    """Returns the layouts of split parameters, as Shards with the global size."""
    return dict(_split_parameters(model))


def _split_parameters(model: nn.Module) -> Iterator[tuple[str, Shard]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, (dim, size) in module.split.items() if isinstance(module, Sliced) else ():
            if isinstance(getattr(module, name), nn.Parameter):  # a linear without bias has None
                yield f"{path}.{name}" if path else name, Shard(dim, ((size, 1),))


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict with unsharded parameters on every rank; all ranks must call it.

    After `torch.save` on one rank, PyTorch's own modules can load it, as can `load_full_state_dict`
    on any number of ranks.
    """
    layouts, group = split_parameters(model), own_group()
    state = {name: value.detach() for name, value in model.state_dict().items()}
    gathered = {name: convert("all_gather", state[name], layouts[name], I, group) for name in state if name in layouts}
    return state | gathered


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies this rank's slices of a state dict with unsharded parameters into the model.

    Raises:
        InputError: a name is missing, unknown, or has another shape.
    """
    layouts, group, own = split_parameters(model), own_group(), model.state_dict()
    check_full_state(state, {name: whole_shape(value.shape, layouts.get(name, I)) for name, value in own.items()})
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(split(value, layouts[name], group.rank, group.size) if name in layouts else value)
