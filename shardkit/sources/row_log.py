"""Rows of a source in the order in which it lists them, on disk if there are many."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from shardkit.system.temporary import TemporaryBytes

PIECE = 1 << 15
"""Rows that are in memory at a time: about 10 MB."""

_ENCODER = json.JSONEncoder(separators=(",", ":"))


class RowLog:
    """A list of tuples of texts and numbers, to append to and to read from its start."""

    def __init__(self) -> None:
        self._last: list[Sequence[Any]] = []
        self._file: TemporaryBytes | None = None
        self._ends = array("q", [0])

    @property
    def pieces(self) -> int:
        """The number of pieces; all but the last one have `PIECE` rows."""
        return len(self._ends)

    def start(self, piece: int) -> int:
        """Return the position of the first row of a piece."""
        return piece * PIECE

    def piece_of(self, position: int) -> int:
        """Return the piece of a row."""
        return position // PIECE

    def append(self, row: Sequence[Any]) -> None:
        """Add a row."""
        self._last.append(row)
        if len(self._last) == PIECE:
            self._file = self._file or TemporaryBytes()
            self._file.append(_ENCODER.encode(self._last).encode())
            self._ends.append(self._file.size)
            self._last = []

    def piece(self, number: int) -> list[Sequence[Any]]:
        """Return the rows of a piece; several threads may call it at once."""
        if self._file is None or number == self.pieces - 1:
            return self._last
        start, end = self._ends[number : number + 2]
        rows: list[Sequence[Any]] = json.loads(self._file.read(start, end - start))
        return rows

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for number in range(self.pieces):
            yield from self.piece(number)
