"""A sharded model on one rank: its calls and graphs, its parameters, and its optimizers.

`module` defines the model that users call. It is a `submodule`, and has a `store` (its weights), an
`agreement` (the ranks' comparisons) and a `runner`. The runner reads a call (`reader`, with its
`call_key`), finds its graph (`compiled`) or captures one (`capturing`), and runs it with its backward
(`step`). `agreement` compares calls (`call_verification`) and what happened between them (`history`),
by `digests`. Outside of calls: `state_dicts`, `optimizers`, `training`, `measure`.
"""
