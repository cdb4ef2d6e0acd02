"""Makes `torch.compile` around a sharded model compile the rank's graphs only, each in one piece.

Dynamo traces `ShardedModule.forward` up to `call_outside`, which runs as plain Python: the ranks'
verification can't be part of a graph. There, the rank's graphs are compiled with the options of the
user's `torch.compile`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

# PyTorch 2.13.0 has no public way to leave whole modules untraced (`trace_rules`), or to find the backend of the trace
# under way (`InstructionTranslator`, `_torchdynamo_orig_backend`).
from torch._dynamo import trace_rules
from torch._dynamo.symbolic_convert import InstructionTranslator

import torchshard.runtime
import torchshard.weights
from torchshard.runtime.compilation import Compiler


class Compilable(Protocol):
    """A sharded model."""

    def call_compiled(self, compiler: Compiler | None, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Calls the model with graphs that a compiler compiles."""


_compilers: dict[int, Compiler] = {}
"""The compilers of this process's calls of torch.compile, by number: traced code takes only constants."""
_REASON = (
    "the ranks verify that they make the same call, and run its compiled graph; "
    'in place of fullgraph=True use torchshard.shard(..., objective={"compile": True}), whose graphs are whole'
)


@torch.compiler.assume_constant_result
def tracing_compiler() -> int:
    """Returns the number of the compiler for which Dynamo is tracing."""
    backend: object = InstructionTranslator.current_tx().output.compiler_fn
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if id(backend) not in _compilers:
        options = {"backend": backend, "dynamic": getattr(backend, "dynamic", None)}
        _compilers[id(backend)] = Compiler(options, where="torch.compile(model)")
    return id(backend)


@torch.compiler.disable(reason=_REASON)
def call_outside(model: Compilable, compiler: int, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Calls a sharded model outside of Dynamo's trace.

    Args:
        compiler: the number of the compiler for its graphs.
    """
    return model.call_compiled(_compilers[compiler], args, kwargs)


def _leave_out_own_code() -> None:
    """Makes Dynamo run this library's Python untraced: parameters that check their reader, hooks, comparisons."""
    own = {f"torchshard.runtime.{module.name}" for module in pkgutil.iter_modules(torchshard.runtime.__path__)}
    for name in sorted(own - {"torchshard.runtime.module", __name__}) + ["torchshard.weights"]:
        trace_rules.add(name)


_leave_out_own_code()
