"""What a user calls: `shard`, `from_pretrained`, `plan`. The story on one screen."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchshard.capture import check_weights, flatten_call, model_without_storage, shared_names
from torchshard.capture.facts import ModelFacts, device_type
from torchshard.compiler.batches import part_of_batch, whole_batch
from torchshard.compiler.constraints import PlanLike, read_constraints, read_plan
from torchshard.compiler.decode_example import decode_example
from torchshard.compiler.meshes import DataLike, MeshLike, checked_world_size, read_mesh
from torchshard.compiler.prepare import check_examples
from torchshard.compiler.program import program
from torchshard.core.errors import InputError, PlanError
from torchshard.core.garbage import without_garbage_collection
from torchshard.core.layouts import Layout
from torchshard.core.mesh import Mesh
from torchshard.distributed.ranks import Ranks
from torchshard.plans.machine import (
    Axes,
    Inputs,
    MachineLike,
    Mode,
    Objective,
    check_inputs,
    objective,
)
from torchshard.plans.plan import Plan
from torchshard.plans.proposals import Proposal, Proposals
from torchshard.plans.proposals import meshes as proposed_meshes
from torchshard.runtime.compilation import CompileOptions, Compiler, compiler_of
from torchshard.runtime.joining import join_ranks
from torchshard.runtime.module import ShardedModule
from torchshard.weights.adapters import with_adapter
from torchshard.weights.folder import Weights, read_folder
from torchshard.weights.transformers_models import lazy_pretrained


def shard(
    model: nn.Module,
    plan: PlanLike = "auto",
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | float | None = None,
    machine: MachineLike | None = None,
    axes: Axes = "weights",
    recompute: str | Sequence[str] = (),
    mode: Mode = "train",
    mesh: MeshLike | None = None,
    data: DataLike | None = None,
    inputs: Inputs = "local",
    weights: str | os.PathLike[str] | None = None,
    compile: CompileOptions = False,
) -> ShardedModule:
    """Splits a model over the ranks of this process's model-parallel group.

    Args:
        model: an ordinary, unsharded module, the same on every rank; it is left as it is.
        plan: "auto"; a dict of module globs and styles (`{"*.q_proj": "column", "*.o_proj": "row"}`), which pins what
            it names and leaves the rest to the search; a `Plan`, or the path of a Plan's JSON.
        example_inputs, example_kwargs: what the model will be called with, for the first capture; meta or fake tensors
            will do. Where the ranks divide the batch, a part of it; with `inputs="global"` all. Without them the
            parameters are split now and the graph is captured at the first call.
        memory, machine, axes, recompute, mode: what the best plan is; see `plan`.
        mesh: axes of ranks by name, outermost first, or PyTorch's `DeviceMesh`: `{"dp": 2, "tp": 4}`. Over the last one
            the ranks divide the weights; over the others the batch. Each rank passes the part of the batch that its
            place on these has, all four of a `tp` group the same.
        data: "replicate": each rank passes its own part of the batch and holds all weights, as in DDP; "shard": a slice
            of each weight (vectors, and weights with fewer rows than ranks, stay whole), which the backward gathers
            again, as in FSDP and ZeRO-3; "shard_grad_op": slices that are gathered once in a step, as in ZeRO-2. With
            `mesh` for all axes but the last, by default "replicate"; or by name:
            `{"dp": "replicate", "fsdp": "shard"}`, as in HSDP. The axes that it names divide the batch. A last axis
            with a name of such axes (dp, fsdp, batch, replica and others) has to be named.
        inputs: where the ranks divide the batch: "local": each passes its own part, and gets its part of results that
            have the batch; "global": each passes the whole batch, and gets whole results.
        weights: a folder of safetensors files (or one file), from which each rank reads its slices and nothing else, in
            place of the values that the model has; the model may be lazy or on the meta device. For models of
            transformers names and shapes are converted as `from_pretrained` converts them. What the files lack keeps
            the model's values, and a warning names it.
        compile: True, or a dict of keyword arguments of `torch.compile`: the rank's forward and backward graphs are
            compiled at the first call. `model.compile()` has later calls compiled.

    Returns:
        a module with the same `forward`, the same parameter names, and this rank's slices of the parameters.

    Raises:
        PlanError: the plan does not fit the model, the number of ranks or the memory, or is "auto" without example
            inputs.
        CaptureError: the model can't be captured as a graph.
        InputError: the example inputs are not what `forward` takes, or are on another device than the model;
            the weights can't be read, or are another model's.
        DistributedError: the ranks hold different models, or weights.
    """
    compiler = compiler_of(compile, where="shard(compile=...)")
    if isinstance(model, ShardedModule):
        raise InputError(
            "the model is sharded already",
            where="shard",
            why=f"it is split over {model.group.size} ranks",
            attempt="shard the unsharded model again, with the other plan",
        )
    check_inputs(inputs)
    ranks = join_ranks(mesh, data)
    aim = objective(machine, memory, axes, device_type(model), recompute, mode)
    return _shard(model, plan, example_inputs, example_kwargs, ranks, aim, inputs, weights, compiler)


def _shard(
    model: nn.Module,
    plan: PlanLike,
    example_inputs: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    ranks: Ranks,
    aim: Objective,
    inputs: Inputs,
    weights: str | os.PathLike[str] | Weights | None,
    compiler: Compiler | None,
) -> ShardedModule:
    check_examples(example_inputs, example_kwargs)
    if isinstance(plan, str) and plan == "auto" and example_inputs is None and example_kwargs is None:
        raise PlanError(
            'plan="auto" needs example_inputs',
            where="shard",
            why="what is split where is found by looking at what a call computes",
            attempt="example_inputs=(x,) or example_kwargs={...}; tensors on the meta device will do",
        )
    has_example = example_inputs is not None or example_kwargs is not None
    aim = replace(aim, compiles=compiler is not None)
    with torch.inference_mode(False):
        # what to cut, the plan will say
        made = ShardedModule(
            model,
            plan,
            ranks,
            aim,
            whole_batches=inputs == "global",
            cut=not has_example,
            weights=weights,
            compiler=compiler,
        )
    if has_example:
        with torch.set_grad_enabled(torch.is_grad_enabled() and aim.trains):
            made.warm_up(tuple(example_inputs or ()), dict(example_kwargs or {}))
    return made


def from_pretrained(
    folder: str | os.PathLike[str],
    plan: PlanLike = "auto",
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    adapter: str | os.PathLike[str] | None = None,
    train: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    memory: str | float | None = None,
    machine: MachineLike | None = None,
    axes: Axes = "weights",
    recompute: str | Sequence[str] = (),
    mode: Mode = "train",
    mesh: MeshLike | None = None,
    data: DataLike | None = None,
    inputs: Inputs = "local",
    compile: CompileOptions = False,
) -> ShardedModule:
    """The sharded model of a folder that transformers' `save_pretrained` wrote: no rank ever holds it whole.

        model = ts.from_pretrained("llama", "auto", example_kwargs={"input_ids": ids, "use_cache": False})

    Args:
        folder: with config.json and safetensors files, on this machine.
        plan, example_inputs, example_kwargs, memory, machine, axes, recompute, mode, mesh, data, inputs, compile: as
            in `shard`.
        adapter: the folder of an adapter of peft (LoRA and others), with which the model is a `PeftModel`.
        train: captures and returns the model in train mode, with the adapter's parameters trainable; else in eval mode,
            as transformers returns it. `model.train()` later on has its own graph captured at the next call.
        dtype: of the parameters; None for the config's, or that of the files, as in transformers.
        device: where the slices go; None for the CPU.

    Returns:
        the model of the class that the config names.

    Raises:
        InputError: the folder has no model of transformers, or one that can't be built, and as `shard`.
        PlanError, CaptureError, DistributedError: as `shard`.
    """
    compiler = compiler_of(compile, where="from_pretrained(compile=...)")
    check_inputs(inputs)
    ranks = join_ranks(mesh, data)

    def built() -> tuple[nn.Module, Weights]:
        with without_garbage_collection():
            model = lazy_pretrained(folder, dtype, train=train, initialise=False)
            weights = read_folder(model_without_storage(model), shared_names(model), folder)
            if weights.missing:  # they keep the values that the constructor gives them
                model = lazy_pretrained(folder, dtype, train=train)
            return (model, weights) if adapter is None else with_adapter(model, weights, adapter, is_trainable=train)

    model, read = ranks.run_on_all(built, InputError, "the ranks can't build this model together")
    if device is not None:
        model = model.to(device)
    aim = objective(machine, memory, axes, device_type(model), recompute, mode)
    return _shard(model, plan, example_inputs, example_kwargs, ranks, aim, inputs, read, compiler)


def _check_decodes(mode: Mode, example_inputs: Sequence[Any], example_kwargs: Mapping[str, Any] | None) -> None:
    if mode != "infer" or example_inputs or example_kwargs:
        raise InputError(
            "batch= and length= are those of a decode step",
            where="plan",
            why="the example inputs have sizes of their own" if mode == "infer" else f"the mode is {mode!r}",
            attempt='mode="infer", batch=8, length=4096, without example inputs',
        )


def plan(
    model: nn.Module,
    plan: PlanLike = "auto",
    *,
    world_size: int | None = None,
    mesh: MeshLike | None = None,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    memory: str | float | None = None,
    machine: MachineLike | None = None,
    axes: Axes = "weights",
    recompute: str | Sequence[str] = (),
    mode: Mode = "train",
    data: DataLike | None = None,
    batch: int | None = None,
    length: int | None = None,
) -> Plan:
    """The Plan for any number of ranks, on any machine, with no process group; a model on the meta device will do.

    Args:
        plan: as in `shard`.
        memory: bytes, or a text such as "24GiB", that a step may take on a rank: parameters and activations, and those
            of training gradients and Adam's state. The plan is the fastest found that fits. Without it the weights are
            split as far as they can be without sending more than that is worth, and the plan is the fastest of those. A
            Plan that is given must fit.
        machine: a `Machine`, the path of a file that `Machine.save` wrote, or a name of `MACHINES`: "h100x8" (without
            it, where the model is not on a CPU), "cpu-memory" and "cpu-gloo" (on one: that by which the ranks talk),
            "h200x8", "b200x8", "a100x8", "mi300x8", ...
        axes: "weights" splits dims that weights bring into the model; "sequence" the sequence too, for lengths that are
            multiples of the number of ranks; "all" batch and sequence too, for inputs of exactly these sizes.
        recompute: globs of modules whose values backward computes again, in place of keeping them: "blocks.*". Values
            that were sent or drawn are kept, so no collective is sent twice and dropouts are the same. The same happens
            to what a model calls through `torch.utils.checkpoint`.
        mode: "train" plans steps with a backward; "infer" calls without gradients: a decode step, if the example inputs
            have a cache, or else a prompt. With `memory=` the plan then says the longest context that fits
            (`plan.costs.context`). A model that is sharded so runs other calls too.
        mesh, data: as in `shard`; the example inputs are one rank's part of the batch. `plan.axes` holds
            one plan per axis, outermost first.
        batch, length: in place of example inputs, for decoders of transformers and mode="infer": a decode step of so
            many sequences, with so many tokens of each in the cache.

    Raises:
        PlanError, CaptureError, InputError: as `shard`.
    """
    ranks = read_mesh(checked_world_size(world_size, mesh), mesh, data)
    check_examples(example_inputs, example_kwargs)
    check_weights(model)
    aim = objective(machine, memory, axes, device_type(model), recompute, mode)
    replaced: tuple[str, ...] = ()
    if batch is not None or length is not None:
        _check_decodes(mode, example_inputs, example_kwargs)
        example_kwargs, replaced = decode_example(model, *(1 if size is None else size for size in (batch, length)))
    divides = ranks.parts > 1
    return _planned(model, plan, ranks, aim, example_inputs, example_kwargs, replaced=replaced, with_memory=divides)


def _planned(
    model: nn.Module,
    plan: PlanLike,
    ranks: Mesh,
    aim: Objective,
    example_inputs: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None,
    *,
    replaced: Sequence[str] = (),
    with_memory: bool = False,
) -> Plan:
    constraints = read_constraints(ModelFacts.of(model), plan, ranks, aim)
    constraints = replace(constraints, steady=not aim.trains)
    with torch.set_grad_enabled(torch.is_grad_enabled() and aim.trains):
        args, inputs = tuple(example_inputs or ()), dict[str, Layout]()
        if constraints.batch_parts:
            call, inputs = whole_batch(flatten_call(model, args, example_kwargs or {}), constraints.batch_parts)
            args, example_kwargs = call.rebuild(call.tensors)
        made = program(model, constraints, args, example_kwargs, batches=inputs, replaced=replaced, repeating=True)
        return made.priced(with_memory=with_memory)


def meshes(
    model: nn.Module,
    plan: PlanLike = "auto",
    *,
    world_size: int,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    memory: str | float | None = None,
    machine: MachineLike | None = None,
    axes: Axes = "weights",
    recompute: str | Sequence[str] = (),
) -> Proposals:
    """The meshes of so many ranks beside each other: what a training step of one batch takes on each, the best first.

        found = ts.meshes(model, world_size=64, example_inputs=(ids, labels), memory="80GiB")
        print(found)                                                        # a table
        model = ts.shard(model, found[0].plan, mesh=found[0].mesh, data=found[0].data)

    Each has an axis for the batch, one for the weights, which stays within a host (`Machine.domain`), or both.

    Args:
        plan: a dict of styles or "auto", as in `shard`.
        example_inputs, example_kwargs: the batch of all ranks; tensors on the meta device will do.
        memory: bytes that a step may take on a rank. What takes more comes last.
        machine, axes, recompute: as in `plan`.

    Raises:
        CaptureError, InputError: as `plan`; or `plan` is a finished one. Meshes without a plan say why in the table.
    """
    if isinstance(read_plan(plan), Plan):
        raise InputError(
            "a finished plan is for one mesh",
            where="meshes(model, plan)",
            why="each mesh gets a plan of its own",
            attempt='a dict of module globs and styles, or "auto"',
        )
    check_examples(example_inputs, example_kwargs)
    check_weights(model)
    call = flatten_call(model, tuple(example_inputs), dict(example_kwargs or {}))
    aims = [objective(machine, limit, axes, device_type(model), recompute) for limit in dict.fromkeys((None, memory))]
    found, of_weights = list[Proposal](), dict[int, Plan]()
    for mesh, data in proposed_meshes(checked_world_size(world_size, None), aims[0].machine.domain):
        ranks, made, why = read_mesh(world_size, mesh, data), None, ""
        for aim in aims:
            shares_plan = aim.memory is None and bool(ranks.across)  # what holds weights does not change it
            given = of_weights.get(ranks.last.size, plan) if shares_plan else plan
            try:
                part = part_of_batch(call, ranks.parts) if ranks.parts > 1 else call
                args, kwargs = part.rebuild(part.tensors)
                made = _planned(model, given, ranks, aim, args, kwargs, with_memory=True)
            except (InputError, PlanError) as error:
                why = f"{error.what}; try: {error.attempt}"
                continue
            if shares_plan:
                of_weights[ranks.last.size] = made
            if Proposal(mesh, data, made, aims[-1].memory).fits:
                break
        found.append(Proposal(mesh, data, made, aims[-1].memory, why))
    return Proposals(found)
