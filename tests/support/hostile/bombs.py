"""Small files that made readers use much memory or time."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np

from shardkit.formats.lmdb import FORMAT_OPTIONS

_PAGE = 4096
_PLACEHOLDER = b"8 bytes."


def lmdb_sharing_a_page(path: Path, *, rows: int, value: int, field: str = "__key__") -> Path:
    """Write rows whose ``field`` is one and the same value of ``value`` bytes."""
    with _lmdb(path, map_size=1 << 30) as transaction:
        transaction.put(b"__shardkit__", b"{}")
        for row in range(rows):
            content = b"k" * value if row == rows - 1 else _PLACEHOLDER
            fields = {"__key__": b"%d" % row, "jpg": b"a", field: content}
            for name, stored in fields.items():
                transaction.put(b"%09d.%b" % (row, name.encode()), stored)
    data = bytearray(path.read_bytes())
    *nodes, last = _nodes(data, f".{field}".encode())
    value_at = 8 + 10 + len(field)
    shared = data[last + value_at :][:8]
    for node in nodes:
        data[node : node + 4] = value.to_bytes(4, "little")
        data[node + 4] |= 1  # the value is on a page of its own
        data[node + value_at : node + value_at + 8] = shared
    path.write_bytes(data)
    return path


def lmdb_overlapping_nodes(path: Path) -> Path:
    """Write a page with many nodes that extend to its end."""
    with _lmdb(path) as transaction:
        for row in range(50):
            transaction.put(b"%09d.__key__" % row, b"k")
        transaction.put(b"__shardkit__", b"{}")
    data = bytearray(path.read_bytes())
    for node in _nodes(data, b".__key__"):
        length = _PAGE - node % _PAGE - 8 - 17
        data[node : node + 4] = length.to_bytes(4, "little")
    path.write_bytes(data)
    return path


def lmdb_with_a_long_key(path: Path) -> Path:
    """Write a node whose key takes most of its page."""
    with _lmdb(path) as transaction:
        transaction.put(b"a", b"x" * 1500)
        transaction.put(b"b", b"x" * 1500)
    data = bytearray(path.read_bytes())
    (node,) = _nodes(data, b"b")
    data[node + 6 : node + 8] = (3000).to_bytes(2, "little")
    path.write_bytes(data)
    return path


@contextmanager
def _lmdb(path: Path, **options: Any) -> Iterator[Any]:
    """Yield a transaction that writes a new file."""
    options = {"subdir": False, "lock": False, "sync": False, **FORMAT_OPTIONS, **options}
    with lmdb.open(str(path), **options) as environment, environment.begin(write=True) as write:
        yield write


def _nodes(data: bytes | bytearray, ending: bytes) -> list[int]:
    """Return the offsets of leaf nodes whose key ends so."""
    found = []
    for page in range(2 * _PAGE, len(data), _PAGE):
        number, flags = (
            int.from_bytes(data[page + a : page + b], "little") for a, b in ((0, 8), (10, 12))
        )
        if number != page // _PAGE or flags != 2:
            continue
        lower = int.from_bytes(data[page + 12 : page + 14], "little")
        for at in range(page + 16, page + lower, 2):
            node = page + int.from_bytes(data[at : at + 2], "little")
            size = int.from_bytes(data[node + 6 : node + 8], "little")
            if data[node + 8 : node + 8 + size].endswith(ending):
                found.append(node)
    return found


def tar_of_pax_records(path: Path, *, headers: int, size: int) -> Path:
    """Write PAX headers of ``size`` bytes, made of the shortest possible records."""
    content = b"5 a=\n" * (size // 5)
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(content)
    header = info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)
    path.write_bytes(header * headers + tarfile.TarInfo("a.txt").tobuf() + bytes(1024))
    return path


def tar_with_a_long_name(path: Path, length: int) -> Path:
    """Write a member whose key has ``length`` characters."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("k" * length + ".txt"))
    return path


def hdf5_of_empty_rows(path: Path, rows: int, *, key: bytes = b"") -> Path:
    """Write rows that have no field, and a key of ``key``."""
    with h5py.File(path, "x", libver=("earliest", "v110")) as file:
        file["__shardkit__"] = np.frombuffer(b"{}", np.uint8)
        file["__key__/data"] = np.frombuffer(key * rows, np.uint8)
        file["__key__/offsets"] = np.arange(rows + 1, dtype=np.int64) * len(key)
        for name in ("jpg", "json"):
            file[f"{name}/data"] = np.zeros(0, np.uint8)
            file[f"{name}/offsets"] = np.zeros(rows + 1, np.int64)
    return path
