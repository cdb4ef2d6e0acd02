"""Compares a sharded program with the unsharded model, simulated in lockstep or on real ranks."""
