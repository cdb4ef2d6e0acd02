"""The functions that users call first: `shard`, `from_pretrained`, `plan`, `meshes`. Each lists its steps."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypedDict, Unpack

import torch
from torch import nn

from torchshard.capture import check_weights, model_without_storage, shared_names
from torchshard.capture.facts import device_type
from torchshard.compiler.calls import aim_of_meshes, plan_call, plan_meshes
from torchshard.compiler.constraints import PlanLike
from torchshard.compiler.decode_example import DecodeStep, decode_example
from torchshard.compiler.meshes import MeshLike, read_mesh
from torchshard.compiler.prepare import check_examples
from torchshard.core.errors import InputError, PlanError
from torchshard.core.garbage import without_garbage_collection
from torchshard.distributed.ranks import Ranks
from torchshard.plans.objective import Objective, ObjectiveLike, check_option, read_aim, read_objective
from torchshard.plans.plan import Plan
from torchshard.plans.proposals import Proposals
from torchshard.runtime.compilation import Compiler, compiler_of
from torchshard.runtime.joining import join_ranks
from torchshard.runtime.module import ShardedModule
from torchshard.weights.adapters import with_adapter
from torchshard.weights.folder import Weights, read_folder
from torchshard.weights.transformers_models import lazy_pretrained

Inputs: TypeAlias = Literal["local", "global"]
"""The inputs that ranks pass when they split the batch: their own shard, or the full batch."""


def shard(
    model: nn.Module,
    plan: PlanLike = "auto",
    example_inputs: Sequence[object] | None = None,
    example_kwargs: Mapping[str, object] | None = None,
    *,
    mesh: MeshLike = None,
    objective: ObjectiveLike | None = None,
    inputs: Inputs = "local",
    weights: str | os.PathLike[str] | None = None,
) -> ShardedModule:
    """Splits a model over the ranks of this process's model-parallel group.

    Args:
        model: an ordinary, unsharded module, the same on every rank; it is left as it is.
        plan: "auto"; a dict of module globs and styles (`{"*.q_proj": "column", "*.o_proj": "row"}`), which pins the
            modules that it names and leaves the rest to the search; a `Plan`, or the path of a Plan's JSON.
        example_inputs, example_kwargs: the arguments of a call of the model, for the first capture; meta or fake
            tensors will do. Without them the parameters are split now and the graph is captured at the first call.
        mesh: the ranks, and what they split. By default all ranks split the weights. A dict names the axes, outermost
            first: `{"dp": 2, "tp": 4}`. Ranks along the last axis split the weights, those along the others the batch:
            each rank passes the part of the batch for its place on these, all four of a `tp` group the same. An axis of
            the batch says how its ranks store the weights, `{"dp": (2, "replicate"), "fsdp": (4, "shard")}`:
            "replicate", the default, stores all weights on each rank, as DDP does; "shard" a slice of each weight
            (vectors, and weights with fewer rows than ranks, stay replicated), which the backward gathers again, as
            FSDP and ZeRO-3 do; "shard_grad_op" slices that are gathered once in a step, as in ZeRO-2. A last axis named
            like an axis of the batch (dp, fsdp, batch, replica and others) must say what it holds. `mesh="shard"` is
            one axis of all ranks. "sequence" and "sequence_shard" split the sequence, the second dim of inputs, with
            the weights as "replicate" and "shard" store them; an axis named cp holds "sequence" by default. PyTorch's
            `DeviceMesh` does as well, with the same in a second item: `(device_mesh, {"dp": "shard"})`.
        objective: what the plan is optimised for, an `Objective` or a dict of its fields: memory, machine, mode, split,
            recompute, compile.
        inputs: if the ranks split the batch. "local": each rank passes its own part, and gets its part of results that
            have the batch. "global": each rank passes the full batch, and gets full results. The examples are such
            inputs too.
        weights: a folder of safetensors files (or one file), from which each rank reads its slices and nothing else, in
            place of the model's values; the model may be lazy or on the meta device. For models of transformers names
            and shapes are converted as `from_pretrained` converts them. Tensors that the files lack keep the model's
            values, and a warning names them.

    Returns:
        a module with the same `forward`, the same parameter names, and this rank's slices of the parameters.

    Raises:
        PlanError: the plan does not fit the model, the number of ranks or the memory, or is "auto" without example
            inputs.
        CaptureError: the model can't be captured as a graph.
        InputError: an argument is invalid: the example inputs are not those of `forward`, or are on a different
            device from the model; the mesh has another number of ranks; the weights can't be read, or are
            another model's.
        DistributedError: the ranks hold different models, or weights.
    """
    if isinstance(model, ShardedModule):
        raise InputError(
            "the model is sharded already",
            where="shard",
            why=f"it is split over {model.group.size} ranks",
            attempt="shard the unsharded model again, with the other plan",
        )
    return _shard(model, plan, example_inputs, example_kwargs, weights, _Request.of(mesh, objective, inputs))


class _Request(NamedTuple):
    """The arguments of `shard` and `from_pretrained` that don't depend on the model."""

    ranks: Ranks
    objective: Objective
    compiler: Compiler | None
    inputs: Inputs

    @classmethod
    def of(cls, mesh: MeshLike, objective: ObjectiveLike | None, inputs: Inputs) -> _Request:
        """Checks the arguments that need no other rank, then joins the ranks of the mesh.

        Raises:
            InputError: an argument is invalid.
        """
        read = read_objective(objective)
        compiler = compiler_of(read.compile, where="objective=")
        _check_inputs(inputs)
        return cls(join_ranks(mesh), read, compiler, inputs)


def _check_inputs(inputs: Inputs) -> None:
    check_option("inputs", inputs, Inputs, "kind of inputs", "each rank's part of the batch; 'global': all of it")


def _shard(
    model: nn.Module,
    plan: PlanLike,
    example_inputs: Sequence[object] | None,
    example_kwargs: Mapping[str, object] | None,
    weights: str | os.PathLike[str] | Weights | None,
    request: _Request,
) -> ShardedModule:
    aim = read_aim(request.objective, device_type(model))
    check_examples(example_inputs, example_kwargs)
    if isinstance(plan, str) and plan == "auto" and example_inputs is None and example_kwargs is None:
        raise PlanError(
            'plan="auto" needs example_inputs',
            where="shard",
            why="what is split where is found by looking at what a call computes",
            attempt="example_inputs=(x,) or example_kwargs={...}; tensors on the meta device will do",
        )
    has_example = example_inputs is not None or example_kwargs is not None
    with torch.inference_mode(False):
        # what to cut, the plan will say
        made = ShardedModule(
            model,
            plan,
            request.ranks,
            aim,
            whole_batches=request.inputs == "global",
            cut=not has_example,
            weights=weights,
            compiler=request.compiler,
        )
    if has_example:
        with torch.set_grad_enabled(torch.is_grad_enabled() and aim.trains):
            made.warm_up(tuple(example_inputs or ()), dict(example_kwargs or {}))
    return made


class Build(TypedDict, total=False):
    """How `from_pretrained` builds the model."""

    adapter: str | os.PathLike[str] | None
    """The folder of an adapter of peft (LoRA and others), with which the model is a `PeftModel`."""
    train: bool
    """Whether to capture and return the model in train mode, with the adapter's parameters trainable; otherwise in eval
    mode, as transformers returns it. After `model.train()` the next call captures a graph of its own."""
    dtype: torch.dtype | str | None
    """The dtype of the parameters; None: the config's, or the files', as in transformers."""
    device: torch.device | str | None
    """The device of the slices; None: the CPU."""


def from_pretrained(
    folder: str | os.PathLike[str],
    plan: PlanLike = "auto",
    example_inputs: Sequence[object] | None = None,
    example_kwargs: Mapping[str, object] | None = None,
    *,
    mesh: MeshLike = None,
    objective: ObjectiveLike | None = None,
    inputs: Inputs = "local",
    **build: Unpack[Build],
) -> ShardedModule:
    """The sharded model of a folder that transformers' `save_pretrained` wrote. No rank ever stores it in full.

        model = ts.from_pretrained("llama", "auto", example_kwargs={"input_ids": ids, "use_cache": False})

    Args:
        folder: with config.json and safetensors files, on this machine.
        plan, example_inputs, example_kwargs, mesh, objective, inputs: as in `shard`.
        build: how the model is built. `adapter`: the folder of an adapter of peft (LoRA and others), with which the
            model is a `PeftModel`. `train`: capture and return the model in train mode, with the adapter's parameters
            trainable; by default it is in eval mode, as transformers returns it, and `model.train()` has the next call
            capture a graph of its own. `dtype`: of the parameters; by default the config's, or the files', as in
            transformers. `device`: of the slices; by default the CPU.

    Returns:
        the model of the class that the config names.

    Raises:
        InputError: the folder has no model of transformers, or one that can't be built; or as `shard`.
        PlanError, CaptureError, DistributedError: as `shard`.
    """
    strangers = build.keys() - Build.__annotations__.keys()
    if strangers:
        name, known = min(strangers), list(Build.__annotations__)
        near = difflib.get_close_matches(name, [*known, "mesh", "objective", "inputs"], n=1)
        raise InputError(
            f"a model is not built by {name!r}",
            where=f"from_pretrained({name}=...)",
            why=f"it is built by {', '.join(known)}",
            attempt=f"{near[0]}=" if near else "objective= for what the plan is optimised for, mesh= for the ranks",
        )
    adapter, train, dtype = build.get("adapter"), build.get("train", False), build.get("dtype")
    request = _Request.of(mesh, objective, inputs)

    def built() -> tuple[nn.Module, Weights]:
        with without_garbage_collection():
            model = lazy_pretrained(folder, dtype, train=train, initialise=False)
            weights = read_folder(model_without_storage(model), shared_names(model), folder)
            if weights.missing:  # they keep the values that the constructor gives them
                model = lazy_pretrained(folder, dtype, train=train)
            return (model, weights) if adapter is None else with_adapter(model, weights, adapter, is_trainable=train)

    model, read = request.ranks.run_on_all(built, InputError, "the ranks can't build this model together")
    if build.get("device") is not None:
        model = model.to(build["device"])
    return _shard(model, plan, example_inputs, example_kwargs, read, request)


def plan(
    model: nn.Module,
    plan: PlanLike = "auto",
    example_inputs: Sequence[object] | DecodeStep | None = None,
    example_kwargs: Mapping[str, object] | None = None,
    *,
    mesh: MeshLike = None,
    objective: ObjectiveLike | None = None,
    inputs: Inputs = "local",
) -> Plan:
    """The Plan for any number of ranks, on any machine, without a process group; a model on the meta device will do.

    Args:
        plan, objective, inputs: as in `shard`.
        example_inputs, example_kwargs: as in `shard`; or a `DecodeStep`, for decoders of transformers and the objective
            {"mode": "infer"}.
        mesh: as in `shard`, with the number of ranks: `mesh=8`, `{"dp": 2, "tp": 4}`. `plan.axes` holds one plan per
            axis, outermost first.

    Raises:
        PlanError, CaptureError, InputError: as `shard`. With the objective's `memory` a given Plan must fit.
    """
    ranks = read_mesh(mesh)
    _check_inputs(inputs)
    aim = read_aim(objective, device_type(model))
    replaced: tuple[str, ...] = ()
    if isinstance(example_inputs, DecodeStep):
        example_kwargs, replaced = decode_example(model, example_inputs, example_kwargs, aim)
        example_inputs = ()
    check_examples(example_inputs, example_kwargs)
    check_weights(model)
    call = model, plan, ranks, aim, example_inputs or (), example_kwargs
    return plan_call(*call, whole_batch=inputs == "global", replaced=replaced, with_memory=ranks.parts > 1)


def meshes(
    model: nn.Module,
    plan: PlanLike = "auto",
    example_inputs: Sequence[object] | None = None,
    example_kwargs: Mapping[str, object] | None = None,
    *,
    mesh: int,
    objective: ObjectiveLike | None = None,
) -> Proposals:
    """Compares the meshes of a number of ranks by the time of a training step of one batch, fastest first.

        found = ts.meshes(model, "auto", (ids, labels), mesh=64, objective={"memory": "80GiB"})
        print(found)                                                        # a table
        model = ts.shard(model, found[0].plan, mesh=found[0].mesh)

    Each has an axis for the batch, one for the weights, which stays within a host (`Machine.domain`), or both. Meshes
    that exceed the objective's memory come last; those that could be the fastest get a plan within it.

    Args:
        plan: a dict of styles or "auto", as in `shard`.
        example_inputs, example_kwargs: the batch of all ranks, as for `inputs="global"`; meta tensors will do.
        mesh: the number of ranks.
        objective: as in `shard`, for the mode "train".

    Raises:
        CaptureError, InputError: as `plan`; or `plan` is a finished one. Meshes without a plan say why in the table.
    """
    aim = aim_of_meshes(model, plan, mesh, objective)
    check_examples(example_inputs, example_kwargs)
    check_weights(model)
    return plan_meshes(model, plan, example_inputs or (), example_kwargs, read_mesh(mesh).size, aim)
