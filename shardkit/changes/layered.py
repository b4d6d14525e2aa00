"""The index of a dataset with layers: fields added, replaced or removed after the conversion.

The entries of the image are those of the dataset's own index. If a layer has replaced the label,
entries are changed when they are loaded: the label, the checksum that covers it, and the check of
the entry. CRC-32 is linear, so this needs no pixel, and damage remains visible.
"""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
import numpy.typing as npt

from shardkit.dataset.index import HEAD, ROW, Index, Rows, damaged_rows
from shardkit.dataset.index_reader import OPAQUE, IndexRows
from shardkit.dataset.opened import OpenedDataset
from shardkit.record import IMAGE, LABEL, NO_LABEL
from shardkit.system.npy import StoredValues

_Words = npt.NDArray[np.uint32]

_AFTER_LABEL = HEAD.stop - HEAD.start - 4
"""Bytes between the label and the image, as the checksum covers them."""


class LayeredIndex(Index):
    """The index of a dataset with layers.

    CorruptDataset on first use, as for `Index`, or if a layer is of another dataset.
    """

    def __init__(self, dataset: OpenedDataset) -> None:
        manifest = dataset.manifest
        super().__init__(dataset.path, manifest.rows, manifest.fields_by_name, manifest.lacking)
        self._dataset = dataset
        self._base = dataset.base.index

    def rows(self, field: str = IMAGE) -> Rows:
        """Return the entries of all rows: memory-mapped and read-only, unless labels changed."""
        if field != IMAGE:
            return self._home(field).rows(field)
        entries = self._base.rows()
        if not self._dataset.manifest.relabels:
            return entries
        patched = relabeled(entries, self._labels())
        patched.setflags(write=False)
        return patched

    def _entries(self, field: str) -> StoredValues:
        if field != IMAGE:
            return self._home(field)._entries(field)
        entries = self._base._entries(IMAGE)
        if self._dataset.manifest.relabels:
            return _RelabeledValues(entries, self._labels())  # type: ignore[return-value]
        return entries

    def _column_files(self, name: str) -> dict[str, StoredValues]:
        return self._home(name)._column_files(name)

    def _labels(self) -> StoredValues | None:
        """Return the entries whose labels count; None if the label was removed."""
        return None if LABEL not in self._schema else self._home(LABEL)._entries(IMAGE)

    def _home(self, name: str) -> Index:
        """Return the index that has a field."""
        return self._dataset.store_of(name).index


class RelabeledRows(IndexRows):
    """The rows of an index with the labels of a layer, or None if it removed the label."""

    def __init__(self, rows: IndexRows, labels: IndexRows | None) -> None:
        self._rows = rows
        self._labels = labels
        self._count = rows.count
        self._held = None
        if rows.is_held:
            self._held = self.read(np.arange(rows.count)).view(OPAQUE)

    def read(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Return the entries of ``rows``, in that order; see `IndexRows.read`."""
        if self._held is not None:
            return self._held[rows].view(ROW)
        labels = None if self._labels is None else self._labels.read(rows)
        return relabeled(self._rows.read(rows), labels)

    def forget(self) -> None:
        """Reopen the files at their next use."""
        self._rows.forget()
        if self._labels is not None:
            self._labels.forget()


class _RelabeledValues:
    """The entries of all rows with the labels of other entries, read on access."""

    def __init__(self, entries: StoredValues, labels: StoredValues | None) -> None:
        self._entries = entries
        self._labels = labels

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, rows: slice) -> Rows:
        return relabeled(self._entries[rows], None if self._labels is None else self._labels[rows])


def relabeled(rows: Rows, labels: Rows | StoredValues | None) -> Rows:
    """Return a copy of entries with the labels of other entries, and the checksums for these.

    An entry stays damaged if it was, or if the other one is. ``labels`` are entries of the same
    rows; None removes all labels.
    """
    patched = np.array(rows)
    others = None if labels is None else np.asarray(labels[:])
    new = np.full(len(rows), NO_LABEL, "<i4") if others is None else others["label"]
    change = (patched["label"] ^ new).astype("<i4").view("<u4")
    sums = _advanced(_crc(change, _AFTER_LABEL), patched["length"])
    check = _crc(change, _AFTER_LABEL, _crc(sums, 0))
    if others is not None:
        check ^= damaged_rows(others).astype(np.uint32)
    patched["label"] = new
    patched["checksum"] ^= sums
    patched["check"] ^= check.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]
    return patched


def _crc(words: _Words, zeros: int, state: _Words | None = None) -> _Words:
    """Return how CRC-32 changes if words of 4 bytes before some unchanged bytes change."""
    table = _one_byte()
    state = words if state is None else state ^ words
    for _ in range(4 + zeros):
        state = table[state & np.uint32(0xFF)] ^ (state >> np.uint32(8))
    return state


def _advanced(state: _Words, lengths: _Words) -> _Words:
    """Return how CRC-32 changes if unchanged bytes follow: of another number in each row."""
    state = state.copy()
    for bit, tables in enumerate(_operators()):
        rows = np.flatnonzero(lengths & np.uint32(1 << bit))
        if len(rows):
            state[rows] = _applied(tables, state[rows])
    return state


def _applied(tables: _Words, state: _Words) -> _Words:
    result = np.zeros_like(state)
    for byte in range(4):
        result ^= tables[byte][(state >> np.uint32(8 * byte)) & np.uint32(0xFF)]
    return result


@cache
def _one_byte() -> _Words:
    """Return the state of CRC-32 after a byte, for each value of its lowest byte."""
    values = np.arange(256, dtype=np.uint32)
    zero = zlib.crc32(b"\0")
    return np.array([zlib.crc32(bytes([value])) ^ zero for value in values.tolist()], np.uint32)


@cache
def _operators() -> tuple[_Words, ...]:
    """Return tables that advance the state of CRC-32 by 1, 2, 4, 8 ... unchanged bytes."""
    table = _one_byte()
    values = np.arange(256, dtype=np.uint32)
    states = [values << np.uint32(8 * byte) for byte in range(4)]
    tables = np.stack([table[s & np.uint32(0xFF)] ^ (s >> np.uint32(8)) for s in states])
    operators = [tables]
    for _ in range(31):
        tables = np.stack([_applied(tables, table) for table in tables])
        operators.append(tables)
    return tuple(operators)
