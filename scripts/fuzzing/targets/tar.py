"""The walk over the headers of a tar, and the parts left to `tarfile`."""

from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

from scripts.fuzzing.targets.shard import ShardTarget
from shardkit.formats.webdataset import FORMAT

_BLOCK = 512


class TarTarget(ShardTarget):
    """Sizes that are negative or lie, PAX and GNU headers, links, sparse members."""

    name = "tar"
    storage = FORMAT
    tokens = (
        *(b"%c" % letter for letter in b"0123456789xgLKSDMVNX\0"),
        *(b"%011o\0" % size for size in (0, 1, 511, 512, 513, 4096, 8**11 - 1)),
        *(size.to_bytes(12, "big") for size in (1 << 95, (1 << 95) + 512, (1 << 95) + (1 << 63))),
        *((-size).to_bytes(12, "big", signed=True) for size in (1, 512, 1024, 2048, 1 << 40)),
        *(b"ustar\x0000", b"ustar  \0", b"a/../../b.jpg", b"/etc/passwd.jpg", b"../up.png"),
        *(b"28 GNU.sparse.realsize=1000\n", b"22 GNU.sparse.major=1\n", b"22 GNU.sparse.minor=0\n"),
        *(b"12 size=-512\n", b"13 size=-1024\n", b"13 size=99999\n", b"14 path=x.jpg\n"),
        *(b"21 hdrcharset=BINARY\n", b"99999999999 path=x\n", b"0 path=x\n", b"14 path=\0\xff\n\n"),
        *(b"20 GNU.sparse.map=0,\n", b"26 GNU.sparse.numblocks=9\n", b"x.y.jpg", b".jpg", b"a."),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            self.seeds.append(_by_tarfile(kind))

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return data
        mended = bytearray(data)
        for start in _headers(data):
            header = mended[start : start + _BLOCK]
            header[148:156] = b" " * 8
            mended[start + 148 : start + 156] = b"%06o\0 " % sum(header)
        return bytes(mended)


def _headers(data: bytes) -> list[int]:
    return [
        start
        for start in range(0, len(data) - _BLOCK + 1, _BLOCK)
        if data[start + 257 : start + 262] == b"ustar"
    ]


def _by_tarfile(kind: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in (
            "folder/a.gif",
            "folder/a.json",
            "x" * 99 + "/" + "y" * 80 + ".gif",
            "ü/é.gif",
        ):
            content = b'{"path":"p","width":1,"height":1}' if "json" in name else b"GIF89a"
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mtime = 1.5  # a float: PAX states it
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
