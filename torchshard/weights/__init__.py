"""Slices of parameters: cut from whole tensors, used in users' own code, saved in state dicts."""
