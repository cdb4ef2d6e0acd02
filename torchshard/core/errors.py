"""Every error a user can cause: four lines that say what, where, why, and what to try.

PlanError: the plan's key 'decoder.*.qproj' matches no module
  where: plan key 'decoder.*.qproj'
  why:   the model has 14 modules, none with a path that this glob matches
  try:   'decoder.*.q_proj'
"""

from __future__ import annotations


class ShardError(Exception):
    """Base of all errors of this library.

    Args:
        what: one sentence, the problem.
        where: the node, plan key, module path or source line at fault.
        why: the sizes or facts at hand that make it a problem.
        attempt: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", attempt: str = "") -> None:
        self.what, self.where, self.why, self.attempt = what, where, why, attempt
        rows = [("where:", where), ("why:  ", why), ("try:  ", attempt)]
        super().__init__("\n".join([what, *(f"  {label} {text}" for label, text in rows if text)]))


class PlanError(ShardError):
    """The plan does not fit the model, the world size, or itself."""


class CaptureError(ShardError):
    """The model can't be captured as one graph that computes what the model computes."""


class InputError(ShardError):
    """The inputs of a call (or the example inputs) are not what the model was sharded for."""


class RuleError(ShardError):
    """A sharding rule does not fit the op that it was written for."""


class DistributedError(ShardError):
    """The process group is missing, wrong, or its ranks disagree."""


class SliceWarning(UserWarning):
    """A result that was computed of this rank's slice of a parameter, by code that may have meant the whole."""


class InternalError(ShardError):
    """A pass made an illegal graph: a defect of this library, not of the user's model."""

    def __init__(self, what: str, *, where: str = "", why: str = "") -> None:
        super().__init__(what, where=where, why=why, attempt="this is a defect of torchshard: please report it")
