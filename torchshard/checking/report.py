"""The report of a check: the largest error of each kind of tensor, the verdict, and where values first differ.

    exact: 4 ranks, 1 outputs, 0 buffers, 0 input gradients, 12 parameter gradients, tolerance 1e-10
      largest error of outputs               2.2e-16
      ...

A report contains further ones, if the program was also compared in wider dtypes, or its capture with the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchshard.checking.compare import KINDS, Comparison
from torchshard.core.columns import Notebook, counted
from torchshard.core.errors import ShardError


class CheckError(ShardError):
    """The sharded program computes different results than the model."""


@dataclass(frozen=True, repr=False)
class Report(Notebook):
    """The result of a check."""

    world_size: int
    tolerance: float
    """The largest error that counts as equal."""
    comparisons: tuple[Comparison, ...]
    diverges_at: str = ""
    """The first node with a wrong value or, if all values agree, the last node with a wrong gradient;
    '' if everything agrees."""
    widened: Report | None = None
    """The comparison with wider dtypes, if the graph computes in less than float64."""
    unwidened: str = ""
    """Why `widened` is missing, if the graph should have it."""
    flips: bool = False
    """Whether rounding moves the unsharded model's values by an equal amount, for instance by flipping
    a comparison; then the wider dtypes decide."""
    captured: Report | None = None
    """The captured graph, unsharded, compared with the model, both in float64, if the model is not in float64."""
    uncaptured: str = ""
    """Why `captured` is missing, if the model should have it."""

    @property
    def ok(self) -> bool:
        """Whether all errors are within the tolerance, in every precision."""
        return all(c.error <= self.tolerance for c in self.comparisons) and all(r.ok for r in self._in_wider)

    @property
    def _in_wider(self) -> list[Report]:
        return [report for report in (self.widened, self.captured) if report is not None]

    @property
    def worst(self) -> Comparison:
        """The comparison that exceeds its tolerance by the largest factor, or comes closest to it."""
        reports = [self, *self._in_wider]
        pairs = [(c.error / report.tolerance, c) for report in reports for c in report.comparisons]
        return max(pairs, key=lambda pair: pair[0], default=(0.0, Comparison("output", "", 0.0)))[1]

    def raise_on_error(self) -> Report:
        """This report; raises CheckError if something differs."""
        if not self.ok:
            wrong = next((report for report in self._in_wider if not report.ok), self)
            raise CheckError(
                f"the {self.worst.kind} {self.worst.name} is off by {self.worst.error:.1e}",
                where=wrong.diverges_at,
                why=f"{self.world_size} ranks, tolerance {wrong.tolerance:.0e}",
                attempt="the rule of that op, if it is your own (torchshard.rule); else please report the model",
            )
        return self

    def __repr__(self) -> str:
        return f"<{str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        by_kind = {kind: [c for c in self.comparisons if c.kind == kind] for kind in KINDS}
        counts = ", ".join(counted(len(found), kind) for kind, found in by_kind.items())
        verdict = "exact" if self.ok else "WRONG"
        lines = [f"{verdict}: {self.world_size} ranks, {counts}, tolerance {self.tolerance:.0e}"]
        for kind, comparisons in by_kind.items():
            if comparisons:
                worst = max(comparisons, key=lambda c: c.error)
                lines.append(f"  largest error of {kind + 's':20} {worst.error:.1e}  {worst.name}")
        return "\n".join([*lines, *self._wrong(), *self._precision_lines()])

    def _precision_lines(self) -> list[str]:
        """The lines about the comparisons in other precisions."""
        lines = []
        if self.flips:
            lines.append("  rounding alone moves the unsharded model's values by as much: the wider dtypes decide")
        if self.widened is not None:
            largest = max((c.error for c in self.widened.comparisons), default=0.0)
            lines.append(f"  with wider dtypes, tolerance {self.widened.tolerance:.0e}: largest error {largest:.1e}")
            lines += self.widened._wrong()
        elif self.unwidened:
            lines.append(f"  not compared with wider dtypes: {self.unwidened}")
        if self.captured is not None and not self.captured.ok:
            lines += ["  the captured graph is not the model, both in float64:", *self.captured._wrong()]
        elif self.uncaptured:
            lines.append(f"  the captured graph was not compared with the model in float64: {self.uncaptured}")
        return lines

    def _wrong(self) -> list[str]:
        wrong = [c for c in self.comparisons if c.error > self.tolerance]
        lines = [f"  wrong: {c.kind} {c.name}: {c.error:.1e}" for c in wrong]
        return lines + ([f"  first differs at {self.diverges_at}"] if self.diverges_at else [])
