"""Datasets, sources and jobs in object stores."""
