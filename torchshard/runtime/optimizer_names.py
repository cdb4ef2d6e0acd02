"""Matches the parameters of a saved optimizer by name, where its file has names.

PyTorch matches them by position. Optimizers of `named_parameters()` save names too, as `param_names`, and full state
dicts of FSDP and DCP have names in place of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.optimizer import Optimizer, StateDict

from torchshard.core.errors import InputError
from torchshard.weights.parameter import ShardedParameter

Groups = Sequence[Sequence[str]]
"""The names of the parameters of each group."""


def in_own_order(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """Returns a state dict with the optimizer's order of groups and of parameters in them, if it has names.

    Raises:
        InputError: the names are of other parameters, or in other groups.
    """
    saved: list[dict[str, Any]] = list(state_dict["param_groups"])
    given = [_saved_names(group) for group in saved]
    if any(names is None for names in given):
        return state_dict
    names = [each for each in given if each is not None]
    for own, others in _readings([_own_names(group) for group in optimizer.param_groups], names):
        order = _order(own, others)
        if order is not None:
            return {
                **state_dict,
                "param_groups": [_reordered(saved[i], others[i], of) for i, of in zip(order, own, strict=True)],
            }
        if own == others:  # also if several parameters have one name
            return state_dict
    raise InputError(
        "the saved optimizer's parameters have other names, or are in other groups",
        where="optimizer.load_state_dict",
        why=f"saved: {_text(names)}; here: {_text([_own_names(group) for group in optimizer.param_groups])}",
        attempt="the groups of that run; or the state dict without 'param_names', and numbers in place of names: its "
        "states are then matched by position",
    )


def _saved_names(group: dict[str, Any]) -> list[str] | None:
    names = group.get("param_names") or group["params"]
    return list(names) if all(isinstance(name, str) for name in names) else None


def _own_names(group: dict[str, Any]) -> list[str]:
    paths = [p.path if isinstance(p, ShardedParameter) else "" for p in group["params"]]
    return list(group.get("param_names") or paths)


def _readings(own: Groups, saved: Groups) -> list[tuple[Groups, Groups]]:
    """Returns the names as they are, and without the prefixes that wrappers add."""
    return [(own, saved), (_without_prefix(own), _without_prefix(saved))]


def _without_prefix(groups: Groups) -> Groups:
    """Removes the modules that all names begin with, such as `module.` of DDP."""
    parts = [[name.split(".") for name in group] for group in groups]
    paths = [each[:-1] for group in parts for each in group]
    common = 0
    while paths and all(len(path) > common and path[common] == paths[0][common] for path in paths):
        common += 1
    return [[".".join(each[common:]) for each in group] for group in parts]


def _order(own: Groups, saved: Groups) -> list[int] | None:
    """Returns the number of the saved group for each own one; None unless their names are the same, each once."""
    names = [name for group in own for name in group]
    if len(set(names)) < len(names) or len(own) != len(saved):
        return None
    numbers = {frozenset(group): number for number, group in enumerate(saved)}
    order = [numbers.get(frozenset(group), -1) for group in own]
    has_same = -1 not in order and all(len(saved[i]) == len(group) for i, group in zip(order, own, strict=True))
    return order if has_same else None


def _reordered(group: dict[str, Any], names: Sequence[str], own: Sequence[str]) -> dict[str, Any]:
    """Returns a saved group with its parameters in another order."""
    places = [names.index(name) for name in own]
    named: dict[str, Any] = {key: [group[key][i] for i in places] for key in ("params", "param_names") if key in group}
    return {**group, **named}


def _text(groups: Groups) -> str:
    text = "; ".join(", ".join(group) for group in groups)
    return text if len(text) <= 300 else f"{text[:300]}..."
