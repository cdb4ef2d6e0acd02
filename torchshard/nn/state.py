"""State dicts of models that have split modules: as PyTorch's modules would have them, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from torchshard.distributed.groups import own_group
from torchshard.distributed.kernels import convert
from torchshard.errors import InputError
from torchshard.layouts import I, Shard, split
from torchshard.nn.modules import Sliced


def split_parameters(model: nn.Module) -> dict[str, Shard]:
    """How the parameters of split modules lie: name -> a Shard that says the global size; the others are whole."""
    return dict(_split_parameters(model))


def _split_parameters(model: nn.Module) -> Iterator[tuple[str, Shard]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, (dim, size) in module.split.items() if isinstance(module, Sliced) else ():
            if isinstance(getattr(module, name), nn.Parameter):
                yield f"{path}.{name}" if path else name, Shard(dim, ((size, 1),))


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole parameters, the same on every rank: a collective call, all ranks must make it.

    `torch.save` of it on one rank is loaded by PyTorch's own modules, or by `load_full_state_dict` on any number of
    ranks.
    """
    layouts, group = split_parameters(model), own_group()
    return {
        name: convert("all_gather", value.detach(), layouts[name], I, group) if name in layouts else value.detach()
        for name, value in model.state_dict().items()
    }


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Takes this rank's slices of a state dict with whole parameters.

    Raises:
        InputError: a name is missing, unknown, or has another shape.
    """
    layouts, group, own = split_parameters(model), own_group(), model.state_dict()
    for name in [*own, *state]:
        expected = list(own[name].shape) if name in own else None
        if expected is not None and name in layouts:
            expected[layouts[name].dim] = (layouts[name].parts or ((0, 1),))[0][0]
        if name not in own or name not in state or list(state[name].shape) != expected:
            raise InputError(
                f"the state dict does not fit at {name!r}",
                where="load_full_state_dict",
                why=f"given: {list(state[name].shape) if name in state else 'nothing'}; the whole model has {expected}",
                attempt="what full_state_dict gives, or the unsharded model's state dict",
            )
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(split(value, layouts[name], group.rank, group.size) if name in layouts else value)
