"""A comparison of meshes for a number of ranks: the costs of a step with the same batch on each.

mesh             time    products  other ops  over weights  over batch  beside  memory per rank
dp=8:shard,tp=8  118 ms  52%       12%        24%           9%          3%      11.2 GiB
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torchshard.core.columns import Notebook, columns
from torchshard.core.mesh import Holds, mesh_option
from torchshard.core.units import size_text, time_text
from torchshard.plans.plan import Plan

HEADER = ("mesh", "time", "products", "other ops", "over weights", "over batch", "beside", "memory per rank")


@dataclass(frozen=True)
class Proposal:
    """One mesh, and the costs of a step on it."""

    mesh: Mapping[str, int | tuple[int, Holds]]
    """The `mesh` argument of `shard`."""
    plan: Plan | None
    """The plan; None if planning failed."""
    limit: float | None = None
    """The limit of a step's bytes on a rank, if any."""
    why: str = ""
    """The reason if planning failed, and a remedy; or why no plan within the limit was searched."""

    @property
    def name(self) -> str:
        """The mesh as an option: 'dp=8:shard,tp=8'."""
        return mesh_option(self.mesh)

    @property
    def fits(self) -> bool:
        """Whether a plan exists and is within the limit."""
        return self.plan is not None and (self.limit is None or self.plan.step_memory["peak"] <= self.limit)

    @property
    def seconds(self) -> float:
        """The seconds of a step; infinite if it does not fit."""
        return self.step if self.fits else float("inf")

    @property
    def step(self) -> float:
        """The seconds of a step, even if it does not fit; infinite without a plan."""
        return sum(self.plan.step_seconds.values()) if self.plan is not None else float("inf")

    def cells(self) -> tuple[str, ...]:
        """Returns its texts, in the order of HEADER."""
        name = self.name
        if self.plan is None:
            return (name, "no plan", *[""] * (len(HEADER) - 2))
        parts, peak = [*self.plan.step_seconds.values()], size_text(self.plan.step_memory["peak"])
        shares = (f"{seconds / self.step if self.step else 0:.0%}" for seconds in (*parts[:4], sum(parts[4:])))
        return (name, time_text(self.step), *shares, peak if self.fits else f"{peak}: too much")

    def __str__(self) -> str:
        """Returns one line."""
        name, time, *shares, memory = self.cells()
        if self.plan is None:
            return f"{name}: {time}: {self.why}"
        return f"{name}: {time}, {', '.join(map(' '.join, zip(HEADER[2:-1], shares, strict=True)))}; {memory}"


class Proposals(list[Proposal], Notebook):
    """Meshes with the fastest first; those that do not fit come last."""

    def __init__(self, found: Iterable[Proposal]) -> None:
        super().__init__(sorted(found, key=lambda each: (each.seconds, each.step)))

    def __repr__(self) -> str:
        best = f"the fastest {dict(self[0].mesh)}" if self and self[0].fits else "none with a plan that fits"
        return f"<{len(self)} mesh{'es' if len(self) != 1 else ''}, {best}>"

    def __str__(self) -> str:
        """Returns a table with a row per mesh; below it, the reasons for those without a plan that fits."""
        names: dict[str, list[str]] = {}
        for each in self:
            if each.why:
                names.setdefault(each.why, []).append(each.name)
        reasons = (f"{' and '.join(of)}: {why}" for why, of in names.items())
        return "\n".join([*columns([HEADER, *(each.cells() for each in self)]), *reasons])


def meshes(ranks: int, host: float) -> Iterator[dict[str, int | tuple[int, Holds]]]:
    """Yields meshes of `ranks` ranks with axes for the batch, the weights or both.

    Args:
        host: the most ranks that may split the weights. If there are several hosts, each may also hold all weights,
            divided over its own ranks (HSDP).
    """
    for tp in (n for n in range(1, ranks + 1) if ranks % n == 0 and n <= host):
        if tp == ranks:
            yield {"tp": tp}
            continue
        of_weights: dict[str, int | tuple[int, Holds]] = {"tp": tp} if tp > 1 else {}
        of_batch: list[dict[str, int | tuple[int, Holds]]] = [
            {"dp": (ranks // tp, "replicate")},
            {"dp": (ranks // tp, "shard")},
        ]
        if tp < host < ranks and ranks % host == host % tp == 0:
            of_batch.append({"hosts": (ranks // int(host), "replicate"), "fsdp": (int(host) // tp, "shard")})
        for axes in of_batch:
            yield axes | of_weights
