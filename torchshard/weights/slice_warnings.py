"""Which functions of a slice give something else than a slice of the function of the whole, and the warning for them.

Functions are told apart by their names: PyTorch has many variants of each (`norm`, `norm_`, `torch.norm`), and a
function that is not listed is taken for one that computes each element by itself if its result has as many elements.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from torchshard.core.errors import SliceWarning

_DRAWN_LIKE = frozenset(["randn_like", "rand_like", "randint_like", "dropout", "alpha_dropout", "bernoulli", "normal"])
_JOINING = frozenset(["cat", "concat", "concatenate", "stack", "hstack", "vstack", "masked_select"])
"""Functions whose result has another number of elements, each of them computed from one."""
_MIXING = frozenset([
    "softmax", "log_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "flip",
    "roll", "renorm", "normalize", "layer_norm", "group_norm", "batch_norm", "matmul", "mm", "linear", "inverse", "inv",
    "matrix_power", "matrix_exp", "cholesky", "pinverse", "pinv", "norm", "vector_norm", "sum", "mean", "max", "min",
    "any", "all", "_foreach_norm", "svd", "qr", "std", "var", "__setitem__", "tril", "triu", "fill_diagonal",
    "diagonal", "index_fill", "index_add", "index_copy", "index_put", "scatter", "scatter_add", "gather",
    "take", "trace",
])  # fmt: skip
"""Functions whose result may have as many elements as the slice, but computed from several of them or their indices."""

ADVICE = (
    "model.full_state_dict() has whole parameters; ts.clip_grad_norm_ and torch.nn.utils.get_total_norm take norms of "
    "whole gradients; a penalty of weights is right as a part of the model's forward"
)


def warn_of_slice(name: str, result: object, size: int, slice_text: str, depth: int) -> bool:
    """Warns if a function did not compute each element by itself; returns whether it warned.

    Args:
        name: of the function.
        size: the number of elements of the slice that the function got.
        slice_text: what that is a slice of.
        depth: how many frames above the caller of this function the user's code is.
    """
    text = _problem(name, result, size, slice_text)
    if text:
        warnings.warn(f"{text}. {ADVICE}", SliceWarning, stacklevel=depth + 1)
    return bool(text)


def _problem(name: str, result: object, size: int, slice_text: str) -> str:
    shown = "an index" if name in ("__getitem__", "__setitem__") else f"{name}()"
    plain = name if name.startswith("__") else name.rstrip("_")
    if plain in _DRAWN_LIKE:
        problem = "draws the same numbers on all ranks, and others than for the whole"
        return f"{shown} of this rank's slice, {slice_text}, {problem}"
    results = result if isinstance(result, list | tuple) else [result]
    changes_size = any(isinstance(r, Tensor) and r.numel() != size for r in results)
    if plain in _MIXING or (changes_size and name not in _JOINING):
        return f"{shown} gives a result of this rank's slice, {slice_text}, not of the whole"
    return ""
