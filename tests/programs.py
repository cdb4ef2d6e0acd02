"""Random models with random plans, for cases that no hand-written test covers.

A program is a list of words of four small numbers. Each word refers to the values so far and becomes one line of a
`forward`; a word that does not fit is skipped. So any list of words is a valid model. A shorter list of smaller
numbers is a simpler model, so a failure shrinks to a few lines that can be run as they are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from tests.program_lines import KINDS
from tests.program_text import Text, Word, Writer
from torchshard.testing import Report, capture

words = st.tuples(st.integers(0, 10_000), st.integers(0, 6), st.integers(0, 8), st.integers(0, 8))
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


def written(shape: tuple[int, ...], said: Sequence[Word], results: int = 2) -> Text:
    """The program that a list of words describes."""
    writer = Writer(shape)
    for word in said:
        writer.read(word, KINDS)
    return writer.text(results)


def drawn(seed: int) -> Text:
    """A program of random words, determined by a seed."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(1, 4)))
    count = draw.randint(3, 30)
    said = [
        (draw.randint(0, 10_000), draw.choice((0, 0, 0, 1, 1, 2, 3)), draw.randint(0, 8), draw.randint(0, 8))
        for _ in range(count)
    ]
    return written(shape, said, draw.randint(1, 3))


def can_be_trained(text: Text) -> bool:
    """Whether its backward runs, and some gradient exceeds rounding noise."""
    model, inputs = text.model(), text.inputs()
    try:
        outputs = model(inputs[0].requires_grad_(), inputs[1])
        made = outputs if isinstance(outputs, tuple) else (outputs,)
        sum((o.sum() for o in made if o.requires_grad), torch.zeros(())).backward()
    except RuntimeError:  # writes to a tensor that was saved for the backward, or to one of several views
        return False
    grads = [t.grad.abs().max() for t in (inputs[0], *model.parameters()) if t.grad is not None]
    return any(bool(g > 1e-6) for g in grads)


def texts(longest: int = 30) -> st.SearchStrategy[Text]:
    """Trainable programs of at most `longest` lines."""
    said = st.lists(words, min_size=1, max_size=longest)
    return st.builds(written, shapes, said, st.integers(1, 3)).filter(can_be_trained)


def checked(text: Text, world: int, seed: int) -> Report:
    """Compares a program under a random plan with the unsharded model.

    Raises:
        AssertionError: an op lacks a rule.
    """
    model, inputs = text.model(), text.inputs()
    inputs[0].requires_grad_()
    call = capture(model, inputs, dynamic=False)
    ruleless = call.ops_without_rule()
    assert not ruleless, f"no rule: {ruleless}"
    return call.plan_at_random(world, seed).check(by_graphs=True)
