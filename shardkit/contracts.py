"""The contracts between the engine and its leaves: Source, ShardReader, ShardWriter, Format.

Nothing here knows an implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shardkit.record import Record


class Source(Protocol):
    """Anything that records can be read from: an image folder, a shard.

    Reading gives the records in the order asked, as often as asked, and never another in the place
    of one that cannot be read. It may be called from several threads at once.
    """

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def read(self, rows: Sequence[int]) -> list[Record]:
        """Return the records of ``rows``: same order, duplicates and all.

        Raises:
            IndexError: If a row is not in ``range(len(self))``.
            ShardkitError: If a record cannot be read.
        """
        ...


class Range(NamedTuple):
    """A piece of a file: ``length`` bytes from ``offset`` on."""

    offset: int
    length: int


class ShardReader(Source, Protocol):
    """One finished shard, read through its format's own library.

    Opening it raises `CorruptShard` if the file is not a whole shard of its format. `read` raises
    `CorruptShard` where the content contradicts itself. Threads may share it only under a lock;
    another process never may.
    """

    meta: Mapping[str, Any]
    """What the shard says of itself: the ``meta`` that its writer was given."""

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        """Return, for each row, where fields lie in the file as plain bytes.

        A field that the file does not hold in one plain piece (compressed, or kept as a number) is
        left out; the engine then asks `read` for it.
        """
        ...

    def close(self) -> None:
        """Release the file; closing twice does nothing."""
        ...


class ShardWriter(Protocol):
    """One shard being written, to a path at which nothing stands. The caller makes it durable.

    The same records in the same order, with the same `ShardSpec`, give the same bytes.
    """

    def write(self, record: Record) -> None:
        """Append ``record``; its row is the number of records written before it.

        Raises:
            OSError: If the disk is full or fails, here or in `close`.
        """
        ...

    def close(self) -> None:
        """Complete the file. Nothing may be written after it."""
        ...

    def abort(self) -> None:
        """Release everything without completing the file; it never raises."""
        ...


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """What a writer knows before the first record."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    """A JSON object that describes the dataset; stored in the shard."""

    raw_shape: tuple[int, int, int] | None = None
    """Height, width and channels of every ``raw`` field; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A storage format: how a shard is written and how it is read."""

    name: str
    """The name in the registry, on the command line and in the manifest."""

    suffix: str
    """The suffix of its files, with the dot."""

    title: str
    """What it is, for help texts and tables."""

    libraries: tuple[str, ...] = ()
    """The packages whose versions can change the bytes written; the manifest records them."""

    overhead: int = 0
    """Bytes that a record takes beside its image, about; to foresee the size of a dataset."""

    copies: int = 1
    """How often a shard's bytes are on the disk while it is written."""

    write: Callable[[Path, ShardSpec], ShardWriter]
    """Begins a shard at a path where nothing stands."""

    read: Callable[[Path], ShardReader]
    """Opens a finished shard."""
