"""Python that a graph keeps whole: a custom `autograd.Function`, and a gradient hook on an activation.

A graph of PyTorch's ops would hold the forward of either and lose its backward. So each is one op of the graph, which
runs the model's own code, forward and backward, on operands that every rank holds whole. A rule may say how to split
it:

    @ts.rule(GradientReversal)
    def reversal(call):
        return call.row("... -> ...")
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils import _pytree as pytree

from torchshard.core.autocast import Autocast, autocasting


@dataclass(eq=False)
class WholeCall:
    """What stands in a graph for a call of Python; called with the op's operands in order."""

    function: Any
    """The custom Function's class, or the hook."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Operands -> (args, kwargs) of the call."""
    operands: int
    """How many operands the arguments hold; those after them are the state of modules among the arguments."""
    single: bool = True
    """Whether it gives one tensor; else a list."""
    draws: bool = False
    """Whether it draws random numbers."""
    seeds: bool = False
    """Whether it asks the system for a seed; the ranks then take one from their common RNG state."""
    autocast: Autocast = ()
    """The autocast that it is called in."""
    modules: dict[int, nn.Module] = field(default_factory=dict)
    """The id of a module among its arguments -> the copy that is called in its place."""
    __module__: str = __name__

    @property
    def __name__(self) -> str:
        """As the graph's code and listing have it."""
        return re.sub(r"\W", "", str(getattr(self.function, "__name__", type(self.function).__name__)))

    def __str__(self) -> str:
        return f"{getattr(self.function, '__module__', '')}.{self.__name__}"

    def __call__(self, *operands: Any) -> Any:
        for (holder, name, _), tensor in zip(state_of(self.modules.values()), operands[self.operands :], strict=True):
            holder[name] = tensor
        args, kwargs = self.rebuild(operands[: self.operands])
        if self.modules:
            args, kwargs = pytree.tree_map(lambda leaf: self.modules.get(id(leaf), leaf), (args, kwargs))
        seeds = _common_seeds(real=not any(map(is_fake, operands))) if self.seeds else contextlib.nullcontext()
        with seeds, autocasting(self.autocast):
            result = self.run(args, kwargs)
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        return found[0] if self.single else found

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The call itself."""
        return self.function.apply(*args, **kwargs)

    def bound(self, operands: Sequence[Any]) -> dict[str, Any]:
        """The arguments by the names of the Function's `forward`, where each operand is one; else by their places."""
        args, kwargs = self.rebuild(operands[: self.operands])
        names = list(inspect.signature(self.function.forward).parameters)
        names = names[len(names) - len(args) - len(kwargs) :] if len(names) > len(args) else names
        plain = not kwargs and len(names) == len(args) and len(operands) == self.operands
        if plain and [a for a in args if any(a is o for o in operands)] == list(operands):
            return dict(zip(names, args, strict=True))
        return {str(i): operand for i, operand in enumerate(operands)}

    def copied(self, memo: dict[int, Any] | None = None) -> WholeCall:
        """The same call with modules of its own, whose tensors are those of `memo` (by id) or the same.

        Each call puts its operands in their place; copying them would read memory that a hollow model does not have.
        """
        if not self.modules:
            return self
        tensors = {id(tensor): tensor for _, _, tensor in state_of(self.modules.values())}
        return replace(self, modules=copy.deepcopy(self.modules, tensors | (memo or {})))


def op_of(target: Any) -> Any:
    """What a node's target is in tables of ops: the Function, or function, of a call that is kept whole."""
    return target.function if isinstance(target, WholeCall) else target


def entry(table: Mapping[Any, Any], target: Any) -> Any:
    """What a table of ops says of a node's target, by itself or by its name; None where it says nothing."""
    op = op_of(target)
    return table.get(op) or table.get(str(op))


class HookCall(WholeCall):
    """A gradient hook: its operand again, whose gradient goes through the hook."""

    @property
    def __name__(self) -> str:
        """As the graph's code and listing have it."""
        return "register_hook"

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operand as a new value."""
        made = args[0].view_as(args[0])
        if made.requires_grad:
            made.register_hook(self.function)
        return made

    def bound(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Its operand."""
        return {"self": operands[0]}


def state_of(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Tensor]]:
    """The parameters and buffers of some modules: (the dict that holds it, its name there, the tensor)."""
    dicts = {id(d): d for top in modules for m in top.modules() for d in (m._parameters, m._buffers)}
    return [(held, name, t) for held in dicts.values() for name, t in held.items() if isinstance(t, Tensor)]


@contextlib.contextmanager
def _common_seeds(*, real: bool) -> Iterator[None]:
    """`torch.seed()` seeds with a number from the RNG state that the ranks have in common, not with the system's."""
    seeding, manual = torch.seed, torch.manual_seed

    def seed() -> int:
        drawn = int(torch.randint(2**62, ()))
        manual(drawn)
        return drawn

    torch.seed = torch.random.seed = seed if real else lambda: 0
    torch.manual_seed = torch.random.manual_seed = manual if real else lambda seed: torch.default_generator
    try:
        yield
    finally:
        torch.seed = torch.random.seed = seeding
        torch.manual_seed = torch.random.manual_seed = manual
