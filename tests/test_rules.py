"""The oracle: every op with a rule, unsharded and split by every choice of its row: values and gradients.

Each case is a graph of its own (`tests.oracle`), which the real passes run in lockstep, in float64, on 2 and 3
ranks: even sizes, uneven ones, empty ranks, and on 2 ranks dims that are split as segments and as units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from tests.helpers import nightly
from tests.op_cases import CASES
from tests.op_cases.attention import sdpa
from tests.op_cases.creation import CREATION
from tests.op_cases.losses import SUM
from tests.op_cases.notation import case, f, flags, ids, pos
from tests.oracle import Case, T, row_and_choices, run
from torchshard.testing import (
    Call,
    Choice,
    TensorType,
    has_rule,
    ops_with_rules,
    row_of,
)

aten = torch.ops.aten


def _names(cases: list[Case]) -> list[str]:
    return [f"{i}-{str(c.target).removeprefix('aten.')}" for i, c in enumerate(cases)]


def _splits(found: list[Choice]) -> str:
    return " ".join(dict.fromkeys(c.name.removeprefix("split ").replace(" ", "+") for c in found if c.factors))


def _every_tenth_is_quick(cases: list[Case]) -> list[Any]:
    return [pytest.param(c, marks=[pytest.mark.quick] if i % 10 == 0 else []) for i, c in enumerate(cases)]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("op", _every_tenth_is_quick(CASES), ids=_names(CASES))
def test_whole_and_in_parts(op: Case, world: int) -> None:
    row, found = row_and_choices(op, world, in_parts=world == 2)
    assert (None if row is None else _splits(found)) == op.splits
    for choice in (c for c in found if world == 2 or c.factors or c.name == "P"):
        report = run(op, choice, world)
        assert report.ok, f"{world} ranks, {choice}\n{report}"


def test_every_rule_has_a_case() -> None:
    ours = {target for target in ops_with_rules() if str(target).startswith("aten.")}
    elsewhere = {aten._grouped_mm.default, aten._linalg_check_errors.default}  # test_experts.py and test_decompose.py
    assert ours - {c.target for c in CASES} == elsewhere


def test_only_these_ops_are_never_split() -> None:
    """Cases without a split would not test an op's row."""
    whole = {c.target for c in CASES} - {c.target for c in CASES if c.splits}
    reduce_all = {aten.median.default, aten.nanmedian.default, aten.searchsorted.Scalar}
    assert whole == {c.target for c in CREATION} | reduce_all | {aten.bernoulli.default, aten.native_batch_norm.default}


# --- pointwise ops by PyTorch's tag ----------------------------------------------------------------------------------

GIVEN = {"rounding_mode": "floor", "decimals": 1, "max": 0.5, "condition": flags(3, 5), "mask": flags(3, 5)}
"""Values of arguments by name; other numbers are 2."""


def _tagged() -> list[Any]:
    """Returns all ops of the pointwise rule by tag, except backward formulas and ops with a rule of their own."""
    names = sorted({s.name[6:] for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")})
    packets = (getattr(aten, name, None) for name in names)
    ops = (getattr(p, o) for p in packets if p is not None for o in p.overloads())
    return [op for op in ops if has_rule(op) and "backward" not in str(op) and op not in ops_with_rules()]


def _example_call(op: Any, tensor: Any) -> Case:
    """Returns a call of an op: its tensors are 3 x 5; the last of several is 5, to be broadcast."""
    wanted = [a for a in op._schema.arguments if not a.has_default_value() or a.name in ("max", "rounding_mode")]
    tensors = [a for a in wanted if str(a.type) in ("Tensor", "Optional[Tensor]")]
    args, kwargs = [], {}
    for argument in wanted:
        if argument in tensors and argument.name not in ("condition", "mask"):
            value = tensor(5) if argument is tensors[-1] and len(tensors) > 1 else tensor(3, 5)
        else:
            value = GIVEN.get(argument.name, 2)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args += [None] * (op._schema.arguments.index(argument) - len(args)) + [value]
    return case(op, None, *args, **kwargs)


def _runs(call: Case) -> bool:
    made = call.call()
    try:
        live = [r for r in pytree.tree_leaves(made.target(*made.args, **made.kwargs)) if r.requires_grad]
        torch.autograd.backward([r.sum() for r in live])
    except (RuntimeError, ValueError):  # unsuitable dtypes, or not differentiable
        return False
    return bool(live) or not any(isinstance(t, Tensor) and t.requires_grad for t in made.args)


def _positive_constant(*shape: int) -> T:
    return T(shape, "positive", grad=False)


def _integers(*shape: int) -> T:
    return T(shape, "int", 5)


def test_ops_are_found_by_their_tag() -> None:
    assert len(_tagged()) > 100


@pytest.mark.parametrize("op", _tagged(), ids=lambda op: str(op).removeprefix("aten."))
def test_ops_by_tag(op: Any) -> None:
    call = next(c for c in (_example_call(op, kind) for kind in (pos, _positive_constant, _integers)) if _runs(c))
    row, found = row_and_choices(call, 3, in_parts=False)
    assert row is not None and {"split a", "split b"} <= {c.name for c in found}
    for choice in found:
        if choice.factors or choice.name == "P":
            report = run(call, choice, 3)
            assert report.ok, f"{choice}\n{report}"


# --- arguments without a row, next to similar ones with a row ---------------------------------------------------------


def _call(target: Any, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (), **args: Any) -> Call:
    """Returns a Call from the shapes of its tensors, by the schema's names; the result's shape is arbitrary."""
    kinds = dtypes or (torch.float64,) * len(shapes)
    tensors = [TensorType(s, d) for s, d in zip(shapes, kinds, strict=True)]
    names = [a.name for a in target._schema.arguments]
    return Call(target, dict(zip(names, tensors, strict=False)) | args, (TensorType(shapes[0], kinds[0]),))


def test_boolean_index_has_no_row() -> None:
    x, where = TensorType((5, 4), torch.float64), (None, TensorType((4,), torch.bool))
    assert row_of(Call(aten.index.Tensor, {"self": x, "indices": list(where)}, (x,))) is None
    index = TensorType((3,), torch.int64)
    held = row_of(Call(aten.index.Tensor, {"self": x, "indices": [None, index]}, (TensorType((5, 3), x.dtype),)))
    assert held is not None and held.text == "a !b, x0 -> a x0"


# --- dynamic sizes: the same graphs with a dynamic first dim ----------------------------------------------------------

DYNAMIC = [
    case(aten.linear.default, None, f(2, 5, 7), T((4, 7))),
    case(aten.matmul.default, None, f(3, 5, 7), f(3, 7, 2)),
    case(aten.softmax.int, None, f(5, 7), 1),
    case(aten.layer_norm.default, None, f(3, 5, 4), [4], T((4,)), T((4,))),
    case(aten.add.Tensor, None, f(5, 7), f(1, 7)),
    case(aten.gather.default, None, f(5, 7), 1, ids(7, 5, 3)),
    case(aten.embedding.default, None, f(7, 4), ids(7, 5, 3), 2),
    case(aten.dropout.default, None, f(5, 7), 0.4, True),
    case(aten.sum.dim_IntList, None, f(5, 7), [1]),
    case(aten.mean.dim, None, f(5, 7), [1]),
    case(aten.split_with_sizes.default, None, f(5, 9), [2, 3, 4], 1),
    case(aten.slice.Tensor, None, f(5, 9), 1, 3, 6),
    case(aten.flatten.using_ints, None, f(5, 4, 3), 1, 2),
    case(aten.unflatten.int, None, f(5, 6), 1, [2, 3]),
    case(aten.transpose.int, None, f(5, 4), 0, 1),
    case(aten.mse_loss.default, None, f(5, 4), f(5, 4), SUM),
    case(aten.cross_entropy_loss.default, None, f(5, 7), ids(7, 5), None, 1, 2, 0.1),
    case(aten.group_norm.default, None, f(5, 6, 3), 3, T((6,)), T((6,))),
    case(sdpa, None, f(3, 4, 5, 2), f(3, 4, 5, 2), f(3, 4, 5, 2), None, 0.3, True),
    case(sdpa, None, f(3, 4, 5, 2), f(3, 2, 5, 2), f(3, 2, 5, 2), None, 0.3, enable_gqa=True),
]
WEIGHTS = {"linear": 1, "layer_norm": (1, 2), "group_norm": (1, 2), "embedding": 0}


class DynamicMode(FakeTensorMode):
    """Makes the first dim dynamic in every tensor that looks like an activation."""

    def __init__(self) -> None:
        super().__init__(shape_env=ShapeEnv())

    def from_tensor(self, tensor: Tensor, **options: Any) -> Any:  # type: ignore[override]
        if options or tensor.ndim == 0 or tensor.shape[0] not in (2, 3, 5):
            return super().from_tensor(tensor, **options)
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.ndim - 1)]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return super().from_tensor(tensor, symbolic_context=context)


class SixMode(FakeTensorMode):
    """Makes every dim of six dynamic, with one size for all."""

    def __init__(self) -> None:
        super().__init__(shape_env=ShapeEnv())

    def from_tensor(self, tensor: Tensor, **options: Any) -> Any:  # type: ignore[override]
        if options:
            return super().from_tensor(tensor, **options)
        sizes = [DimDynamic.DUCK if size == 6 else DimDynamic.STATIC for size in tensor.shape]
        return super().from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


OF_SIX = {"fakes": SixMode, "divides_dynamic": True}


def _of_six(op: Case) -> Iterator[Case]:
    """Yields the case with all dims of one size changed to six, for each of its sizes, if that is legal."""
    leaves, spec = pytree.tree_flatten((op.args, dict(op.kwargs)))
    for size in sorted({size for leaf in leaves if isinstance(leaf, T) for size in leaf.shape if size > 1}):
        made = [
            replace(leaf, shape=tuple(6 if n == size else n for n in leaf.shape)) if isinstance(leaf, T) else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(made, spec)
        changed = replace(op, args=args, kwargs=kwargs, options=OF_SIX)
        if _is_legal(changed):
            yield changed


def _is_legal(op: Case) -> bool:
    call = op.call()
    try:
        call.target(*call.args, **call.kwargs)
    except (RuntimeError, IndexError, ValueError):  # the sizes no longer fit together
        return False
    return True


def test_ops_of_a_transformer_split_a_dynamic_dim() -> None:
    """The next test would also pass without any split, so this one requires splits."""
    wanted = {
        aten.linear.default, aten.matmul.default, aten.layer_norm.default, aten.rms_norm.default, aten.softmax.int,
        sdpa, aten.embedding.default, aten.add.Tensor, aten.gelu.default, aten.dropout.default, aten.mean.dim,
        aten.sum.default, aten.mse_loss.default, aten.cross_entropy_loss.default, aten.transpose.int,
        aten.unsqueeze.default,
    }  # fmt: skip
    for target in wanted:
        of_six = (changed for c in CASES if c.target == target for changed in _of_six(c))
        legal = (choice for changed in of_six for choice in row_and_choices(changed, 2, in_parts=False)[1])
        assert any(choice.splits_dynamic for choice in legal), target


def _every_twelfth_is_fast(cases: list[Case]) -> list[Any]:
    return [pytest.param(c, marks=[] if i % 12 == 0 else [pytest.mark.nightly]) for i, c in enumerate(cases)]


@nightly("252-cross_entropy_loss.default", "576-scaled_dot_product_attention.default", "96-einsum.default")
@pytest.mark.parametrize("op", _every_twelfth_is_fast(CASES), ids=_names(CASES))
def test_a_dynamic_dim_is_split_in_equal_slices(op: Case) -> None:
    is_split = False
    for changed in _of_six(op):
        for world in (2, 3, 6):
            try:
                row, found = row_and_choices(changed, world, in_parts=False)
            except (RuntimeError, NotImplementedError):  # the op can't be captured with this dynamic dim
                continue
            for choice in found:
                if row is not None and choice.splits_dynamic:
                    report, is_split = run(changed, choice, world), True
                    assert report.ok, f"{world} ranks, {choice}\n{report}"
    if not is_split:
        pytest.skip("no dim of six of this call may be dynamic and split")


@nightly("19-scaled_dot_product_attention.default")
@pytest.mark.parametrize("op", DYNAMIC, ids=_names(DYNAMIC))
def test_a_dynamic_dim_is_never_split_and_the_others_are(op: Case) -> None:
    op = replace(op, options={"fakes": DynamicMode})
    row, found = row_and_choices(op, 2, in_parts=False)
    assert row is not None
    dynamic = {axis for axis, size in row.sizes.items() if not isinstance(size, int)}
    split = [c for c in found if c.factors]
    assert dynamic and split and not dynamic & {factor for c in split for factor, _ in c.factors}
    for choice in split:
        report = run(op, choice, 2)
        assert report.ok, f"{choice}\n{report}"
