"""Archives from other programs as datasets, in place."""
