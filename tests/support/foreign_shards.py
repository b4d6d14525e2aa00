"""Shards of MosaicML Streaming and LitData, whose own packages wrote those of `tests/golden`."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

Sample = Sequence[bytes]
"""The value of each column."""


def shard_of(samples: Sequence[Sample], between: bytes = b"") -> bytes:
    """Return a shard: number of samples, offsets, what the writer adds, and the samples."""
    rows = [struct.pack(f"<{len(row)}I", *map(len, row)) + b"".join(row) for row in samples]
    start = 4 * (len(rows) + 2) + len(between)
    offsets = accumulate(map(len, rows), initial=start)
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + between + b"".join(rows)


def write_mds(folder: Path, columns: dict[str, str], shards: Sequence[Sequence[Sample]]) -> Path:
    """Write shards with columns of these encodings, none of which has a size of its own."""
    stated: list[dict[str, Any]] = []
    names = sorted(columns)
    for number, samples in enumerate(shards):
        data = shard_of(samples, json.dumps({"column_names": names}).encode())
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        stated.append(
            {
                "column_encodings": [columns[name] for name in names],
                "column_names": names,
                "column_sizes": [None] * len(names),
                "compression": None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(samples),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": stated, "version": 2}))
    return folder


def write_litdata(
    folder: Path, columns: dict[str, str], shards: Sequence[Sequence[Sample]]
) -> Path:
    """Write chunks of samples that are dictionaries."""
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    spec = {
        "type": "builtins.dict",
        "context": json.dumps([*columns]),
        "children_spec": [leaf] * len(columns),
    }
    config = {
        "chunk_bytes": 1 << 26,
        "chunk_size": None,
        "compression": None,
        "data_format": [*columns.values()],
        "data_spec": json.dumps([1, spec]),
        "encryption": None,
        "item_loader": "PyTreeLoader",
    }
    chunks = []
    for number, samples in enumerate(shards):
        data = shard_of(samples)
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(data)
        chunks.append({"chunk_bytes": len(data), "chunk_size": len(samples), "filename": name})
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))
    return folder


def pil_value(mode: str, width: int, height: int, pixels: bytes) -> bytes:
    """Return a value of type ``pil``, which both write alike."""
    return struct.pack("<3I", width, height, len(mode)) + mode.encode() + pixels


def image_at(path: Path, image: str, column: int, columns: int) -> tuple[Path, int]:
    """Return the file of an image's value and its offset; ``image`` is the path of its record."""
    stem, _, row = image.removesuffix(".png").rpartition("/")
    (file,) = (file for file in path.iterdir() if file.name.startswith(stem + "."))
    data = file.read_bytes()
    (start,) = struct.unpack_from("<I", data, 4 + 4 * int(row))
    sizes = struct.unpack_from(f"<{columns}I", data, start)
    return file, start + 4 * columns + sum(sizes[:column])
