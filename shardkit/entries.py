"""The list of a source's images, packed so that a source may have many millions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, overload


class Entry(NamedTuple):
    """One image of a source, listed but not yet read."""

    path: str
    """Name of the image in its split, with ``/`` between parts; stored with the image."""
    key: str
    """Key of the record; `shardkit.record.make_keys` makes keys from paths."""
    label: int
    """Position in `Scan.classes`, or `shardkit.record.NO_LABEL`."""
    bytes: int
    """Size of the encoded image; determines shard boundaries if images are stored unchanged."""
    stamp: int
    """Number that changes with the content, such as a modification time; 0 if unknown."""


class PackedEntries(Sequence[Entry]):
    """A sequence of entries in a quarter of a list's memory: their text and 32 bytes each.

    An `Entry` exists only while it is used. `take` shares the memory. A pickled copy is a list.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._rows: Sequence[int] = range(0)
        self._text = b""
        self._ends = array("q", [0])
        self._keys = array("q")
        """Position of each key in the text, after the path."""
        self._labels = array("i")
        self._bytes = array("q")
        self._stamps = array("q")
        text = bytearray()
        for path, key, label, size, stamp in entries:
            text += path.encode("utf-8", "surrogateescape")
            self._keys.append(len(text))
            text += key.encode()
            self._ends.append(len(text))
            self._labels.append(label)
            self._bytes.append(size)
            self._stamps.append(stamp)
        self._text = bytes(text)
        self._rows = range(len(self._labels))

    def take(self, rows: Iterable[int]) -> PackedEntries:
        """Return the entries of ``rows``, in that order."""
        taken = PackedEntries(())
        vars(taken).update(vars(self))
        taken._rows = array("q", map(self._rows.__getitem__, rows))
        return taken

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Entry: ...
    @overload
    def __getitem__(self, row: slice) -> PackedEntries: ...
    def __getitem__(self, row: int | slice) -> Entry | PackedEntries:
        if isinstance(row, slice):
            return self.take(range(*row.indices(len(self))))
        return self._entry(self._rows[row])

    def __iter__(self) -> Iterator[Entry]:
        return map(self._entry, self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[list[Entry]], tuple[list[Entry]]]:
        return list, (list(self),)

    def _entry(self, place: int) -> Entry:
        text, key = self._text, self._keys[place]
        return Entry._make(
            (
                text[self._ends[place] : key].decode("utf-8", "surrogateescape"),
                text[key : self._ends[place + 1]].decode(),
                self._labels[place],
                self._bytes[place],
                self._stamps[place],
            )
        )
