"""Seeded faults: one line of the library made wrong at a time, and whether a test sees it.

Each fault is put into a copy of the library, and the tests that should see it run there. One that no test sees is a
hole in the tests.

    caught     a test fails
    MISSED     all tests pass
    broken     the tests can't run: the fault proves nothing

    python benchmarks/mutants.py
    python benchmarks/mutants.py --only dual mean
    python benchmarks/mutants.py --check

With `--check` no test runs but `ts.check`, on a model that comes by the line, in four dtypes (`benchmarks/checked.py`):
each must see the fault, as often as float64 does.

    seen       in every dtype, as often in each
    UNSEEN     in none
    UNLIKE     in some dtypes more often than in others
    apart      no model: no check's numbers depend on the line
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 600
FAILED = 1
"""pytest's exit code where tests ran and some failed."""


@dataclass(frozen=True)
class Fault:
    """A line of the library, and a wrong one in its place."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str
    """Arguments of pytest: the tests that should see it."""
    models: str = ""
    """Models of `benchmarks/checked.py` that come by the line; none where a check's numbers do not depend on it: it
    counts for real processes, for sizes that are told or for mistakes in a rule, or is the check's own."""


LAYOUTS, RULES, RANKS = (
    "tests/test_layouts.py",
    "tests/test_rules.py tests/test_wrong_rules.py tests/test_own_rules.py",
    "tests/test_collectives.py tests/test_groups.py",
)
PASSES = (
    "tests/test_passes.py tests/test_functionalize.py tests/test_written_buffers.py tests/test_mutations.py "
    "tests/test_check_parts.py tests/test_rounding.py"
)

FAULTS = (
    # layouts
    Fault(
        "dual of R",
        "core/layouts.py",
        "_DUALS: dict[Layout, Layout] = {R: P, P: R}",
        "_DUALS: dict[Layout, Layout] = {P: R}",
        f"{LAYOUTS} tests/test_conversions.py",
        models="mlp",
    ),
    Fault(
        "chunks rounded down",
        "core/layouts.py",
        "step = -(-count // world)",
        "step = max(count // world, 1)",
        LAYOUTS,
        models="mlp_uneven",
    ),
    Fault(
        "parts without their offset",
        "core/layouts.py",
        "        offset += count * unit\n",
        "        pass\n",
        LAYOUTS,
        models="fused_by_split",
    ),
    Fault(
        "parts joined rank by rank",
        "core/layouts.py",
        "[column[part] for part in range(len(parts)) for column in columns]",
        "[column[part] for column in columns for part in range(len(parts))]",
        LAYOUTS,
        models="gathered_parts",
    ),
    Fault(
        "every rank holds rank 0's part of a dynamic size",
        "core/layouts.py",
        "return size // parts_size(shard.parts) * local_size(shard.parts, rank, world)",
        "return size // parts_size(shard.parts) * local_size(shard.parts, 0, world)",
        f"{LAYOUTS} tests/test_notation.py",
    ),
    Fault(
        "repeated parts once",
        "core/choices.py",
        "return _Composed(scaled, repeated=True)",
        "return _Composed(scaled)",
        "tests/test_notation.py tests/test_transformers.py",
        models="multihead",
    ),
    Fault(
        "a Partial on every rank",
        "core/layouts.py",
        "return tensor if rank == 0 else torch.zeros_like(tensor)",
        "return tensor",
        f"{LAYOUTS} {RULES}",
    ),
    Fault(
        "too small a unit",
        "core/layouts.py",
        "    if count % world == 0:\n        return 1\n",
        "    if count >= world:\n        return 1\n",
        f"{LAYOUTS} tests/test_notation.py",
        models="attention_7_heads",
    ),
    # conversions
    Fault(
        "copy without its reduce",
        "core/conversions.py",
        'Conversion("copy", _I, _R, "none", "reduce")',
        'Conversion("copy", _I, _R, "none", "copy")',
        "tests/test_conversions.py tests/test_collectives.py",
    ),
    Fault(
        "gather backward as of R",
        "core/conversions.py",
        'Conversion("gather", Shard, _I, "all_gather", "scatter")',
        'Conversion("gather", Shard, _I, "all_gather", "reduce_scatter")',
        "tests/test_conversions.py tests/test_collectives.py",
    ),
    Fault(
        "all_to_all forgets to turn",
        "distributed/ops.py",
        "args = (*args[2:4], *args[0:2], args[4]) if len(args) == 5 else args",
        "args = args",
        RANKS,
    ),
    # kernels
    Fault(
        "the average in place of the sum",
        "distributed/kernels.py",
        'return Exchange("all_reduce", summable(x), lambda received: received.to(x.dtype))',
        'return Exchange("all_reduce", summable(x), lambda received: received.to(x.dtype) / group.size)',
        RANKS,
    ),
    Fault(
        "padding not cut off",
        "distributed/kernels.py",
        "join([pieces[r].narrow(dim, 0, n) for r, n in enumerate(slices.widths)], source)",
        "join([pieces[r] for r, n in enumerate(slices.widths)], source)",
        RANKS,
    ),
    Fault(
        "reduce_scatter in rank 0's width",
        "distributed/kernels.py",
        "return received.narrow(dim, 0, slices.widths[group.rank]).contiguous()",
        "return received.narrow(dim, 0, slices.widths[0]).contiguous()",
        RANKS,
    ),
    Fault(
        "pad at the front",
        "distributed/kernels.py",
        "whole.narrow(source.dim, begin, end - begin).copy_(x.narrow(source.dim, at, end - begin))",
        "whole.narrow(source.dim, 0, end - begin).copy_(x.narrow(source.dim, at, end - begin))",
        RANKS,
    ),
    Fault(
        "conjugation not done",
        "distributed/kernels.py",
        "return x.resolve_conj().resolve_neg().contiguous()",
        "return x.contiguous()",
        "tests/test_by_hand.py tests/test_objects.py",
    ),
    # notation
    Fault(
        "a sum that is not Partial",
        "core/choices.py",
        "summed = I if set(factors) & row.options.reduced else P",
        "summed = I",
        f"{RULES} -k linear",
        models="mlp",
    ),
    Fault("axes of no tensor", "core/notation.py", "    if strangers:\n", "    if False:\n", "tests/test_notation.py"),
    Fault(
        "unsplittable axes split",
        "core/choices.py",
        "return factor not in row.unsplittable and (factor in row.equal or (isinstance(size, int) and size > 0))",
        "return factor in row.equal or (isinstance(size, int) and size > 0)",
        f"{RULES} -k layer",
        models="queries",
    ),
    Fault(
        "a local size of the plain split",
        "core/rows.py",
        "return size / self.world if parts == EQUAL else local_size(parts, self.rank, self.world)",
        "return -(-size // self.world)",
        f"{RULES} -k split",
        models="fused_by_split_7_heads",
    ),
    # rules
    Fault(
        "a mean of means",
        "rules/reductions.py",
        "replacements = {name: local for d, name in enumerate(letters(ndim)) if d in dims}",
        "replacements = {}",
        f"{RULES} -k mean",
        models="mean",
    ),
    Fault(
        "a mean that forgets the batch",
        "rules/reductions.py",
        "count = aten.sym_size.int(x, d) * (count * ranks)",
        "pass",
        "tests/test_split_by_default.py -k dynamic_batch",
        models="mean_of_the_batch",
    ),
    Fault(
        "a mean over slices of a sequence that counts a slice alone",
        "rules/reductions.py",
        "count = aten.sym_size.int(x, d) * (count * ranks)",
        "count = aten.sym_size.int(x, d) * count",
        f"{RULES} -k 'equal_slices and mean'",
    ),
    Fault(
        "a graph for lengths that divide takes all",
        "capture/assumptions.py",
        "if divided and not all(known.admits(sizes[size]) for size, known in sizes_divided.items()):",
        "if False:",
        "tests/test_sequence.py -k any_length",
    ),
    Fault(
        "a graph for one sample per rank takes more",
        "capture/assumptions.py",
        "min(size // ranks, 2)",
        "min(size // ranks, 1)",
        "tests/test_batch_training.py -k one_element",
    ),
    Fault(
        "norms of slices are added",
        "rules/gathered_reductions.py",
        "return cast(aten.linalg_vector_norm.default(_gathered(ctx, own), order, [0]), acc_dtype(result), result)",
        "return cast(aten.sum.dim_IntList(_gathered(ctx, own), [0]), acc_dtype(result), result)",
        f"{RULES} -k norm",
        models="norm",
    ),
    Fault(
        "a variance of the slices' alone",
        "rules/gathered_reductions.py",
        "deviations = aten.add.Tensor(aten.add.Tensor(deviations, squares), between)",
        "deviations = aten.add.Tensor(deviations, squares)",
        f"{RULES} -k 'var or std'",
        models="variance",
    ),
    Fault(
        "the largest share a gradient rank by rank",
        "rules/gathered_reductions.py",
        "count = ops.reduce.default(aten.sum.dim_IntList(equal, dims, True, dtype=acc_dtype(dtype)), ctx.group)",
        "count = aten.sum.dim_IntList(equal, dims, True, dtype=acc_dtype(dtype))",
        f"{RULES} -k 'amax or amin'",
        models="largest",
    ),
    Fault(
        "queries of a causal mask split as of none",
        "rules/attention.py",
        'local |= {"l": _causal_rows(call)} if is_causal and not drops else {}',
        "pass",
        f"{RULES} -k scaled_dot",
        models="queries",
    ),
    Fault(
        "channels dropped rank by rank",
        "rules/random.py",
        "mask if dim > 1 else _own_part(ctx, mask, dim, ctx.parts(factor) or ())",
        "mask if dim > 1 else aten.feature_dropout.default(aten.ones_like.default(x), p, True)",
        f"{RULES} -k feature_dropout",
        models="dropout_of_channels",
    ),
    Fault(
        "a unit looks back at another step",
        "custom_ops/recurrent.py",
        "outputs.append(units if whole else state[0])",
        "outputs.insert(0, units if whole else state[0])",
        "tests/test_split_by_default.py -k recurrent_layers",
        models="recurrent",
    ),
    Fault(
        "units of another direction",
        "custom_ops/recurrent.py",
        "return torch.stack(outputs[::-1] if backward else outputs), state",
        "return torch.stack(outputs), state",
        "tests/test_split_by_default.py -k recurrent_layers",
        models="recurrent",
    ),
    Fault(
        "masked rows not zero",
        "rules/indexing.py",
        "return aten.masked_fill.Scalar(rows, aten.unsqueeze.default(outside, -1), 0.0)",
        "return rows",
        f"{RULES} -k embedding",
        models="gpt_hidden_30",
    ),
    Fault(
        "padding row of each rank",
        "rules/indexing.py",
        'own_padding = padding_idx - ctx.start("v") if padding_idx >= 0 else -1',
        "own_padding = padding_idx",
        f"{RULES} -k embedding",
        models="padding",
    ),
    Fault(
        "softmax of a rank's own largest",
        "rules/normalization.py",
        "return ops.all_reduce_max.default(aten.amax.default(x, [dim], True), ctx.group)",
        "return aten.amax.default(x, [dim], True)",
        f"{RULES} -k softmax",
        models="softmax",
    ),
    Fault(
        "a norm's own count",
        "rules/normalization.py",
        "dims, count = [d - len(shape) for d in range(len(shape))], math.prod(shape)",
        "dims, count = [d - len(shape) for d in range(len(shape))], -(-math.prod(shape) // 2)",
        f"{RULES} -k layer_norm",
        models="layer_norm",
    ),
    Fault(
        "ignored targets counted",
        "rules/losses.py",
        "scale = aten.masked_fill.Scalar(scale, ignored, 0.0)\n",
        "pass\n",
        f"{RULES} -k cross_entropy",
        models="ignored_labels",
    ),
    Fault(
        "a loss over its own count",
        "rules/losses.py",
        "mean = aten.div.Tensor(total, ops.reduce.default(count, ctx.group))",
        "mean = aten.div.Tensor(total, count)",
        f"{RULES} -k 'cross_entropy or nll'",
        models="ignored_rows",
    ),
    Fault(
        "a mask of the slice's size",
        "rules/random.py",
        "dim, own = layout.dim, [aten.sym_size.int(x, i) for i in range(ndim)]",
        "return aten.dropout.default(x, p, True)\n    dim, own = 0, []",
        f"{RULES} -k dropout",
        models="dropout",
    ),
    Fault(
        "another rank's part of a repeated mask",
        "rules/random.py",
        "for start, stop in ranges(parts, ctx.rank, ctx.world)]",
        "for start, stop in ranges(parts, 0, ctx.world)]",
        "tests/test_transformers.py -k dropout",
        models="multihead",
    ),
    Fault(
        "x + y jointly linear with whole x",
        "rules/pointwise.py",
        "return [{0, 1}] if n == 2 else []",
        "return [{0}, {1}] if n == 2 else []",
        f"{RULES} -k add",
        models="residual",
    ),
    Fault(
        "a product linear in both",
        "rules/linear_algebra.py",
        "BOTH = ({0}, {1})",
        "BOTH = ({0, 1},)",
        f"{RULES} -k mm",
        models="product",
    ),
    Fault(
        "a diagonal that stays",
        "rules/cuts.py",
        'return call.target(x, diagonal + (start if factor == "a" else -start))',
        "return call.target(x, diagonal)",
        f"{RULES} -k 'tril or triu'",
        models="triangle",
    ),
    Fault(
        "sizes of a refinement that failed",
        "rules/common_factors.py",
        "            found[factor] = step\n",
        "            sizes[factor] = step\n",
        f"{RULES} -k reshape",
        models="reshaped",
    ),
    # passes
    Fault(
        "the bias on every rank",
        "passes/rewrites.py",
        "        (aten.linear.default, *CONVOLUTIONS, aten.convolution.default),\n",
        "        (*CONVOLUTIONS, aten.convolution.default),\n",
        "tests/test_passes.py tests/test_models.py",
        models="mlp",
    ),
    Fault(
        "random numbers in the order of memory",
        "passes/normalize.py",
        "changed |= _replace(module, dict.fromkeys((*BY_ELEMENT, *DRAWS), by_index))",
        "pass",
        "tests/test_random.py",
        models="dropout_channels_last",
    ),
    Fault(
        "autocast blocks are left out",
        "passes/normalize.py",
        "    changed |= explicit_casts(module)\n",
        "",
        "tests/test_autocast.py",
        models="autocast",
    ),
    Fault(
        "unused norms are dropped",
        "ir/effects.py",
        "bool(node.is_impure(impure_random=False)) or writes_statistics(node.target, bound_args(node))",
        "bool(node.is_impure(impure_random=False))",
        "tests/test_functionalize.py tests/test_written_buffers.py",
        models="unused_norm",
    ),
    Fault(
        "a view not taken anew",
        "passes/aliases.py",
        "        version = self.version.get(self.root(node), 0)\n",
        "        version = self.seen_version.get(node, 0)\n",
        "tests/test_functionalize.py tests/test_written_buffers.py",
        models="an_older_view",
    ),
    Fault(
        "a written buffer not stored",
        "passes/functionalize.py",
        "    store_written(aliases)\n",
        "",
        "tests/test_functionalize.py tests/test_written_buffers.py",
        models="writes",
    ),
    Fault(
        "one conversion for all layouts",
        "passes/insert.py",
        "node = self._inserted.get((value, layout))",
        "node = next((n for (v, _), n in self._inserted.items() if v is value), None)",
        f"{PASSES} tests/test_models.py",
        models="two_layouts",
    ),
    Fault(
        "conversions in the wrong order",
        "passes/insert.py",
        "with graph.inserting_after(source) if after",
        "with graph.inserting_after(value) if after",
        "tests/test_passes.py",
    ),
    Fault(
        "sizes of rank 0",
        "passes/localize.py",
        "shape = local_shape(plain_shape(value), layout, coordinate.rank, coordinate.axis.size)",
        "shape = local_shape(plain_shape(value), layout, 0, coordinate.axis.size)",
        PASSES,
    ),
    Fault(
        "a bias fused where layouts differ",
        "passes/simplify.py",
        "if choice.results == (result,) and all(map(serves, operands(node), choice.operands)):",
        "if True:",
        f"{PASSES} tests/test_models.py",
        models="bias_apart",
    ),
    Fault(
        "a cast that is none",
        "passes/rewrites.py",
        "same = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device",
        "same = a.shape == b.shape and a.device == b.device",
        "tests/test_passes.py",
        models="truncated",
    ),
    Fault(
        "every mask is causal",
        "passes/causal.py",
        "return mask.ndim >= 2 and torch.equal(",
        "return mask.ndim >= 2 or torch.equal(",
        "tests/test_causal.py",
        models="masked",
    ),
    Fault(
        "a composite op of other sizes",
        "passes/decompose.py",
        "return sizes.error_on_new_guards() if sizes is not None else nullcontext()",
        "return nullcontext()",
        "tests/test_decompose.py",
    ),
    # capture, parameters
    Fault(
        "no_grad forgotten",
        "capture/regions.py",
        "inside = {n for n in ops if not modes_of(n).grad}",
        "inside = set()",
        "tests/test_capture.py tests/test_capture_modes.py tests/test_autocast.py",
        models="no_grad",
    ),
    Fault(
        "all ranks hold rank 0's slice",
        "weights/materialize.py",
        "sharding.local(tensor.detach(), place)",
        "sharding.local(tensor.detach(), dict.fromkeys(place, 0))",
        "tests/test_models.py",
        models="mlp",
    ),
    Fault(
        "frozen parameters trained",
        "weights/materialize.py",
        "nn.Parameter(sliced, tensor.requires_grad)",
        "nn.Parameter(sliced)",
        "tests/test_rounding.py -k frozen",
        models="frozen",
    ),
    # the check itself
    Fault(
        "only outputs compared",
        "checking/compare.py",
        "    for name, grad in expected.parameter_grads.items():\n",
        "    for name, grad in ():\n",
        "tests/test_mutations.py tests/test_check_parts.py tests/test_rounding.py",
    ),
    Fault(
        "noise as large as the largest gradient",
        "checking/compare.py",
        "floors = {place: min(measured.get(place, 0.0), ceiling) for place, ceiling in highest.items()}",
        "floors = highest",
        "tests/test_check_parts.py -k small_gradient",
    ),
    Fault(
        "no wider dtypes",
        "checking/check.py",
        "report = _with_wider(_report(trial, sides, tolerance_of(compiled.captured.graph)), trial, sides)",
        "report = _report(trial, sides, tolerance_of(compiled.captured.graph))",
        "tests/test_rounding.py -k smaller_than_rounding",
    ),
    Fault(
        "noise that undoes a choice",
        "checking/rounding.py",
        'if node.op == "call_function" and _is_moved(value, operands):',
        "if False:",
        "tests/test_check_parts.py -k rounding_noise",
    ),
    Fault(
        "what rounding may do excuses the capture",
        "checking/check.py",
        "    if any(c.error > tolerance for c in captured):\n        return report\n",
        "",
        "tests/test_rounding.py -k flip",
    ),
    Fault(
        "what rounding may do is excused where wider dtypes differ too",
        "checking/report.py",
        "return all(c.error <= self.tolerance for c in self.comparisons) and all(r.ok for r in self._in_wider)",
        "return all(c.error <= self.tolerance for c in self.comparisons)",
        "tests/test_rounding.py -k flip",
    ),
    Fault(
        "what rounding hides of the capture",
        "checking/check.py",
        "return _with_captured(report, reference, args, kwargs)",
        "return report",
        "tests/test_rounding.py -k hidden_by_rounding",
    ),
    Fault(
        "gradients of frozen parameters are not compared",
        "checking/compare.py",
        'comparisons += [Comparison("parameter gradient", name, math.inf) for name in sorted(frozen)]',
        "pass",
        "tests/test_rounding.py -k ranks_train",
    ),
    # what ranks have done, and slices in the hands of users
    Fault(
        "gradients of the results are not compared",
        "distributed/facts.py",
        "close = spread <= TOLERANCE * largest",
        "close = True",
        "tests/test_habits.py tests/test_habits_told.py",
    ),
    Fault(
        "a step is not counted",
        "runtime/optimizers.py",
        "            cast(StepCounter, model).note_step(settings)\n",
        "            pass\n",
        "tests/test_history.py tests/test_habits.py tests/test_habits_told.py",
    ),
    Fault(
        "norms of slices pass for those of wholes",
        "weights/over_ranks.py",
        "joined = ranks.reduced(powers, dist.ReduceOp.SUM, eager=what)",
        "joined = powers",
        "tests/test_state.py tests/test_state_parts.py tests/test_habits.py tests/test_habits_told.py",
    ),
    Fault(
        "what is computed by elements is no slice any more",
        "weights/slice_calls.py",
        "return mark(leaf, of, False) if isinstance(of, SliceType) and not is_given else leaf",
        "return leaf",
        "tests/test_habits.py tests/test_habits_told.py",
    ),
    Fault(
        "globals of the functions that forward calls are not watched",
        "capture/visible.py",
        "        self._read_globals(str(function.__module__), function.__globals__, names.globals)\n",
        "        pass\n",
        "tests/test_visible.py tests/test_visible_held.py tests/test_visible_hooks.py tests/test_visible_ranks.py",
    ),
    Fault(
        "values that hold others have no text of their type and place",
        "capture/watch.py",
        'return f"a {self._numbers.of(type(value))} at {visible.places[id(value)]}"',
        'return ""',
        "tests/test_visible_held.py -k wherever",
    ),
    Fault(
        "iterators pass for constants",
        "capture/attributes.py",
        "        return Unknown()  # its position can't be read without moving it\n",
        "        return value\n",
        "tests/test_visible_hooks.py -k iterator",
    ),
    Fault(
        "results that forward leaves in attributes are not told of",
        "runtime/capturing.py",
        "        self._note_left(planned.captured.left)\n",
        "        pass\n",
        "tests/test_attributes.py",
    ),
    # weights and checkpoints
    Fault(
        "pieces without their place in the slice",
        "weights/boxes.py",
        "itertools.accumulate((b - a for a, b in own), initial=0)",
        "itertools.repeat(0)",
        "tests/test_layouts.py -k parts_of",
    ),
    Fault(
        "runs without the gaps between them",
        "weights/boxes.py",
        "range(0, size * stride * itemsize, stride * itemsize)",
        "range(0, size * length * itemsize, length * itemsize)",
        "tests/test_folders.py -k part_of_a_file",
    ),
    Fault(
        "parts written in the order of the slice",
        "weights/safetensors_writer.py",
        "values.permute(order), place.permute(order)",
        "values.permute(order), place",
        "tests/test_checkpoint_files.py -k its_place_says",
    ),
    Fault(
        "read parts of slices from their beginning",
        "weights/boxes.py",
        "tuple((at + first - start, at + last - start)",
        "tuple((at, at + last - first)",
        "tests/test_layouts.py -k parts_of",
    ),
    Fault(
        "committed before all have written",
        "checkpoints/completion.py",
        '                self._wait(number, f"rank {number} did not finish writing")\n',
        "                pass\n",
        "tests/test_checkpoints.py tests/test_checkpoint_refusals.py -k 'cannot_write or elsewhere'",
    ),
    Fault(
        "placements of a sharding are joined in the order in which they split",
        "core/sharding.py",
        "for axis, layout in reversed(self):",
        "for axis, layout in self:",
        "tests/test_layouts.py -k whole",
    ),
    Fault(
        "of a value that one axis splits the next one reads a part's size",
        "passes/localize.py",
        "    for source in list(module.graph.nodes):\n",
        "    for source in module.graph.find_nodes(op='placeholder'):\n",
        "tests/test_meshes.py -k dropouts",
    ),
    Fault(
        "gradients of two axes in one message",
        "passes/bucket.py",
        "_Message(of, node.target, node.args[-1],",
        "_Message(of, node.target, None,",
        "tests/test_meshes.py -k own_groups",
    ),
    Fault(
        "a slice of a slice is gathered along one axis",
        "distributed/ranks.py",
        "in reversed([*enumerate(of)]):",
        "in [*enumerate(of)][-1:]:",
        "tests/test_mesh_ranks.py -k slices_of_slices",
    ),
    Fault(
        "ranks that hold the same slice count it each in a norm",
        "runtime/training.py",
        "_is_slice(p) and ranks.counts(p)",
        "_is_slice(p)",
        "tests/test_mesh_ranks.py -k by_the_norm",
    ),
    Fault(
        "a norm over two models is that over the ranks of the first",
        "distributed/ranks.py",
        "max(found, key=lambda ranks: ranks.count)",
        "found[0]",
        "tests/test_mesh_ranks.py -k by_the_norm",
    ),
    Fault(
        "of ranks with the same slice each counts for PyTorch's norm",
        "weights/over_ranks.py",
        ".where(counts, 0.0)",
        "",
        "tests/test_meshes.py tests/test_mesh_ranks.py -k whole_batch",
    ),
    Fault(
        "a slice that one axis has found to differ is not told along the other",
        "runtime/agreement.py",
        "tell_failure(self._ranks.group, failure)",
        "_raise(failure) if failure else None",
        "tests/test_mesh_ranks.py -k told",
    ),
    Fault(
        "ranks that share weights don't compare their parts of the batch",
        "runtime/reader.py",
        "compared = unsplit if self._agreement.is_across else inputs",
        "compared = inputs",
        "tests/test_mesh_ranks.py -k told",
    ),
    Fault(
        "a refusal is told to the ranks of one axis alone",
        "runtime/agreement.py",
        "        except ShardError as error:\n            failure = error\n",
        "        except ShardError:\n            raise\n",
        "tests/test_mesh_ranks.py -k told",
    ),
    Fault(
        "sums over one axis are priced as of whole weights, where another axis holds slices",
        "compiler/slice_costs.py",
        "found = tuple(each[key] for each in later if key in each)",
        "found = ()",
        "tests/test_meshes.py -k sent_of_slices",
    ),
    Fault(
        "a gather waits for the op before the one that needs it",
        "planner/timeline.py",
        "before, now = now, max(now, sent(op.gathers[way], before))",
        "before, now = now, max(now, sent(op.gathers[way], now))",
        "tests/test_costs.py",
    ),
    Fault(
        "a tensor is kept for the backward that needs its size",
        "passes/partition.py",
        "if node.target in (aten.sym_size.int, aten.sym_numel.default):",
        "if False:",
        "tests/test_step.py -k for_its_size",
    ),
    Fault(
        "Python's operators of a replacement have no rule over the next axis",
        "passes/next_axis.py",
        "if node.target in OPERATORS and is_tensor(node)",
        "if False and is_tensor(node)",
        "tests/test_meshes.py -k operators",
    ),
    Fault(
        "gradients that were kept are not summed with those of the next call",
        "runtime/step.py",
        "(own if parameter is None else with_kept(parameter, own))",
        "own",
        "tests/test_later_sums.py -k 'all_calls or orders'",
    ),
    Fault(
        "gradients that were kept of parameters that a call does not reach stay unsummed",
        "runtime/runner.py",
        "            sum_kept(p for p in self._store.parameters.values() if id(p) not in reached)\n",
        "            pass\n",
        "tests/test_later_sums.py -k other_parameters",
    ),
    Fault(
        "a gradient of which a part is not summed may be read",
        "weights/parameter.py",
        "                raise _unsummed(self.path)\n",
        "                pass\n",
        "tests/test_later_sums.py -k orders",
    ),
    Fault(
        "zero_grad leaves what was kept",
        "weights/parameter.py",
        "            self.unsummed = {}\n        with unwatched():",
        "        with unwatched():",
        "tests/test_later_sums.py -k orders",
    ),
    Fault(
        "a gradient that is not asked for is kept",
        "runtime/step.py",
        "return parameter if torch._C._will_engine_execute_node(node) else None",
        "return parameter",
        "tests/test_later_sums.py -k orders",
    ),
    Fault(
        "weights in slices are gathered before autocast casts them",
        "ir/graph.py",
        'return node.op == "call_function" and is_weight(before_casts(node))',
        'return node.op == "call_function" and node.target is _COPY and is_weight(before_casts(node))',
        "tests/test_batches.py -k cast",
    ),
    Fault(
        "gradients of casts are summed in bfloat16",
        "passes/__init__.py",
        "    widen(joint)\n",
        "",
        "tests/test_batches.py -k cast",
    ),
    Fault(
        "weights in slices are kept whole for the backward",
        "ir/gathered_again.py",
        "if is_weight(weight := before_casts(value)):",
        "if is_weight(weight := before_casts(value)) and False:",
        "tests/test_batches.py -k in_slices",
    ),
    Fault(
        "all weights in slices are gathered at once",
        "passes/schedule.py",
        "due = {begin, *(n for n in waiting if place[n] < latest and (n.target is not wait or _frees_memory(n)))}",
        "due = {begin}",
        "tests/test_batches.py -k in_slices",
    ),
    Fault(
        "whole gradients of weights in slices are held until the backward ends",
        "passes/schedule.py",
        "(n.target is not wait or _frees_memory(n))",
        "n.target is not wait",
        "tests/test_batches.py -k in_slices",
    ),
    Fault(
        "background saves without copies",
        "checkpoints/copies.py",
        'copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())',
        "copied = tensor.detach()",
        "tests/test_checkpoint_habits.py -k 'copies or changes_'",
    ),
    Fault(
        "optimizer states by the order of parameters",
        "checkpoints/loading.py",
        "by_index |= dict(zip(indices, names, strict=True))",
        "by_index |= dict(zip(indices, sorted(names), strict=True))",
        "tests/test_checkpoints.py -k elsewhere",
    ),
    Fault(
        "failed loads are not undone",
        "checkpoints/loading.py",
        "for step in reversed(undo):",
        "for step in ():",
        "tests/test_checkpoint_habits.py -k fails_last",
    ),
    Fault(
        "states cast to the parameters' dtype",
        "checkpoints/loading.py",
        "or loaded.dtype == saved.dtype",
        "or True",
        "tests/test_checkpoint_habits.py -k any_optimizer",
    ),
    Fault(
        "an optimizer that reads the model has an owner",
        "runtime/optimizer_trials.py",
        "if not _equal(*ends):",
        "if False:",
        "tests/test_full_steps.py -k unsharded_run",
    ),
    Fault(
        "random numbers of an owner",
        "runtime/optimizer_trials.py",
        "if ops.of_model or trial.has_drawn or begun() != before:",
        "if False:",
        "tests/test_full_steps.py -k unsharded_run",
    ),
    Fault(
        "steps of elements are not tried with slices",
        "runtime/optimizer_trials.py",
        "is_element = ops.elementwise and trial.is_of_elements(step, group, full)",
        "is_element = ops.elementwise",
        "tests/test_full_steps.py -k unsharded_run",
    ),
    Fault(
        "steps of elements are not watched",
        "runtime/optimizers.py",
        "if is_found and not is_compiled() else None",
        "if False else None",
        "tests/test_full_steps.py -k reads_more_later",
    ),
    Fault(
        "ops in tensors that wrap others are taken for elementwise",
        "runtime/optimizer_trials.py",
        "if any(map(is_wrapper, tensors)):",
        "if False:",
        "tests/test_full_steps.py -k comes_with_size",
    ),
    Fault(
        "the matrices of a trial have few elements",
        "runtime/optimizer_trials.py",
        "float(_LONGEST_VECTOR if len(whole) == 1 else _LARGEST_MATRIX)",
        "1e2",
        "tests/test_full_steps.py -k small_parameters",
    ),
    Fault(
        "loaded codes are cast to floats",
        "runtime/optimizer_states.py",
        "optimizer.state[parameter] = as_given(optimizer.state[parameter], given)",
        "pass",
        "tests/test_full_steps.py -k goes_on",
    ),
    Fault(
        "a mask of dropout is cut in one piece for blocks",
        "core/choices.py",
        "if options.contiguous and any(",
        "if False and any(",
        "tests/test_context.py -k dropout-4",
    ),
    Fault(
        "a mean over blocks divides by the rank's rows",
        "core/layouts.py",
        "return not self.repeated or isinstance(self.parts, Blocks)",
        "return not self.repeated",
        "tests/test_layouts.py -k blocks",
    ),
    Fault(
        "blocks of any size are alike",
        "core/choices.py",
        "_Composed(Blocks(str(sizes[term[split[0]]]), after), repeated=True)",
        '_Composed(Blocks("n"), repeated=True)',
        "tests/test_notation.py -k blocks",
    ),
    Fault(
        "a rank's queries begin at the first",
        "rules/attention.py",
        "start = own * ctx.rank if ctx.parts",
        "start = own * 0 if ctx.parts",
        "tests/test_context.py -k causal",
    ),
    Fault(
        "rows of labels may have other blocks",
        "compiler/program.py",
        "        bool(first == size)",
        "        pass",
        "tests/test_context.py -k stay_split",
    ),
    Fault(
        "a sequence is split along the batch",
        "core/mesh.py",
        "return SEQUENCE if self.holds in _STORED else BATCH",
        "return BATCH",
        "tests/test_context.py -k 2-causal",
    ),
    Fault(
        "gradients of parts of one axis count for all",
        "runtime/batch_split.py",
        "return math.prod(axis.size for axis, layout in of if isinstance(layout, Shard))",
        "return of[0].axis.size if of else 1",
        "tests/test_context.py -k gradients_of_inputs",
    ),
    Fault(
        "loaded rows of a state are taken for all",
        "runtime/optimizer_states.py",
        "optimizer.register_load_state_dict_post_hook(_mark_loaded)",
        "optimizer",
        "tests/test_full_steps.py -k other_ranks",
    ),
    Fault(
        "state dicts of new optimizers without marks",
        "weights/parameter.py",
        "cast(OptimizerOwner, model).note_optimizer(optimizer)",
        "pass",
        "tests/test_dcp.py -k not_stepped",
    ),
    Fault(
        "whole values of several ranks are not compared",
        "checkpoints/saving.py",
        "ranks.verify_along(axis, hashes(items if axis == MODEL else common, axis), what)",
        "pass",
        "tests/test_checkpoint_refusals.py -k different_values",
    ),
    Fault(
        "a checkpoint's ranks are numbered along the wrong axis first",
        "core/mesh.py",
        "for axis in reversed(self.axes):",
        "for axis in self.axes:",
        "tests/test_mesh_ranks.py -k 'training_is and hsdp and not tp'",
    ),
    # the step: forward and backward as graphs
    Fault(
        "a collective takes the memory of a value that others read",
        "passes/schedule.py",
        "    while len(value.users) == 1 and value.op",
        "    while value.op",
        "tests/test_step.py -k memory",
    ),
    Fault(
        "a write before a read",
        "passes/schedule.py",
        "                before[node] += users[argument]\n",
        "                pass\n",
        "tests/test_step.py -k before_a_write",
    ),
    Fault(
        "draws in another order",
        "passes/schedule.py",
        "            before[node] += drawn\n",
        "            pass\n",
        "tests/test_step.py -k keep_their_order",
    ),
    Fault(
        "gradients of zeros for results without",
        "runtime/step.py",
        "        ctx.set_materialize_grads(False)\n",
        "",
        "tests/test_step_results.py -k are_the_models",
    ),
    Fault(
        "no segment ends at a result",
        "ir/segments.py",
        "        if views or any(",
        "        if views and any(",
        "tests/test_step_results.py -k are_the_models",
    ),
    Fault(
        "buffers are written to again for gradients of gradients",
        "runtime/step.py",
        "ctx.before.get(i, tensor)",
        "tensor",
        "tests/test_step_results.py -k are_the_models",
    ),
    Fault(
        "other masks for gradients of gradients",
        "runtime/step.py",
        "_drawing(ctx.rng_states, before)",
        "_drawing({}, before)",
        "tests/test_step_results.py -k are_the_models",
    ),
    Fault(
        "a lowered collective is not waited for",
        "passes/lower.py",
        "return [result(WAIT(under_way) if communicates(op) else under_way)]",
        "return [result(under_way)]",
        "tests/test_passes.py -k listing",
    ),
    Fault(
        "a lowered collective that sends nothing",
        "distributed/convert.py",
        'return op(sent, "sum", name), made.result',
        "return sent.clone(), made.result",
        "tests/test_lowering.py -k lowered",
    ),
    Fault(
        "compiled graphs draw numbers of their own",
        "runtime/compilation.py",
        "config.patch(fallback_random=True)",
        "config.patch(fallback_random=False)",
        "tests/test_compile.py -k inductor",
    ),
    Fault(
        "one rank alone compiles",
        "runtime/call_verification.py",
        "{purpose} {call.compiler}",
        "{purpose}",
        "tests/test_compile.py -k mistakes",
    ),
    Fault(
        "a layer's number is read unseen",
        "capture/repeated.py",
        "            repeats.was_read = True\n",
        "",
        "tests/test_repeated.py -k differ",
    ),
    Fault(
        "the last layer is not compared",
        "capture/copied_layers.py",
        "if first.described(constants) != last.described(constants):",
        "if False:",
        "tests/test_repeated.py -k tells",
    ),
    Fault(
        "layers that are called in another way are repeated",
        "capture/repeated.py",
        "call == run.first.call and not is_last",
        "not is_last",
        "tests/test_repeated.py -k differ",
    ),
    Fault(
        "copied layers keep the first one's checkpoint",
        "capture/copied_layers.py",
        '{"nn_module_stack": stack} | modes_in(node, mark)',
        '{"nn_module_stack": stack}',
        "tests/test_repeated.py -k most_layers",
    ),
    Fault(
        "the last wave of a product's tiles is priced as if it were full",
        "planner/kernels.py",
        "(math.ceil(tiles / machine.tiles) * machine.tiles)",
        "tiles",
        "tests/test_kernels.py -k waves",
    ),
    Fault(
        "a fused op is priced as if it read what its own kernel computes",
        "planner/kernels.py",
        'return "fused" in node.meta and operand.meta.get("fused") == node.meta["fused"]',
        "return False",
        "tests/test_kernels.py -k one_kernel",
    ),
    Fault(
        "causal attention is priced as full attention",
        "planner/costs.py",
        "return flops / 2 if op.is_causal and not is_by_rows else flops",
        "return flops",
        "tests/test_kernels.py -k causal",
    ),
    Fault(
        "collectives of a backward are priced as if nothing hid them",
        "planner/costs.py",
        "if not sent.nbytes or not value.hides:",
        "if True:",
        "tests/test_plan_options.py -k hidden",
    ),
    Fault(
        "what was gathered of a sequence is kept",
        "passes/insert.py",
        "if is_gathered_again(step, dims_gathered_again(value, [consumer])):",
        "if False:",
        "tests/test_sequence.py -k gathers_again",
    ),
    Fault(
        "a mask's slice keeps the whole mask",
        "rules/random.py",
        "part = aten.clone.default(aten.select.int(mask, dim, ctx.rank))",
        "part = aten.select.int(mask, dim, ctx.rank)",
        "tests/test_sequence.py -k gathers_again",
    ),
    Fault(
        "a layer's gradients are given to the wrong parameters",
        "passes/bucket.py",
        "emit(joint, operator.getitem, (pieces, i), node)",
        "emit(joint, operator.getitem, (pieces, len(nodes) - 1 - i), node)",
        "tests/test_explain.py -k one_message",
    ),
    Fault(
        "sums of gradients go before what the backward waits for",
        "passes/sums_behind.py",
        "if own and _is_backward(begin):",
        "if False:",
        "tests/test_mesh_ranks.py -k hidden_behind",
    ),
    Fault(
        "gradients of a part of the batch are not averaged",
        "runtime/batches.py",
        "factor * ranks if enters else factor / ranks",
        "factor * ranks if enters else factor",
        "tests/test_batch_training.py -k ddp",
    ),
    Fault(
        "gradients of parts that enter a graph are not multiplied",
        "runtime/batches.py",
        "factor * ranks if enters else factor / ranks",
        "factor if enters else factor / ranks",
        "tests/test_chains.py",
    ),
    Fault(
        "the grad of an input that is a leaf is not divided",
        "runtime/batches.py",
        "gradient / ranks for gradient in gradients",
        "gradient for gradient in gradients",
        "tests/test_chains.py",
    ),
    Fault(
        "a gradient that is handed back is divided again",
        "runtime/batches.py",
        "if not ctx.enters and gradient in _DIVIDED:",
        "if ctx is None:",
        "tests/test_chains.py",
    ),
    Fault(
        "numbers that go with a call are this rank's own",
        "distributed/memory/stream.py",
        "self.of_all = [post.riding[1:] for post in posts]",
        "self.of_all = [list(self.numbers[1:]) for post in posts]",
        "tests/test_shared_memory_faults.py -k precedes",
    ),
    Fault(
        "sums are joined in the order of their layers",
        "passes/bucket.py",
        "nodes = sorted(nodes, key=place.__getitem__)",
        "nodes = list(nodes)",
        "tests/test_costs.py -k soft_mixture",
    ),
    Fault(
        "what reads memory gets it as the ranks laid it out",
        "passes/localize.py",
        "elif node.target in BY_ELEMENT or reads_memory(node):",
        "elif node.target in BY_ELEMENT:",
        "tests/test_strides.py",
    ),
    Fault(
        "of a whole batch each rank keeps the gradient of its part",
        "runtime/batches.py",
        "_OPS.scatter.default",
        "_OPS.narrow.default",
        "tests/test_batch_training.py -k whole_batches",
    ),
    Fault(
        "the size of a part is taken for that of the batch",
        "passes/localize.py",
        "call_function(operator.mul, (node, ranks))",
        "call_function(operator.mul, (node, 1))",
        "tests/test_batches.py tests/test_batch_training.py -k whole_batch",
    ),
    Fault(
        "neighbours among sorted rows are taken for rows of their own",
        "passes/own_order.py",
        "return of_rows and as_many and all",
        "return of_rows and all",
        "tests/test_experts.py -k across",
    ),
    Fault(
        "rows that are sorted backwards are multiplied by a rank's own groups",
        "passes/own_order.py",
        'ndim != 1 or bound_args(node).get("descending"):',
        "ndim != 1:",
        "tests/test_experts.py -k across",
    ),
    Fault(
        "what lies in the first order is added to sorted rows",
        "passes/own_order.py",
        "isinstance(at, Shard) == (operand in taken) for",
        "isinstance(at, Shard) or operand not in taken for",
        "tests/test_experts.py -k across",
    ),
    Fault(
        "rows come to experts in the order of the ranks",
        "distributed/experts.py",
        "lambda rows: rows[order], lengths",
        "lambda rows: rows, lengths",
        "tests/test_experts_sent.py -k rows_at",
    ),
    Fault(
        "rows come back in the order of the experts",
        "distributed/experts.py",
        "as_they_came[_in_order_of_experts(received)] = x",
        "as_they_came.copy_(x)",
        "tests/test_experts_sent.py -k rows_at",
    ),
    Fault(
        "rows are viewed by the number that there was before they went to experts",
        "passes/to_experts.py",
        "node.replace_input_with(size, own_count)",
        "node.replace_input_with(size, size)",
        "tests/test_experts_sent.py -k rows_go",
    ),
    Fault(
        "what meets rows at their experts stays where it was",
        "passes/to_experts.py",
        "if taken not in region.nodes:",
        "if taken is region.rows:",
        "tests/test_experts_sent.py -k rows_go",
    ),
    Fault(
        "what a call leaves of a part of the batch is taken for the whole batch's",
        "compiler/divided.py",
        "found[place] = I if dim is None else Shard(BATCH)",
        "found[place] = I",
        "tests/test_carried_batches.py -k leaves",
    ),
)


def tried(fault: Fault) -> str:
    """What pytest makes of a fault: 'caught', 'MISSED' or 'broken'."""
    ended = _run(fault, f"-m pytest -q -x -p no:cacheprovider {fault.tests}")
    if isinstance(ended, str):
        return ended
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    if ended.returncode == FAILED:
        return f"caught: {next((line for line in ended.stdout.splitlines() if line.startswith('FAILED')), last)[:90]}"
    return f"MISSED: {last}" if ended.returncode == 0 else f"broken: {last}"


def checked(fault: Fault) -> str:
    """What `ts.check` makes of it: 'seen', 'unseen', 'UNLIKE' or 'broken'."""
    if not fault.models:
        return "apart"
    ended = _run(fault, f"benchmarks/checked.py --models {fault.models}")
    if isinstance(ended, str):
        return ended
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    if not last.startswith("not exact: "):
        return f"broken: {ended.stderr.strip().splitlines()[-1:]}"
    counts = ast.literal_eval(last.removeprefix("not exact: "))
    if not counts:
        return "UNSEEN"
    alike = len(counts) == len(DTYPES) and len(set(counts.values())) == 1
    return f"{'seen' if alike else 'UNLIKE'}: {counts}"


DTYPES = ("float64", "float32", "bfloat16", "float16")


def _run(fault: Fault, command: str) -> subprocess.CompletedProcess[str] | str:
    """Runs Python in a copy of the library with the fault; a text where that proves nothing, or has no end."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("torchshard", "tests", "docs", "examples", "benchmarks"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, folder)
        file = Path(folder) / "torchshard" / fault.file
        text = file.read_text()
        if text.count(fault.right) != 1:
            return f"broken: {fault.right!r} is {text.count(fault.right)} times in {fault.file}"
        file.write_text(text.replace(fault.right, fault.wrong))
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        options = {"shell": True, "cwd": folder, "env": environment, "capture_output": True, "text": True}
        try:
            return subprocess.run(f"{sys.executable} {command}", timeout=LIMIT_SECONDS, **options)
        except subprocess.TimeoutExpired:
            return "caught: no end"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="faults with one of these in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--check", action="store_true", help="whether ts.check sees them, alike in every dtype")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if any(part in fault.name for part in given.only)]
    start, counts = time.perf_counter(), Counter[str]()
    with ThreadPoolExecutor(given.jobs) as pool:
        for fault, result in zip(faults, pool.map(checked if given.check else tried, faults), strict=True):
            counts[result.partition(":")[0]] += 1
            print(f"{fault.name:40} {result}", flush=True)
    print(f"{dict(counts)} of {len(faults)} in {time.perf_counter() - start:.0f} s")
    sys.exit(counts["caught"] + counts["seen"] + counts["apart"] != len(faults))


if __name__ == "__main__":
    main()
