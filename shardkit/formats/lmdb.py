"""LMDB: one environment file with keys ``%09d.field`` (row, field) and the fields' bytes.

The `lmdb` library writes. Readers find byte ranges by parsing pages
(`shardkit.formats.lmdb_pages`). They never open an environment, so second openings, forks, threads
and damaged pages are harmless.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb

from shardkit.contracts import Format, Range, ShardSpec
from shardkit.errors import ConversionFailed
from shardkit.formats.lmdb_pages import MalformedLmdbError, walk
from shardkit.formats.ranges import KEY, META, NPY, RangeReader, stored_fields
from shardkit.record import Record, dump_json, is_raw
from shardkit.system import compiled
from shardkit.system.files import free_bytes
from shardkit.system.text import quoted, size

if TYPE_CHECKING:
    from shardkit.record_columns import RecordColumns

FIRST_MAP_SIZE = 1 << 30
"""Initial size of the map, which doubles when full. It takes address space, not disk space."""

_BATCH_ROWS = 1000
_BATCH_BYTES = 64 << 20
"""Rows or bytes per transaction: larger ones are not faster and take memory."""

_TRIAL_BYTES = 1 << 20

FORMAT_OPTIONS: dict[str, Any] = (
    {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}
)
"""lmdb 3 can also write LMDB 1.0 files, which no other tool reads yet; 0 selects the 0.9 format."""


class LmdbWriter:
    """Appends rows in key order, in transactions, which fills the pages completely."""

    def __init__(self, path: Path, spec: ShardSpec) -> None:
        self._path = path
        with _disk_errors(path):
            self._environment = lmdb.open(
                os.fsencode(path),
                subdir=False,
                lock=False,  # no other process knows the file yet
                sync=False,  # the caller syncs once
                metasync=False,
                map_size=FIRST_MAP_SIZE,
                mode=0o666,  # less the umask, as for all other files
                **FORMAT_OPTIONS,
            )
        self._map_size = FIRST_MAP_SIZE
        self._spec = spec
        self._rows = 0
        self._items: list[tuple[bytes, bytes]] = []
        self._pending_rows = 0
        self._pending_bytes = 0

    def write(self, record: Record) -> None:
        """Append ``record`` as the next row."""
        self.write_all([record])

    def write_all(self, records: list[Record] | RecordColumns) -> None:
        """Append ``records`` as the next rows."""
        start = 0
        if isinstance(records, list):
            sizes = [sum(map(len, record.fields.values())) for record in records]
        else:
            sizes = records.sizes()
        for stop, stored in enumerate(sizes, 1):
            self._pending_rows += 1
            self._pending_bytes += stored
            if self._pending_rows == _BATCH_ROWS or self._pending_bytes >= _BATCH_BYTES:
                self._add(records[start:stop])
                self._commit()
                start = stop
        self._add(records[start:])

    def close(self) -> None:
        """Commit the rest and complete the file."""
        self._commit((META.encode(), dump_json(self._spec.meta)))
        self._environment.close()

    def abort(self) -> None:
        """Release the environment without completing it."""
        self._environment.close()

    def _add(self, records: list[Record] | RecordColumns) -> None:
        """Add key and value of each field of some records to those to commit."""
        first = self._rows
        self._rows += len(records)
        items = compiled.lmdb_items(records, first, self._spec.headers)
        self._items += items or [
            (b"%09d.%b" % (row, name.encode()), value)
            for row, record in enumerate(records, first)
            for name, value in sorted(
                [(KEY, record.key.encode()), *stored_fields(record, self._spec)]
            )
        ]

    def _commit(self, *last: tuple[bytes, bytes]) -> None:
        """Write all items in one transaction; if the map is full, double it and retry."""
        while True:
            try:
                with _disk_errors(self._path):
                    self._put([*self._items, *last])
                break
            except lmdb.MapFullError:
                self._map_size *= 2
                with _disk_errors(self._path):
                    self._environment.set_mapsize(self._map_size)
        self._items = []
        self._pending_rows = 0
        self._pending_bytes = 0

    def _put(self, items: list[tuple[bytes, bytes]]) -> None:
        with self._environment.begin(write=True) as transaction:
            _, added = transaction.cursor().putmulti(items, append=True)
            if added < len(items):  # a refused append raises nothing
                raise ValueError(f"LMDB refused to append {len(items) - added} keys")


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn LMDB's errors into `OSError`; LMDB reports a full disk as an input/output error."""
    try:
        yield
    except lmdb.MapFullError:
        raise
    except lmdb.Error as error:
        if os.strerror(errno.ENOMEM) in str(error):
            raise ConversionFailed(
                f"memory ran out: LMDB maps {size(FIRST_MAP_SIZE)} or more of address space for "
                f"{path}",
                remedy="Raise the limit (`ulimit -v`), or convert to another format",
            ) from error
        code = _errno_of(error, path.parent)
        raise OSError(code, f"{os.strerror(code)} ({error})", str(path)) from error


def _errno_of(error: lmdb.Error, folder: Path) -> int:
    """Return the error number for the disk of ``folder``, writing to it if necessary."""
    if os.strerror(errno.ENOSPC) in str(error) or free_bytes(folder) < _BATCH_BYTES:
        return errno.ENOSPC
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIAL_BYTES))
    except OSError as trial_error:
        return trial_error.errno or errno.EIO
    return errno.EIO


class LmdbReader(RangeReader):
    """Reads a finished file by parsing its pages."""

    _keys: list[str]
    _fields: list[dict[str, Range]]

    def _find(self) -> None:
        if self._take(compiled.walk_lmdb(self._file.fileno(), self._size)):
            return
        self._keys = []
        self._fields = []
        try:
            for entry in walk(self._file.fileno(), self._size):
                self._add(entry.key, Range(entry.offset, entry.length))
        except MalformedLmdbError as error:
            self._fail(str(error))
        if len(self._keys) != len(self._fields):
            self._fail(f"row {len(self._fields) - 1} has no key")
        # The metadata, which state arrays and typed pixels, come last.
        for row, fields in enumerate(self._fields):
            if any(map(_is_raw_file, fields)):
                self._fields[row] = dict(
                    self._field(name, range_) if _is_raw_file(name) else (name, range_)
                    for name, range_ in fields.items()
                )
        for fields in self._fields if self._arrays else ():
            for name in fields.keys() & self._arrays.keys():
                if not is_raw(name):
                    fields[name] = self._values(name, fields[name])

    def _add(self, lmdb_key: bytes, range_: Range) -> None:
        if lmdb_key == META.encode():
            self.meta = self._parse_meta(range_)
            return
        row, _, stored = lmdb_key.decode("latin-1").partition(".")
        if row != f"{len(self._fields) - 1:09d}":
            if row != f"{len(self._fields):09d}" or len(self._keys) != len(self._fields):
                self._fail(
                    f"the key {quoted(lmdb_key)} is stored where row {len(self._fields)} belongs"
                )
            self._fields.append({})
        if stored == KEY:
            self._keys.append(self._decode_key(range_))
            return
        if not _is_raw_file(stored):
            stored, range_ = self._field(stored, range_)
        self._fields[-1][stored] = range_

    def _decode_key(self, range_: Range) -> str:
        self._check_key_size(range_.length)
        try:
            return self._pread(range_).decode()
        except UnicodeDecodeError as error:
            self._fail(f"the key at byte {range_.offset} is not UTF-8: {error}")


def _is_raw_file(stored: str) -> bool:
    """Return whether a stored name is that of raw pixels with their header."""
    return stored.endswith(NPY) and is_raw(stored.removesuffix(NPY))


FORMAT = Format(
    name="lmdb",
    suffix=".lmdb",
    title="LMDB environment files",
    overhead=2300,
    libraries=("lmdb",),
    write=LmdbWriter,
    write_all=LmdbWriter.write_all,
    read=LmdbReader,
)
