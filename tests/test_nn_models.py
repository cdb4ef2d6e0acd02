"""Models of parallel modules, and tests of bugs in the first torchshard."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchshard as ts
import torchshard.distributed as tsd
import torchshard.nn.functional as tsf
from tests.test_nn import EMBEDDING_STYLES, LINEAR_STYLES, close, draw, own
from torchshard.testing import run_ranks

# --- a model ---------------------------------------------------------------------------------------------------------


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=2)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def _in_slices(whole: Whole) -> Whole:
    made: Any = copy.deepcopy(whole)
    made.table = ts.nn.ParallelEmbedding.from_embedding(whole.table, "vocab")
    made.up = ts.nn.ParallelLinear.from_linear(whole.up, "column")
    made.down = ts.nn.ParallelLinear.from_linear(whole.down, "row", input_is_parallel=True)
    made.head = ts.nn.ParallelLinear.from_linear(whole.head, "column")
    made.head.weight = made.table.weight
    return made


def _trained(rank: int) -> dict[str, Any]:
    tsd.init_process_group()
    torch.manual_seed(0)
    whole = Whole().double()
    mine = _in_slices(whole)
    ids, labels = torch.randint(11, (2, 3, 5))
    plain, of_slices = nn.CrossEntropyLoss(ignore_index=3), ts.nn.ParallelCrossEntropyLoss(dim=-1, ignore_index=3)
    losses: list[tuple[Tensor, Tensor]] = []
    norms: list[tuple[Tensor, Tensor]] = []
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (whole, mine)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        pair = plain(whole(ids).flatten(0, 1), labels.flatten()), of_slices(mine(ids).flatten(0, 1), labels.flatten())
        for loss in pair:
            loss.backward()
        losses.append(pair)
        norms.append((nn.utils.clip_grad_norm_(whole.parameters(), 0.1), ts.clip_grad_norm_(mine, 0.1)))
        for optimizer in optimizers:
            optimizer.step()
    full = ts.nn.full_state_dict(mine)
    file = io.BytesIO()
    torch.save(full, file)
    file.seek(0)
    loaded = Whole().double()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    again = _in_slices(Whole().double())
    ts.nn.load_full_state_dict(again, whole.state_dict())
    return {
        "losses": all(close(a, b) for a, b in losses),
        "norms": all(close(a, b) for a, b in norms),
        "parameters": [n for n, t in whole.state_dict().items() if not close(t, full[n])],
        "loaded": close(loaded(ids), whole(ids)),
        "loaded again": close(tsd.gather(again(ids), -1), whole(ids)),
        "whole on every rank": {n: t for n, t in mine.named_parameters() if n.startswith("norm") or n == "down.bias"},
        "slices": sum(p.numel() for p in mine.parameters()) < sum(p.numel() for p in whole.parameters()),
    }


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_model_trains_like_the_unsharded_one(world: int) -> None:
    ranks = run_ranks(_trained, world)
    for found in ranks:
        assert found["parameters"] == []
        assert all(found[k] for k in ("losses", "norms", "loaded", "loaded again", "slices")), found
        for name, value in found["whole on every rank"].items():
            assert torch.equal(value, ranks[0]["whole on every rank"][name]), name


class Oddity(nn.Linear):
    split = "train"


def _norms(rank: int) -> dict[str, bool]:
    """Compares norms with empty slices, in every dtype, and of gradients that overflow when squared."""
    tsd.init_process_group()
    found: dict[str, bool] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        rtol = 1e-2 if dtype.itemsize == 2 else 4 * torch.finfo(dtype).eps
        for norm_type in (1.0, 2.0, 3.0, float("inf")):
            whole = Oddity(3, 2).to(dtype)
            mine = ts.nn.ParallelLinear.from_linear(whole, "column")
            both = nn.Sequential(mine, Oddity(1, 1).to(dtype))
            grads = [torch.full_like(p, 100.0) for p in whole.parameters()]
            for p, g in zip(whole.parameters(), grads, strict=True):
                p.grad = g
            for p, g in zip(mine.parameters(), grads, strict=True):
                p.grad = own(g, 0).detach()
            expected, got = (
                nn.utils.clip_grad_norm_(whole.parameters(), 1.0, norm_type),
                ts.clip_grad_norm_(both, 1.0, norm_type),
            )
            close_enough = torch.allclose(got, expected, rtol=rtol, atol=0) and got.dtype == expected.dtype
            scaled = torch.allclose(mine.weight.grad, own(whole.weight.grad, 0).detach(), rtol=rtol, atol=0)  # type: ignore[arg-type]
            found[f"{dtype}, {norm_type}"] = close_enough and scaled
    return found


def test_norms_of_empty_slices_and_of_large_gradients() -> None:
    for found in run_ranks(_norms, 4):
        assert all(found.values()) and len(found) == 16, found


def _moved(rank: int) -> dict[str, bool]:
    """A move to a different device type replaces parameters, which must stay sharded."""
    tsd.init_process_group()
    with torch.device("meta"):
        layer = ts.nn.ParallelLinear(6, 4, style="column")
    before = layer.weight
    layer.to_empty(device="cpu")
    return {
        "a new parameter": layer.weight is not before and not layer.weight.is_meta,
        "of the same sharding": type(layer.weight) is type(before) and layer.weight.sharding == before.sharding,
    }


def test_parameters_stay_sharded_on_another_device() -> None:
    for found in run_ranks(_moved, 2):
        assert all(found.values()), found


def _made_before(rank: int) -> bool:
    """A module built before the group raises instead of using its full weight as a slice."""
    layer = ts.nn.ParallelLinear(6, 8, style="column", gather_output=True)
    tsd.init_process_group()
    try:
        layer(torch.ones(2, 6))
    except ts.InputError as error:
        return "of a split of 8" in str(error)
    return False


def test_a_module_made_before_the_group_is_refused() -> None:
    assert run_ranks(_made_before, 3) == [True] * 3


def _autocast(rank: int) -> list[str]:
    """Compares dtypes and values under autocast, and targets in all dtypes that PyTorch accepts."""
    tsd.init_process_group()
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6)
    wrong = []
    with torch.autocast("cpu", torch.bfloat16):
        pairs = {
            "by columns": (F.linear(x, w, b), tsf.parallel_linear(x, own(w, 0), own(b, 0), 1, gather_output=True)),
            "by rows": (F.linear(x, w, b), tsf.parallel_linear(x, own(w, 1), b, 0)),
        }
        logits, target = F.linear(x, w, b), torch.tensor([0, 1, 5, 2])
        for dtype in (torch.int64, torch.uint8):
            args = target.to(dtype)
            pairs[f"loss, {dtype}"] = (
                F.cross_entropy(logits, args), tsf.parallel_cross_entropy(tsd.scatter(logits, -1), args, dim=-1)
            )  # fmt: skip
    for name, (expected, got) in pairs.items():
        tolerance = 1e-6 if name.startswith("loss") else 3e-2
        if got.dtype != expected.dtype or not torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
            wrong.append(f"{name}: {got} for {expected}")
    return wrong


def test_autocast() -> None:
    assert run_ranks(_autocast, 2) == [[], []]


def _initial(rank: int) -> dict[str, Any]:
    """Builds modules on ranks with different random seeds."""
    tsd.init_process_group()
    torch.manual_seed(7)
    expected = nn.Linear(5, 7)
    torch.manual_seed(7 + rank)
    made = ts.nn.ParallelLinear(5, 7, style="column", gather_output=True)
    made.requires_grad_(False)
    full = ts.nn.full_state_dict(made)
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        empty = ts.nn.ParallelEmbedding(10, 4, style="vocab")
    return {
        "as on rank 0": all(torch.equal(full[n], t) for n, t in expected.state_dict().items()),
        "value": torch.allclose(made(x), expected(x)),
        "meta": (empty.weight.is_meta, tuple(empty.weight.shape)),
        "copied": torch.equal(copy.deepcopy(made)(x), made(x)),
        "text": repr(made),
    }


def test_initial_weights_are_rank_0s() -> None:
    for found in run_ranks(_initial, 2):
        assert found["as on rank 0"] and found["value"] and found["copied"]
        assert found["meta"] == (True, (5, 4)) and found["text"] == "ParallelLinear(5, 7, bias=True, style='column')"


def test_alone_they_are_pytorchs_own() -> None:
    torch.manual_seed(0)
    for style, of_table in zip(LINEAR_STYLES, EMBEDDING_STYLES, strict=True):
        max_norm = 1.0 if of_table == "replicate" else None
        torch.manual_seed(1)
        made = ts.nn.ParallelLinear(4, 6, style=style)  # type: ignore[arg-type]
        table = ts.nn.ParallelEmbedding(5, 4, max_norm=max_norm, style=of_table)  # type: ignore[arg-type]
        torch.manual_seed(1)
        linear, embedding = nn.Linear(4, 6), nn.Embedding(5, 4, max_norm=max_norm)
        ids = torch.tensor([0, 4])
        assert torch.equal(made(table(ids)), linear(embedding(ids)))
    loss = ts.nn.ParallelCrossEntropyLoss(torch.ones(6), dim=1)
    assert torch.equal(loss(torch.ones(2, 6), ids), F.cross_entropy(torch.ones(2, 6), ids))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a third dim": (lambda: ts.nn.ParallelLinear(4, 4, style=2), "2 is no style"),
    "a split input by columns": (
        lambda: ts.nn.ParallelLinear(4, 4, style="column", input_is_parallel=True),
        "no such option",
    ),
    "a gathered result by rows": (
        lambda: ts.nn.ParallelLinear(4, 4, style="row", gather_output=True),
        "no such option",
    ),
    "max_norm": (lambda: ts.nn.ParallelEmbedding(4, 4, max_norm=1.0, style="vocab"), "max_norm="),
    "sparse": (lambda: ts.nn.ParallelEmbedding(4, 4, sparse=True, style="column"), "sparse=True"),
    "no such reduction": (
        lambda: tsf.parallel_cross_entropy(torch.ones(2, 3), torch.ones(2), dim=None, reduction="max"),
        "'max'",
    ),
    "another model's state": (lambda: ts.nn.load_full_state_dict(nn.Linear(2, 2), {}), "does not fit at 'weight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(ts.InputError, match=text):
        call()


def _refused_in_a_group(rank: int) -> list[str]:
    tsd.init_process_group()
    layer, ones = ts.nn.ParallelLinear(4, 6, style="row"), torch.ones
    calls = {
        "a slice in place of the whole": (lambda: layer(torch.ones(2, 2)), "input_is_parallel=True"),
        "the whole in place of a slice": (
            lambda: tsf.parallel_linear(torch.ones(2, 4), layer.weight, dim=0, input_is_parallel=True),
            "does not fit the weight",
        ),
        "whole weights": (lambda: tsf.parallel_linear(ones(2, 4), ones(6, 4), dim=1, size=6), "a split of 6"),
        "no such padding row": (lambda: tsf.parallel_embedding(ones(1).long(), ones(2, 3), 4, dim=0), "no row 4"),
    }  # fmt: skip
    wrong = []
    for name, (call, text) in calls.items():
        try:
            call()
            wrong.append(name)
        except ts.InputError as error:
            wrong += [] if text in str(error) else [f"{name}: {error}"]
    return wrong


def test_refused_in_a_group() -> None:
    assert run_ranks(_refused_in_a_group, 2) == [[], []]


# --- bugs of the first torchshard -------------------------------------------------------------------------------------


def _groups_smaller_than_the_world(rank: int) -> bool:
    """The first torchshard used the world's ranks and sizes instead of the group's."""
    whole = draw(3, 8, grad=False)
    return close(tsd.gather(tsd.scatter(whole, -1), -1), whole) and tsd.get_world_size() == 2


def _reduce_keeps_its_input(rank: int) -> bool:
    """The first torchshard summed in place a value that a backward had saved."""
    x = draw(4)
    y = x.exp()  # its backward reads the result
    kept = y.detach().clone()
    tsd.reduce(y).sum().backward()
    return close(y, kept) and close(x.grad, kept)


def _copy_keeps_the_upstream_gradient(rank: int) -> bool:
    """The first torchshard's backward summed in place a gradient that others read too."""
    x, gradient = draw(4), torch.full((4,), 3.0, dtype=torch.float64)
    tsd.copy(x).backward(gradient)
    return bool((gradient == 3).all()) and close(x.grad, gradient * 2)


def _gathered_is_not_split(rank: int) -> bool:
    """The first torchshard marked gathered tensors as split, and its loss treated them as slices."""
    logits, target = draw(4, 6), torch.randint(6, (4,))
    gathered = tsd.gather(tsd.scatter(logits, -1), -1)
    expected = F.cross_entropy(logits, target)
    marks = [name for name in vars(gathered) if "dim" in name]
    return close(tsf.parallel_cross_entropy(gathered, target, dim=None), expected) and not marks


def _loss_weighs_classes(rank: int) -> bool:
    logits, target, weight = draw(4, 6), torch.randint(6, (4,)), torch.rand(6, dtype=torch.float64)
    loss = ts.nn.ParallelCrossEntropyLoss(weight, dim=-1)
    return close(loss(tsd.scatter(logits, -1), target), F.cross_entropy(logits, target, weight))


def _loss_ignores_an_index(rank: int) -> bool:
    """The first torchshard's one-hot vectors failed on -100."""
    logits, target = draw(4, 6), torch.tensor([1, -100, 5, -100])
    return close(tsf.parallel_cross_entropy(tsd.scatter(logits, -1), target, dim=1), F.cross_entropy(logits, target))


def _loss_of_each_row_has_one_dim(rank: int) -> bool:
    """The first torchshard returned [N, 1]."""
    logits, target = draw(4, 6), torch.randint(6, (4,))
    got = tsf.parallel_cross_entropy(tsd.scatter(logits, -1), target, dim=1, reduction="none")
    return got.shape == (4,) and close(got, F.cross_entropy(logits, target, reduction="none"))


def _a_padding_row_of_a_split_vocabulary(rank: int) -> bool:
    """The first torchshard used the row's number within the slice, so other rows lost their gradients."""
    table = draw(6, 3)
    part, ids = own(table, 0), torch.tensor([[0, 4, 5, 1]])
    tsf.parallel_embedding(ids, part, padding_idx=4, dim=0).sum().backward()
    F.embedding(ids, table, padding_idx=4).sum().backward()
    assert table.grad is not None
    return close(part.grad, own(table.grad, 0))


def _saving_without_cuda(rank: int) -> bool:
    model = ts.nn.ParallelLinear(4, 6, style="column")
    file = io.BytesIO()
    torch.save(ts.nn.full_state_dict(model), file)
    file.seek(0)
    held = torch.load(file, weights_only=True)
    return held["weight"].shape == (6, 4) and held["bias"].shape == (6,) and held["weight"].device.type == "cpu"


BUGS = (
    _groups_smaller_than_the_world, _reduce_keeps_its_input, _copy_keeps_the_upstream_gradient, _gathered_is_not_split,
    _loss_weighs_classes, _loss_ignores_an_index, _loss_of_each_row_has_one_dim, _a_padding_row_of_a_split_vocabulary,
    _saving_without_cuda,
)  # fmt: skip


def _old_bugs(rank: int) -> list[str]:
    tsd.init_process_group(group_size=2)
    torch.manual_seed(0)
    return [bug.__name__ for bug in BUGS if not bug(rank)]


def test_what_the_first_torchshard_got_wrong() -> None:
    assert run_ranks(_old_bugs, 4) == [[]] * 4
