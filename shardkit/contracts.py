"""Contracts that sources and storage formats implement.

A source lists images and reads them; a format writes and reads shards.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

from shardkit.errors import BadImage, Problem
from shardkit.record import Field, Record, Schema, default_schema, load_schema, uniform_arrays


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
    place: int = 0
    """Number for the source's own use, such as the offset or row of the image in a file."""
    values: str = ""
    """Text for the source's own use, such as the small fields of the record as JSON."""


class PackedEntries(Sequence[Entry]):
    """A sequence of entries in a quarter of a list's memory: their text and 52 bytes each.

    An `Entry` exists only while it is used. `take` shares the memory. A pickled copy is a list.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._rows: Sequence[int] = range(0)
        self._text: str | bytes = ""
        """Paths, keys and values, end to end: text if it is ASCII, else smaller bytes."""
        self._ends = array("q", [0])
        self._keys = array("q")
        """Position of each key in the text, after the path."""
        self._values = array("q")
        """Position of the values of each entry in the text, after the key."""
        self._labels = array("i")
        self._bytes = array("q")
        self._stamps = array("q")
        self._places = array("q")
        text = bytearray()
        for path, key, label, size, stamp, place, values in entries:
            text += path.encode("utf-8", "surrogateescape")
            self._keys.append(len(text))
            text += key.encode()
            self._values.append(len(text))
            text += values.encode()
            self._ends.append(len(text))
            self._labels.append(label)
            self._bytes.append(size)
            self._stamps.append(stamp)
            self._places.append(place)
        self._text = text.decode() if text.isascii() else bytes(text)
        self._rows = range(len(self._labels))

    def take(self, rows: Iterable[int]) -> PackedEntries:
        """Return the entries of ``rows``, in that order."""
        taken = PackedEntries(())
        vars(taken).update(vars(self))
        taken._rows = array("q", map(self._rows.__getitem__, rows))
        return taken

    def paths(self) -> list[str]:
        """Return the path of each entry."""
        text, ends, keys = self._text, self._ends, self._keys
        if isinstance(text, str):
            return [text[ends[place] : keys[place]] for place in self._rows]
        return [_decoded(text[ends[place] : keys[place]]) for place in self._rows]

    def sizes(self) -> list[int]:
        """Return `Entry.bytes` of each entry."""
        return [*map(self._bytes.__getitem__, self._rows)]

    def facts(self) -> Iterator[tuple[str, int, int, int]]:
        """Do what `Images.facts` does."""
        text, values, ends = self._text, self._values, self._ends
        for path, row in zip(self.paths(), self._rows, strict=True):
            label = self._labels[row]
            own = _values_sum(label, text[values[row] : ends[row + 1]])
            yield path, self._bytes[row], self._stamps[row], own

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
        text, key, values = self._text, self._keys[place], self._values[place]
        path: str | bytes = text[self._ends[place] : key]
        name: str | bytes = text[key:values]
        own: str | bytes = text[values : self._ends[place + 1]]
        return Entry._make(
            (
                path if isinstance(path, str) else _decoded(path),
                name if isinstance(name, str) else name.decode(),
                self._labels[place],
                self._bytes[place],
                self._stamps[place],
                self._places[place],
                own if isinstance(own, str) else own.decode(),
            )
        )


def _values_sum(label: int, values: str | bytes) -> int:
    data = values.encode() if isinstance(values, str) else values
    return zlib.crc32(data, label & 0xFFFFFFFF)


def _decoded(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


class Source(Protocol):
    """A list of images and the bytes of each.

    A source is pickled to worker processes, so it holds paths and options but no open files.
    """

    kind: str
    """Name of its `SourceKind` in the registry; stored in the manifest."""

    def __str__(self) -> str:
        """Return the name of the source in messages, such as its path."""
        ...

    def paths(self) -> Sequence[Path]:
        """Return the files and folders that a dataset must not overlap."""
        ...

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images, in an order that depends only on the source and its options.

        Args:
            classes: Class names in the order of their labels, from an earlier conversion. New
                classes get the labels after these.

        Raises:
            UsageError: If the source is missing, unreadable or empty.
        """
        ...

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the description of a split for the manifest: JSON values, no absolute paths.

        ``name``, a string, is required. `SourceKind.find` receives these values. Reserved names
        are ``kind``, ``images``, ``limit``, ``order``, ``seed`` and ``division``.
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
        """Return the location of an image, for messages."""
        ...

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return the images of a split as the conversion listed them, in the same order.

        A source that still lists its bad images returns ``scan.splits[split].entries``.

        Args:
            scan: The source today, scanned with the classes of the conversion.
            split: The split, which the source may no longer have.
            skipped: Bad images that the conversion left out. Those it had listed still affect
                order, keys and limit, even if they are gone.
        """
        ...


class SourcePart(NamedTuple):
    """Neighboring images, which one process lists."""

    split: str
    """The split to which its problems and ignored files belong."""
    place: Any
    """What the part contains, for the source's own use; it can be pickled and hashed."""


class Listing(NamedTuple):
    """What a part of a source contains."""

    entries: Iterator[tuple[str, Entry]]
    """Split and entry of each image; the lists are complete after the last one."""
    problems: list[Problem]
    """Images and folders that cannot be listed."""
    ignored: list[Problem]
    """Files that are not images. The caller may clear it between two images."""


class PartedSource(Source, Protocol):
    """A source that several processes can list, none of which holds all images in memory."""

    def parts(self, most: int) -> tuple[Scan, Sequence[SourcePart]]:
        """Return a scan without images, and the parts of the source in the order of `scan`.

        The ignored files of the scan are those outside of all parts; `scan` lists them last.

        Args:
            most: Maximum number of parts of a split, roughly.

        Raises:
            UsageError: If the source is missing or unreadable.
        """
        ...

    def list_part(self, part: SourcePart) -> Listing:
        """List the images of a part."""
        ...

    def require_images(self, scan: Scan) -> None:
        """Refuse an empty source, given the scan of all parts.

        Raises:
            UsageError: If there are neither images nor problems.
        """
        ...


class FileSource(Source, Protocol):
    """A source whose images are files. Conversions read many of them at once."""

    def files(self, split: str, entries: Sequence[Entry]) -> Sequence[bytes] | None:
        """Return the path of each image's file, for the `os` module; None if `read` does more.

        The file's content is the image. If the file is unchanged, its size is ``entry.bytes`` and
        its time of modification, in nanoseconds, is ``entry.stamp``.
        """
        ...


class Located(NamedTuple):
    """A record, and where its source stores the bytes of its fields."""

    record: Record
    """The record, as `Source.read` returns it."""
    offsets: Mapping[str, int]
    """The offset in the file of each field that the file contains as it is, by stored name."""


class AttachableSource(Source, Protocol):
    """A source whose files contain the fields of its records as plain bytes.

    `shardkit.conversion.attach` indexes these files in place.
    """

    raw_shape: tuple[int, int, int] | None
    """Height, width and channels if the files contain raw pixels; None if they contain images."""

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return each file with its images, in order; also the files without images.

        Raises:
            UsageError: If the files do not contain the fields as plain bytes.
        """
        ...

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images of one file, or why it cannot be read or attached.

        Raises:
            BadImage: If the file cannot be read at all.
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
        """Return the records of ``rows`` in that order; see `Source.read`.

        Raises:
            IndexError: If a row is not in ``range(len(self))``.
        """
        return [self.source.read(self.split, self._entry(row)) for row in rows]

    def paths(self) -> Sequence[str]:
        """Return the path of each image."""
        entries = self.entries
        if isinstance(entries, PackedEntries):
            return entries.paths()
        return [entry.path for entry in entries]

    def sizes(self) -> Iterable[int]:
        """Return `Entry.bytes` of each image."""
        entries = self.entries
        if isinstance(entries, PackedEntries):
            return entries.sizes()
        return (entry.bytes for entry in entries)

    def facts(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield of each image path, size, stamp, and a checksum of label and `Entry.values`."""
        entries = self.entries
        if isinstance(entries, PackedEntries):
            yield from entries.facts()
            return
        for path, _, label, size, stamp, _, values in entries:
            yield path, size, stamp, _values_sum(label, values)

    def files(self) -> Sequence[bytes] | None:
        """Return the file of each image, if the source has `FileSource.files`."""
        found: Callable[[str, Sequence[Entry]], Sequence[bytes] | None] | None
        found = getattr(self.source, "files", None)
        return found and found(self.split, self.entries)

    def take(self, rows: Iterable[int]) -> Images:
        """Return only the images of ``rows``, in that order."""
        if isinstance(self.entries, PackedEntries):
            return self.of(self.entries.take(rows))
        return self.of([self.entries[row] for row in rows])

    def __reduce__(self) -> tuple[type[Images], tuple[Source, str, Sequence[Entry]]]:
        """Pickle only these images of a source that holds them in memory, and has ``only``."""
        only: Callable[[Sequence[Entry]], Source] | None = getattr(self.source, "only", None)
        source = self.source if only is None else only(self.entries)
        return Images, (source, self.split, self.entries)

    def of(self, entries: Sequence[Entry]) -> Images:
        """Return other images of the same split."""
        return Images(self.source, self.split, entries)

    def locate(self, row: int) -> str:
        """Return the location of an image, for messages."""
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
    """Images by split name; without splits, the only name is ""."""
    classes: tuple[str, ...] | None
    """Class names in the order of their labels, shared by all splits; None if unlabeled."""
    ignored: Mapping[str, Collection[Problem]] = field(default_factory=dict)
    """Files that are not images and the reasons, by split."""
    problems: dict[str, list[Problem]] = field(default_factory=dict)
    """Images and folders that cannot be listed and the reasons, by split."""
    understood: Mapping[str, str] = field(default_factory=dict)
    """How the source was understood, for the user to check: a term, such as "label", and a text."""
    fields: Schema | None = None
    """The fields of all records; None means images, and labels if there are classes."""
    known: bool = True
    """Whether entries state labels and sizes. Otherwise only records state labels (entries have
    `shardkit.record.NO_LABEL`), and sizes are estimates."""
    records: bool = False
    """Whether the source reads finished records of a dataset. By default a conversion keeps
    their order, and stores them unchanged."""
    raw_shape: tuple[int, int, int] | None = None
    """Height, width and channels of raw pixels in such records; None without."""
    whole: bool = True
    """Whether a dataset made from the source has all of these images, not a selection that the
    source does not know."""
    exact_sizes: bool = True
    """Whether `Entry.bytes` is the size of the record's image, unlike where the source encodes it
    from pixels."""

    @property
    def schema(self) -> Schema:
        """The fields of all records."""
        return default_schema(self.classes) if self.fields is None else self.fields


@dataclass(frozen=True, kw_only=True)
class SourceOption:
    """An option of a source: a keyword of `SourceKind.open`, and an option of its command."""

    flags: str
    """The option's flags, as ``click.option`` takes them: ``--class-order``, ``--a/--no-a``."""
    help: str
    default: Any = None
    metavar: str | None = None
    type: Callable[[str], Any] | None = None
    """Converts the user's text; None infers the type from ``default`` or the flags."""


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    """A kind of source: how to open one, also from a dataset's manifest."""

    name: str
    """Name in the registry, on the command line and in the manifest."""

    title: str
    """One line for help texts."""

    help: str
    """Help text of ``shardkit convert NAME``, with SRC and DST for the arguments."""

    options: tuple[SourceOption, ...] = ()

    of_files: bool = False
    """Whether a path or pattern names all files, so they can be copied from URLs first."""

    open: Callable[..., Source]
    """Opens a source: its path, then its options as keywords."""

    find: Callable[[Path, Mapping[str, Mapping[str, Any]]], Source]
    """Opens the source of a dataset, given its path and the description of each split in the
    manifests (see `Source.describe`)."""


class Range(NamedTuple):
    """A piece of a file: ``length`` bytes from ``offset`` on."""

    offset: int
    length: int


class ShardReader(Protocol):
    """One finished shard, opened for reading.

    A shard is untrusted input: a reader bounds its memory and time by the size of the file.
    shardkit's own readers parse the files themselves, since the formats' libraries do not promise
    that. Opening raises `CorruptShard` if the file is not a complete shard of its format. `read`
    raises it if the content contradicts itself. Threads share a reader only under a lock; processes
    never share one.
    """

    meta: Mapping[str, Any]
    """Description of the dataset: the ``meta`` given to the writer."""

    def __len__(self) -> int:
        """Return the number of records."""
        ...

    def read(self, rows: Sequence[int]) -> list[Record]:
        """Return the records of ``rows`` in that order, including duplicates.

        Raises:
            IndexError: If a row is not in ``range(len(self))``.
            CorruptShard: If a record cannot be read.
        """
        ...

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        """Return the byte range of each field that the file stores as plain bytes, for each row.

        Fields in any other form (compressed, split, or stored as a number) are left out; use `read`
        for them.
        """
        ...

    def close(self) -> None:
        """Release the file; closing twice does nothing."""
        ...


class ShardWriter(Protocol):
    """Writes one shard to a path that does not exist yet. The caller syncs the file.

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
    """Description of a shard, given to its writer."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    """JSON object that describes the dataset; stored in the shard."""

    raw_shape: tuple[int, int, int] | None = None
    """Height, width and channels of all raw pixels (`shardkit.record.is_raw`); None without."""

    @cached_property
    def arrays(self) -> Mapping[str, Field]:
        """The arrays of one shape, by stored name: records hold their values without a header.

        They follow from the schema in ``meta``.
        """
        return stated_arrays(self.meta)


def stated_arrays(meta: Mapping[str, Any]) -> Mapping[str, Field]:
    """Return the arrays of one shape that a shard's metadata state, by stored name.

    Raises:
        ValueError: If the metadata are damaged.
    """
    if not meta.get("schema"):
        return {}
    return uniform_arrays(load_schema(meta["schema"], ()))


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Functions to work on a part of a shard, for formats that store records one after another.

    Conversions use them to distribute one shard among several processes.
    """

    encode: Callable[[Sequence[Record], ShardSpec], list[bytes]]
    """Returns the bytes that `ShardWriter.write` would append for these records."""

    append: Callable[[Any, list[bytes]], int]
    """Appends encoded records to a writer of the format; returns the offset of the first one."""

    read: Callable[[Path, int, int | None], ShardReader]
    """Opens the records between two offsets of a finished shard. The first part starts at 0; None
    means the end of the file."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A storage format: how to write and read shards."""

    name: str
    """Name in the registry, on the command line and in the manifest."""

    suffix: str
    """Suffix of its files, with the dot."""

    title: str
    """One line for help texts and tables."""

    libraries: tuple[str, ...] = ()
    """Packages whose versions can change the bytes written; recorded in the manifest."""

    overhead: int = 0
    """Approximate bytes of a record in addition to its image, to estimate dataset sizes."""

    copies: int = 1
    """Copies of a shard's bytes on the disk while it is being written."""

    write: Callable[[Path, ShardSpec], ShardWriter]
    """Starts a shard at a path that does not exist yet."""

    read: Callable[[Path], ShardReader]
    """Opens a finished shard."""

    pieces: Pieces | None = None
    """Allows several processes to work on one shard; None if the format does not permit that."""
