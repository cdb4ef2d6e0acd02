"""The planner's numbers, each with the reason or the experiment that set it. Prices of a machine are in
`plans.machine`."""

from __future__ import annotations

FORBIDDEN = float("inf")
"""The cost of what is not legal: sums and minima of tables then need no second table of what is."""

# --- the network of costs --------------------------------------------------------------------------------------------

GATHERED_PARAMETER = 1e6
"""How many times its seconds the gather of a parameter counts whose layout is fixed. It is legal, because the plan may
have no other way to run, and the factor keeps it the last resort: a gather of 1 us outweighs a step of a second."""
MAX_SETS = 1024
"""The sets of layouts considered for a value that many ops read, the smallest first. Each op multiplies the sets by the
layouts that it may require, without bound; sets with many layouts pay for many conversions and are rarely the best."""
MAX_WANTED = 4
"""Segmentations of a dim kept per tensor while `wanted_parts` collects those that ops could use. Fused weights need one
or two (q, k and v; gate and up); each one more is one more state of every op that the tensor reaches."""
MAX_WANTED_PARTS = 8
"""Parts of the longest segmentation kept: q, k, v, and gates of recurrent layers in both directions fit."""

# --- repeated blocks -------------------------------------------------------------------------------------------------

MIN_BLOCKS = 5
"""Shorter runs are left as they are: four blocks of a run are planned in any case."""
MAX_PERIODS = 12
"""Distances at which repetitions are tried, the most frequent first. A block has a few dozen ops, and the distance from
layer to layer is among the first, since every op of a layer repeats at it."""
MULTIPLES = (2, 3, 4, 6)
"""And how many times these distances, where layers of several kinds take turns: Gemma's local and global attention, or
one dense layer for every two, three, four or six."""

# --- elimination -----------------------------------------------------------------------------------------------------

MAX_TABLE = 1 << 23
"""Entries of the largest table. As doubles that is 64 MiB; to add it up and take its minimum takes 0.14 s, at each of
the four or so prices that a sweep tries."""
COMPETE = 1 << 22
"""Entries of a table from which on the order of smallest bags competes with networkx's tree decompositions, which do
not know how many states a decision has. Of ten models (2 and 6 layers, two and four ranks, axes "weights" and "all")
the orders of nine have 0.63 to 400 times as many entries in all tables, and save a millisecond at most: ours is taken
without asking, for to find both others takes 10 to 80 ms. Two layers of phi3 have a table of 18 million entries in our
order (117 million on four ranks) and are only bounded; minimum fill-in has 0.42 (0.16) times as many entries, so that
they are solved exactly: the plan has a collective fewer, and is found in 1.8 s in place of 2.3."""
NEIGHBOURHOOD = 48
"""Decisions that are solved together where a table would be too large: two thirds of those that are open in a layer of
llama (77 after pruning), so that a neighbourhood reaches across any value of a layer."""
ROUNDS = 8
"""The most times that all neighbourhoods are gone through. With tables of 1,000 entries none improves after one
to three (llama, t5, phi3, mixtral of two layers)."""

# --- the budget of bytes ---------------------------------------------------------------------------------------------

WEIGHT_SLACK = 0.1
"""How much more than the fewest bytes of weights the ranks may store, as a fraction of these; weights that can't be
split or are pinned whole do not count. With none, activations would be sent to split a router of 8 x 4096."""
WHOLE_WEIGHT_GAIN = 0.5
"""A weight stays whole if that saves this many percent of the step's time for each percent more bytes."""
TRAINING_COPIES = 4
"""How many times a weight is stored in training: itself, its gradient, and Adam's two moments. Without training, bytes
are a quarter as dear."""
EPSILON = 1e-9
"""Costs that differ by a smaller fraction are equal but for rounding: sums of a thousand doubles are good to 1e-13."""
MAX_PRICE = 1e-3
"""Seconds per byte, more than any byte is worth: at this price the plan with the fewest bytes is the best. A link of
1 kB/s sends a byte in that time."""

# --- the cost model --------------------------------------------------------------------------------------------------

FUSED = 1e-3
"""What the time of elementwise ops counts where they fuse with their neighbours: to divide them is worth no collective,
but of two plans that send the same, the one with less work per rank is better."""
BUCKETED = 4
"""Gradients that share the latency of one message: a layer's two norms have four, each a weight and a bias."""

# --- reports ---------------------------------------------------------------------------------------------------------

WEIGHTS, WORK, SENT = 0.05, 0.1, 0.1
"""An op with a rule that is not split is reported from these fractions of the model's weights, the step's computation,
or the bytes sent: PyTorch's own attention, which once ran whole without a word, has more, a norm or a router less."""
NEAR = 12
"""The reason why an op runs whole is looked for among this many ops before and after it, about a block of attention."""
