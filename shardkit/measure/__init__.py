"""Measuring: how fast a dataset is read on this machine, what limits it, and what would help."""
