"""What was planned, for people: why each collective is there, listings, pictures."""
