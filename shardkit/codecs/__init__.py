"""Encode and decode images. A codec never opens a file."""
