"""The one graph type: `fx.Graph` with what its nodes know in `meta`."""
