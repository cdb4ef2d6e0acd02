"""Slices in users' code: a result is the slice of the full result, or the call warns or raises."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.checkpoint import checkpoint

import torchshard as ts
from tests.helpers import refused_input
from torchshard.testing import run_ranks

TOLD: dict[str, Callable[[Tensor], Any]] = {
    "einsum": lambda p: torch.einsum("ij,ij->", p, p),
    "addmm": lambda p: torch.addmm(p.new_zeros(p.shape[0], p.shape[0]), p, p.t()),
    "multi_dot": lambda p: torch.linalg.multi_dot([p, p.t(), p]),
    "msort": lambda p: torch.msort(p),
    "rot90": lambda p: torch.rot90(p).softmax(1),
    "softmin": lambda p: F.softmin(p, 0),
    "rms_norm": lambda p: F.rms_norm(p.t(), (p.shape[0],)),
    "fft": lambda p: torch.fft.fft(p, dim=0),
    "out": lambda p: torch.sum(p.detach(), 0, out=torch.empty(p.shape[1], dtype=p.dtype)),
    "by name": lambda p: torch.sum(input=p),
    "gumbel_softmax": lambda p: F.gumbel_softmax(p),
    "poisson": lambda p: torch.poisson(p.abs()),
    "gradient": lambda p: torch.gradient(p, dim=0),
    "index_select": lambda p: p.index_select(0, torch.tensor([0])),
    "attention": lambda p: F.scaled_dot_product_attention(p[None], p[None], p[None]),
    "vmap": lambda p: torch.vmap(lambda x: x / x.sum(), in_dims=1)(p),
    "svd_lowrank": lambda p: torch.svd_lowrank(p, 2),
    "masked": lambda p: torch.masked.sum(p, 0),
    "numpy": lambda p: p.detach().numpy(),
    "asarray": lambda p: np.asarray(p.detach()),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p.max().item(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "data_ptr": lambda p: p.data_ptr(),
    "equal": lambda p: torch.equal(p, p + 1),
    "a flat buffer": lambda p: torch.zeros(100, dtype=p.dtype)[: p.numel()].copy_(p.detach().reshape(-1)),
    "a module": lambda p: nn.Softmax(0)(p),
    "a module in a checkpoint": lambda p: checkpoint(nn.MSELoss(), p, torch.zeros_like(p), use_reentrant=False),
    "flattened": lambda p: torch._utils._flatten_dense_tensors([p.detach(), p.detach()]).norm(),
    "hessian": lambda p: torch.autograd.functional.hessian(lambda q: (q**3).sum(), p.detach()),
    "a learnt factor": lambda p: torch.ones((), requires_grad=True) * p,
    "a copy": lambda p: copy.copy(p).norm(),
    "a pickle": lambda p: pickle.loads(pickle.dumps({"w": p}))["w"].norm(),
    "a file": lambda p: _from_file(p).norm(),
    "a copy of a file": lambda p: copy.deepcopy(_from_file(p)).norm(),
    "a layer that has loaded it": lambda p: _loaded(p).weight.norm(),
    "a plain parameter": lambda p: _written(p).norm(),
    "the data of a plain parameter": lambda p: [q.data.copy_(p) for q in [nn.Parameter(torch.ones(p.shape))]],
    "heads": lambda p: p.view(2, -1, p.shape[1]),
    "its own buffer": lambda p: torch.zeros(p.shape, dtype=p.dtype).add_(p.detach()).data.norm(),
}
SILENT: dict[str, Callable[[Tensor], Any]] = {
    "files": lambda p: (_from_file(p) * 2, copy.copy(p) * 2, _loaded(p), _written(p) * 2),
    "what it is": lambda p: (p.shape, p.numel(), p.dim(), p.stride(), p.dtype, p.device, p.is_contiguous(), {p: 1}),
    "elements": lambda p: (p * 2, torch.where(p > 0, p, 0), p.to(torch.float32), torch._foreach_mul([p, p], 2.0)),
    "other dims": lambda p: (p.t(), p[:, 0], p.softmax(1), p.norm(dim=1), p.chunk(2, 1), p.reshape(-1)),
    "a moving average": lambda p: torch.zeros_like(p).lerp_(p.detach(), 0.1),
    "columns": lambda p: p.detach()[:, 0].zero_(),
    "a module of elements": lambda p: nn.GELU()(p),
    "an average of weights": lambda p: get_ema_avg_fn(0.5)(p.detach(), p, torch.tensor(1)),  # type: ignore[no-untyped-call]
    "a factor": lambda p: torch.ones(()) * p,
    "new tensors": lambda p: (p.new_zeros(()), torch.zeros(p.shape, dtype=p.dtype).add_(p.detach())),
    "copies": lambda p: (copy.deepcopy(p), p.detach().clone()),
}


def _from_file(tensor: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def _loaded(tensor: Tensor) -> nn.Linear:
    """Returns a layer outside the model that has loaded a slice."""
    layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=tensor.dtype)
    layer.load_state_dict({"weight": tensor.detach()})
    return layer


def _written(tensor: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype))
    with torch.no_grad():
        return parameter.copy_(tensor)  # type: ignore[return-value]


def _sharded() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ts.shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).double(), {"0": "column", "2": "row"})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(3, 8, dtype=torch.float64)).sum().backward()
        optimizer.step()
    return model, optimizer


def _said(rank: int) -> tuple[list[str], list[str]]:
    """Returns the functions of `TOLD` that don't warn, and the functions of `SILENT` that do."""
    model, optimizer = _sharded()
    slices = {
        "parameter": lambda: model[0].weight,
        "gradient": lambda: model[0].weight.grad,
        "optimizer state": lambda: optimizer.state[model[0].weight]["exp_avg"],
        "state dict": lambda: model.state_dict()["0.weight"],
    }
    wrong: tuple[list[str], list[str]] = [], []
    for kind, of in slices.items():
        for i, functions in enumerate((TOLD, SILENT)):
            for name, function in functions.items():
                with warnings.catch_warnings(record=True) as held:
                    warnings.simplefilter("always")
                    function(of())
                if any(issubclass(warning.category, ts.SliceWarning) for warning in held) is bool(i):
                    wrong[i].append(f"{name} of a {kind}")
    return wrong


def test_what_reads_across_a_slice_is_told_and_nothing_else() -> None:
    for silent, told in run_ranks(_said, 2):
        assert not silent and not told, (silent, told)


# --- slices that leave a process --------------------------------------------------------------------------------------


def _leaves(rank: int, folder: str) -> dict[str, bool]:
    model, optimizer = _sharded()
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    moment = optimizer.state[model[0].weight]["exp_avg"]
    state = model.state_dict()
    mean = {name: (value + state[name]) / 2 for name, value in model.state_dict().items()}
    found = {}

    dcp.save(average, checkpoint_id=folder)
    full = model.full_state_dict()
    whole = {name: torch.zeros_like(value) for name, value in full.items()}
    dcp.load(whole, checkpoint_id=folder)
    found["dcp joins copies"] = all(torch.equal(whole[name], full[name]) for name in full)

    for name, tensors in {"copies": average, "states": {"0.weight": moment}, "means": mean}.items():
        file = io.BytesIO()
        torch.save(tensors, file)
        file.seek(0)
        sent = [torch.load(file)]
        dist.broadcast_object_list(sent)  # the first rank's
        loaded = sent[0]["0.weight"]

        def copy_in(value: Tensor = loaded) -> None:
            with torch.no_grad():
                model[0].weight.copy_(value)

        found[f"{name} of another rank"] = rank == 0 or refused_input(copy_in, "slices of different ranks")
        of_weight = optimizer.state[model[0].weight]
        own, of_weight["exp_avg"] = of_weight["exp_avg"], loaded
        found[f"{name} as state"] = rank == 0 or refused_input(
            optimizer.step, "'exp_avg' of '0.weight' is another slice"
        )
        of_weight["exp_avg"], model[0].weight.grad = own, loaded
        found[f"{name} as gradient"] = rank == 0 or refused_input(
            optimizer.step, "'grad' of '0.weight' is another slice"
        )
        model[0].weight.grad = None
        if len(tensors) > 1:
            load = lambda sent=sent: model.load_state_dict(sent[0])  # noqa: E731
            found[f"{name} loaded"] = rank == 0 or refused_input(load, "another slice of '0.weight'")
        save = lambda tensors=tensors: safetensors.torch.save(dict(tensors))  # noqa: E731
        found[f"{name} in safetensors"] = refused_input(save, "safetensors can't save")
    return found


def test_what_leaves_a_process_knows_its_place_or_is_refused(tmp_path: Path) -> None:
    for found in run_ranks(_leaves, 2, str(tmp_path)):
        assert len(found) == 15 and all(found.values()), found


def _kept(rank: int) -> list[bool]:
    """Returns whether copies of a slice, also from files, behave as PyTorch's copies of a parameter."""
    model, _ = _sharded()
    weight, found = model[0].weight, []
    for made in (copy.copy(weight), _from_file(weight), pickle.loads(pickle.dumps(copy.copy(weight)))):
        (made * 2).sum().backward()
        found += [isinstance(made, nn.Parameter), made.is_leaf, torch.equal(made.grad, torch.full_like(made.grad, 2))]
        found += [torch.equal(made, weight), made.place == weight.place]
        model[0].weight = made  # as a new parameter
        found.append(type(model[0].weight) is type(weight))
    return found


def test_copies_of_parameters_are_parameters() -> None:
    assert all(all(found) and len(found) == 18 for found in run_ranks(_kept, 2))


# --- collectives over the ranks of a model ---------------------------------------------------------------------------


WORLD: Any = dist.group
COLLECTIVES: dict[str, Callable[[Any, Tensor], Any]] = {
    "all_reduce": lambda m, p: dist.all_reduce(p.grad),
    "all_reduce_coalesced": lambda m, p: dist.all_reduce_coalesced([q.grad for q in m.parameters()]),
    "all_to_all_single": lambda m, p: dist.all_to_all_single(p.data, torch.zeros_like(p)),
    "average_parameters": lambda m, p: averaging.average_parameters(iter(m.parameters()), WORLD.WORLD),
    "irecv": lambda m, p: dist.irecv(p.data, 1 - dist.get_rank()),
    "recv": lambda m, p: dist.recv(p.data, 1 - dist.get_rank()),
    "scatter": lambda m, p: dist.scatter(p.data, [p.data, p.data] if dist.get_rank() == 0 else None),
    "functional all_reduce": lambda m, p: functional.all_reduce(p.grad, "sum", WORLD.WORLD),  # type: ignore
    "functional broadcast": lambda m, p: functional.broadcast(p.grad, 0, WORLD.WORLD),  # type: ignore
}
QUIET: dict[str, Callable[[Any, Tensor], Any]] = {
    "a whole parameter": lambda m, p: dist.all_reduce(m[2].bias.grad),
    "ranks with the same slice": lambda m, p: dist.all_reduce(p.grad, group=ts.distributed.get_data_parallel_group()),
    "slices, gathered": lambda m, p: dist.all_gather([torch.zeros(p.shape, dtype=p.dtype) for _ in range(2)], p.data),
    "a slice, sent": lambda m, p: _sent(p),
}


def _sent(tensor: Tensor) -> None:
    if dist.get_rank() == 0:
        return dist.send(tensor.data, 1)
    dist.recv(torch.zeros(tensor.shape, dtype=tensor.dtype), 0)


def _collected(rank: int) -> list[str]:
    """Returns the collectives that accept slices as copies; others must accept slices without a warning."""
    model, _ = _sharded()
    model(torch.ones(3, 8, dtype=torch.float64)).sum().backward()
    weight, wrong = model[0].weight, []
    for name, collective in COLLECTIVES.items():
        before = weight.plain.clone(), weight.grad.plain.clone()
        try:
            collective(model, weight)
            wrong.append(name)
        except ts.DistributedError as error:
            assert "as copies of it" in str(error)
        assert torch.equal(before[0], weight.plain) and torch.equal(before[1], weight.grad.plain), name
    with warnings.catch_warnings():
        warnings.simplefilter("error", ts.SliceWarning)
        for collective in QUIET.values():
            collective(model, weight)
        with pytest.raises(ts.SliceWarning, match="writes other ranks' values into"):
            dist.broadcast(model.state_dict()["0.weight"], 0)
    return wrong


def test_collectives_that_take_slices_for_copies_are_refused() -> None:
    assert run_ranks(_collected, 2) == [[], []]
