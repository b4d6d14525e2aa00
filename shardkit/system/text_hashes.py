"""Which of many texts are equal, in memory that does not grow with their number."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from shardkit.system.temporary import TemporaryBytes

_BUFFERED = 1 << 16
"""Hashes to write to the file at a time."""

_AT_ONCE = 1 << 19
"""Hashes that are compared at a time: 4 MiB."""


class TextHashes:
    """The 64-bit hashes of texts, in an unnamed temporary file if there are many.

    Python hashes texts with a key of the process, so that nobody can make some with equal hashes.
    """

    def __init__(self) -> None:
        self._buffer = array("q")
        self._file: TemporaryBytes | None = None
        self._count = 0

    def add(self, text: str) -> None:
        """Add the hash of a text."""
        self._buffer.append(hash(text))
        self._count += 1
        self._spool()

    def _spool(self) -> None:
        """Write hashes to the file if there are many."""
        if len(self._buffer) == _BUFFERED:
            self._file = self._file or TemporaryBytes()
            self._file.append(self._buffer.tobytes())
            del self._buffer[:]

    def add_all(self, texts: Iterable[str]) -> None:
        """Add the hashes of some texts."""
        remaining = iter(texts)
        while batch := [*itertools.islice(remaining, _BUFFERED - len(self._buffer))]:
            self._buffer.extend(map(hash, batch))
            self._count += len(batch)
            self._spool()

    def repeated(self) -> set[int]:
        """Return the hashes that were added more than once; different texts may have one."""
        alike = set[int]()
        for values in self._sorted():
            alike.update(values[1:][values[1:] == values[:-1]].tolist())
        return alike

    def single(self) -> set[int]:
        """Return the hashes that were added once."""
        alone = set[int]()
        for values in self._sorted():
            starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1, append=values[-1:] + 1))
            alone.update(values[starts[:-1]][np.diff(starts) == 1].tolist())
        return alone

    def _sorted(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield all hashes, sorted; equal ones together."""
        passes = 1 + self._count // _AT_ONCE
        for number in range(passes):
            blocks = [block[block.view(np.uint64) % passes == number] for block in self._blocks()]
            values = np.concatenate(blocks)
            values.sort()
            yield values

    def _blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        if self._file is not None:
            for offset in range(0, self._file.size, 8 * _BUFFERED):
                yield np.frombuffer(self._file.read(offset, 8 * _BUFFERED), np.int64)
        yield np.array(self._buffer, np.int64)
