"""The graph type of the compiler: `fx.GraphModule` with facts about each node in its `meta`."""
