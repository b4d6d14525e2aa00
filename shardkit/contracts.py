"""Contracts between the engine and what plugs into it: sources and storage formats.

A source lists images and reads them; a format writes and reads shards. This module knows no
implementation of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shardkit.errors import Problem
from shardkit.record import Record


class Entry(NamedTuple):
    """One image of a source, listed but not yet read."""

    path: str
    """Names the image in its split, with ``/`` between parts; stored with the image."""
    key: str
    """Key of the record; `shardkit.record.make_keys` makes keys from paths."""
    label: int
    """Position in `Scan.classes`, or `shardkit.record.NO_LABEL`."""
    bytes: int
    """Size of the encoded image; decides where shards are cut if images are stored as they are."""
    stamp: int
    """Number that changes with the content, such as a modification time; 0 if there is none."""


class Source(Protocol):
    """Where images come from: their list, and the bytes of each.

    A source is pickled to worker processes, so it keeps paths and options and no open file.
    """

    kind: str
    """Name of its `SourceKind` in the registry; stored in the manifest."""

    def __str__(self) -> str:
        """Return what messages call the source, such as its path."""
        ...

    def paths(self) -> Sequence[Path]:
        """Return the files and folders that a dataset must not overlap."""
        ...

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images, in an order that depends only on the source and its options.

        Args:
            classes: Class names in the order of their labels, from an earlier conversion. Classes
                that are new since then get the labels after these.

        Raises:
            UsageError: If the source is missing, unreadable or empty.
        """
        ...

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return what identifies a split in the manifest: JSON values, no absolute paths.

        ``name`` is required, a text. `SourceKind.find` gets these values back. The names ``kind``,
        ``images``, ``limit``, ``order`` and ``seed`` are taken.
        """
        ...

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image: the encoded image, its label and its path.

        Several threads may call it at once. `shardkit.sources.images.image_record` builds the
        record from the bytes of an image file.

        Raises:
            BadImage: If it cannot be read, is not an image or has changed since the scan.
        """
        ...

    def locate(self, split: str, entry: Entry) -> str:
        """Return where an image is, for messages."""
        ...

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return the images of a split as the conversion listed them, in the same order.

        A source whose list still has its bad images returns ``scan.splits[split].entries``.

        Args:
            scan: The source today, listed with the classes of the conversion.
            split: The split, which the source may no longer have.
            skipped: Bad images that the conversion left out. Those it had listed take part in
                order, keys and limit even if they are gone.
        """
        ...


@dataclass(frozen=True, slots=True)
class Images:
    """Images of one split of a source, in order."""

    source: Source
    split: str
    entries: Sequence[Entry]

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, rows: Iterable[int]) -> list[Record]:
        """Return the records of ``rows``, in the order asked; see `Source.read`.

        Raises:
            IndexError: If a row is not in ``range(len(self))``.
        """
        return [self.source.read(self.split, self._entry(row)) for row in rows]

    def take(self, rows: Iterable[int]) -> Images:
        """Return the images of ``rows`` alone, in their order."""
        return self.of([self.entries[row] for row in rows])

    def of(self, entries: Sequence[Entry]) -> Images:
        """Return other images of the same split."""
        return Images(self.source, self.split, entries)

    def locate(self, row: int) -> str:
        """Return where an image is, for messages."""
        return self.source.locate(self.split, self._entry(row))

    def _entry(self, row: int) -> Entry:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not in {self.source}, which has {len(self)} images")
        return self.entries[row]


@dataclass(frozen=True, kw_only=True)
class Scan:
    """The images of a source, listed."""

    source: Source
    splits: dict[str, Images]
    """Split to its images; the split "" is the whole source where there are none."""
    classes: tuple[str, ...] | None
    """Class names in the order of their labels, common to all splits; None if unlabelled."""
    ignored: dict[str, list[Problem]] = field(default_factory=dict)
    """Split to the files that are not images, with the reason."""
    problems: dict[str, list[Problem]] = field(default_factory=dict)
    """Split to the images, and folders of images, that cannot be listed, with the reason."""


@dataclass(frozen=True, kw_only=True)
class SourceOption:
    """An option of a source: a keyword of `SourceKind.open`, and an option of its command."""

    flags: str
    """The option's flags, as ``click.option`` takes them: ``--class-order``, ``--a/--no-a``."""
    help: str
    default: Any = None
    metavar: str | None = None
    type: Callable[[str], Any] | None = None
    """Converts the text given; None takes it from ``default``, or from the flags."""


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    """A kind of source: how one is opened, and found again from a manifest."""

    name: str
    """Name in the registry, on the command line and in the manifest."""

    title: str
    """One line for help texts."""

    help: str
    """Help text of ``shardkit convert NAME``, with SRC and DST for the arguments."""

    options: tuple[SourceOption, ...] = ()

    open: Callable[..., Source]
    """Opens a source: its path, then its options as keywords."""

    find: Callable[[Path, Mapping[str, Mapping[str, Any]]], Source]
    """Opens the source of a dataset: its path, and from the manifests the description of each split
    (see `Source.describe`)."""


class Range(NamedTuple):
    """A piece of a file: ``length`` bytes from ``offset`` on."""

    offset: int
    length: int


class ShardReader(Protocol):
    """One finished shard, opened for reading.

    A shard is untrusted input: a reader bounds its memory and time by the size of the file.
    shardkit's own readers parse the files themselves, since the formats' libraries do not promise
    that. Opening a shard raises `CorruptShard` if the file is not a whole shard of its format, and
    `read` raises it where the content contradicts itself. Threads share a reader only under a lock,
    processes never.
    """

    meta: Mapping[str, Any]
    """Description of the dataset: the ``meta`` given to the writer."""

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def read(self, rows: Sequence[int]) -> list[Record]:
        """Return the records of ``rows``, in the order asked; a row may be asked twice.

        Raises:
            IndexError: If a row is not in ``range(len(self))``.
            CorruptShard: If a record cannot be read.
        """
        ...

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        """Return, for each row, the fields that the file holds as plain bytes, and where.

        Fields in any other form (compressed, split, or stored as a number) are left out; the engine
        gets them from `read`.
        """
        ...

    def close(self) -> None:
        """Release the file; closing twice does nothing."""
        ...


class ShardWriter(Protocol):
    """One shard being written, to a path that does not exist yet. The caller makes it durable.

    The same records in the same order, with the same `ShardSpec`, give the same bytes.
    """

    def write(self, record: Record) -> None:
        """Append ``record``; its row is the number of records written before it.

        Raises:
            OSError: If the disk is full or fails, here or in `close`.
        """
        ...

    def close(self) -> None:
        """Complete the file; no `write` may follow."""
        ...

    def abort(self) -> None:
        """Release everything without completing the file. Never raises."""
        ...


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """What a writer gets before the first record."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    """JSON object that describes the dataset; stored in the shard."""

    raw_shape: tuple[int, int, int] | None = None
    """Height, width and channels of every ``raw`` field; None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """For a format that stores records one after another: work on some of them alone.

    Conversions use this to spread one shard over several processes.
    """

    encode: Callable[[Sequence[Record], ShardSpec], list[bytes]]
    """Returns the bytes that `ShardWriter.write` would append for these records."""

    append: Callable[[Any, list[bytes]], int]
    """Appends encoded records to a writer of the format; returns the offset of the first one."""

    read: Callable[[Path, int, int | None], ShardReader]
    """Opens the records between two offsets of a finished shard. The first part begins at 0; None
    is the end of the file."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A storage format: how shards are written and read."""

    name: str
    """Name in the registry, on the command line and in the manifest."""

    suffix: str
    """Suffix of its files, with the dot."""

    title: str
    """One line for help texts and tables."""

    libraries: tuple[str, ...] = ()
    """Packages whose versions can change the bytes written; recorded in the manifest."""

    overhead: int = 0
    """Approximate bytes of a record besides its image, to estimate the size of a dataset."""

    copies: int = 1
    """Copies of a shard's bytes on the disk while it is written."""

    write: Callable[[Path, ShardSpec], ShardWriter]
    """Starts a shard at a path that does not exist yet."""

    read: Callable[[Path], ShardReader]
    """Opens a finished shard."""

    pieces: Pieces | None = None
    """Lets several processes work on one shard, if the format permits that."""
