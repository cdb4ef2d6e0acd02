"""Verifies that all ranks make the same call of the same model, before its collectives hang or mix data up.

Each call costs one small all-reduce of a digest. It overlaps with the graph's computation until the
graph communicates (`begin_verifying`). Through memory, the digest travels with the first data that
the graph sends, and the ranks compare it before they use the data. Only if digests differ do the
ranks exchange the facts behind them; every rank then raises the error for the first fact that
differs.

The digest also covers the ranks' history since the last call (`history`). The ranks compare a new
graph once, more thoroughly: with its plan and every bit of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchshard.capture import Leaves
from torchshard.compiler.batches import SplitDims
from torchshard.compiler.program import Program
from torchshard.core.errors import DistributedError, InputError, ShardError, first_line
from torchshard.core.hashing import hash_tensor, hash_text
from torchshard.core.layouts import Layout
from torchshard.distributed.facts import begin_verifying, verify_equal
from torchshard.distributed.group import Group
from torchshard.distributed.ranks import Ranks
from torchshard.ir.graph import placeholders, where
from torchshard.ir.listing import listing
from torchshard.ir.sizes import value_text
from torchshard.plans.plan import Plan
from torchshard.runtime import digests
from torchshard.runtime.call_key import CallKey
from torchshard.runtime.compiled import Compiled, RankProgram, graph_uses_rng
from torchshard.runtime.history import EARLIER, GRADIENTS, MODEL, PARAMETER, SENT, STEPS, HistorySnapshot

VALUES = "the values of input"
RNG_STATE = "the RNG state"
CAPTURE = "the captured graph"
COMPILER = "torch.compile"
SUMS = "when gradients are summed"
SAME_SHAPE = "the ranks were called with inputs of the same shape but different values"
Purpose = Literal["a call", "a capture for example inputs"]
"""Why a call is prepared. The ranks compare it, because a capture does not run the graph's collectives."""
Sums = Literal["in its backward", "in a later one", "with those of earlier calls"]


@dataclass(frozen=True)
class PreparedCall:
    """A call as one rank sees it; its arguments fit the model."""

    inputs: Leaves
    """The inputs in global shapes: tensors without memory replace carried slices and shards of the batch."""
    compared: Leaves
    """Like `inputs`, but batch shards keep their values if the comparing ranks must have equal ones."""
    tensors: tuple[Tensor, ...]
    """The call's tensors on this rank; carried slices are plain tensors."""
    layouts: Mapping[str, Layout]
    """The layouts of the inputs that earlier calls carried to this one, by name."""
    batches: SplitDims
    """The dims of the inputs that are split over the ranks of the batch or the sequence, by name."""
    left_by: Sequence[object]
    """The call that carried each slice here: slices differ between ranks, but must come from one call."""
    arguments: object
    """The caller's (args, kwargs), which receive the carried values."""
    key: CallKey
    compiled: Compiled | None
    """The graph captured for such calls, or None."""
    compiler: str
    """The options of torch.compile; '' without it."""
    sums: Sums
    """When the ranks sum the gradients of parameters over the batch."""
    visible_state: str
    """The current values of attributes and globals that forward reads, for errors."""

    @property
    def elsewhere(self) -> dict[str, Tensor]:
        """The compared inputs whose values are on a device, so that reading them would wait for it."""
        named = zip(self.compared.names, self.compared.tensors, strict=True)
        return {f"input {name}": tensor for name, tensor in named if digests.is_elsewhere(tensor)}

    @property
    def rng_digest(self) -> str:
        """A hash of the RNG state if the call's graph draws random numbers, else ''."""
        return rng_digest(self.tensors) if self.compiled is not None and self.compiled.uses_rng else ""


def begin_verifying_call(
    group: Group, call: PreparedCall | ShardError, purpose: Purpose, snapshot: HistorySnapshot
) -> Callable[[], None]:
    """Starts to compare a call's digest with the other ranks, and its facts if the digests differ.

    Args:
        call: this rank's error if it refuses the call; without it the other ranks would wait.
        snapshot: this rank's history since the last call.

    Returns:
        a function that waits for the other ranks. It raises InputError or DistributedError if the ranks' calls or
        histories differ.
    """
    summary = _summary_of_refusal(call, purpose) if isinstance(call, ShardError) else _summary(call, purpose, snapshot)
    # The model is compared first: calls of different models differ in other facts too. Threads that each
    # train a model mix their calls.
    first = {MODEL: snapshot.facts.get(MODEL, ""), GRADIENTS: "equal up to rounding"}
    compare = begin_verifying(
        group,
        lambda: first | dict(summary.facts()),
        call_error,
        "the ranks were called with different arguments",
        digest=hash_text(f"{summary.text} {snapshot.facts}"),
        unlike=snapshot.slice_digest,
        near=snapshot.gradients,
        rides=True,
    )

    def verify() -> None:
        same_slice = compare()
        if same_slice and snapshot.slice_name:
            raise _overwritten_slice(snapshot.slice_name)
        group.handshake.recent_unverified.clear()

    return verify


def tell_failure(group: Group, failure: ShardError | None) -> None:
    """Shares with a group whether a rank found, on the mesh's other axis, that calls differ.

    Raises:
        ShardError: on every rank of the group, if one found a difference.
    """
    what = "the ranks can't make this call together"
    all_same = verify_equal(group, {}, DistributedError, what, unlike=int(failure is not None))
    if failure is not None:
        raise failure
    if not all_same:
        raise DistributedError(
            what,
            where="the call",
            why="another rank that this one works with has found a difference along the other axis of the mesh",
            attempt="the error of that rank, which says what differs",
        )


class _Summary(NamedTuple):
    """A call as a short text for the digest and as facts for errors; both must match on all ranks."""

    text: str
    facts: Callable[[], Mapping[str, str]]
    """Called only if the digests differ: texts of tensors and structures take too long for each call."""


def _summary_of_refusal(refusal: ShardError, purpose: Purpose) -> _Summary:
    why = first_line(refusal)
    return _Summary(f"{why} {purpose}", lambda: {"the arguments": why, "the purpose": purpose})


def _summary(call: PreparedCall, purpose: Purpose, snapshot: HistorySnapshot) -> _Summary:
    compared = call.compared
    values = [digests.values_digest(tensor) if digests.is_here(tensor) else 0 for tensor in compared.tensors]
    shapes = [tuple(tensor.shape) for tensor in compared.tensors]
    # A graph stores the digest of its key: hashing the key's long text would take longer than all the rest.
    key = call.key.digest if call.compiled is None else call.compiled.digest
    rng = call.rng_digest

    def facts() -> dict[str, str]:
        shown = {"the arguments": "they fit", "the tensors of the call": ", ".join(compared.names) or "none"}
        for name, tensor, own, value in zip(compared.names, compared.tensors, call.tensors, values, strict=True):
            text = f"a part {value_text(own)}" if name in call.batches else value_text(tensor)
            shown |= {f"input {name}": text, f"{VALUES} {name}": str(value)}
        return shown | {
            "the arguments that are not tensors": str(call.inputs.structure),
            "the calls that have left split inputs": str(call.left_by),
            "numbers among the arguments": str(dict(zip(call.inputs.number_names, call.inputs.numbers, strict=True))),
            "the attributes and globals that forward reads": call.visible_state,
            **call.key.facts,
            CAPTURE: "to be captured now" if call.compiled is None else "captured before",
            RNG_STATE: rng,
            "the purpose": purpose,
            COMPILER: call.compiler or "nothing is compiled",
            SUMS: call.sums,
            **snapshot.facts,
        }

    seen = [*values, *call.inputs.numbers, *call.left_by]
    return _Summary(f"{key} {shapes} {seen} {rng} {call.compiled is None} {purpose} {call.compiler} {call.sums}", facts)


def verify_same_program(ranks: Ranks, made: RankProgram, call: PreparedCall) -> None:
    """Compares a new graph, its plan and constants, all bits of the inputs, and the RNG state if it draws.

    Raises:
        DistributedError: the programs, constants or RNG states differ.
        InputError: the inputs' values differ.
    """
    if ranks.count == 1:
        return
    program, what = made.program, "the ranks made different programs of the model"
    facts = {"the graph": listing(program.graph, sources=False), "the plan": program.plan.to_json(question=False)}
    ranks.verify(facts, what)
    ranks.verify(_constants(program), "the ranks' forwards read different tensors", PASSED)
    if made.of_batch:
        of_batch = Plan(tuple(plan for plan, _ in made.of_batch))
        ranks.verify({"the plans of the batch": of_batch.to_json(question=False)}, what)
        ranks.verify_along(program.axes[-1].name, {"the graph": listing(made.graph, sources=False)}, what)

    def verify_inputs() -> None:
        named = zip(call.compared.names, call.compared.tensors, strict=True)
        values = {f"input {name}": digests.describe_content(tensor) for name, tensor in named}
        verify_equal(ranks.group, values, InputError, SAME_SHAPE, attempt=SAME_BATCH)

    ranks.on_replicas(verify_inputs, InputError, SAME_SHAPE)
    if graph_uses_rng(program.graph):
        facts = {RNG_STATE: rng_digest(call.tensors)}
        for group in (ranks.group, ranks.replicas):
            ranks.run_on_all(partial(verify_equal, group, facts, call_error, SAME_SHAPE), DistributedError, SAME_SHAPE)


PASSED = "equal tensors on every rank; a rank's part of a batch as an argument of the call"


def _constants(program: Program) -> dict[str, str]:
    """Returns {path and line that reads it: content} of the tensors that forward reads beyond its arguments."""
    held = {n.meta["path"]: n for n in placeholders(program.captured.graph.graph) if n.meta["kind"] == "constant"}
    lines = {path: next((where(user) for user in node.users), path) for path, node in held.items()}
    constants = program.captured.constants
    return {f"{path}, read at {line}": digests.describe_content(constants[path]) for path, line in lines.items()}


def rng_digest(tensors: Sequence[Tensor]) -> str:
    """Returns a hash of the RNG state that a call with these tensors draws from."""
    on_gpu = any(t.is_cuda for t in tensors)
    return f"{hash_tensor(torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()):x}"


def _overwritten_slice(name: str) -> DistributedError:
    return DistributedError(
        f"all ranks hold the same slice of {name!r}",
        where=f"parameter or buffer {name!r}",
        why="each rank had a slice of its own when the model was sharded: one was copied over the others since, by a "
        "broadcast, a wrapper of torch.distributed, or an initialiser that draws the same numbers on every rank",
        attempt="no broadcast of a sharded model's parameters (ts.shard has compared them); load_full_state_dict",
    )


_ERRORS: dict[str, tuple[str, str]] = {
    RNG_STATE: (
        "the ranks' RNG states differ, and the model draws random numbers",
        "torch.manual_seed(0) on every rank before the call; a generator of its own for what only some ranks draw",
    ),
    STEPS: (
        "the ranks' optimizers have taken different steps since the last call",
        "the same steps of the same optimizers on every rank",
    ),
    MODEL: (
        "the ranks have called different models",
        "the same models in the same order on every rank; threads mix their calls in an order of each rank's own",
    ),
    GRADIENTS: (
        "the ranks' losses differ: their backwards computed other gradients of the results",
        "the same loss of the same results, labels and random numbers on every rank",
    ),
    SENT: (
        "the ranks have run different backwards, or in another order, since the last call",
        "the same backwards in the same order on every rank",
    ),
    SUMS: ("some ranks are within no_sync()", "no_sync() around the same calls on every rank"),
    COMPILER: ("the ranks would compile the model with different options", "the same objective= on every rank"),
    CAPTURE: ("some ranks would capture a graph that others have", "the same calls since ts.shard on every rank"),
}
"""A differing fact -> (the DistributedError's sentence, its advice). Other facts are about arguments."""

SAME_BATCH = "the same batch on all ranks of a group; mesh= where each has a part of its own"


def call_error(what: str, *, where: str, why: str, attempt: str) -> ShardError:
    """Returns the error for the first fact that differs between the ranks; `where` is that fact."""
    if where.startswith((PARAMETER, f"{EARLIER} parameter")):
        what = "the ranks' weights have drifted apart"
        attempt = "the same updates on every rank; load_full_state_dict of one of them"
        return DistributedError(what, where=where, why=why, attempt=attempt)
    if where in _ERRORS:
        what, attempt = _ERRORS[where]
        return DistributedError(what, where=where, why=why, attempt=attempt)
    if where.startswith((VALUES, EARLIER)):
        what, attempt = SAME_SHAPE, SAME_BATCH
    return InputError(what, where=where, why=why, attempt=attempt)
