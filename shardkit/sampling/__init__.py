"""The order of an epoch and each rank's subset, as pure functions."""
