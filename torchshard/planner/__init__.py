"""Finds the best choices for the ops of a captured graph, under constraints."""
