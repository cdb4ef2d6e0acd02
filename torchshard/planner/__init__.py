"""A captured graph and constraints in; the best choices for its ops out."""
