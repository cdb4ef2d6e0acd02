"""Common PyTorch modules and code are split without a plan: exactly, with nearly all bytes in slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import torchshard as ts
from tests.helpers import nightly
from torchshard.testing import Shard, capture

X, IMAGES, IDS = torch.randn(6, 8).double(), torch.randn(2, 8, 12).double(), torch.randint(0, 50, (4, 5))


def _split(model: nn.Module, plan: ts.Plan) -> float:
    """Returns the fraction of the parameters' bytes that is in slices."""
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    return sum(n for name, n in sizes.items() if plan.parameters.get(name, ts.I) != ts.I) / sum(sizes.values())


def _exact_and_split(model: nn.Module, *args: Any, least: float = 0.9) -> None:
    torch.manual_seed(0)
    for world in (2, 3):
        report = ts.check(model.double(), "auto", example_inputs=args, mesh=world)
        assert report.ok, str(report)
    assert _split(model, ts.plan(model, "auto", example_inputs=args, mesh=2)) >= least


# --- computed weights -------------------------------------------------------------------------------------------------


def _layers(normed: Callable[[nn.Module], nn.Module], make: Callable[[int, int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(normed(make(8, 12)), nn.ReLU(), normed(make(12, 8)))


@nightly(but=["0"])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm(dim: int | None) -> None:
    _exact_and_split(_layers(lambda m: weight_norm(m, dim=dim), nn.Linear), X)


@pytest.mark.nightly
def test_weight_norm_of_convolutions_and_the_older_one() -> None:
    _exact_and_split(_layers(weight_norm, lambda a, b: nn.Conv1d(a, b, 3)), IMAGES)
    with pytest.warns(FutureWarning):
        older = _layers(nn.utils.weight_norm, nn.Linear)
    _exact_and_split(older, X)


# --- embedding bags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(mode: str) -> None:
    _exact_and_split(nn.EmbeddingBag(50, 12, mode=mode), IDS)
    _exact_and_split(nn.EmbeddingBag(50, 12, mode=mode, padding_idx=3), IDS.flatten(), torch.tensor([0, 2, 5]))


# --- random draws, and losses -----------------------------------------------------------------------------------------


class _Mlp(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(8, 16), nn.Linear(16, 8), forward

    def forward(self, *args: Tensor) -> Any:
        return self.body(self.down(F.relu(self.up(args[0]))), *args)


def _drop_path(h: Tensor, x: Tensor) -> Tensor:
    """Stochastic depth, as in timm."""
    return x + h * x.new_empty((x.shape[0], 1)).bernoulli_(0.8).div_(0.8)


LOSSES: dict[str, Callable[..., Any]] = {
    "bernoulli_": _drop_path,
    "bce with logits": lambda h, x, y: F.binary_cross_entropy_with_logits(h, y),
    "bce of positives": lambda h, x, y: F.binary_cross_entropy_with_logits(h, y, y, pos_weight=y[0]),
    "bce": lambda h, x, y: F.binary_cross_entropy(h.sigmoid(), y),
    "mse": lambda h, x, y: F.mse_loss(h, y),
    "norms": lambda h, x: (F.normalize(h, dim=-1), h.norm(), torch.linalg.vector_norm(h, 1, dim=0), h.mean()),
}


@nightly("bce", "mse", "norms")
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_drawn_and_losses(name: str) -> None:
    args = [X] if name in ("bernoulli_", "norms") else [X, X.sigmoid()]
    _exact_and_split(_Mlp(LOSSES[name]), *args)


class _Loss(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.loss = nn.Linear(8, 512), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.up(x), y)


@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy_with_logits, lambda h, y: (h - y).square().mean()])
def test_a_mean_over_a_dynamic_batch_is_computed_on_the_slices(loss: Callable[..., Tensor]) -> None:
    example = (torch.randn(256, 8), torch.rand(256, 512))
    made = ts.plan(_Loss(loss), {"up": "column"}, example_inputs=example, mesh=2)
    assert {c.name for c in made.costs.collectives} == {"reduce", "scatter"}
    assert ts.check(_Loss(loss), made, example_inputs=example, mesh=2).ok


# --- recurrent layers ------------------------------------------------------------------------------------------------


class _Unrolled(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        state, made = None, []
        for step in x.unbind():
            state = self.cell(step, state)
            made.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(made)


@nightly("*bidirectional=True)")
@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(8, 5, num_layers=3, dropout=0.3, batch_first=True),
        nn.LSTM(8, 5, num_layers=2, bidirectional=True, bias=False),
        nn.GRU(8, 5, num_layers=2, bidirectional=True),
        nn.RNN(8, 5, batch_first=True),
        nn.RNN(8, 1, nonlinearity="relu"),
    ],
    ids=str,
)
def test_recurrent_layers_are_one_op(layer: nn.Module) -> None:
    x = torch.randn(3, 4, 8).double()
    _exact_and_split(layer, x)
    assert sum(type(n.target).__name__ == "RecurrentCall" for n in capture(layer, (x,)).graph.graph.nodes) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("cell", [nn.LSTMCell(8, 10), nn.GRUCell(8, 10, bias=False), nn.RNNCell(8, 10)], ids=str)
def test_recurrent_cells(cell: nn.Module) -> None:
    _exact_and_split(_Unrolled(cell), torch.randn(3, 4, 8).double())


def test_one_graph_of_a_recurrent_layer_for_all_lengths() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(8, 6).double()
    made = ts.plan(model, "auto", example_inputs=(torch.randn(3, 4, 8).double(),), mesh=2)
    ahead, back = made.costs.calls
    assert (ahead, back) == (3 + 3, 3)  # one per step; one per result, which the backward slices locally
    for steps in (1, 5):
        report = ts.check(model, made, example_inputs=(torch.randn(steps, 2, 8).double(),), mesh=2)
        assert report.ok, str(report)


class _Blocks(nn.Module):
    """Layers that are equal except for their dropout."""

    def __init__(self, dropouts: Sequence[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, 2, dropout=p) for p in dropouts)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


@pytest.mark.parametrize("dropouts", [[0.1 * i for i in range(1, 9)], [0.3] * 8], ids=["differ", "equal"])
def test_repeated_recurrent_layers_keep_their_own_dropout(dropouts: list[float]) -> None:
    report = ts.check(_Blocks(dropouts), {"layers.*": "column"}, example_inputs=(torch.randn(5, 3, 8),), mesh=2)
    assert report.ok, str(report)


def test_lstm_projections_run_whole_and_exact() -> None:
    _exact_and_split(nn.LSTM(8, 6, proj_size=3), torch.randn(3, 4, 8).double(), least=0.0)


# --- pins -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style, dim", [("column", 1), ("row", 0)])
def test_a_transposed_convolution_can_be_pinned(style: str, dim: int) -> None:
    model, x = nn.Sequential(nn.ConvTranspose2d(6, 4, 3), nn.ReLU()), torch.randn(2, 6, 5, 5)
    for world in (2, 3):
        made = ts.plan(model, {"0": style}, example_inputs=(x,), mesh=world)
        assert made.parameters["0.weight"] == Shard(dim)
        assert ts.check(model, made, example_inputs=(x,), mesh=world).ok


def test_a_recurrent_layer_and_a_bag_can_be_pinned() -> None:
    bag = nn.EmbeddingBag(50, 12)
    assert ts.plan(bag, {"": "column"}, example_inputs=(IDS,), mesh=2).parameters == {"weight": Shard(1)}
    lstm = nn.Sequential(nn.GRU(8, 6))
    made = ts.plan(lstm, {"0": "column"}, example_inputs=(torch.randn(3, 4, 8),), mesh=2)
    assert {str(layout) for layout in made.parameters.values()} == {"S(0; 6+6+6)"}
    with pytest.raises(ts.PlanError, match="can't be split by row"):
        ts.plan(lstm, {"0": "row"}, example_inputs=(torch.randn(3, 4, 8),), mesh=2)
