"""A sharded model on one rank: its calls and graphs, its parameters, and its optimizers.

`module` defines the model that users call, on top of `state` (its tensors) and `submodule`. A call
goes through `call_key` (which kind of call), `compiled` (find or make the graph) and
`call_verification`, which compares facts from `history` and `digests` across ranks. Around calls:
`optimizers`, `training`, `measure`.
"""
