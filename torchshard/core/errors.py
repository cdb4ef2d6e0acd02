"""The exceptions that users see: the problem and, if known, its place, cause and remedy.

PlanError: the plan's key 'decoder.*.qproj' matches no module
  where: plan key 'decoder.*.qproj'
  why:   globs are paths of modules ('' is the model itself), and it matches none of 14 submodules
  try:   'decoder.*.q_proj'
"""

from __future__ import annotations


class ShardError(Exception):
    """Base of all errors of this library.

    Args:
        what: one sentence, the problem.
        where: the node, plan key, module path or source line at fault.
        why: the sizes or facts that make it a problem.
        attempt: a remedy for the user to try.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", attempt: str = "") -> None:
        self.what, self.where, self.why, self.attempt = what, where, why, attempt
        rows = [("where:", where), ("why:  ", why), ("try:  ", attempt)]
        super().__init__("\n".join([what, *(f"  {label} {text}" for label, text in rows if text)]))


def first_line(error: BaseException) -> str:
    """Returns an error's text up to its first line break."""
    return str(error).partition("\n")[0]


def in_short(error: BaseException) -> str:
    """Returns an exception's type and the first line of its text: `ValueError: no such dim`."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class PlanError(ShardError):
    """The plan contradicts itself or misfits the model or world size; or no plan fits the memory."""


class CaptureError(ShardError):
    """The model can't be captured as a single graph that computes the same as the model."""


class InputError(ShardError):
    """A call of the library, or one of its arguments, is invalid."""


class RuleError(ShardError):
    """A sharding rule does not fit the op that it was written for."""


class DistributedError(ShardError):
    """The process group is missing or wrong, or its ranks disagree."""


class SliceWarning(UserWarning):
    """User code computed with this rank's slice of a parameter, perhaps meaning the full parameter."""


class InternalError(ShardError):
    """A pass produced an illegal graph: a bug in this library, not in the user's model."""

    def __init__(self, what: str, *, where: str = "", why: str = "") -> None:
        super().__init__(what, where=where, why=why, attempt="this is a defect of torchshard: please report it")
