"""Orders of an epoch that a user asks for: weights, mixtures, buckets, windows."""
