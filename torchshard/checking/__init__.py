"""Proof for users: the sharded program beside the unsharded model, in lockstep or on real ranks."""
