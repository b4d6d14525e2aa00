"""Rows of a source in the order in which it lists them, on disk if there are many."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from shardkit.system.temporary import TemporaryBytes

CHUNK = 1 << 15
"""Rows that are in memory at a time: about 10 MB."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))


class RowLog:
    """A list of tuples of texts and numbers, to append to and to read from its start."""

    def __init__(self) -> None:
        self._last: list[Sequence[Any]] = []
        self._file: TemporaryBytes | None = None
        self._ends = array("q", [0])

    @property
    def chunks(self) -> int:
        """The number of chunks; all but the last one have `CHUNK` rows."""
        return len(self._ends)

    def start(self, chunk: int) -> int:
        """Return the position of the first row of a chunk."""
        return chunk * CHUNK

    def chunk_of(self, position: int) -> int:
        """Return the chunk of a row."""
        return position // CHUNK

    def append(self, row: Sequence[Any]) -> None:
        """Add a row."""
        self._last.append(row)
        if len(self._last) == CHUNK:
            self._file = self._file or TemporaryBytes()
            self._file.append(_ENCODER.encode(self._last).encode())
            self._ends.append(self._file.size)
            self._last = []

    def chunk(self, number: int) -> list[Sequence[Any]]:
        """Return the rows of a chunk; several threads may call it at once."""
        if self._file is None or number == self.chunks - 1:
            return self._last
        start, end = self._ends[number : number + 2]
        rows: list[Sequence[Any]] = json.loads(self._file.read(start, end - start))
        return rows

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for number in range(self.chunks):
            yield from self.chunk(number)
