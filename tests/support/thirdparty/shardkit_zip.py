"""A third-party format: compressed zip files, without plain byte ranges.

A member ``000000003/jpg`` is the field ``jpg`` of row 3; its key is the member ``000000003/key`` in
capitals, which no field's name has. The archive's comment is too short for the description, which
therefore is a member too.
"""

from __future__ import annotations

import contextlib
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from shardkit.contracts import Format, Range, ShardSpec
from shardkit.errors import CorruptShard
from shardkit.record import Record, dump_json

META = "META"
KEY = "KEY"

_DAMAGE = (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error)


class ZipWriter:
    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self._spec = spec
        self._archive = zipfile.ZipFile(path, "x")
        self._rows = 0

    def write(self, record: Record) -> None:
        if "raw" in record.fields:
            shape = self._spec.raw_shape
            array = self._spec.arrays.get("raw")
            size = array.values.itemsize if array else 1
            if shape is None or len(record.fields["raw"]) != prod(shape) * size:
                raise ValueError(f"raw pixels of {record.key!r} have not the shape of this shard")
        self._add(f"{self._rows:09d}/{KEY}", record.key.encode())
        for name in sorted(record.fields):
            self._add(f"{self._rows:09d}/{name}", record.fields[name])
        self._rows += 1

    def close(self) -> None:
        self._add(META, dump_json(self._spec.meta))
        self._archive.close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._archive.close()

    def _add(self, name: str, content: bytes) -> None:
        # A ZipInfo of its own: a name alone would be stored with the time of now.
        self._archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)


class ZipReader:
    meta: Mapping[str, Any]

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except _DAMAGE as error:
            raise CorruptShard(f"{path} is damaged: {error}") from error
        try:
            self.meta = dict(json.loads(self._archive.read(META)))
            self._rows: list[list[str]] = []
            for name in self._archive.namelist():
                row, slash, field = name.partition("/")
                if field == KEY and row == f"{len(self._rows):09d}":
                    self._rows.append([])
                elif slash:
                    self._rows[int(row)].append(field)
        except (*_DAMAGE, IndexError) as error:
            self.close()
            raise CorruptShard(f"{path} is damaged: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: Sequence[int]) -> list[Record]:
        return [self._record(row) for row in rows]

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        return [{} for _ in self._rows]

    def close(self) -> None:
        self._archive.close()

    def _record(self, row: int) -> Record:
        if not 0 <= row < len(self._rows):
            raise IndexError(f"row {row} is not in {self._path}")
        try:
            key, *values = (
                self._archive.read(f"{row:09d}/{name}") for name in (KEY, *self._rows[row])
            )
            return Record(key.decode(), dict(zip(self._rows[row], values, strict=True)))
        except _DAMAGE as error:
            raise CorruptShard(f"{self._path} is damaged: row {row}: {error}") from error


FORMAT = Format(
    name="zip", suffix=".zip", title="Compressed zip files", write=ZipWriter, read=ZipReader
)
