"""Datasets, plans and sources of files in object stores: upload, download, share among jobs."""
