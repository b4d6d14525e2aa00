"""Conformance suites for storage formats and sources, and strategies to test them with.

It requires the extra ``testing`` (pytest and hypothesis).
"""

from __future__ import annotations

from shardkit.testing.conformance import FormatConformance
from shardkit.testing.sources import SourceConformance
from shardkit.testing.strategies import field_names, keys, paths, records
from shardkit.testing.tools import read_shard, write_shard

__all__ = [
    "FormatConformance",
    "SourceConformance",
    "field_names",
    "keys",
    "paths",
    "read_shard",
    "records",
    "write_shard",
]
