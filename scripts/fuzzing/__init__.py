"""Fuzzing: hostile bytes for whatever parses bytes that it did not write; see scripts/fuzz.py."""
