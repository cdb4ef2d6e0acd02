"""Slices of parameters: cut from full tensors, used in users' code, saved in state dicts."""
