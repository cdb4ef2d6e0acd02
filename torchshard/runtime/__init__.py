"""A sharded model on a rank: its calls and graphs, its parameters, and its optimizers.

`module` is the model that users hold, on `state` (its tensors), on `submodule` (its parts). A call goes from `call_key`
(what kind of call it is) to `compiled` (find or make the graph) to `call_verification`, which compares what `history`
and `digests` know. Around it: `optimizers`, `training`, `measure`.
"""
