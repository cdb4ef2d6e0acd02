"""The rule of recurrent layers: hidden units are split, each with all of its gates.

`custom_ops.recurrent` defines a rank's computation.
"""

from __future__ import annotations

from typing import cast

from torchshard.core.rows import Local, Row
from torchshard.custom_ops.fx_types import Proxy, Traced
from torchshard.custom_ops.recurrent import RECURRENCES, RecurrentCall, SplitRecurrent, uses_rng
from torchshard.rules.registry import Call, rule, spaced


@rule(*RECURRENCES)
def recurrent(call: Call) -> Row | None:
    """`f32[9,2,8], f32[1,2,16], f32[48,8], f32[48,16] -> f32[9,2,16], f32[1,2,16]`, a GRU without biases:

    `!t n !i, !l n h, (!g h) !i, (!g h) !j -> !t n h, !l n h`     g=3

    The rule returns None if cuDNN draws the dropout, because a rank can't follow cuDNN's RNG; with
    projections (`proj_size`); and under autocast, which casts inside PyTorch's kernel, not where
    the steps of a split layer would.
    """
    target = cast(RecurrentCall, call.target)
    recurrence, params = RECURRENCES[target.function], call["params"]
    hidden = params[1].shape[1]
    drawn_by_cudnn = uses_rng(call.args) and call["device"] != "cpu"
    if target.autocast or drawn_by_cudnn or params[0].shape[0] != recurrence.gates * hidden:
        return None
    n = "!n" if uses_rng(call.args) else "n"
    sequence = [n, "!t"] if call["batch_first"] else ["!t", n]
    state = ["!l", n, "h"]
    weights = [["(!g h)", f"!i{i}"] if len(p.shape) == 2 else ["(!g h)"] for i, p in enumerate(params)]
    results = [[*sequence, "(!d h)"], *([state] * recurrence.states)]
    sizes = {"g": recurrence.gates, "d": 2 if call["bidirectional"] else 1, "h": hidden}

    def local(ctx: Local, x: Proxy, *operands: Traced) -> Proxy:
        """Records one node for the call: SplitRecurrent called with Proxies would run its steps."""
        split = SplitRecurrent(target.function, ctx.parts("h") or (), group=ctx.group)
        args = target.rebuild((x, *operands))[0]
        return x.tracer.create_proxy("call_function", split, tuple(args), {})

    operands = [[*sequence, "!i"], *([state] * recurrence.states), *weights]
    return call.row(f"{spaced(*operands)} -> {spaced(*results)}", sizes=sizes, local={"h": local})
