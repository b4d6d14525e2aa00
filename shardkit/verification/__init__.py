"""Verify, compare with the source, repair, reindex and describe datasets."""
