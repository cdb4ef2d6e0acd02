"""Finds out how far the step of an unknown optimizer reads, by steps of small random parameters.

A step is of single elements if all of its ops are elementwise, and steps of slices are slices of full
steps. Some steps run again with another loss, and with other gradients, or none, for half of the
parameters: if a parameter of the other half, its state, or a setting ends differently, or a step draws
random numbers or has collectives of its own, it is of the whole model.

The steps are the optimizer's own, with its own settings, on parameters that have random values
meanwhile. All else is put back afterwards. An op may come later than the trial's last step, so later
steps of single elements refuse ops that are not elementwise.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchshard.core.errors import InputError
from torchshard.distributed.memory import MemoryProcessGroup
from torchshard.distributed.ranks import widest
from torchshard.runtime.compiled_regions import uncompiled
from torchshard.runtime.optimizer_classes import REACHES, Reach, parameters_of
from torchshard.runtime.state_forms import is_wrapper, opened
from torchshard.weights.local_slice import unwatched
from torchshard.weights.parameter import DATA, ShardedParameter

T = TypeVar("T")
Step = Callable[[Callable[[], Tensor]], object]
"""An optimizer's step, as a function of its closure."""
_STEPS = 12
"""The steps of a trial: some optimizers read more than elements only after ten, which is a common default."""
_LONGEST_VECTOR, _LARGEST_MATRIX = 1 << 16, 160**2
"""The most elements of a trial's parameters, of vectors and of all others."""
_GRADIENTS = 3
"""The number of different gradients. With one, each would keep its sign, and an update by signs would never change."""
_OF_A_KIND, _SHAPES = 2, 6
"""The parameters of a shape that take part, and the number of shapes, the smallest ones."""
_LEAST_RATE = 1e-2
"""The smallest learning rate of a trial. At the rate 0 of a warm-up, no parameter would change."""
_OTHERS = (1e3, 1e-3)
"""The factors of the other gradients: clipping acts on large ones only."""
_ELEMENTWISE = frozenset(
    f"aten::{name}" for name in (
        "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
        "zero_", "fill_", "copy_", "detach", "detach_", "alias", "_to_copy", "lift_fresh", "lift_fresh_copy",
    )
)  # fmt: skip
"""Ops of single elements that PyTorch does not tag as pointwise."""
# `_c10d_functional`: the operators of functional collectives, which have no public namespace (PyTorch 2.13.0).
_COLLECTIVES = ("c10d", "_c10d_functional")
"""The namespaces of collectives: an optimizer's own expect the full model on each rank, as under DDP."""
_ACROSS = tuple(f"aten::_foreach_{name}" for name in ("norm", "powsum", "max", "mm"))
"""The ops on lists that read more than single elements."""


class Ops(TorchDispatchMode):
    """Notes whether all ops are elementwise, and whether one draws random numbers or is a collective."""

    def __init__(self, refuse: Callable[[str], NoReturn] | None = None) -> None:
        """Starts without any op.

        Args:
            refuse: raises an error for an op that is not elementwise.
        """
        super().__init__()
        self.elementwise, self.of_model, self._refuse, self._is_paused = True, False, refuse, False

    def around(self, closure: Callable[[], T]) -> Callable[[], T]:
        """Returns a closure whose ops do not count."""

        def uncounted() -> T:
            self._is_paused = True
            try:
                return closure()
            finally:
                self._is_paused = False

        return uncounted

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Runs an op."""
        if not self._is_paused:
            of_model = torch.Tag.nondeterministic_seeded in func.tags or func.namespace in _COLLECTIVES
            is_elementwise = not of_model and _is_elementwise(func, args, kwargs or {})
            if self._refuse is not None and not is_elementwise:
                self._refuse(str(func))
            self.of_model, self.elementwise = self.of_model or of_model, self.elementwise and is_elementwise
        return func(*args, **kwargs or {})


def _is_elementwise(func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    name = func._schema.name
    given = [*args, *kwargs.values()]
    if name.startswith("aten::_foreach_"):
        lists = [arg for arg in given if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
        return name not in _ACROSS and all(_have_one_shape(each) for each in zip(*lists, strict=False))
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
    if not any(t.ndim for t in tensors):
        return True  # numbers: a count of steps, a learning rate
    if any(map(is_wrapper, tensors)):
        return False  # its own ops are not seen: one may read a block of elements
    return (torch.Tag.pointwise in func.tags or name in _ELEMENTWISE) and _have_one_shape(tensors)


def _have_one_shape(tensors: Sequence[Tensor]) -> bool:
    return len({t.shape for t in tensors if t.ndim}) <= 1


def agreed_reach(optimizer: Optimizer, step: Step) -> list[Reach]:
    """Returns the reach of each of an optimizer's groups: the widest that a rank finds. A collective call.

    Args:
        step: makes a step, without hooks, and calls a closure if it takes one.

    Raises:
        InputError: the trial fails.
    """
    ranks = widest(parameters_of(optimizer))
    what = f"how far {type(optimizer).__name__}'s step reads"
    groups = [dist.group.WORLD, *(group.process_group for group in ranks.groups.values())]

    def begun() -> int:
        return sum(group.calls.begun for group in groups if isinstance(group, MemoryProcessGroup))

    found = ranks.run_on_all(lambda: _found_reach(optimizer, step, begun), InputError, what)
    numbers = torch.tensor([REACHES.index(reach) for reach in found], device="cpu")
    return [REACHES[int(number)] for number in ranks.reduced(numbers, dist.ReduceOp.MAX, eager=what)]


def _found_reach(optimizer: Optimizer, step: Step, begun: Callable[[], int]) -> list[Reach]:
    """Returns the reach of each group, as this rank finds it.

    Args:
        begun: returns the number of collectives that have begun over groups without operators.

    Raises:
        InputError: the trial fails.
    """
    groups = [_smallest(group["params"]) for group in optimizer.param_groups]
    chosen = [p for group in groups for p in group]
    try:
        with _Trial(optimizer, chosen) as trial:
            reaches: list[Reach] = []
            for group in groups:
                before = begun()
                with Ops() as ops:
                    full = trial.run(step, dict.fromkeys(group))
                if ops.of_model or trial.has_drawn or begun() != before:
                    return ["model"] * len(groups)
                is_element = ops.elementwise and trial.is_of_elements(step, group, full)
                reaches.append("element" if is_element else "parameter")
            return ["model"] * len(groups) if _reads_others(trial, step, chosen) else reaches
    except Exception as error:
        raise _unknown(optimizer, error) from error


def _reads_others(trial: _Trial, step: Step, chosen: Sequence[Tensor]) -> bool:
    """Returns whether a parameter ends differently if others have different gradients, or none, or the loss differs."""
    usual = trial.run(step, dict.fromkeys(chosen))
    if not _equal(usual, trial.run(step, dict.fromkeys(chosen), loss=2.0)):
        return True
    for bit, half in itertools.product(range(max((len(chosen) - 1).bit_length(), 1)), (0, 1)):
        kept = [i for i in range(len(chosen)) if (i >> bit) & 1 == half]  # each two are in different halves once
        if len(kept) == len(chosen):
            continue
        same: dict[Tensor, float | None] = {chosen[i]: None for i in kept}
        for factors in (*({p: same.get(p, factor) for p in chosen} for factor in _OTHERS), same):
            try:
                other = trial.run(step, factors)
            except Exception:  # such as a sum over an empty list
                return True
            ends = ([end.settings, *((end.parameters[i], end.states[i]) for i in kept)] for end in (usual, other))
            if not _equal(*ends):
                return True
    return False


def _smallest(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The parameters of a group that take part in the trial."""
    shapes = dict[tuple[int, ...], list[Tensor]]()
    for p in sorted(parameters, key=lambda p: torch.Size(_full_shape(p)).numel()):
        if p.requires_grad and torch.Size(_full_shape(p)).numel():
            shapes.setdefault(_full_shape(p), []).append(p)
    dims = {len(shape): shape for shape in reversed(shapes)}
    few = dict.fromkeys([*dims.values(), *list(shapes)[:_SHAPES]])  # the smallest of each number of dims, and others
    return [p for shape in few for p in shapes[shape][:_OF_A_KIND]]


def _full_shape(p: Tensor) -> tuple[int, ...]:
    """The shape of a parameter in the trial: its full one, or with its largest dims cut.

    Some steps treat parameters of few elements differently, so the cut ones have many: 50000, 8 -> 3200, 8.
    """
    whole = p.whole if isinstance(p, ShardedParameter) else tuple(p.shape)
    elements, shape = float(_LONGEST_VECTOR if len(whole) == 1 else _LARGEST_MATRIX), list(whole)
    for left, dim in enumerate(sorted(range(len(whole)), key=whole.__getitem__)):
        shape[dim] = min(whole[dim], int(elements ** (1 / (len(whole) - left)) + 1e-6))
        elements /= max(shape[dim], 1)
    return tuple(shape)


class _Ended(NamedTuple):
    """The outcome of a trial's steps."""

    parameters: list[Tensor]
    states: list[object]
    """The state of each parameter."""
    settings: object
    """The settings of the optimizer and its groups, and its state that is not of a parameter."""


def _equal(one: object, other: object) -> bool:
    """Returns whether two trees of tensors and numbers are equal, bit by bit."""
    first, second = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(first, second, strict=True)
    )


def _settings(optimizer: Optimizer) -> object:
    plain = (int, float, Tensor)
    own = {name: value for name, value in vars(optimizer).items() if isinstance(value, plain)}
    groups = [
        {name: v for name, v in group.items() if isinstance(v, plain) and name != "params"}
        for group in optimizer.param_groups
    ]
    return copy.deepcopy([own, groups, {str(k): v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}])


class _Trial:
    """An optimizer whose parameters have random values for a while."""

    def __init__(self, optimizer: Optimizer, chosen: Sequence[Tensor]) -> None:
        self._optimizer, self.has_drawn = optimizer, False
        self._all, self._devices = parameters_of(optimizer), {p.device for p in chosen if p.device.type != "cpu"}
        generator = torch.Generator("cpu").manual_seed(0)

        def drawn(p: Tensor) -> Tensor:
            drawn = torch.randn(_full_shape(p), generator=generator, dtype=torch.float64, device="cpu")
            is_narrow = p.dtype.itemsize < 4  # in bfloat16 an update may be rounded away
            return drawn.to(p.device, torch.float32 if is_narrow else p.dtype)

        self._values = {p: drawn(p) for p in chosen}
        self._gradients = [{p: (drawn(p), drawn(p)) for p in chosen} for _ in range(_GRADIENTS)]
        """The gradients of a step, which take turns: a parameter -> its gradient, and another one."""

    def __enter__(self) -> _Trial:
        with unwatched():
            self._before = [(p, p.__class__, DATA(p), p.grad) for p in self._all]
        for p in self._all:
            p.__class__ = nn.Parameter if isinstance(p, ShardedParameter) else p.__class__
        return self

    def __exit__(self, *error: object) -> None:
        for p, cls, data, grad in self._before:
            p.grad = None
            p.data = data
            p.grad = grad
            p.__class__ = cls

    def is_of_elements(self, step: Step, group: Sequence[Tensor], full: _Ended) -> bool:
        """Returns whether steps of slices are slices of full steps: a step may also read shapes, or call NumPy."""
        for dim in (0, -1):
            sliced = self.run(step, dict.fromkeys(group), partial(_half, dim=dim))
            for i, p in enumerate(self._values):
                whole, own = _half(full.parameters[i], dim=dim), sliced.parameters[i]
                rounding = 1e3 * torch.finfo(whole.dtype).eps * whole.abs().max()  # vectors round unlike single numbers
                if any(p is q for q in group) and not bool((whole - own).abs().max() <= rounding):
                    return False
        return True

    def run(
        self,
        step: Step,
        factors: Mapping[Tensor, float | None],
        part: Callable[[Tensor], Tensor] = torch.clone,
        loss: float = 1.0,
    ) -> _Ended:
        """Makes some steps.

        Args:
            factors: a parameter -> the factor of its other gradient, or None for its gradient; the rest have none.
            part: returns a copy of a parameter, or of a slice of it.
            loss: the loss of the closure.
        """
        for p in self._all:
            p.grad = None
        for p, value in self._values.items():
            p.data = part(value)
        turns = itertools.cycle(self._gradients)

        def closure() -> Tensor:
            gradients = next(turns)
            for p, factor in factors.items():
                gradient, other = gradients[p]
                # of a parabola: SAM takes gradients at other parameters than it updates
                p.grad = part(gradient if factor is None else other * factor) + p.data
            return torch.tensor(loss, device="cpu")

        copies, generators = _on_copies(self._optimizer, self._all), torch.random.fork_rng(self._devices)
        with copies, generators, _python_draws_kept(), uncompiled():
            before = _python_draws()
            for _ in range(_STEPS):
                closure()
                step(closure)
            self.has_drawn = _python_draws() != before
            # open: a tensor that wraps others may have no copy
            states = copy.deepcopy([opened(self._optimizer.state.get(p)) for p in self._values])
            return _Ended([p.data.clone() for p in self._values], states, _settings(self._optimizer))


@contextlib.contextmanager
def _on_copies(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Gives an optimizer copies of its attributes and settings, and an empty state, for a while."""
    own, memo = dict(vars(optimizer)), dict[int, Any]((id(p), p) for p in parameters)

    def copied(name: str, value: object) -> object:
        if isinstance(value, OrderedDict):
            return value  # hooks
        if isinstance(value, torch.Generator):
            return value.clone_state()
        with contextlib.suppress(Exception):  # such as a lock: it is not a setting
            return copy.deepcopy(value, memo)
        return value

    vars(optimizer).update({name: copied(name, value) for name, value in own.items() if name != "state"})
    optimizer.state = defaultdict(dict)
    for group in optimizer.param_groups:
        if group.get("lr") is not None and float(group["lr"]) < _LEAST_RATE:  # a warm-up begins at 0
            group["lr"] = torch.full_like(group["lr"], _LEAST_RATE) if isinstance(group["lr"], Tensor) else _LEAST_RATE
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(own)


def _half(x: Tensor, dim: int) -> Tensor:
    """A copy of the first half along a dim."""
    half = x.narrow(dim, 0, max(x.shape[dim] // 2, 1)) if x.ndim else x
    return half.clone(memory_format=torch.contiguous_format)


def _python_draws() -> object:
    """The states of the generators of Python and NumPy."""
    return random.getstate(), str(np.random.get_state(legacy=False))


@contextlib.contextmanager
def _python_draws_kept() -> Iterator[None]:
    """Puts back the generators of Python and NumPy."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _unknown(optimizer: Optimizer, error: Exception) -> InputError:
    name = type(optimizer).__name__
    return InputError(
        f"how far {name}'s step reads can't be found out",
        where=f"{name}.step()",
        why=f"a step of random parameters fails: {type(error).__name__}: {error}",
        attempt=f'ts.register_optimizer({name}, "element") if it treats each element by itself, as AdamW does; '
        '"parameter" if it looks at full matrices, as Muon does; otherwise "model"',
    )
