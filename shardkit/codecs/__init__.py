"""Bytes to values and back. A codec never opens a file."""
