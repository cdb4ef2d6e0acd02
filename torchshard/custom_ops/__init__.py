"""Ops that graphs hold and PyTorch has no name for: Python kept whole, recurrent layers, replaced values."""
