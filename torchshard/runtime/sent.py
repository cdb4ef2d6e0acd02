"""The collectives that graphs send: graphs that ranks make together must send the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import fx

from torchshard.capture import without_tools
from torchshard.core.errors import DistributedError, in_short
from torchshard.core.hashing import hash_text
from torchshard.distributed.facts import verify_equal
from torchshard.distributed.group import Group
from torchshard.distributed.ranks import Ranks
from torchshard.ops import Begin

log = logging.getLogger("torchshard.runtime.step")
T = TypeVar("T")


class Sent(NamedTuple):
    """A collective of a graph."""

    name: str
    args: str
    group: object
    """The name of the group that it communicates in; other groups may send slices of other sizes."""

    def seen_by(self, group: Group) -> str:
        """Returns the text that must match on all ranks of a group."""
        return f"{self.name} {self.args}" if self.group == group.name else self.name


def sent_by(module: fx.GraphModule) -> list[Sent]:
    """Returns the collectives of a graph, in order; they must match on all ranks."""
    begun = [n for n in module.graph.nodes if isinstance(n.target, Begin)]
    return [Sent(str(n.target), str(n.args[1:-1]), n.args[-1]) for n in begun]


def on_all_ranks(
    ranks: Ranks, make: Callable[[], T], sent: Callable[[T], list[Sent]], level: int = logging.INFO
) -> T | None:
    """Returns `make()` if it succeeds on all ranks with the same collectives; otherwise None on all ranks.

    Args:
        level: the level at which a failure is logged.
    """
    made, collectives, failure = None, list[Sent](), ""
    try:
        with without_tools():
            made = make()
        collectives = sent(made)
    except Exception as error:  # after any error autograd computes the backward
        failure = f"{type(error).__name__}: {error}"
        log.log(level, "no graph of the backward: %s", in_short(error))
    what = "the ranks can't make the graph of a backward together"
    groups = [group for group in reversed(ranks.groups.values()) if group.size > 1]
    for group in (*groups, *groups[:-1]):  # a failure along one axis must reach all ranks of the other
        text = failure or "; ".join(each.seen_by(group) for each in collectives)
        if not verify_equal(group, {}, DistributedError, what, unlike=hash_text(text)):
            made, failure = None, "the graphs differ"
    return made
