"""Ops that our graphs need and PyTorch does not have: calls of Python code, split recurrent layers, with_value."""
