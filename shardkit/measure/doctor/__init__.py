"""Where the time of a sample goes, what limits loading, and what would help."""
