"""The version of shardkit."""

__version__ = "0.1.0"
