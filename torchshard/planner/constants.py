"""The planner's numbers, each with the reason or the experiment that set it. Prices of a machine are in
`plans.machine`."""

from __future__ import annotations

FORBIDDEN = float("inf")
"""The cost of an illegal combination: an infinite cost makes a separate table of legality unnecessary."""

# --- the network of costs --------------------------------------------------------------------------------------------

GATHERED_PARAMETER = 1e6
"""Factor on the time of gathering a parameter with a fixed layout. The gather is legal, because some plans can't run
without it. The factor makes it a last resort: a gather of 1 us outweighs a step of a second."""
MAX_SETS = 1024
"""Sets of layouts considered for a value that several ops read, the smallest first. Each op multiplies the number of
sets by the layouts that it may require. Large sets pay for many conversions and are rarely the best."""
MAX_WANTED = 4
"""Segmentations kept per tensor while `wanted_parts` collects the ones that ops could use. Fused weights need one or
two (q, k and v; gate and up). Each further one adds a state to every op that the tensor reaches."""
MAX_WANTED_PARTS = 8
"""Parts of the longest segmentation kept: q, k, v and the gates of bidirectional recurrent layers fit."""

# --- repeated blocks -------------------------------------------------------------------------------------------------

MIN_BLOCKS = 5
"""Shorter runs are not folded, because four blocks of a run are planned in any case."""
MAX_PERIODS = 12
"""Distances at which repetitions are tried, the most frequent first. A block has a few dozen ops. The distance between
layers is among the most frequent, since every op of a layer repeats at it."""
MULTIPLES = (2, 3, 4, 6)
"""Multiples of these distances, tried for layers of alternating kinds: Gemma's local and global attention, or one
dense layer for every two, three, four or six."""

# --- elimination -----------------------------------------------------------------------------------------------------

MAX_TABLE = 1 << 23
"""Entries of the largest table: 64 MiB of doubles. Summing its factors and taking the minimum takes 0.14 s, at each of
the roughly four prices that a sweep tries."""
COMPETE = 1 << 22
"""Size of a table, in entries, at which the smallest-bag order starts to compete with networkx's tree decompositions,
which ignore the number of states of a decision. For nine of ten models (2 and 6 layers, two and four ranks, axes
"weights" and "all") networkx's orders have 0.63 to 400 times our entries in all tables and save at most a millisecond,
but finding both takes 10 to 80 ms: below this size they are not tried. Two layers of phi3 have a table of 18 million
entries in our order (117 million on four ranks), which gives only a bound. Minimum fill-in has 0.42 (0.16) times our
entries and solves phi3 exactly: the plan has one collective fewer and is found in 1.8 s instead of 2.3 s."""
NEIGHBOURHOOD = 48
"""Decisions that are solved together if a table would be too large: two thirds of the open decisions in a llama layer
(77 after pruning), so a neighbourhood spans any value of a layer."""
ROUNDS = 8
"""Maximum number of passes over all neighbourhoods. With tables of 1,000 entries, one to three passes suffice (two
layers of llama, t5, phi3 and mixtral)."""

# --- the budget of bytes ---------------------------------------------------------------------------------------------

WEIGHT_SLACK = 0.1
"""Bytes of weights that the ranks may store above the minimum, as a fraction of the minimum; weights that can't be
split or are pinned replicated do not count. At 0, plans would send activations to split a router of 8 x 4096."""
WHOLE_WEIGHT_GAIN = 0.5
"""A weight stays replicated if it saves at least this percentage of the step's time per percent of extra bytes."""
TRAINING_COPIES = 4
"""Copies of a weight in training: itself, its gradient, and Adam's two moments. In inference a byte costs a quarter."""
EPSILON = 1e-9
"""Costs that differ by a smaller fraction are equal up to rounding: sums of 1,000 doubles are accurate to 1e-13."""
MAX_PRICE = 1e-3
"""Seconds per byte, more than any byte is worth, so the best plan at this price is the smallest. A link of 1 kB/s
sends a byte in that time."""

# --- the cost model --------------------------------------------------------------------------------------------------

FUSED = 1e-3
"""Factor on the bytes that an op passes on within a kernel. They never justify a collective, but of two plans that send
the same bytes, the one with less work per rank is better."""
BUCKETED = 4
"""Gradients that share the latency of one message: a layer has two norms, each with a weight and a bias."""

# --- reports ---------------------------------------------------------------------------------------------------------

WEIGHTS, WORK, SENT = 0.05, 0.1, 0.1
"""Fractions of the model's weights, the step's computation and the bytes sent, above which an unsplit op with a rule is
reported. PyTorch's own attention, which once ran replicated without a report, exceeds them; a norm or a router does
not."""
NEAR = 12
"""Number of ops before and after an unsplit op that are searched for the reason: about one attention block."""
