"""Fuzzing of everything that parses untrusted bytes; see scripts/fuzz.py."""
