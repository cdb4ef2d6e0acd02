"""Slices of parameters: cut from whole tensors, in the hands of users, in state dicts."""
