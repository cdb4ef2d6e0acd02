"""Checkpoints of training runs, and models written out for other libraries."""
