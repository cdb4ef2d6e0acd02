"""A Plan: which layout each parameter has, which choice each op takes, and what that costs. It knows no rank.

Plans print, compare, and go through JSON; the layouts are written as they print (`S(0; 7x8)`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchshard.core.columns import Notebook
from torchshard.core.errors import PlanError
from torchshard.core.files import write_text
from torchshard.plans import exchange, json_form, table
from torchshard.plans.data import PlanData


@dataclass(frozen=True, repr=False)
class Plan(PlanData, Notebook):
    """One choice per op, one layout per parameter; `PlanData` lists its fields.

    Two classes, because tables and files are made of the data and `Plan` offers them as methods: one class would need
    modules that import each other.
    """

    def __str__(self) -> str:
        """A table, a row per module."""
        return table.table(self)

    def __repr__(self) -> str:
        return f"<{table.summary(self)[0]}>"

    def to_hf(self) -> dict[str, str]:
        """The plan as a `tp_plan` of Hugging Face transformers: module globs and styles.

        Raises:
            PlanError: a tp_plan can't express all of it; the error names what it can't.
        """
        return exchange.to_hf(self)

    def to_dtensor(self) -> dict[str, Any]:
        """The plan as a `parallelize_plan` of `torch.distributed.tensor.parallel.parallelize_module`.

        Raises:
            PlanError: DTensor's styles can't express all of it; the error names what they can't.
        """
        return exchange.to_dtensor(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan's JSON.

        Raises:
            InputError: the file can't be written; what was there before is left as it was.
        """
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """The plan that `save` wrote.

        Raises:
            PlanError: it is no path; the file can't be read, is cut short, holds no plan or one of another version.
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
        """The plan as JSON text.

        Args:
            question: whether it holds the graph and all else that the plan was made for, so that `torchshard.what_if`
                can ask again, without the model; twice as much text as the plan itself.
        """
        return json_form.write(self, self.source.question() if question and self.source is not None else None)

    @staticmethod
    def from_json(text: str, where: str = "Plan.from_json") -> Plan:
        """The plan that `to_json` wrote; `where` names the text's origin in errors.

        Raises:
            PlanError: the text is no plan, one of another version, or cut short.
        """
        return Plan(**json_form.read(text, where))
