"""Datasets on disk: manifest, index, shards and the bytes of each record."""
