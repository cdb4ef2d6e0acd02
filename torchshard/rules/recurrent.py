"""Recurrent layers: the hidden units split, each with all of its gates. What a rank does: `custom_ops.recurrent`."""

from __future__ import annotations

from typing import Any

from torchshard.core.notation import Inside, Local, Row
from torchshard.custom_ops.recurrent import RECURRENCES, SplitRecurrent, uses_rng
from torchshard.rules.registry import Call, rule, spaced


@rule(*RECURRENCES)
def recurrent(call: Call) -> Row | None:
    """`f32[9,2,8], f32[1,2,16], f32[48,8], f32[48,16] -> f32[9,2,16], f32[1,2,16]`, a GRU without biases:

    `!t n !i, !l n h, (!g h) !i, (!g h) !j -> !t n h, !l n h`     g=3

    There is none where cuDNN draws the dropout, with projections (`proj_size`), nor in autocast, which casts what
    PyTorch's kernels compute as a whole.
    """
    kind, params = RECURRENCES[call.target.function], call["params"]
    hidden = params[1].shape[1]
    drawn_by_cudnn = uses_rng(call.args) and call["device"] != "cpu"
    if call.target.autocast or drawn_by_cudnn or params[0].shape[0] != kind.gates * hidden:
        return None
    n = "!n" if uses_rng(call.args) else "n"
    sequence = [n, "!t"] if call["batch_first"] else ["!t", n]
    state = ["!l", n, "h"]
    weights = [["(!g h)", f"!i{i}"] if len(p.shape) == 2 else ["(!g h)"] for i, p in enumerate(params)]
    made = [[*sequence, "(!d h)"], *([state] * kind.states)]
    sizes = {"g": kind.gates, "d": 2 if call["bidirectional"] else 1, "h": hidden}

    def local(ctx: Local, x: Any, *operands: Any) -> Any:
        """The call is a node of its own, for all steps."""
        split = SplitRecurrent(call.target.function, ctx.parts("h") or (), ctx.group)
        args = call.target.rebuild((x, *operands))[0]
        return x.tracer.create_proxy("call_function", split, tuple(args), {})

    operands = [[*sequence, "!i"], *([state] * kind.states), *weights]
    comm = {"h": (Inside("all_gather", ("n", "h"), times=("t", "l")),)}
    return call.row(f"{spaced(*operands)} -> {spaced(*made)}", sizes=sizes, local={"h": local}, comm=comm)
