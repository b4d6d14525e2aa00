"""The table of a shard: the key of each row, and the byte range of each field, in arrays.

The compiled module makes it for tar and LMDB files that are exactly as shardkit writes them. It
leaves all others to the readers in Python, which explain what is wrong with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from shardkit.contracts import Range
from shardkit.system.compiled import WalkResult
from shardkit.system.strings import split_strings

Integers = npt.NDArray[np.int64]


class Table(NamedTuple):
    """Keys and byte ranges of the rows of a shard, or of some of them."""

    text: bytes
    """All keys, end to end, in UTF-8."""
    ends: Integers
    """The end of each key in ``text``, shape (rows,)."""
    names: tuple[str, ...]
    """The fields with byte ranges, sorted."""
    offsets: Integers
    """The offset of each field in the file, shape (rows, names); -1 where a row lacks it."""
    lengths: Integers
    """The length of each field, of the same shape."""
    labels: Integers | None = None
    """The labels, if the file stores them as numbers; -1 where there is none."""
    start: int = 0
    """The start of the first key in ``text``."""

    def keys(self) -> list[str]:
        """Return the key of each row; UnicodeDecodeError if one is not UTF-8."""
        bounds = np.concatenate([[self.start], self.ends]) - self.start
        text = self.text[self.start : self.start + bounds[-1]]
        return split_strings(text, bounds[:-1], bounds[1:], "strict")

    def take(self, rows: range) -> Table:
        """Return the table of some neighboring rows."""
        selected = slice(rows.start, rows.stop)
        return self._replace(
            ends=self.ends[selected],
            offsets=self.offsets[selected],
            lengths=self.lengths[selected],
            labels=None if self.labels is None else self.labels[selected],
            start=int(self.ends[rows.start - 1]) if rows.start else self.start,
        )


class TableRows(Sequence[Mapping[str, Range]]):
    """The byte ranges of each row's fields, made on access."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._rows = range(len(table.ends))

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Mapping[str, Range]: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Mapping[str, Range]]: ...
    def __getitem__(self, row: int | slice) -> Mapping[str, Range] | Sequence[Mapping[str, Range]]:
        if isinstance(row, slice):
            return [self[number] for number in self._rows[row]]
        row = self._rows[row]
        starts = self._table.offsets[row].tolist()
        sizes = self._table.lengths[row].tolist()
        return {
            name: Range(start, size)
            for name, start, size in zip(self._table.names, starts, sizes, strict=True)
            if start >= 0
        }


def as_walked(result: WalkResult) -> tuple[Range, bytes, Table]:
    """Return metadata, header and table of `shardkit.system.compiled.walk_tar` or ``walk_lmdb``.

    The metadata have length 0 if there are none; the header is that of all raw pixels, empty
    without any.
    """
    (offset, length, stored, raw_header, text, starts, sizes), ends = result
    names = [name.decode("latin-1") for name in stored]
    order = sorted(range(len(names)), key=names.__getitem__)
    shape = len(ends) // 8, len(names)
    offsets = np.frombuffer(starts, np.int64).reshape(shape)
    lengths = np.frombuffer(sizes, np.int64).reshape(shape)
    table = Table(
        text=text,
        ends=np.frombuffer(ends, np.int64),
        names=tuple(names[number] for number in order),
        offsets=np.ascontiguousarray(offsets[:, order]),
        lengths=np.ascontiguousarray(lengths[:, order]),
    )
    return Range(offset, length), raw_header, table
