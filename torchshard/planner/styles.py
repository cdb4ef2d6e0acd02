"""The styles of a dict plan as tables: the words with their origins, and their effects on ops and modules."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import fx, nn
from torch._ops import OpOverload

from torchshard.capture.facts import ModelFacts
from torchshard.core.errors import PlanError
from torchshard.core.layouts import Layout, Shard
from torchshard.custom_ops.recurrent import RECURRENCES
from torchshard.custom_ops.whole import op_of
from torchshard.rules.convolution import CONVOLUTIONS

aten = torch.ops.aten


@dataclass(frozen=True)
class Style:
    """The split that a word of a plan requests."""

    name: str
    """'column', 'row', 'vocab', 'sequence' or 'replicate'."""
    whole_result: bool = False
    """Whether every rank must get the full result."""


_COLUMN, _ROW, _VOCAB, _REPLICATE = Style("column"), Style("row"), Style("vocab"), Style("replicate")
_SEQUENCE = Style("sequence")


class DTensorStyle(Protocol):
    """A style of `torch.distributed.tensor.parallel`: `ColwiseParallel()`, `RowwiseParallel()`."""

    # `_apply` is the method of `ParallelStyle`, to which parallelize_module passes a module (PyTorch 2.13.0).
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module: ...


StyleWord = (
    Literal[
        "column", "row", "vocab", "sequence", "replicate", 1, -1, 0, None,
        "colwise", "rowwise", "embedding_rowwise", "embedding_colwise", "colwise_rep", "rowwise_rep",
        "rowwise_split_input", "colwise_gather_output", "packed_colwise", "packed_rowwise",
        "replicated_with_grad_allreduce", "sequence_parallel",
    ]
    | DTensorStyle
)  # fmt: skip
"""A style of a module in a dict plan."""

WORDS: dict[str | int | None, Style] = {
    # our words; numbers are dims of the transposed weight [in, out], as in `nn.functional.parallel_linear`
    "column": _COLUMN, "row": _ROW, "vocab": _VOCAB, "sequence": _SEQUENCE, "replicate": _REPLICATE,
    1: _COLUMN, -1: _COLUMN, 0: _ROW, None: _REPLICATE,
    # Hugging Face's tp_plan
    "colwise": _COLUMN, "rowwise": _ROW, "embedding_rowwise": _VOCAB, "embedding_colwise": _COLUMN,
    "colwise_rep": Style("column", whole_result=True), "rowwise_rep": _ROW, "rowwise_split_input": _ROW,
    "colwise_gather_output": Style("column", whole_result=True), "packed_colwise": _COLUMN, "packed_rowwise": _ROW,
    "replicated_with_grad_allreduce": _REPLICATE, "sequence_parallel": _SEQUENCE,
    # DTensor's classes, by name
    "ColwiseParallel": _COLUMN, "RowwiseParallel": _ROW, "SequenceParallel": _SEQUENCE,
}  # fmt: skip


class Split(NamedTuple):
    """The effect of a style on an op."""

    axes: tuple[str, ...]
    """Factors of the op's row; the first one that the row can split is split."""
    weight: int | None = None
    """The split dim of the weight; None if it depends on the call."""
    bias: int | None = None
    """The split dim of the bias; None: it stays replicated."""


_CONVOLUTION = {"column": Split(("o", "g"), 0, 0), "row": Split(("c", "g"), 1)}

SPLITS: dict[object, dict[str, Split]] = {
    aten.linear.default: {"column": Split(("n",), 0, 0), "row": Split(("k",), 1), "vocab": Split(("n",), 0, 0)},
    aten.mm.default: {"column": Split(("n",)), "row": Split(("k",))},
    aten.bilinear.default: {"column": Split(("n",), 0, 0)},
    aten.matmul.default: {"column": Split(("n",)), "row": Split(("k",))},
    aten.embedding.default: {"column": Split(("e",), 1), "row": Split(("v",), 0), "vocab": Split(("v",), 0)},
    **dict.fromkeys(CONVOLUTIONS, _CONVOLUTION),
    aten.convolution.default: {"column": Split(("o",), 1, 0), "row": Split(("c",), 0)},  # transposed
    aten.embedding_bag.padding_idx: {"column": Split(("e",), 1)},
    **{function: {"column": Split(("h",))} for function in RECURRENCES},
}  # fmt: skip
"""Op -> style -> its effect."""
OPS_OF_MODULES: dict[type[nn.Module], OpOverload] = {
    nn.Linear: aten.linear.default, nn.Embedding: aten.embedding.default,
    nn.Bilinear: aten.bilinear.default, nn.EmbeddingBag: aten.embedding_bag.padding_idx,
    nn.Conv1d: aten.conv1d.default, nn.Conv2d: aten.conv2d.default, nn.Conv3d: aten.conv3d.default,
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), aten.convolution.default),
}  # fmt: skip
"""Modules that call one op with a weight and a bias: a style determines their layouts without a graph."""


def style_of(node: fx.Node) -> str:
    """Returns the word that requests an op's choice; '' if no word does."""
    choice, splits = node.meta.get("choice"), SPLITS.get(op_of(node.target))
    if choice is None or splits is None:
        return ""
    axes = {axis for axis, _ in choice.factors}
    return next((word for word, split in splits.items() if axes & {*split.axes}), "" if axes else "replicate")


def parse_style(key: str, word: object) -> Style:
    """Returns the Style of a value in a plan.

    Raises:
        PlanError: the value is not a style, or is a DTensor style with its own layouts.
    """
    name = word if isinstance(word, (str, int, type(None))) and not isinstance(word, bool) else type(word).__name__
    if name not in WORDS:
        known = sorted(w for w in WORDS if isinstance(w, str))
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
        raise PlanError(
            f"{word!r} is no style",
            where=f"plan key {key!r}",
            why=f"styles are {', '.join(known)}, or dim: 1, -1, 0, None",
            attempt=repr(near[0]) if near else "'column' or 'row'",
        )
    if not isinstance(word, (str, int, type(None))):
        _refuse_own_layouts(key, word)
    return WORDS[name]


def _refuse_own_layouts(key: str, style: object) -> None:
    default = type(style)()
    changed = [n for n in ("input_layouts", "output_layouts", "sequence_sharding", "use_local_output")
               if getattr(style, n, None) != getattr(default, n, None)]  # fmt: skip
    if changed:
        raise PlanError(
            f"{type(style).__name__} with its own {', '.join(changed)} can't be taken over",
            where=f"plan key {key!r}",
            why="layouts between ops are found by the planner here",
            attempt=f"{type(style).__name__}() without arguments; 'colwise_gather_output' for a whole result",
        )


def parameter_layouts(facts: ModelFacts, pins: Mapping[str, tuple[str, Style]]) -> dict[str, Layout]:
    """Returns the layouts of named modules' parameters, as far as the modules' types determine them."""
    layouts: dict[str, Layout] = {}
    for path, (_, style) in pins.items():
        split = SPLITS.get(OPS_OF_MODULES.get(facts.modules[path]), {}).get(style.name)
        if split is None or path in facts.grouped:
            continue
        for leaf, dim in (("weight", split.weight), ("bias", split.bias)):
            name = facts.first_names.get(f"{path}.{leaf}" if path else leaf)
            if name is not None and dim is not None and facts.tensors[name].is_parameter:
                layouts[name] = Shard(dim)
    return layouts
