"""The calls that the oracle runs: every op with a rule, in sizes that split evenly and sizes that don't.

Sizes are 5, 7, 4, 6, 3, 2 and 1: on 2 and 3 ranks they make even, uneven and empty shards. `splits` lists the
factors that a case's row allows to split, written from knowledge of the op, not copied from the rule. The files are
named as those of the rules (`torchshard/rules/`).
"""

from __future__ import annotations

from tests.op_cases.attention import ATTENTION
from tests.op_cases.batched import BATCHED
from tests.op_cases.convolution import CONVOLUTIONS
from tests.op_cases.creation import CREATION
from tests.op_cases.indexing import INDEXING
from tests.op_cases.linear_algebra import LINEAR_ALGEBRA
from tests.op_cases.losses import LOSSES
from tests.op_cases.normalization import NORMALIZATION
from tests.op_cases.pointwise import POINTWISE
from tests.op_cases.random import RANDOM
from tests.op_cases.reductions import REDUCTIONS
from tests.op_cases.shapes import SHAPES

CASES = [
    *BATCHED, *LINEAR_ALGEBRA, *CONVOLUTIONS, *CREATION, *INDEXING, *NORMALIZATION, *LOSSES, *POINTWISE, *RANDOM,
    *REDUCTIONS, *SHAPES, *ATTENTION,
]  # fmt: skip
"""All cases."""
