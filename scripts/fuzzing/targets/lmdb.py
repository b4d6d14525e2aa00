"""The walk over LMDB's pages."""

from __future__ import annotations

import struct

from scripts.fuzzing.targets.shard import ShardTarget
from shardkit.formats.lmdb import FORMAT


class LmdbTarget(ShardTarget):
    """Pages that point at each other, lengths that overflow, sizes that lie."""

    name = "lmdb"
    storage = FORMAT
    tokens = (
        *(struct.pack("<H", flags) for flags in (1, 2, 4, 8, 0x10, 0x20, 0x40, 3, 6)),
        *(struct.pack("<Q", page) for page in (0, 1, 2, 3, 4, 5, 6, (1 << 64) - 1, 1 << 52)),
        struct.pack("<IIQQ", 0xBEEFC0DE, 1, 0, 1 << 30),
        b"__shardkit__",
        *(b"%09d." % row for row in (0, 1, 4, 5, 10, 999999999)),
        *(b"%09d.__key__" % row for row in (0, 4, 5)),
        *(
            b"000000000." + name
            for name in (b"jpg", b"raw.npy", b"raw", b"cls", b"json", b"", b".")
        ),
        b"\x93NUMPY\x01\x00",
    )
