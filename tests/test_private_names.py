"""The private names of PyTorch and of other libraries that the package uses, and those of the package in tests."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from tests.private_names import is_private, overrides, own_attributes, uses

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torchshard"
HEADS = {"torch", "transformers", "peft", "safetensors", "huggingface_hub", "accelerate", "Module", "Tensor"}
"""The libraries, and the classes of PyTorch whose methods the package names in strings."""

_TYPES = [nn.Module(), torch.Tensor, nn.Parameter, fx.Node, fx.Graph, fx.GraphModule, torch.optim.Optimizer,
          torch.ops.aten.add, torch.ops.aten.add.default, torch.autograd.Function,
          torch.distributed.ProcessGroup]  # fmt: skip
THEIRS = {name for each in _TYPES for name in dir(each) if is_private(name)}
"""Private attributes of PyTorch's classes: names that a class of ours may have too."""

NOT_OF_A_LIBRARY = {
    "_asdict",  # public, of named tuples
    "_IF_", "_available", "_foreach_", "_old", "_old_", "_own", "_zeros",  # parts of texts, and of names of nodes
    "_torchshard", "_torchshard_memories",
}  # fmt: skip


EVERYWHERE = {
    "torch.utils._pytree": "flattens arguments as export does, whose documentation names it for users' classes",
    "torch._ops.OpOverload": "the type of the ops in a graph, which has no public name",
    "torch._ops.OpOverloadPacket": "the type of `torch.ops.aten.add`, which has no public name",
    "torch._subclasses.fake_tensor": "fake tensors, by the import that PyTorch's page on them shows",
    "torch.utils._python_dispatch.TorchDispatchMode": "sees the ops of a call; documented under `extending PyTorch`",
    "torch.utils._sympy": "the functions in the expressions of dynamic sizes, which plans' files write and read",
    "torch._dynamo.source.ConstantSource": "where a new dynamic size is from, which `ShapeEnv.create_symbol` requires",
    "torch.utils._python_dispatch._disable_current_modes": "runs ops on real values during export",
    "torch._C.DisableTorchFunctionSubclass": "documented under `extending PyTorch`, by this name",
    "torch._C.TensorBase": "the class that has a tensor's C++ properties, which subclasses override",
    "torch.Tensor._make_subclass": "makes a tensor of a subclass that shares memory; `nn.Parameter` uses it",
    "_schema": "an op's arguments and results, with the ones it writes; `torch.library` has no public reader",
    "_version": "counts the writes to a tensor; documented in PyTorch's notes on autograd",
    "_cdata": "a storage's address in C++: equal for all Python objects of a storage",
    "_parameters": "a module's own parameters, in which None stands for an absent one; `named_parameters` skips those",
    "_buffers": "a module's own buffers, as `_parameters`",
    "_modules": "a module's own children, as `_parameters`",
    "_rename": "renames an fx.Node in its graph; assigning `name` may give two nodes one name",
    "_graph_namespace": "keeps new names of an fx.Graph's nodes apart from those in use",
}
"""Name or prefix -> why. Names that any file may use: many do, and PyTorch has documented or kept them for years."""

PRIVATE: dict[str, str] = {
    "Module._call_impl": "weights/callers",
    "Module._load_from_state_dict": "weights/callers",
    "Module._wrapped_call_impl": "weights/callers",
    "_allgather_base": "distributed/memory/backend",
    "_apply": "checking/check nn/modules planner/styles runtime/module",
    "_backward_hooks": "capture/models runtime/results_beside",
    "_c10d_functional": "runtime/optimizer_trials weights/over_ranks",
    "_can_decompose": "passes/decompose weights/op_layouts",
    "_check_input_dim": "capture/replacements",
    "_detect_is_causal_mask": "capture/export_errors",
    "_empty_nn_module_stack": "capture/node_facts",
    "_extra_state": "checkpoints/contents",
    "_foreach_supported_types": "weights/parameter",
    "_optimizer_state_dict_post_hooks": "runtime/optimizer_states",
    "_forward_hooks": "capture/entry_points",
    "_forward_pre_hooks": "capture/entry_points",
    "_from_config": "cli/configurations weights/transformers_models",
    "_get_backend": "distributed/memory/backend",
    "_get_dtype_plan": "weights/transformers_models",
    "_get_sequence_number_for_group": "distributed/memory/backend",
    "_global_": "capture/equal_layers capture/tools",
    "_guards_code": "capture/assumptions",
    "_is_param": "weights/local_slice",
    "_is_view": "weights/slice_calls",
    "_jvp_with_argnums": "capture/replacements",
    "_keys_to_ignore_on_save": "checkpoints/formats",
    "_map_assigned_buffer": "capture/state_before",
    "_non_persistent_buffers_set": "runtime/store",
    "_optimizer_step_post_hooks": "runtime/optimizers",
    "_orig_mod": "capture/models checkpoints/contents",
    "_overloadname": "core/overloads",
    "_overloadpacket": "core/overloads",
    "_post_accumulate_grad_hooks": "capture/models",
    "_qualified_op_name": "passes/normalize",
    "_reduce_scatter_base": "distributed/memory/backend",
    "_set_group_name": "distributed/memory/backend",
    "_set_replacement": "passes/localize",
    "_set_sequence_number_for_group": "distributed/memory/backend",
    "_shape_env": "ops/declared",
    "_torchdynamo_orig_backend": "runtime/dynamo",
    "_values": "passes/aliases",
    "_vjp_with_argnums": "capture/replacements",
    "_weight_conversions": "runtime/store weights/folder",
    "torch.Tensor._make_wrapper_subclass": "weights/lazy",
    "torch._C.DisableTorchFunction": "capture/known_numbers",
    "torch._C._AutoDispatchBelowADInplaceOrView": "distributed/memory/segment",
    "torch._C._AutoDispatchBelowAutograd": "weights/following",
    "torch._C._DisableTorchDispatch": "distributed/memory/segment",
    "torch._C._EnableTorchFunction": "weights/local_slice",
    "torch._C._TorchDispatchModeKey": "capture/transforms",
    "torch._C._TorchDispatchModeKey.FAKE": "capture/tools",
    "torch._C._VariableFunctions": "passes/direct",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "capture/transforms",
    "torch._C._autograd._push_saved_tensors_default_hooks": "capture/transforms",
    "torch._C._autograd._top_saved_tensors_default_hooks": "capture/modes capture/transforms runtime/lazy_step",
    "torch._C._current_graph_task_id": "runtime/batches",
    "torch._C._disabled_torch_function_impl": "capture/models weights/lazy",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "runtime/compiled_regions",
    "torch._C._functorch.is_functorch_wrapped_tensor": "capture/trace runtime/history",
    "torch._C._functorch.is_legacy_batchedtensor": "runtime/history",
    "torch._C._functorch.peek_interpreter_stack": "capture/models distributed/eager",
    "torch._C._get_dispatch_mode": "capture/tools",
    "torch._C._is_torch_function_enabled": "weights/local_slice",
    "torch._C._jit_resolve_packet": "passes/normalize",
    "torch._C._len_torch_dispatch_stack": "capture/layer_calls runtime/compilation",
    "torch._C._len_torch_function_stack": "capture/layer_calls capture/transforms",
    "torch._C._nn": "passes/direct",
    "torch._C._storage_Use_Count": "weights/slice_calls",
    "torch._C._will_engine_execute_node": "runtime/batches runtime/step",
    "torch._amp_foreach_non_finite_check_and_unscale_": "weights/local_slice",
    "torch._decomp.decomposition_table": "weights/op_layouts",
    "torch._decomp.get_decompositions": "passes/decompose",
    "torch._disable_dynamo": "runtime/step",
    "torch._dispatch.python.enable_python_dispatcher": "ir/fake_values passes/record",
    "torch._dynamo": "capture/seeding weights/callers",
    "torch._dynamo.config": "core/fakes",
    "torch._dynamo.eval_frame": "weights/callers",
    "torch._dynamo.exc.TorchDynamoException": "runtime/compilation",
    "torch._dynamo.symbolic_convert.InstructionTranslator": "runtime/dynamo",
    "torch._dynamo.trace_rules": "runtime/dynamo",
    "torch._export": "weights/callers",
    "torch._export.non_strict_utils": "capture/quiet",
    "torch._export.utils._compiling_state_context": "capture/rehearsal",
    "torch._foreach_norm": "weights/over_ranks",
    "torch._functorch": "weights/callers weights/parameter",
    "torch._functorch.apis": "capture/replacements",
    "torch._functorch.eager_transforms": "capture/replacements",
    "torch._functorch.functional_call": "weights/callers",
    "torch._functorch.vmap": "weights/dcp",
    "torch._inductor": "weights/callers",
    "torch._inductor.config.patch": "runtime/compilation",
    "torch._inductor.list_mode_options": "runtime/compilation",
    "torch._ops.HigherOrderOperator": "capture/regions",
    "torch._ops.OperatorBase": "passes/decompose",
    "torch._ops._get_dispatch_mode_pre_dispatch": "capture/transforms",
    "torch._ops._set_mode_pre_dispatch": "capture/transforms",
    "torch._ops.unset_mode_pre_dispatch": "capture/transforms",
    "torch._prims_common.suggest_memory_format": "passes/nodes",
    "torch._subclasses": "weights/callers",
    "torch._tensor_str": "weights/callers",
    "torch.autograd._profiler_enabled": "passes/direct",
    "torch.autograd.forward_ad._current_level": "capture/models",
    "torch.autograd.function._SingleLevelFunction": "capture/whole_calls",
    "torch.default_generator._cdata": "weights/lazy",
    "torch.distributed._functional_collectives": "weights/callers",
    "torch.distributed._state_dict_utils": "weights/dcp",
    "torch.distributed.distributed_c10d._get_default_store": "checkpoints/completion",
    "torch.distributed.distributed_c10d._resolve_process_group": "weights/over_ranks",
    "torch.export.dynamic_shapes._DimHint": "capture/trace",
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing": "capture/models",
    "torch.fx.graph._BoxedCodeGen": "runtime/step",
    "torch.fx.node._get_qualified_name": "passes/direct",
    "torch.nn.Module._call_impl": "capture/trace",
    "torch.nn.modules._functions.BackwardHookFunction": "capture/whole_calls",
    "torch.nn.modules.batchnorm._BatchNorm": "capture/replacements",
    "torch.nn.modules.module._global_buffer_registration_hooks": "capture/state_before",
    "torch.nn.modules.module._global_forward_hooks.values": "capture/watch",
    "torch.nn.modules.module._global_forward_pre_hooks.values": "capture/watch",
    "torch.nn.utils.stateless._reparametrize_module": "capture/rehearsal",
    "torch.ops._c10d_functional": "distributed/convert",
    "torch.ops._c10d_functional.all_reduce": "distributed/convert",
    "torch.ops._c10d_functional.wait_tensor.default": "passes/lower",
    "torch.overrides._pop_mode": "capture/transforms",
    "torch.overrides._push_mode": "capture/transforms",
    "torch.testing._comparison": "weights/callers",
    "torch.utils._foreach_utils": "weights/callers weights/parameter",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "capture/shared_memory",
    "torch.utils._python_dispatch.return_and_correct_aliasing": "weights/lazy",
}  # fmt: skip


def _trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def _is_operator(name: str) -> bool:
    """Whether a name is an operator's: its schema is its interface, also where the name starts with `_`."""
    namespace = re.match(r"torch\.ops\.([a-z]\w*)\.|aten\.", name)
    return namespace is not None or hasattr(torch.ops.aten, name) or hasattr(torch.ops.mkldnn, name)


def _found() -> dict[str, dict[str, list[int]]]:
    """Name -> file -> lines, of all private names of libraries in the package."""
    trees = _trees()
    ours = {name for tree in trees.values() for name in own_attributes(tree)}
    ours |= {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, _Definition)}
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file, tree in trees.items():
        own = own_attributes(tree) | (ours - THEIRS)
        kept = [use for use in uses(tree) if _is_of_a_library(use.name, own)]
        for use in [*kept, *overrides(tree, THEIRS)]:
            found[use.name][file.removesuffix(".py")].append(use.line)
    return found


_Definition = ast.FunctionDef | ast.ClassDef


def _is_of_a_library(name: str, own: set[str]) -> bool:
    head, _, rest = name.partition(".")
    if rest:
        return head in HEADS and not _is_operator(name)
    if name in own or name in NOT_OF_A_LIBRARY or name.startswith("_ts_"):
        return False
    return name in THEIRS or not _is_operator(name)  # Tensor._version is also an operator's name


FOUND = _found()


def _common(name: str) -> str | None:
    """The entry of `EVERYWHERE` that covers a name."""
    return next((known for known in EVERYWHERE if f"{name}.".startswith(f"{known}.")), None)


def test_every_private_name_is_known() -> None:
    """Each private name of a library is in `EVERYWHERE`, or in `PRIVATE` with the files that use it."""
    used = {name: " ".join(files) for name, files in FOUND.items() if _common(name) is None}
    added = {name: files for name, files in used.items() if PRIVATE.get(name) != files}
    assert not added, f"""private names of a library, new or in other files than listed: {added}
Use a public name where one exists. Otherwise write an entry of PRIVATE in tests/test_private_names.py, as printed, and
a comment above the use: why, the version as in "(PyTorch {VERSION})", and the upstream issue or PR if there is one.
If the name belongs to no library, write it to NOT_OF_A_LIBRARY."""


def test_no_entry_outlives_its_use() -> None:
    covered = {_common(name) or name for name in FOUND}
    gone = sorted((PRIVATE.keys() | EVERYWHERE.keys()) - covered)
    assert not gone, f"no longer used: remove from PRIVATE or EVERYWHERE in tests/test_private_names.py: {gone}"


VERSION = "2.13.0"
_CHECKED = re.compile(r"PyTorch 2\.\d+\.\d+|transformers \d")


def _comments(source: str) -> dict[int, str]:
    """Line -> the block of comments that ends there, each block as one text."""
    blocks: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            blocks[line] = f"{blocks.get(line - 1, '')} {token.string}"
    return blocks


def _explained(name: str, lines: list[int], comments: dict[int, str]) -> bool:
    """Whether a comment with the checked version stands at a use, or names the private name elsewhere in the file."""
    checked = {line: text for line, text in comments.items() if _CHECKED.search(text)}
    leaf = name.rstrip("_").rpartition(".")[2]
    return any(line in checked or line - 1 in checked for line in lines) or any(
        leaf in text for text in checked.values()
    )


def test_private_names_are_explained_where_they_are_used() -> None:
    """A comment says why, and with which version that was checked."""
    missing: dict[str, set[str]] = defaultdict(set)
    for name, files in FOUND.items():
        for file, lines in files.items():
            comments = _comments((PACKAGE / f"{file}.py").read_text())
            if _common(name) is None and not _explained(name, lines, comments):
                missing[file].add(name)
    assert not missing, f"private names without a comment above that has `(PyTorch {VERSION})`: {dict(missing)}"


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.stem)
def test_no_test_reads_a_private_name(path: Path) -> None:
    names = {use.name for use in uses(ast.parse(path.read_text()), docstrings=True)}
    assert not [name for name in names if re.match(r"torchshard\.|_ts_\w", name)]


@pytest.mark.parametrize(("text", "name"), [
    ("import torch._dynamo", "torch._dynamo"),
    ("from torch.utils import _pytree as tree\ntree.tree_leaves(x)", "torch.utils._pytree"),
    ("import torch\ntorch._C._nn", "torch._C._nn"),
    ("from torch.nn import Module as M\nM._call_impl", "torch.nn.Module._call_impl"),
    ("x._version", "_version"),
    ("self.x._version", "_version"),
    ("getattr(x, '_version')", "_version"),
    ("f(torch_module, f'_global_{name}')", "_global_"),
    ("name.startswith('torch._dynamo.')", "torch._dynamo"),
    ("x.__class__; _ = x", None),
    ("'see _this, x._y and tests/_z.py'", None),
])  # fmt: skip
def test_a_private_name_is_found(text: str, name: str | None) -> None:
    found = {use.name for use in uses(ast.parse(text)) if _is_of_a_library(use.name, set())}
    assert found == ({name} - {None})
