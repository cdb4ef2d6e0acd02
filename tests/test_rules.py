"""The oracle: every op with a rule runs whole and in parts, under every choice of its row, values and gradients.

Each case is put into a graph of its own (`tests.oracle`) and run by the real passes in lockstep, in float64, on 2 and 3
ranks: even sizes, uneven ones, ranks with nothing, and at 2 ranks dims that are split as segments and as units.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

import torchshard as ts
from tests.helpers import nightly
from tests.op_cases import CASES, CREATION, SUM, case, f, flags, ids, pos, sdpa
from tests.oracle import Case, T, build, row_and_choices, run
from torchshard.testing import (
    Call,
    Choice,
    PlannedCall,
    Row,
    TensorType,
    capture,
    changed_rule,
    collective,
    has_rule,
    ops_with_rules,
    row_of,
)

aten = torch.ops.aten


def _names(cases: list[Case]) -> list[str]:
    return [f"{i}-{str(c.target).removeprefix('aten.')}" for i, c in enumerate(cases)]


def _splits(found: list[Choice]) -> str:
    return " ".join(dict.fromkeys(c.name.removeprefix("split ").replace(" ", "+") for c in found if c.axes))


def _every_tenth_is_quick(cases: list[Case]) -> list[Any]:
    return [pytest.param(c, marks=[pytest.mark.quick] if i % 10 == 0 else []) for i, c in enumerate(cases)]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("op", _every_tenth_is_quick(CASES), ids=_names(CASES))
def test_whole_and_in_parts(op: Case, world: int) -> None:
    row, found = row_and_choices(op, world, in_parts=world == 2)
    assert (None if row is None else _splits(found)) == op.splits
    for choice in (c for c in found if world == 2 or c.axes or c.name == "P"):
        report = run(op, choice, world)
        assert report.ok, f"{world} ranks, {choice}\n{report}"


def test_every_rule_has_a_case() -> None:
    ours = {target for target in ops_with_rules() if str(target).startswith("aten.")}
    elsewhere = {aten._grouped_mm.default, aten._linalg_check_errors.default}  # test_experts.py and test_decompose.py
    assert ours - {c.target for c in CASES} == elsewhere


def test_only_these_ops_are_never_split() -> None:
    """An op whose every case runs whole would prove nothing of its row."""
    whole = {c.target for c in CASES} - {c.target for c in CASES if c.splits}
    reduce_all = {aten.median.default, aten.nanmedian.default, aten.searchsorted.Scalar}
    assert whole == {c.target for c in CREATION} | reduce_all | {aten.bernoulli.default, aten.native_batch_norm.default}


# --- pointwise ops by PyTorch's tag ----------------------------------------------------------------------------------

GIVEN = {"rounding_mode": "floor", "decimals": 1, "max": 0.5, "condition": flags(3, 5), "mask": flags(3, 5)}
"""Arguments by name; the others by their types."""


def _tagged() -> list[Any]:
    """Every op that the pointwise rule takes by its tag, and that is not one of PyTorch's own backward formulas."""
    names = sorted({s.name[6:] for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")})
    packets = (getattr(aten, name, None) for name in names)
    ops = (getattr(p, o) for p in packets if p is not None for o in p.overloads())
    return [op for op in ops if has_rule(op) and "backward" not in str(op) and op not in ops_with_rules()]


def _example_call(op: Any, tensor: Any) -> Case:
    """A call of an op: its tensors are 3 x 5, the last one of several is 5, to be broadcast."""
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
    except (RuntimeError, ValueError):  # not for these dtypes, or not differentiable
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
        if choice.axes or choice.name == "P":
            report = run(call, choice, 3)
            assert report.ok, f"{choice}\n{report}"


# --- arguments for which there is no row, and the ones beside them for which there is -------------------------------


def _call(target: Any, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (), **args: Any) -> Call:
    """A Call from the shapes of its tensors, by the schema's names; the result's shape does not matter here."""
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


# --- dynamic sizes: the same graphs with a first dim that is only known when it runs --------------------------------

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
    """Every tensor that looks like an activation has a dynamic first dim."""

    def __init__(self) -> None:
        super().__init__(shape_env=ShapeEnv())

    def from_tensor(self, tensor: Tensor, **options: Any) -> Any:  # type: ignore[override]
        if options or tensor.ndim == 0 or tensor.shape[0] not in (2, 3, 5):
            return super().from_tensor(tensor, **options)
        sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.ndim - 1)]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return super().from_tensor(tensor, symbolic_context=context)


class SixMode(FakeTensorMode):
    """Every dim of six is dynamic, and all are one size."""

    def __init__(self) -> None:
        super().__init__(shape_env=ShapeEnv())

    def from_tensor(self, tensor: Tensor, **options: Any) -> Any:  # type: ignore[override]
        if options:
            return super().from_tensor(tensor, **options)
        sizes = [DimDynamic.DUCK if size == 6 else DimDynamic.STATIC for size in tensor.shape]
        return super().from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


OF_SIX = {"fakes": SixMode, "divides_dynamic": True}


def _of_six(op: Case) -> Iterator[Case]:
    """The case, and it with all its dims of another size of six in place of that."""
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
    except (RuntimeError, IndexError, ValueError):  # its sizes do not fit one another any more
        return False
    return True


def test_ops_of_a_transformer_split_a_dynamic_dim() -> None:
    """The test below would pass where nothing is split."""
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
        for world in (2, 3):
            try:
                row, found = row_and_choices(changed, world, in_parts=False)
            except (RuntimeError, NotImplementedError):  # the op itself can't be captured with a dynamic dim there
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
    split = [c for c in found if c.axes]
    assert dynamic and split and not dynamic & {axis for c in split for axis, _ in c.axes}
    for choice in split:
        report = run(op, choice, 2)
        assert report.ok, f"{choice}\n{report}"


# --- the oracle can fail ---------------------------------------------------------------------------------------------


def _row(text: str, **options: Any) -> Any:
    return lambda call: call.row(text, **options)


WRONG_RULES = [
    ("a split axis of a norm", case(aten.layer_norm.default, None, f(5, 4), [4]), _row("a b -> a b")),
    ("a scan along a split axis", case(aten.cumsum.default, None, f(5, 4), 1), _row("a b -> a b")),
    ("a mean of means", case(aten.mean.dim, None, f(5, 4), [1]), _row("a b -> a")),
    ("a table split without masks", case(aten.embedding.default, None, f(5, 4), ids(5, 7)), _row("v e, a -> a e")),
    ("a bias added by every rank", case(aten.linear.default, None, f(5, 4), f(3, 4), f(3)), _row("a k, n k, n -> a n")),
    ("a nonlinear op of addends", case(aten.relu.default, None, f(5, 4)), _row("a b -> a b", linear=[{0}])),
    ("a sum with a whole of a Partial", case(aten.add.Tensor, None, f(4), f(4)), _row("a, a -> a", linear=[{0}])),
    ("a mask per rank", case(aten.dropout.default, None, f(5, 4), 0.5, True), _row("a b -> a b")),
    ("copies in the wrong order", case(aten.repeat.default, None, f(4), [3]), _row("a -> (a r)", sizes={"r": 3})),
    ("dims swapped", case(aten.transpose.int, None, f(4, 4), 0, 1), _row("a b -> a b")),
    ("a size of the whole", case(aten.expand.default, None, f(5, 1), [5, 4]), _row("a 1 -> a b")),
    ("a target split alone", case(aten.gather.default, None, f(4, 5), 1, ids(5, 4, 3)), _row("a v, a i -> a i")),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("op", "wrong"), [w[1:] for w in WRONG_RULES], ids=[w[0] for w in WRONG_RULES])
def test_a_wrong_rule_is_caught(op: Case, wrong: Any) -> None:
    assert all(run(op, choice, 2).ok for choice in row_and_choices(op, 2)[1])
    with changed_rule(op.target, wrong):
        assert not all(_holds(op, choice) for choice in row_and_choices(op, 2)[1])


def _holds(op: Case, choice: Choice) -> bool:
    try:
        return run(op, choice, 2).ok
    except (ts.RuleError, RuntimeError, IndexError):  # the rule is not the library's
        return False


SABOTAGED = [
    (case(aten.linear.default, None, f(5, 6), f(4, 6)), "split n"),
    (case(aten.linear.default, None, f(5, 6), f(4, 6)), "split k"),
    (case(aten.softmax.int, None, f(5, 4), 1), "split b"),
    (case(aten.embedding.default, None, f(5, 4), ids(5, 3, 7)), "split v"),
    (case(aten.mul.Tensor, None, f(5, 4), f(4)), "P"),
    (case(aten.exp.default, None, f(5, 4)), "R"),
]


@pytest.mark.parametrize(("op", "name"), SABOTAGED, ids=[f"{c.target}-{n}" for c, n in SABOTAGED])
def test_every_tampered_collective_is_caught(op: Case, name: str) -> None:
    _, found = row_and_choices(op, 2, in_parts=False)
    choice = next(c for c in found if c.name == name)
    made = build(op, choice, 2)
    assert made.check().ok
    tampered = list(_tampered(made))
    assert tampered
    for what, graph in tampered:
        report = made.check(graph)
        assert not report.ok and report.diverges_at, what


def _tampered(made: PlannedCall) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graph with one collective dropped, taken for another, or with other elements of the same number.

    The order in which a stack of addends is dealt to the ranks makes no difference to their sum.
    """
    names = {n.name for n in made.graph.graph.nodes}
    same_shape = {"copy": "all_reduce", "reduce": "all_reduce", "all_reduce": "reduce"}
    for position, node in enumerate(made.graph.graph.nodes):
        row = collective(node)
        if row is None:
            continue
        held = row.name
        if held in same_shape:
            yield f"{node.name} dropped", _edited(made, position, None)
            yield f"{node.name} as {same_shape[held]}", _edited(made, position, same_shape[held])
        if held in ("scatter", "narrow", "gather") and f"{node.args[0].name}_sum" not in names:
            size, first = node.args[2][0], 2 + node.args[2][0] % 2
            yield f"{node.name} in other parts", _edited(made, position, held, parts=[first, 1, size - first, 1])


def _edited(made: PlannedCall, position: int, name: str | None, parts: Any = None) -> fx.GraphModule:
    held = made.graph_copy()
    node = list(held.graph.nodes)[position]
    if name is None:
        node.replace_all_uses_with(node.args[0])
        held.graph.erase_node(node)
    else:
        node.target = getattr(torch.ops.torchshard, name).default
        node.args = node.args if parts is None else (*node.args[:2], parts, *node.args[3:])
    held.recompile()
    return held


# --- rules of users --------------------------------------------------------------------------------------------------


@torch.library.custom_op("torchshard_tests::weigh", mutates_args=())
def weigh(x: Tensor, weight: Tensor) -> Tensor:
    """A user's op with a backward of its own: x * tanh(weight), per channel."""
    return x * weight.tanh()


weigh.register_fake(lambda x, weight: torch.empty_like(x))
weigh.register_autograd(
    lambda ctx, grad: (
        grad * ctx.saved_tensors[1].tanh(),
        (grad * ctx.saved_tensors[0] * (1 - ctx.saved_tensors[1].tanh() ** 2)).sum((0, 1)),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Weighing(nn.Module):
    """column -> the user's op -> row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.weight = nn.Parameter(torch.randn(10))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.ops.torchshard_tests.weigh(self.up(x), self.weight))


PLAN = {"up": "column", "down": "row"}


def _check(world: int) -> tuple[ts.Report, list[str]]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        report = ts.check(Weighing(), PLAN, world_size=world, example_inputs=(torch.randn(2, 5, 6),))
    return report, [str(w.message) for w in heard if "sharding rule" in str(w.message)]


@pytest.mark.parametrize("world", [2, 3])
def test_an_op_without_a_rule_is_right_and_warns_once(world: int) -> None:
    report, heard = _check(world)
    assert report.ok, str(report)
    assert len(heard) == 1
    # f64[2,5,10] is gathered; of its gradient each rank keeps a slice, which moves nothing
    sent = 2 * 5 * 8 * (world - 1) * -(-10 // world)  # slices are padded to the largest
    assert heard[0].startswith(f"{sent} B gathered per step for torchshard_tests.weigh.default (node")
    assert '@torchshard.rule("torchshard_tests.weigh.default")' in heard[0]


@pytest.mark.parametrize("world", [2, 3])
def test_a_user_rule_keeps_the_op_split(world: int) -> None:
    target = torch.ops.torchshard_tests.weigh.default
    with changed_rule(target, None):
        ts.rule(target, row="... c, c -> ... c", linear=[{0}])
        report, heard = _check(world)
        made = ts.plan(Weighing(), PLAN, world_size=world, example_inputs=(torch.randn(2, 5, 6),))
        op = case(target, "_1 _0 c", f(2, 5, 7), f(7))
        assert all(run(op, choice, world).ok for choice in row_and_choices(op, world)[1])
    assert report.ok, str(report)
    assert not heard
    assert str(made.parameters["weight"]) == "S(0)"


def test_a_rule_that_does_not_fit_its_op_is_an_error_that_names_the_row() -> None:
    x = TensorType((5, 4), torch.float64)
    with pytest.raises(ts.RuleError, match="the row has 3 dims, the tensor 2"):
        Call(aten.relu.default, {"self": x}, (x,)).row("a b c -> a b c")
    assert Call(aten.relu.default, {"self": x}, (x,)).row("a b -> a b").sizes == {"a": 5, "b": 4}


# --- random ops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_dropout_draws_the_unsharded_numbers(seed: int) -> None:
    """One choice under two seeds: the values are those of each seed, not of a first run."""
    op = case(aten.dropout.default, None, f(6, 8), 0.5, True)
    choice = Choice("split _0", (ts.S(1),), (ts.S(1),), (("_0", ((8, 1),)),))
    made = build(op, choice, 2, seed)
    torch.manual_seed(seed)
    assert made.check().ok
    masks = []
    for each in (seed, seed + 2):
        torch.manual_seed(each)
        masks.append(made.model(*made.args)[0] == 0)
    assert not torch.equal(*masks)


def test_constants_of_a_call_are_not_remembered() -> None:
    """The same op and shapes with other arguments: rows and replacements follow the arguments."""
    for start in (1, 3):
        op = case(aten.slice.Tensor, None, f(5, 9), 1, start, start + 3)
        assert all(run(op, choice, 2).ok for choice in row_and_choices(op, 2)[1])
    for p in (0.2, 0.7):
        op = case(aten.dropout.default, None, f(5, 9), p, True)
        assert all(run(op, choice, 2).ok for choice in row_and_choices(op, 2)[1])


LOOKUPS = {
    "embedding": (nn.Embedding(7, 4), torch.tensor([[1, 7]])),
    "negative": (nn.Embedding(7, 4), torch.tensor([[1, -1]])),
}


class _Picks(nn.Module):
    """A value split along the dim that is looked up."""

    def __init__(self, pick: Any, width: int = 7) -> None:
        super().__init__()
        self.up, self.pick = nn.Linear(6, width), pick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pick(self.up(x))  # type: ignore[no-any-return]


PICKS = {
    "index_select": lambda h: h.index_select(1, torch.tensor([1, 9])),
    "gather": lambda h: h.gather(1, torch.full((30, 2), 7)),
    "cross_entropy": lambda h: F.cross_entropy(h, torch.tensor([1, 71, -100] * 10)),
}


def _with_split_picks(model: nn.Module, plan: Any, x: torch.Tensor) -> PlannedCall:
    """The call in which what looks up is split along what it looks up in, whatever that costs."""
    call = capture(model, (x,))
    pick = call.nodes("embedding", "index_select", "gather", "cross_entropy_loss")[0]
    split = next(c for c in call.choices(pick, 2) if c.name == "split v")
    return call.plan(ts.Plan(2, call.plan(plan, 2).plan.parameters, {pick.name: split}), 2)


@pytest.mark.parametrize("name", [*LOOKUPS, *PICKS])
def test_an_index_that_is_no_ranks_is_an_error(name: str) -> None:
    if name in LOOKUPS:
        model, x, plan = nn.Sequential(LOOKUPS[name][0]), LOOKUPS[name][1], {"0": "vocab"}
    else:
        model, x, plan = _Picks(PICKS[name], 70 if name == "cross_entropy" else 7), torch.randn(30, 6), {"up": "column"}
    made = _with_split_picks(model, plan, x)
    with pytest.raises(RuntimeError, match="out of range"):
        made.run()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("body", [lambda h: h.square().mean(-1), lambda h: F.mse_loss(h, torch.zeros_like(h))])
def test_means_of_halves_over_a_split_dim_do_not_overflow(dtype: torch.dtype, body: Any) -> None:
    model = _Picks(body)
    model.up = nn.Linear(6, 4096)
    nn.init.constant_(model.up.bias, 9.0)
    report = ts.check(
        model.to(dtype), {"up": "column"}, world_size=2, example_inputs=(torch.randn(3, 6, dtype=dtype),), dtype=None
    )
    assert report.ok, str(report)


def test_a_failing_rule_is_reported_with_the_op_and_its_shapes() -> None:
    def broken(call: Call) -> Row:
        raise KeyError("nothing of that name")

    text = r"the rule of torchshard_tests\.weigh\.default fails"
    with (
        changed_rule(torch.ops.torchshard_tests.weigh.default, broken),
        pytest.raises(ts.RuleError, match=text) as caught,
    ):
        ts.check(Weighing(), PLAN, world_size=2, example_inputs=(torch.randn(2, 5, 6),))
    assert "KeyError" in str(caught.value) and ", 10], [10]" in str(caught.value)


@pytest.mark.parametrize("axis", ["n", "v"])
def test_the_mean_of_a_large_batch_of_halves(axis: str) -> None:
    """Its sum and its count need more digits than a half has; in float16 PyTorch's own sum on the CPU is infinite."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Parameter((30 * torch.randn(6000, 4)).to(torch.bfloat16))

        def forward(self, target: Tensor) -> Tensor:
            return F.cross_entropy(self.scores, target)

    torch.manual_seed(0)
    model, target = Loss(), torch.randint(4, (6000,))
    layouts = {"scores": ts.S("nv".index(axis))}
    made = capture(model, (target,), dynamic=False).plan({}, 2, machine="cpu-gloo", axes="all", layouts=layouts)
    report = made.check()
    assert report.ok, str(report)
    assert not any(c.value == "scores" for c in made.plan.costs.collectives)
