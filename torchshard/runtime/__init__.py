"""A sharded model on a rank: its module, its state, what optimizers and training steps do with it."""
