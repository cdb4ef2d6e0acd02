"""The kinds of lines of random models: each is a function of the program so far, a value's name and two numbers."""

from __future__ import annotations

import random

from tests.program_text import CLASSES, Kind, Writer


def _linear(w: Writer, x: str, b: int, c: int) -> str:
    wide = w.values[x].shape[-1]
    bias = f", {w.parameter(1 + b)}" if c % 2 else ""
    return f"F.linear({x}, {w.parameter(1 + b, wide)}{bias})"


def _pointwise(w: Writer, x: str, b: int, c: int) -> str:
    known = ("{}.relu()", "F.gelu({})", "{}.tanh()", "-{}", "{}.sigmoid()", "{} * 0.5 + 1", "{}.abs()",
             "F.silu({})", "{}.clamp(-0.5, 0.7)", "{}.float().double()", "torch.where({0} > 0, {0}, 0.1)",
             "({} * 2).exp().log1p()")  # fmt: skip
    return known[(b * 9 + c) % len(known)].format(x)


def _two(w: Writer, x: str, b: int, c: int) -> str:
    known = ("{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "torch.atan2({}, 2 + {}.abs())")
    return known[c % len(known)].format(x, w.like(x, b))


def _scaled(w: Writer, x: str, b: int, c: int) -> str:
    """Combines a value with a parameter that varies along one dim."""
    shape = w.values[x].shape
    dim = b % len(shape)
    return f"{x} {'+*-'[c % 3]} {w.parameter(*[n if i == dim else 1 for i, n in enumerate(shape)][dim:])}"


def _matmul(w: Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    if len(shape) < 2:
        return f"torch.outer({x}, {x})" if len(shape) else None
    return (f"{x} @ {x}.mT", f"{x}.mT @ {x}", f"torch.einsum('...ij,kj->...ik', {x}, {w.parameter(1 + b, shape[-1])})")[
        c % 3
    ]


def _norm(w: Writer, x: str, b: int, c: int) -> str:
    shape = w.values[x].shape
    wide = shape[-1]
    known = (
        lambda: f"F.layer_norm({x}, ({wide},), {w.parameter(wide)}, {w.parameter(wide)}, 1e-2)",
        lambda: f"F.rms_norm({x}, ({wide},), {w.parameter(wide)}, 1e-2)",
        lambda: f"{x}.softmax({b % len(shape)})",
        lambda: f"F.log_softmax({x}, {b % len(shape)})",
        lambda: f"F.group_norm({x}, 1, eps=1e-2)",
        lambda: f"{x} * torch.rsqrt({x}.square().mean(-1, keepdim=True) + 0.1)",
    )
    return known[c % len(known)]()


def _merged(w: Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    if len(shape) < 2:
        return f"{x}[None]"
    dim = b % (len(shape) - 1)
    return f"{x}.{('flatten', 'contiguous().flatten')[c % 2]}({dim}, {dim + 1})"


def _factored(w: Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    dim = b % len(shape)
    factors = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]
    return f"{x}.unflatten({dim}, (-1, {factors[c % len(factors)]}))" if len(shape) < 5 else None


def _viewed(w: Writer, x: str, b: int, c: int) -> str:
    """Merges all dims and cuts the result into two."""
    total = w.values[x].numel()
    first = [n for n in range(1, total + 1) if total % n == 0]
    return f"{x}.reshape({first[b % len(first)]}, -1)" if c % 2 else f"{x}.reshape(-1, {first[b % len(first)]})"


def _moved(w: Writer, x: str, b: int, c: int) -> str:
    ndim = len(w.values[x].shape)
    order = random.Random(9 * b + c).sample(range(ndim), ndim)
    known = (f"{x}.transpose({b % ndim}, {c % ndim})", f"{x}.permute({order})", f"{x}.unsqueeze({c % (ndim + 1)})",
             f"{x}.squeeze({b % ndim})", f"{x}.movedim({b % ndim}, {c % ndim})")  # fmt: skip
    return known[(b + c) % len(known)]


def _cut(w: Writer, x: str, b: int, c: int) -> str:
    shape = w.values[x].shape
    dim = b % len(shape)
    size = shape[dim]
    start = c % size
    known = (
        f"{x}.narrow({dim}, {start}, {size - start})",
        f"{x}.narrow({dim}, 0, {start + 1})",
        f"{x}.chunk({1 + c % 3}, {dim})[-1]",
        f"{x}.split({1 + c}, {dim})[0]",
        f"{x}.select({dim}, {start})" if len(shape) > 1 else f"{x}[::2]",
        f"{x}.flip({dim})",
        f"{x}.roll({c}, {dim})",
        f"{x}.tril({c - 4})",
        f"{x}.index_select({dim}, torch.arange({size}).flip(0))",
        f"F.pad({x}, ({c % 3}, {b % 2}))",
        f"{x}.unfold({dim}, {start + 1}, 1)",
    )
    return known[(b * 9 + c) % len(known)]


def _joined(w: Writer, x: str, b: int, c: int) -> str:
    other, ndim = w.like(x, b), len(w.values[x].shape)
    return (f"torch.cat([{x}, {other}], {c % ndim})", f"torch.stack([{x}, {other}], {c % (ndim + 1)})",
            f"{x}.expand(2, *{x}.shape)", f"{x}.repeat_interleave(2, {c % ndim})")[(b + c) % 4]  # fmt: skip


def _reduced(w: Writer, x: str, b: int, c: int) -> str:
    dim = b % len(w.values[x].shape)
    known = (f"{x}.sum({dim})", f"{x}.mean({dim}, keepdim=True)", f"{x}.amax({dim})", f"{x}.logsumexp({dim})",
             f"{x}.var({dim}, correction=0)", f"{x}.cumsum({dim})", f"{x}.mean()", f"{x}.norm(dim={dim}) + 1",
             f"{x}.argmax({dim}).double() + {x}.sum({dim})")  # fmt: skip
    return known[c % len(known)]


def _written(w: Writer, x: str, b: int, c: int) -> str | None:
    if x not in w.own:
        return f"{x}.clone()"
    dim = b % len(w.values[x].shape)
    known = (f"{x}.mul_(0.5)", f"{x}.add_({w.like(x, b)})", f"{x}.narrow({dim}, 0, 1).mul_(2)", f"{x}.relu_()",
             f"{x}.view(-1).add_(1)", f"{x}.select({dim}, 0).zero_()", f"{x}.transpose(0, {dim}).sub_(0.3)",
             f"{x}.masked_fill_({x} > 0.5, 0.25)", f"{x}.copy_({w.like(x, c)})")  # fmt: skip
    return known[c % len(known)]


def _random(w: Writer, x: str, b: int, c: int) -> str:
    return (f"F.dropout({x}, 0.3)", f"{x} + torch.rand_like({x})", f"{x} * torch.bernoulli({x}.detach().sigmoid())",
            f"{x} + torch.randn({list(w.values[x].shape)}, dtype={x}.dtype)")[c % 4]  # fmt: skip


def _looked_up(w: Writer, x: str, b: int, c: int) -> str:
    return f"F.embedding(ids, {w.parameter(CLASSES, 1 + b)})"


def _lost(w: Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    wide = w.parameter(CLASSES, shape[-1])
    ids = w.values["x"].shape[:2].numel()
    if len(shape) > 1 and shape[:-1].numel() == ids:
        how = ("", ", ignore_index=2", ", label_smoothing=0.1", ", reduction='sum'")[c % 4]
        return f"F.cross_entropy(F.linear({x}, {wide}).reshape(-1, {CLASSES}), ids.reshape(-1){how})"
    return (f"F.mse_loss({x}, {w.like(x, b)})", f"F.l1_loss({x}, {x}.detach() * 2)", f"F.smooth_l1_loss({x}, {x} * 0)",
            f"F.binary_cross_entropy_with_logits({x}, {x}.detach().sigmoid())")[c % 4]  # fmt: skip


def _attended(w: Writer, x: str, b: int, c: int) -> str | None:
    if len(w.values[x].shape) < 3:
        return None
    how = ("", ", is_causal=True", ", scale=0.5")[c % 3]
    return f"F.scaled_dot_product_attention({x}, {x} * {w.parameter(w.values[x].shape[-1])}, {x} + 1{how})"


def _convolved(w: Writer, x: str, b: int, c: int) -> str | None:
    shape = w.values[x].shape
    if len(shape) != 3:
        return None
    return f"F.conv1d({x}, {w.parameter(1 + b, shape[1], 1 + c % 3)}, {w.parameter(1 + b)}, padding={c % 2})"


def _picked(w: Writer, x: str, b: int, c: int) -> str:
    """Picks elements by the order of their values or by constant indices."""
    shape = w.values[x].shape
    dim = b % len(shape)
    size = shape[dim]
    order, places = f"{x}.argsort(dim={dim}, stable=True)", f"torch.arange({size}).flip(0)"
    known = (
        f"{x}.sort(dim={dim}, stable=True).values",
        f"{x}.topk({1 + c % size}, {dim}).values",
        f"{x}.gather({dim}, {order})",
        f"{x}.gather({dim}, {order}.narrow({dim}, 0, {1 + c % size}))",
        f"torch.zeros_like({x}).scatter({dim}, {order}, {x})",
        f"({x} * 2).scatter_add({dim}, {order}.narrow(0, 0, 1), {x})",
        f"{x}.index_add({dim}, {places}, {x})",
        f"{x}.index_copy({dim}, {places}, {x} * 3)",
        f"{x}[{places}]" if dim == 0 else f"{x}[:, {places}]",
        f"{x}.index_put((torch.tensor([{c % shape[0]}]),), {x}[:1] * 2)",
        f"{x} * torch.searchsorted(torch.linspace(-1, 1, 5, dtype={x}.dtype), {x}.detach().contiguous())",
    )
    return known[(b * 9 + c) % len(known)]


def _batched(w: Writer, x: str, b: int, c: int) -> str | None:
    """Ops on a batch of matrices or signals."""
    shape = w.values[x].shape
    if len(shape) < 3:
        return None
    known = (
        f"F.avg_pool1d({x}, 2, ceil_mode=True)",
        f"F.max_pool1d({x}, 1 + {c % 2})",
        f"F.adaptive_avg_pool1d({x}, {1 + b})",
        f"F.interpolate({x}, scale_factor=2)",
        f"F.conv_transpose1d({x}, {w.parameter(shape[1], 1 + b, 1 + c % 3)})",
        f"F.conv1d({x}, {w.parameter(shape[1] * (1 + b % 2), 1, 1 + c % 2)}, groups={shape[1]})",
        f"torch.fft.rfft({x}, dim={b % len(shape)}).real",
        f"torch.linalg.solve({x} @ {x}.mT + 3 * torch.eye({shape[-2]}, dtype={x}.dtype), {x})",
        f"torch.linalg.inv({x}.mT @ {x} + 2 * torch.eye({shape[-1]}, dtype={x}.dtype))",
        f"torch.baddbmm({x}.flatten(0, -3) @ {x}.flatten(0, -3).mT, {x}.flatten(0, -3), {x}.flatten(0, -3).mT, beta=2)",
    )
    return known[(b * 9 + c) % len(known)]


def _normed(w: Writer, x: str, b: int, c: int) -> str | None:
    """Normalizes by statistics of a batch, a sample or a vector."""
    shape = w.values[x].shape
    if len(shape) < 2:
        return None
    weight = w.parameter(shape[1])
    groups = [n for n in range(1, shape[1] + 1) if shape[1] % n == 0]
    known = (
        f"F.batch_norm({x}, None, None, {weight}, training=True, eps=1e-2)",
        f"F.batch_norm({x}, {weight}.detach() * 0, {weight}.detach() * 0 + 1, {weight}, eps=1e-2)",
        f"F.instance_norm({x}, eps=1e-2)",
        f"F.group_norm({x}, {groups[-1 - b % len(groups)]}, {weight}, {weight}, 1e-2)",
        f"F.normalize({x} + 0.1, dim={b % len(shape)})",
    )
    return known[c % len(known)]


def _counted(w: Writer, x: str, b: int, c: int) -> str:
    """Writes to a buffer and reads it."""
    return f"{x} * (1 + self.running.add_({x}.detach().mean(), alpha=0.1))"


KINDS: tuple[Kind, ...] = (
    _linear, _pointwise, _two, _linear, _scaled, _norm, _merged, _factored, _moved, _cut, _joined, _reduced, _written,
    _matmul, _viewed, _random, _looked_up, _lost, _attended, _convolved, _pointwise, _linear, _written, _counted,
    _picked, _batched, _normed,
)  # fmt: skip
