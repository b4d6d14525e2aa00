"""Archives of other programs as datasets, in place."""
