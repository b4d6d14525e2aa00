"""Files of other programs, made of bytes: of MosaicML Streaming, LitData, FFCV, TFRecord and tar.

Fuzz targets and tests share them, so it imports little. Those of `tests/golden` are of the programs
themselves.
"""

from __future__ import annotations

import json
import struct
import tarfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.sources.crc32c import crc32c

Sample = Sequence[bytes]
"""The value of each column."""


def shard_of(samples: Sequence[Sample], between: bytes = b"", fixed: Sequence[bool] = ()) -> bytes:
    """Return a shard: number of samples, offsets, what the writer adds, and the samples.

    Args:
        samples: Their values.
        between: What the writer adds.
        fixed: Whether the size of a column is stated elsewhere.
    """
    rows = []
    for row in samples:
        sizes = [len(value) for n, value in enumerate(row) if not any(fixed[n : n + 1])]
        rows.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(row))
    start = 4 * (len(rows) + 2) + len(between)
    offsets = accumulate(map(len, rows), initial=start)
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + between + b"".join(rows)


def write_mds(
    folder: Path,
    columns: Mapping[str, str],
    shards: Sequence[Sequence[Sample]],
    sizes: Mapping[str, int] | None = None,
) -> Path:
    """Write shards with columns of these encodings; ``sizes`` has those of a fixed size."""
    stated: list[dict[str, Any]] = []
    names = sorted(columns)
    fixed = [(sizes or {}).get(name) for name in names]
    for number, samples in enumerate(shards):
        between = json.dumps({"column_names": names}).encode()
        data = shard_of(samples, between, [size is not None for size in fixed])
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        stated.append(
            {
                "column_encodings": [columns[name] for name in names],
                "column_names": names,
                "column_sizes": fixed,
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
    folder: Path, columns: Mapping[str, str], shards: Sequence[Sequence[Sample]]
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


# TFRecord


def tfrecord_record(data: bytes) -> bytes:
    """Return a record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# FFCV: `test_ffcv` compares what this writes with a file of FFCV itself


class BetonColumn(NamedTuple):
    """A field, and what the row of each sample holds of it; ``None`` where its offset goes."""

    name: str
    type_id: int
    form: str
    """Types of what a row holds, as `struct` has them; ``Q`` with None is the offset."""
    rows: Sequence[Sequence[Any]]
    values: Sequence[bytes] = ()
    """What is outside of the rows."""
    arguments: bytes = b""


def write_beton(path: Path, columns: Sequence[BetonColumn], page: int = 512) -> Path:
    """Write a file of FFCV, of one page."""
    path.write_bytes(beton_of(columns, page))
    return path


def beton_of(columns: Sequence[BetonColumn], page: int = 512) -> bytes:
    """Return a file of FFCV, of one page."""
    count = len(columns[0].rows)
    kinds = [np.dtype([(str(n), kind) for n, kind in enumerate(c.form.split())]) for c in columns]
    types = [kind["0"] if kind.itemsize == 8 else kind for kind in kinds]
    rows = np.zeros(
        count, np.dtype([(c.name, t) for c, t in zip(columns, types, strict=True)], align=True)
    )
    start = -(-(24 + 1041 * len(columns) + rows.nbytes) // page) * page
    data, table = b"", b""
    for row in range(count):
        for column in columns:
            stated = list(column.rows[row])
            if column.values:
                value = column.values[row]
                table += struct.pack("<QQQ", row, start + len(data), len(value))
                stated[stated.index(None)] = start + len(data)
                data += value
            rows[column.name][row] = stated[0] if len(stated) == 1 else tuple(stated)
    data = data.ljust(page, b"\0")
    described = b"".join(
        bytes([c.type_id]) + c.name.encode().ljust(16, b"\0") + c.arguments.ljust(1024, b"\0")
        for c in columns
    )
    head = struct.pack("<HHIQQ", 2, len(columns), page, count, start + len(data))
    return (head + described + rows.tobytes()).ljust(start, b"\0") + data + table


# Tar


def tar_member(info: tarfile.TarInfo, content: bytes) -> bytes:
    """Return a member of an archive, with its header in GNU's format."""
    info.size = len(content)
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def old_sparse_member(name: str, content: bytes, size: int, start: int = 0) -> bytes:
    """Return a sparse member of GNU's old kind, of ``size`` bytes: its content and a hole."""
    info = tarfile.TarInfo(name)
    info.type = b"S"
    member = bytearray(tar_member(info, content))
    member[386:410] = b"%011o\0%011o\0" % (start, len(content))
    member[483:495] = b"%011o\0" % size
    member[148:156] = b" " * 8
    member[148:156] = b"%06o\0 " % sum(member[:512])
    return bytes(member)


def pax_header(records: bytes) -> bytes:
    """Return an extended header for the next member."""
    info = tarfile.TarInfo("x")
    info.type = tarfile.XHDTYPE
    return tar_member(info, records)


def sparse_member(name: str, numbers: bytes, content: bytes = b"", size: int = 100) -> bytes:
    """Return a sparse member of PAX 1.0: it starts with ``numbers``, the map of its pieces."""
    pairs = {"major": 1, "minor": 0, "name": name, "realsize": size}
    records = b""
    for key, value in pairs.items():
        record = f" GNU.sparse.{key}={value}\n".encode()
        records += b"%d" % (len(record) + 2) + record
    mapped = numbers + bytes(-len(numbers) % 512)
    return pax_header(records) + tar_member(tarfile.TarInfo(name), mapped + content)
