"""A sharded model on a rank: its calls and graphs, its parameters, and its optimizers."""
