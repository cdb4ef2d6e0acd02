"""Python code as one op of a graph: a custom `autograd.Function`, or a gradient hook on an activation.

Traced into PyTorch's ops, either would keep its forward and lose its own backward. So it stays one
op, which runs the model's code, forward and backward, on full operands. A rule can declare how to
split it:

    @ts.rule(GradientReversal)
    def reversal(call):
        return call.row("... -> ...")
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

from torchshard.core.autocast import Autocast, autocasting
from torchshard.core.modules import TensorDict
from torchshard.core.patches import Patch, Patches
from torchshard.custom_ops.fx_types import Argument, Target

OpKey: TypeAlias = Target | str
"""An op in a table of ops: an OpOverload, a function, a custom Function, or an optional op's name."""
Entry = TypeVar("Entry")


@dataclass(eq=False)
class WholeCall:
    """The target of a node that calls Python code; its arguments are the op's operands in order."""

    function: Any
    """The class of the custom Function, or the hook, of any type."""
    rebuild: Callable[[Sequence[Argument]], tuple[Sequence[Argument], dict[str, Argument]]]
    """Operands -> (args, kwargs) of the call."""
    operands: int
    """The number of operands in the arguments; further operands are the state of modules among them."""
    single: bool = True
    """Whether the call returns one tensor; otherwise it returns a list."""
    uses_rng: bool = False
    """Whether the call draws random numbers."""
    seeds: bool = False
    """Whether the call seeds from the system; ranks draw the seed from their common RNG state instead."""
    autocast: Autocast = ()
    """The autocast state of the call."""
    modules: dict[int, nn.Module] = field(default_factory=dict)
    """The id of each module among the arguments -> the copy that the call uses instead."""
    __module__: str = __name__

    @property
    def __name__(self) -> str:
        """The name in the graph's code and in listings."""
        return re.sub(r"\W", "", str(getattr(self.function, "__name__", type(self.function).__name__)))

    def __str__(self) -> str:
        return f"{getattr(self.function, '__module__', '')}.{self.__name__}"

    def __call__(self, *operands: Argument) -> Tensor | list[Tensor]:
        # modules among the arguments read their parameters from operands: autograd must see the
        # graph's tensors
        for (holder, name, _), tensor in zip(state_of(self.modules.values()), operands[self.operands :], strict=True):
            holder[name] = tensor
        args, kwargs = self.rebuild(operands[: self.operands])
        if self.modules:
            args, kwargs = pytree.tree_map(lambda leaf: self.modules.get(id(leaf), leaf), (args, kwargs))
        seeds = _common_seeds(real=not any(map(is_fake, operands))) if self.seeds else contextlib.nullcontext()
        with seeds, autocasting(self.autocast):
            result = self.run(args, kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return tensors[0] if self.single else tensors

    def run(self, args: Sequence[Argument], kwargs: dict[str, Argument]) -> object:
        """Runs the call itself; the tensors in its return value are the results."""
        return self.function.apply(*args, **kwargs)

    def bound(self, operands: Sequence[Argument]) -> dict[str, Argument]:
        """Returns the arguments by the parameter names of the Function's `forward`.

        If an argument contains operands, or an operand is not an argument, the names are the
        operands' indices.
        """
        args, kwargs = self.rebuild(operands[: self.operands])
        names = list(inspect.signature(self.function.forward).parameters)
        # a Function without setup_context has a ctx before its arguments
        names = names[len(names) - len(args) - len(kwargs) :] if len(names) > len(args) else names
        named = not kwargs and len(names) == len(args) and len(operands) == self.operands
        if named and [a for a in args if any(a is o for o in operands)] == list(operands):
            return dict(zip(names, args, strict=True))
        return {str(i): operand for i, operand in enumerate(operands)}

    def with_own_modules(self, memo: Mapping[int, object] | None = None) -> WholeCall:
        """Returns this call with copies of its modules, because a call puts operands into its modules.

        Until then the copies share their tensors. Copying those would read memory that a model
        without storage does not have.

        Args:
            memo: the id of a tensor -> the tensor that replaces it in the copies.
        """
        if not self.modules:
            return self
        shared: dict[int, object] = {id(tensor): tensor for _, _, tensor in state_of(self.modules.values())}
        return replace(self, modules=copy.deepcopy(self.modules, {**shared, **(memo or {})}))


def op_of(target: Target | str) -> Target | str:
    """Returns a target's key in tables of ops: the function of a WholeCall, any other target itself."""
    return target.function if isinstance(target, WholeCall) else target


def entry(table: Mapping[OpKey, Entry], target: Target | str) -> Entry | None:
    """Returns a table's entry for a node's target, by the op or by its name; None if it is missing.

    Ops of libraries that may not be installed are in tables by name.
    """
    op = op_of(target)
    return table.get(op) or table.get(str(op))


class HookCall(WholeCall):
    """A gradient hook on an activation: the op returns its operand; its gradient passes the hook."""

    @property
    def __name__(self) -> str:
        """The name in the graph's code and in listings."""
        return "register_hook"

    def run(self, args: Sequence[Argument], kwargs: dict[str, Argument]) -> object:
        """Returns a view of the operand, so the hook is on this node's result, not another node's."""
        view = args[0].view_as(args[0])
        if view.requires_grad:
            view.register_hook(self.function)
        return view

    def bound(self, operands: Sequence[Argument]) -> dict[str, Argument]:
        """Returns the operand, named as in `Tensor.register_hook`."""
        return {"self": operands[0]}


def state_of(modules: Iterable[nn.Module]) -> list[tuple[TensorDict, str, Tensor]]:
    """Returns the parameters and buffers of modules: (dict that has the tensor, its name there, tensor)."""
    dicts = {id(d): d for top in modules for m in top.modules() for d in (m._parameters, m._buffers)}
    return [(holder, name, t) for holder in dicts.values() for name, t in holder.items() if isinstance(t, Tensor)]


class _Seeding(threading.local):
    """How the call that runs in this thread may seed; `from_state` is None outside calls."""

    from_state: bool | None = None
    """True for a call on real tensors; False for one on fake tensors, which must not change the RNG state."""


_SEEDING = _Seeding()


def _seed_from_state(original: object) -> object:
    function = cast(Callable[[], int], original)

    def seed() -> int:
        if _SEEDING.from_state is None:
            return function()
        if not _SEEDING.from_state:
            return 0
        drawn = int(torch.randint(2**62, (), device="cpu"))
        torch.manual_seed(drawn)
        return drawn

    return seed


def _seed_if_real(original: object) -> object:
    function = cast(Callable[[int], torch.Generator], original)
    return lambda seed: torch.default_generator if _SEEDING.from_state is False else function(seed)


_SEED_PATCHES = Patches(
    *(Patch(owner, "seed", _seed_from_state) for owner in (torch, torch.random)),
    *(Patch(owner, "manual_seed", _seed_if_real) for owner in (torch, torch.random)),
)


@contextlib.contextmanager
def _common_seeds(*, real: bool) -> Iterator[None]:
    """Makes `torch.seed()` in this thread draw from the ranks' common RNG state, not the system.

    `torch.seed` has no tensor arguments, so modes do not see its calls. The function itself is
    replaced, and calls in other threads go to the original.

    Args:
        real: false for a call on fake tensors, which must not change the RNG state.
    """
    outer, _SEEDING.from_state = _SEEDING.from_state, real
    try:
        with _SEED_PATCHES:
            yield
    finally:
        _SEEDING.from_state = outer
