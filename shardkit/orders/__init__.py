"""Orders of an epoch beyond shuffling: weights, mixtures, buckets, windows."""
