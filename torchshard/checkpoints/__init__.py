"""Checkpoints of training runs, and export of models for other libraries."""
