"""Shards of MosaicML Streaming and LitData: a line with the index, then the shard."""

from __future__ import annotations

import json
import random
import struct
from itertools import accumulate
from typing import Any

from hostile.foreign_shards import pil_value, write_litdata, write_mds

from scripts.fuzzing.targets.sources import GIF, SourceTarget, require_in_place
from shardkit.errors import UsageError
from shardkit.registry import get_source

_PIL = pil_value("RGB", 2, 1, b"123456")


class ColumnsTarget(SourceTarget):
    """Columns, sizes and offsets that lie."""

    file = "index.json"
    whole = True
    shard: str
    """Name of the shard."""

    def check(self, data: bytes) -> str:
        index, _, shard = data.partition(b"\n")
        for path in self.folder.iterdir():
            if path.is_file():
                path.unlink()
        (self.folder / self.shard).write_bytes(shard)
        return super().check(index)

    def _one(self, path: Any, data: bytes, options: dict[str, Any]) -> str:
        shard = (self.folder / self.shard).read_bytes()
        source: Any = get_source(self.kind).open(path, **options)
        images = next(iter(source.scan().splits.values()))
        try:
            groups = source.by_file(images)
        except UsageError:
            groups = ()
        for _, part in groups:
            require_in_place(source.located("", list(part.entries[:100])), shard)
        return super()._one(path, data + shard, options)

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        """State the size of the shard and the number of its samples, and have its table so."""
        index, _, shard = data.partition(b"\n")
        if rng.random() < 0.7:  # few changed indexes are indexes, and few tables fit the samples
            index, _, whole = rng.choice(self.seeds).partition(b"\n")
            if rng.random() < 0.5:
                content = bytearray(whole)
                for _ in range(rng.randrange(1, 9)):
                    content[rng.randrange(len(content))] = rng.choice(shard or b"\0")
                return index + b"\n" + content
        try:
            stated = json.loads(index)
            rows = rng.randrange(4)
            start = struct.unpack_from("<I", shard, 4)[0] if len(shard) > 8 else 0
            start = min(max(start, 4 * rows + 8), len(shard))
            sizes = [rng.randrange(0, 40) for _ in range(rows)]
            if rng.random() < 0.5:
                shard = (
                    struct.pack(f"<{rows + 2}I", rows, *accumulate(sizes, initial=start))
                    + (shard[4 * rows + 8 :])
                )
            self.state(stated, rows if rng.random() < 0.8 else 1 << 31, len(shard))
            index = json.dumps(stated).encode()
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            pass
        return index + b"\n" + shard

    def joined(self) -> bytes:
        """Return the index and the shard in the folder as an input."""
        return b"\n".join((self.folder / name).read_bytes() for name in (self.file, self.shard))

    def state(self, index: Any, rows: int, size: int) -> None:
        """State rows and size of the shard in an index."""
        raise NotImplementedError


class MdsTarget(ColumnsTarget):
    """MosaicML Streaming."""

    name = "source-mds"
    kind = "mds"
    shard = "shard.00000.mds"
    options = ({}, {"keep": "none"})
    tokens = (
        *(b'"pil"', b'"png"', b'"json"', b'"ndarray"', b'"ndarray:int8:1,2"', b'"int"', b'"pkl"'),
        *(b"null", b"8", b'"../secret"', b"[1]", GIF, _PIL, b"\xff" * 4, bytes(4), b"\x11\x01"),
    )

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        label, info = struct.pack("<q", 3), b"[1]"
        self.seeds = [
            self._made({"image": "png", "label": "int"}, [(GIF, label)] * 2, {"label": 8}),
            self._made({"image": "pil", "x": "json"}, [(_PIL, info)], {}),
            self._made(
                {"image": "bytes", "x": "ndarray", "y": "ndarray:int8:2"},
                [(GIF, b"\x09\x04\x04abcd", b"ab"), (GIF, b"\x08\x08\x01\x02ab", b"cd")],
                {"y": 2},
            ),
        ]

    def _made(
        self, columns: dict[str, str], rows: list[tuple[bytes, ...]], sizes: dict[str, int]
    ) -> bytes:
        write_mds(self.folder, columns, [rows], sizes)
        return self.joined()

    def state(self, index: Any, rows: int, size: int) -> None:
        index["shards"][0]["raw_data"]["bytes"] = size
        index["shards"][0]["samples"] = rows


class LitDataTarget(ColumnsTarget):
    """LitData."""

    name = "source-litdata"
    kind = "litdata"
    shard = "chunk-0-0.bin"
    options = ({"image": "image"}, {"image": "image", "keep": "none"})
    tokens = (
        *(b'"pil"', b'"bytes"', b'"json"', b'"numpy"', b'"tensor"', b'"no_header_numpy:3"'),
        *(b'"pickle"', b'"jpeg"', b'"int"', b'"../secret"', b"[1]", GIF, _PIL, b"\xff" * 4),
        *(b'\\"type\\": null', b'\\"builtins.list\\"', b'\\"children_spec\\": []', bytes(4)),
    )

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        array = struct.pack("<3I", 4, 1, 2) + b"ab"
        tensor = struct.pack(">3I", 11, 1, 2) + b"ab"
        label = struct.pack("<q", 3)
        self.seeds = [
            self._made({"image": "jpeg", "label": "int"}, [(GIF, label)] * 2),
            self._made({"image": "pil", "x": "json"}, [(_PIL, b"[1]")]),
            self._made(
                {"image": "bytes", "x": "numpy", "y": "tensor", "z": "no_header_numpy:4"},
                [(GIF, array, tensor, b"abc")],
            ),
        ]

    def _made(self, columns: dict[str, str], rows: list[tuple[bytes, ...]]) -> bytes:
        write_litdata(self.folder, columns, [rows])
        return self.joined()

    def state(self, index: Any, rows: int, size: int) -> None:
        index["chunks"][0].update(chunk_bytes=size, chunk_size=rows)
