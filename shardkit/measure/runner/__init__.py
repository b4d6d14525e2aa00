"""Isolated processes, interleaved rounds and timing; knows none of the tools."""
