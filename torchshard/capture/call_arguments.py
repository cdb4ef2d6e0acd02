"""The arguments of a call of a model, by the names of its forward's parameters: 'ids', 'batch.mask', 'past[0][1]'.

`capture.signature` flattens any value, and its places are indices. Errors, plans and graphs name a call's tensors by
the parameters that the user wrote.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from torchshard.capture.signature import Leaves, children, flatten, with_keys
from torchshard.core.errors import InputError


def is_unchanged(before: Leaves, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether forward left the containers and objects among a call's arguments unchanged."""
    try:
        numbers = before.number_names
        is_number = lambda place: argument_name(place, before.positional) in numbers  # noqa: E731
        after = with_keys(flatten((tuple(args), dict(kwargs)), is_number))
    except InputError:
        return False
    same_tensors = len(after.tensors) == len(before.tensors) and all(map(operator.is_, after.tensors, before.tensors))
    return same_tensors and after.structure == before.structure


def flatten_call(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], numbers: Collection[str] = ()
) -> Leaves:
    """Flattens a call, with `model.forward`'s parameter names; `rebuild` returns (args, kwargs).

    Args:
        numbers: the places of integers that vary between calls.

    Raises:
        InputError: `forward` does not take these arguments, or one contains an object that can't be
            compared.
    """
    bound = bound_call(model, args, kwargs)
    ordered = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = bound.signature.parameters
    positional = [n for n, p in parameters.items() if n in bound.arguments and p.kind in ordered]
    is_number = (lambda place: argument_name(place, positional) in numbers) if numbers else None
    flat = with_keys(flatten((bound.args, bound.kwargs), is_number))
    return dataclasses.replace(
        flat,
        names=tuple(argument_name(name, positional) for name in flat.names),
        number_names=tuple(argument_name(name, positional) for name in flat.number_names),
        positional=positional,
        arguments=(bound.args, bound.kwargs),
        repeated=_repeated((bound.args, bound.kwargs)),
    )


def _repeated(value: object) -> frozenset[int]:
    """The ids of the lists, dicts and objects that occur in a value more than once."""
    counts: Counter[int] = Counter()

    def visit(held: object) -> None:
        if (items := children(held)) is not None:
            counts[id(held)] += not isinstance(held, tuple)
            for item in items.values():
                visit(item)

    visit(value)
    return frozenset(number for number, count in counts.items() if count > 1)


def bound_call(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> inspect.BoundArguments:
    """Binds a call's arguments to the parameters of `model.forward`.

    Raises:
        InputError: `forward` does not take them.
    """
    signature = inspect.signature(model.forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"the model's forward does not take these arguments: {error}",
            where=f"{type(model).__name__}.forward{signature}",
            why=f"{len(args)} positional and the keywords {sorted(kwargs)} were passed",
            attempt="the unsharded model's arguments (of plan, check and shard: example_inputs, example_kwargs)",
        ) from None


def argument_name(path: str, positional: Sequence[str]) -> str:
    """Names a path in (args, kwargs): '[0][2]' by the third parameter, "[1]['mask']" by 'mask'."""
    first, _, rest = path[1:].partition("]")
    if not rest:  # pytree knows no names
        return f"tensor {first} of the arguments"
    head, _, tail = rest[1:].partition("]")
    if first == "1":
        return head.strip("'\"") + tail
    index = int(head)
    return (positional[index] if index < len(positional) else f"args[{index - len(positional)}]") + tail
