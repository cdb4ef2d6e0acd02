"""Calls like earlier ones are taken apart in one walk, with the same answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchshard as ts
from torchshard.capture import KnownCalls, Leaves, flatten_call
from torchshard.capture import known_calls as module


class Takes(nn.Module):
    def forward(self, x: Any, past: Any = None, **more: Any) -> Any:
        return x


class Cache:
    """An object that is not registered with pytree."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def _nests() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.integers(0, 2), st.booleans(), st.none(), st.sampled_from(["", "a"]), st.sampled_from([0.0, -0.0, 1.0]),
        st.just(torch.float32), st.builds(lambda: torch.zeros(2)), st.sampled_from([range(2), frozenset({1})]),
    )  # fmt: skip

    def nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        names = st.sampled_from(["a", "b", "c"])
        return st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(names, children, max_size=3),
            st.dictionaries(names, children, max_size=3).map(lambda values: Cache(**values)),
        )

    return st.recursive(leaves, nested, max_leaves=8)


def _same(known: Leaves, own: Leaves) -> None:
    assert len(known.tensors) == len(own.tensors)
    assert all(a is b for a, b in zip(known.tensors, own.tensors, strict=True))
    assert (known.names, known.structure, known.numbers) == (own.names, own.structure, own.numbers)
    assert (known.number_names, list(known.positional)) == (own.number_names, list(own.positional))
    assert known.repeated == own.repeated
    rebuilt = [call.rebuild(call.tensors, numbers=call.numbers) for call in (known, own)]
    assert flatten_call(Takes(), *rebuilt[0]).structure == flatten_call(Takes(), *rebuilt[1]).structure


@settings(max_examples=150, deadline=None)
@given(st.lists(_nests(), min_size=1, max_size=4), st.sampled_from([(), ("past['a']", "past.a", "x")]))
def test_an_answer_is_that_of_flatten_call(nests: list[Any], numbers: tuple[str, ...]) -> None:
    model = Takes()
    known = KnownCalls(model)
    for _ in range(2):
        for nest in nests:
            for args, kwargs in (((torch.ones(1), nest), {}), ((nest,), {"other": nest})):
                _same(known.flatten(args, kwargs, numbers), flatten_call(model, args, kwargs, numbers))


def test_a_call_like_an_earlier_one_is_not_flattened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    own = module.flatten_call
    monkeypatch.setattr(module, "flatten_call", lambda *a: asked.append(1) or own(*a))  # type: ignore[func-returns-value]
    known = KnownCalls(Takes())
    for position in range(5):
        cache = Cache(keys=torch.zeros(position), position=position, kind="full")
        leaves = known.flatten((torch.ones(1), cache), {}, ("past.position",))
        assert leaves.numbers == (position,) and leaves.tensors[1] is cache.keys
        assert leaves.rebuild(leaves.tensors)[0][1].position == position
    assert len(asked) == 1
    known.flatten((torch.ones(1), Cache(keys=torch.zeros(1), position=0, kind="sliding")), {}, ("past.position",))
    assert len(asked) == 2


def test_code_that_an_argument_brings_is_compared() -> None:
    known, scale = KnownCalls(Takes()), 2.0

    class Scaled(Cache):
        def scaled(self, x: Tensor) -> Tensor:
            return x * scale

    first = known.flatten((Scaled(a=1),), {}, ())
    scale = 3.0
    assert known.flatten((Scaled(a=1),), {}, ()).structure != first.structure


def test_an_object_that_holds_itself_is_refused() -> None:
    cache = Cache()
    cache.own = cache
    with pytest.raises(ts.InputError, match="holds itself"):
        KnownCalls(Takes()).flatten((cache,), {}, ())
