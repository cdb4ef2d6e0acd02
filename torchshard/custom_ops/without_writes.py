"""The functional form of an op that writes to its arguments: it returns the new values instead.

before    out = mylib::update(x, mean, var)                                        writes to mean and var
after     out, mean_1, var_1 = WithoutWrites(mylib::update)(x, mean, var)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from torchshard.core.errors import InputError
from torchshard.custom_ops.fx_types import Argument


@dataclass(frozen=True)
class WithoutWrites:
    """The target of a node for an op without a functional overload; arguments are in schema order."""

    op: OpOverload[..., object]
    __module__: str = __name__

    @property
    def __name__(self) -> str:
        """The name in the graph's code and in listings."""
        return self.op._schema.name.split("::")[1].rstrip("_")

    def __str__(self) -> str:
        return str(self.op)

    def __call__(self, *values: Argument) -> tuple[Argument, ...]:
        """Returns the op's results that are not arguments, then new values of arguments it writes to."""
        arguments, written = list(values), list[Tensor]()
        for i, argument in enumerate(self.op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                arguments[i] = pytree.tree_map_only(Tensor, Tensor.clone, arguments[i])
                written += pytree.tree_leaves(arguments[i])
        named = {a.name: v for a, v in zip(self.op._schema.arguments, arguments, strict=True) if a.kwarg_only}
        shapes = [tensor.shape for tensor in written]
        found = self.op(*arguments[: len(arguments) - len(named)], **named)
        if shapes != [tensor.shape for tensor in written]:
            raise InputError(
                f"{self.op} changes the shape of what it writes to",
                where="the call",
                why=f"of {[*map(tuple, shapes)]} it makes {[tuple(tensor.shape) for tensor in written]}",
                attempt="a call of the unsharded model first: what it leaves in its buffers then has its last shape",
            )
        results = found if isinstance(found, (tuple, list)) else [found]
        new = [r for r, known in zip(results, self.op._schema.returns, strict=False) if known.alias_info is None]
        return (*new, *written)
