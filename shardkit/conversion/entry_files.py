"""Lists of images in files, for sources whose images do not fit in memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from shardkit.contracts import Entry
from shardkit.record import dump_json, load_json


class StoredEntries(Sequence[Entry]):
    """Entries in pieces, one of which is in memory at a time; for slices of neighboring rows.

    Args:
        load: Returns the entries of a piece.
        cuts: First row of each piece, then the number of rows.
        rows: The rows of this sequence; None means all.
    """

    def __init__(
        self,
        load: Callable[[int], Sequence[Entry]],
        cuts: Sequence[int],
        rows: range | None = None,
    ) -> None:
        self._load = load
        self._cuts = cuts
        self._rows = range(cuts[-1]) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Entry: ...
    @overload
    def __getitem__(self, row: slice) -> StoredEntries: ...
    def __getitem__(self, row: int | slice) -> Entry | StoredEntries:
        if isinstance(row, slice):
            return StoredEntries(self._load, self._cuts, self._rows[row])
        position = self._rows[row]
        piece = self._piece(position)
        return self._load(piece)[position - self._cuts[piece]]

    def __iter__(self) -> Iterator[Entry]:
        start, stop, cuts = self._rows.start, self._rows.stop, self._cuts
        while start < stop:
            piece = self._piece(start)
            yield from self._load(piece)[start - cuts[piece] : stop - cuts[piece]]
            start = cuts[piece + 1]

    def _piece(self, row: int) -> int:
        return bisect.bisect_right(self._cuts, row) - 1


def dump_entries(entries: Iterable[Entry]) -> bytes:
    """Return entries as JSON."""
    return dump_json({"entries": list(entries)})


def load_entries(content: bytes) -> list[Entry]:
    """Return the entries that `dump_entries` wrote.

    Raises:
        ValueError: If ``content`` is something else.
    """
    try:
        entries = [Entry(*each) for each in load_json(content)["entries"]]
    except (TypeError, KeyError) as error:
        raise ValueError(f"it does not list images: {error!r}") from error
    if any(tuple(map(type, entry)) != _TYPES for entry in entries):
        raise ValueError("a value of an image has another type")
    return entries


_TYPES = (str, str, int, int, int, int, str)
