"""For those who write a storage format: the suite that it must pass, and strategies to test with.

It needs the extra ``testing`` (pytest and hypothesis), which nothing else in shardkit does.
"""

from __future__ import annotations

from shardkit.testing.conformance import FormatConformance
from shardkit.testing.strategies import field_names, keys, paths, records
from shardkit.testing.tools import read_shard, write_shard

__all__ = [
    "FormatConformance",
    "field_names",
    "keys",
    "paths",
    "read_shard",
    "records",
    "write_shard",
]
