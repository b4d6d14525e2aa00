"""Datasets, image operations and batches."""
