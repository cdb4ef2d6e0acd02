"""A Plan: each parameter's layout, each op's choice, and the costs. It does not depend on the rank.

Plans print, compare, and convert to JSON; layouts are written as they print (`S(0; 7x8)`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchshard.core.columns import Notebook
from torchshard.core.errors import PlanError
from torchshard.core.files import write_text
from torchshard.plans import exchange, json_form, table
from torchshard.plans.data import PlanData

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True, repr=False)
class Plan(PlanData, Notebook):
    """One choice per op, one layout per parameter; `PlanData` lists its fields.

    There are two classes because tables and files are built from the data, and `Plan` offers them
    as methods. With one class, modules would import each other.
    """

    def __str__(self) -> str:
        """A table, a row per module."""
        return table.table(self)

    def __repr__(self) -> str:
        return f"<{table.summary(self)[0]}>"

    def to_hf(self) -> dict[str, str]:
        """Returns the plan as a `tp_plan` of Hugging Face transformers: module globs and styles.

        Raises:
            PlanError: a tp_plan can't express all of it; the error names the rest.
        """
        return exchange.to_hf(self)

    def to_dtensor(self) -> dict[str, ParallelStyle]:
        """Returns the plan as a `parallelize_plan` of `torch.distributed.tensor`'s
        `parallelize_module`.

        Raises:
            PlanError: DTensor's styles can't express all of it; the error names the rest.
        """
        return exchange.to_dtensor(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan's JSON.

        Raises:
            InputError: the file can't be written; a previous file is left unchanged.
        """
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Returns the plan that `save` wrote.

        Raises:
            PlanError: `path` is not a path; or the file can't be read, is cut short, is not a plan,
                or has another version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise PlanError(
                f"the plan {os.fspath(path)!r:.200} can't be read",
                where="the plan",
                why=(error.strerror if isinstance(error, OSError) else None) or str(error),
                attempt="the path of a file that Plan.save, or torchshard plan --json, wrote",
            ) from None
        except TypeError:
            raise PlanError(
                f"a {type(path).__name__} is not the path of a plan",
                where="the plan",
                why="a plan is read from a file",
                attempt="the path of what Plan.save wrote; model.plan for the plan of a sharded model",
            ) from None
        return Plan.from_json(text, os.fspath(path))

    def to_json(self, *, question: bool = True) -> str:
        """Returns the plan as JSON text.

        Args:
            question: whether to include the graph and everything else that the plan was made for.
                `torchshard.what_if` can then plan again without the model; the text is twice as
                long.
        """
        return json_form.write(self, self.source.question() if question and self.source is not None else None)

    @staticmethod
    def from_json(text: str, where: str = "Plan.from_json") -> Plan:
        """Returns the plan that `to_json` wrote; `where` names the text's origin in errors.

        Raises:
            PlanError: the text is not a plan, has another version, or is cut short.
        """
        return Plan(**vars(json_form.read(text, where)))
