"""Modules over `torchshard.nn.functional`.

Rank 0 draws the weights, as PyTorch's modules do, and the ranks split them. A module's `split` maps
each split parameter to (dim, global size). `state_dict` returns this rank's slices;
`full_state_dict` of a model returns the tensors of PyTorch's own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Self, cast

import torch
from torch import Tensor, nn

from torchshard.core.errors import InputError
from torchshard.core.layouts import I, Layout, Shard
from torchshard.core.layouts import split as slice_of
from torchshard.core.mesh import MODEL
from torchshard.distributed.group import own_group
from torchshard.distributed.primitives import broadcast
from torchshard.distributed.ranks import Ranks
from torchshard.nn import functional
from torchshard.weights.parameter import ShardedParameter

Split = dict[str, tuple[int, int]]
"""Parameter -> (split dim, global size); without the replicated parameters."""
LinearStyle = Literal["column", "row", "replicate"]
EmbeddingStyle = Literal["vocab", "column", "replicate"]
LINEAR_DIMS: Mapping[str, int | None] = {"column": 1, "row": 0, "replicate": None}
EMBEDDING_DIMS: Mapping[str, int | None] = {"vocab": 0, "column": 1, "replicate": None}
"""Style -> the functions' `dim`."""
Device = torch.device | str | int | None
"""The types of `device=` in PyTorch's modules."""


class Sliced(nn.Module):
    """A module with slices of another module's parameters."""

    split: Split
    weight: Tensor
    bias: Tensor | None

    @property
    def _size(self) -> int | None:
        """The global size of the weight's split dim."""
        return self.split["weight"][1] if self.split else None

    def _take(self, whole: nn.Module, split: Split, *, share: bool) -> None:
        """Registers this rank's slices of a module's parameters.

        Args:
            share: broadcasts rank 0's parameters first, because each rank has drawn different ones.
        """
        ranks, self.split = Ranks(own_group()), split
        group = ranks.group
        for name, parameter in whole.named_parameters():
            tensor, layout = parameter.detach(), cast(Layout, I)
            if share and group.size > 1 and not tensor.is_meta:
                tensor = broadcast(tensor)
            if name in split:
                dim, size = split[name]
                tensor, layout = slice_of(tensor, Shard(dim), group.rank, group.size), Shard(dim, ((size, 1),))
            own = tensor.clone(memory_format=torch.contiguous_format)  # a view would keep the full tensor in memory
            own.requires_grad_(parameter.requires_grad)
            of = ranks.sharding({MODEL: layout})
            self.register_parameter(name, ShardedParameter.of(own, of, ranks, name, parameter.shape))

    # `_apply` is what `to`, `cuda` and `half` end in; there is no public hook (PyTorch 2.13.0).
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keeps parameters sharded: on a move to another device type, PyTorch makes them plain."""
        before = dict(self._parameters)
        super()._apply(fn, recurse)
        for name, parameter in before.items():
            replacement = self._parameters[name]
            if isinstance(parameter, ShardedParameter) and replacement is not None:
                parameter.adopt(replacement)
        return self


def _dim(dims: Mapping[str, int | None], style: object) -> int | None:
    """Returns the `dim` of a style.

    Raises:
        InputError: the style is unknown.
    """
    if not isinstance(style, str) or style not in dims:
        raise InputError(
            f"{style!r} is no style",
            where="style=",
            why=f"styles are {', '.join(map(repr, dims))}, as in a plan",
            attempt=f"style={next(iter(dims))!r}",
        )
    return dims[style]


class ParallelLinear(Sliced):
    """`torch.nn.Linear`, split by columns or by rows.

    Args:
        in_features, out_features: global sizes.
        style: "column": each rank has some of the outputs, weight `[out / n, in]`, and the result
            stays split; "row": some of the inputs, `[out, in / n]`, and the result is replicated;
            "replicate": every rank has the full weight.
        input_is_parallel, gather_output: see `functional.parallel_linear`.

    Shape: by columns `[..., in]` gives `[..., out / n]`; by rows `[..., in]`, or `[..., in / n]`
    with `input_is_parallel`, gives `[..., out]`.

    Raises:
        InputError: the style is unknown, or does not have such an option.

    Source: Megatron-LM's `ColumnParallelLinear` and `RowParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        style: LinearStyle,
        input_is_parallel: bool = False,
        gather_output: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options = functional.LinearOptions(_dim(LINEAR_DIMS, style), input_is_parallel, gather_output)
        self._set(nn.Linear(in_features, out_features, bias, device, dtype), style, options, share=True)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, style: LinearStyle, *, input_is_parallel: bool = False, gather_output: bool = False
    ) -> Self:
        """Returns a module with this rank's slices; all ranks must pass the same linear."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        options = functional.LinearOptions(_dim(LINEAR_DIMS, style), input_is_parallel, gather_output)
        module._set(linear, style, options, share=False)
        return module

    def _set(self, whole: nn.Linear, style: LinearStyle, options: functional.LinearOptions, *, share: bool) -> None:
        options.check()
        self.in_features, self.out_features, self.style = whole.in_features, whole.out_features, style
        _, self.input_is_parallel, self.gather_output = options
        by_columns = {"weight": (0, whole.out_features), "bias": (0, whole.out_features)}
        split: dict[int | None, Split] = {None: {}, 0: {"weight": (1, whole.in_features)}}
        self._take(whole, split.get(options.dim, by_columns), share=share)
        if whole.bias is None:
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        """See `functional.parallel_linear`."""
        return functional.parallel_linear(
            input,
            self.weight,
            self.bias,
            LINEAR_DIMS[self.style],
            size=self._size,
            input_is_parallel=self.input_is_parallel,
            gather_output=self.gather_output,
        )

    def extra_repr(self) -> str:
        """Returns the options of `nn.Linear`, and the style."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, style={self.style!r}"


class ParallelEmbedding(Sliced):
    """`torch.nn.Embedding`, split by rows or by columns; the result is replicated.

    Args:
        num_embeddings, embedding_dim: global sizes.
        style: "vocab": each rank has some of the rows, weight `[num / n, width]`; "column": a part
            of each row, `[num, width / n]`; "replicate": every rank has the full table, which
            `max_norm` and `sparse` need.

    Raises:
        InputError: the style is unknown, or excludes `max_norm` or `sparse`.

    Source: Megatron-LM's `VocabParallelEmbedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        style: EmbeddingStyle,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        self._set(nn.Embedding(num_embeddings, embedding_dim, *options, device=device, dtype=dtype), style, share=True)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, style: EmbeddingStyle) -> Self:
        """Returns a module with this rank's slices; all ranks must pass the same embedding."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._set(embedding, style, share=False)
        return module

    def _set(self, whole: nn.Embedding, style: EmbeddingStyle, *, share: bool) -> None:
        dim = _dim(EMBEDDING_DIMS, style)
        functional.check_embedding(dim, whole.max_norm, whole.sparse)
        self.num_embeddings, self.embedding_dim, self.style = whole.num_embeddings, whole.embedding_dim, style
        self.padding_idx, self.max_norm, self.norm_type = whole.padding_idx, whole.max_norm, whole.norm_type
        self.scale_grad_by_freq, self.sparse = whole.scale_grad_by_freq, whole.sparse
        split: dict[int | None, Split] = {None: {}, 0: {"weight": (0, whole.num_embeddings)}}
        self._take(whole, split.get(dim, {"weight": (1, whole.embedding_dim)}), share=share)

    def forward(self, input: Tensor) -> Tensor:
        """See `functional.parallel_embedding`."""
        return functional.parallel_embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
            EMBEDDING_DIMS[self.style],
            size=self._size,
        )

    def extra_repr(self) -> str:
        """Returns the options of `nn.Embedding`, and the style."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, style={self.style!r}"


_MISSING: Final[Any] = object()
"""The default of a required argument for which None has a meaning."""


class ParallelCrossEntropyLoss(nn.Module):
    """`torch.nn.CrossEntropyLoss` of logits that are split along `dim`.

    Args:
        weight: `[classes]`, unsharded, on every rank.
        dim, size: see `functional.parallel_cross_entropy`; `dim` is -1 or 1 for the classes,
            None for logits that are not split.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        dim: int | None = _MISSING,
        size: int | None = None,
        ignore_index: int = -100,
        reduction: functional.Reduction = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if dim is _MISSING:
            raise InputError(
                "ParallelCrossEntropyLoss must be told how the logits are split",
                where="ParallelCrossEntropyLoss(dim=...)",
                why="the logits themselves don't show it",
                attempt="dim=-1 for logits of some classes each (of a ParallelLinear by columns); dim=None: whole",
            )
        self.weight: Tensor | None
        self.register_buffer("weight", weight)
        self.dim, self.size = dim, size
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """See `functional.parallel_cross_entropy`."""
        return functional.parallel_cross_entropy(
            input,
            target,
            self.weight,
            dim=self.dim,
            size=self.size,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def extra_repr(self) -> str:
        """Returns the split dim of the logits, and the reduction."""
        return f"dim={self.dim}, reduction={self.reduction!r}"
