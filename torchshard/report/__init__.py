"""Plans for people: the reason for each collective, listings, pictures."""
