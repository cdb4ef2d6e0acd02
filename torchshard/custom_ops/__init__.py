"""Ops that our graphs need and PyTorch does not have: Python calls kept whole, split recurrent layers, with_value."""
