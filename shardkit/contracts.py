"""Contracts that sources, storage formats and targets implement.

A source lists images and reads them; a format writes and reads shards; a target publishes them.
"""

from __future__ import annotations

import bisect
import hashlib
import inspect
import itertools
import json
import zlib
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from shardkit._version import __version__
from shardkit.errors import BadImage, Problem, UsageError, located
from shardkit.kinds.field import Field, Schema, default_schema, load_schema, uniform_arrays
from shardkit.options import Option, make, options_of
from shardkit.record import DATASET_FILE, Record, is_raw
from shardkit.system.npy import npy_header
from shardkit.system.packages import version_of
from shardkit.system.strings import UTF8, join_strings, split_strings

if TYPE_CHECKING:
    from shardkit.record_columns import RecordColumns
    from shardkit.sources.recognize import Overview

LOOSE = "outside any class folder"
"""Reason for which sources ignore images next to class folders."""


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


NUMBERS = np.dtype(
    [
        ("start", "<i8"),
        *((name, "<u4") for name in ("path", "key", "values")),
        ("label", "<i4"),
        *((name, "<i8") for name in ("bytes", "stamp", "place")),
    ]
)
"""Where the texts of an entry start, the bytes of each, and its numbers."""

_Numbers = npt.NDArray[np.void]

_AT_ONCE = 4096
"""Entries to pack or unpack at a time."""

_HELD = 1 << 18
"""Packed entries of `StoredEntries` to hold in memory: 27 MB."""


class PackedEntries(Sequence[Entry]):
    """A sequence of entries as columns, in a quarter of a list's memory: their text and 48 bytes.

    An `Entry` exists only while it is used: unpacking costs 1 us. `take` shares the text.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        remaining = iter(entries)
        chunks = iter(lambda: [*itertools.islice(remaining, _AT_ONCE)], [])
        self._hold(*_joined([_packed(*zip(*chunk, strict=True)) for chunk in chunks]))

    def _hold(self, text: bytes, numbers: _Numbers) -> None:
        self._text: str | bytes = text.decode() if text.isascii() else text
        """Path, key and values of each entry; text if it is ASCII, whose slices take less time."""
        self._numbers = numbers

    @classmethod
    def of(cls, text: bytes, numbers: bytes | _Numbers) -> PackedEntries:
        """Return the entries of `parts`, or neighboring ones with their text."""
        entries = cls.__new__(cls)
        entries._hold(text, _end_to_end(np.frombuffer(numbers, NUMBERS)))
        return entries

    @classmethod
    def of_columns(cls, paths: Sequence[str], keys: Sequence[str], *numbers: Any) -> PackedEntries:
        """Return entries whose label, bytes, stamp and place are ``numbers``, without values."""
        return cls.of(*_packed(paths, keys, *numbers, itertools.repeat("", len(paths))))

    @classmethod
    def joined(cls, several: Iterable[PackedEntries]) -> PackedEntries:
        """Return the entries of several sequences, in order."""
        return cls.of(*_joined([entries.parts() for entries in several]))

    def parts(self) -> tuple[bytes, _Numbers]:
        """Return the text of all entries, end to end, and their numbers."""
        numbers = self._numbers
        starts = numbers["start"]
        ends = starts + text_lengths(numbers)
        text: Any = self._text
        if not len(numbers) or (starts[1:] == ends[:-1]).all():
            text = text[starts[0] : ends[-1]] if len(numbers) else text[:0]
        else:
            spans = zip(starts.tolist(), ends.tolist(), strict=True)
            text = text[:0].join([text[start:end] for start, end in spans])
        return text.encode() if isinstance(text, str) else text, _end_to_end(numbers)

    def take(self, rows: Iterable[int] | npt.NDArray[np.int64]) -> PackedEntries:
        """Return the entries of ``rows``, in that order."""
        rows = rows if isinstance(rows, np.ndarray) else np.fromiter(rows, np.int64)
        return self._with(self._numbers[rows])

    def _with(self, numbers: _Numbers) -> PackedEntries:
        taken = PackedEntries.__new__(PackedEntries)
        taken._text = self._text
        taken._numbers = numbers
        return taken

    def chunks(self) -> Iterator[PackedEntries]:
        """Yield the entries in chunks, as `StoredEntries.chunks` does: all at once."""
        yield self

    def numbers(self, name: str) -> list[int]:
        """Return ``label``, ``bytes``, ``stamp`` or ``place`` of each entry."""
        numbers: list[int] = self._numbers[name].tolist()
        return numbers

    def paths(self) -> list[str]:
        """Return the path of each entry."""
        return self._texts(self._numbers["start"], self._numbers["path"])

    def keys(self) -> list[str]:
        """Return the key of each entry."""
        numbers = self._numbers
        return self._texts(numbers["start"] + numbers["path"], numbers["key"])

    def facts(self) -> Iterator[tuple[str, int, int, int]]:
        """Do what `Images.facts` does."""
        numbers = self._numbers
        sums = numbers["label"].astype(np.uint32).tolist()
        if numbers["values"].any():
            starts = numbers["start"] + numbers["path"] + numbers["key"]
            values = self._texts(starts, numbers["values"])
            sums = [zlib.crc32(text.encode(), s) for text, s in zip(values, sums, strict=True)]
        return zip(self.paths(), self.numbers("bytes"), self.numbers("stamp"), sums, strict=True)

    def _texts(self, starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> list[str]:
        return split_strings(self._text, starts, starts + lengths)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, row: int) -> Entry: ...
    @overload
    def __getitem__(self, row: slice) -> PackedEntries: ...
    def __getitem__(self, row: int | slice) -> Entry | PackedEntries:
        if isinstance(row, slice):
            return self._with(self._numbers[row])
        row = range(len(self))[row]
        return next(iter(self[row : row + 1]))

    def __iter__(self) -> Iterator[Entry]:
        text = self._text
        for at in range(0, len(self), _AT_ONCE):
            for start, path, key, values, *numbers in self._numbers[at : at + _AT_ONCE].tolist():
                key_at = start + path
                at_values = key_at + key
                texts: Any = (
                    text[start:key_at],
                    text[key_at:at_values],
                    text[at_values : at_values + values],
                )
                if isinstance(text, bytes):
                    texts = [text.decode(*UTF8) for text in texts]
                yield Entry._make((*texts[:2], *numbers, texts[2]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Callable[..., PackedEntries], tuple[bytes, bytes]]:
        text, numbers = self.parts()
        return PackedEntries.of, (text, numbers.tobytes())


def _packed(paths: Sequence[str], keys: Sequence[str], *columns: Any) -> tuple[bytes, _Numbers]:
    """Return texts and numbers of entries, given the columns of `Entry`."""
    *numbers, values = columns
    packed = np.zeros(len(paths), NUMBERS)
    text, ends = join_strings([*itertools.chain(*zip(paths, keys, values, strict=True))])
    lengths = np.diff(ends, prepend=0).reshape(-1, 3).T
    names = ("path", "key", "values", "label", "bytes", "stamp", "place")
    for name, column in zip(names, (*lengths, *numbers), strict=True):
        packed[name] = column
    return text.tobytes(), _end_to_end(packed)


def text_lengths(numbers: _Numbers) -> npt.NDArray[np.int64]:
    """Return the length of the text of each entry."""
    columns = np.stack([numbers[name] for name in ("path", "key", "values")])
    lengths: npt.NDArray[np.int64] = columns.sum(0, np.int64)
    return lengths


def _end_to_end(numbers: _Numbers) -> _Numbers:
    """Return the numbers of entries whose texts follow one another."""
    numbers = numbers.copy()
    lengths = text_lengths(numbers)
    numbers["start"] = np.cumsum(lengths) - lengths
    return numbers


def _joined(parts: Sequence[tuple[bytes, _Numbers]]) -> tuple[bytes, _Numbers]:
    """Return texts and numbers of several sequences of entries, in order."""
    numbers = np.concatenate([np.zeros(0, NUMBERS), *(numbers for _, numbers in parts)])
    return b"".join([text for text, _ in parts]), _end_to_end(numbers)


def as_packed(entries: Sequence[Entry]) -> PackedEntries:
    """Return entries packed."""
    return entries if isinstance(entries, PackedEntries) else PackedEntries(entries)


class StoredEntries(Sequence[Entry]):
    """Entries in chunks, the last used of which are in memory, to be read in order.

    A slice shares these chunks. Threads may read at once. A pickled copy is packed.

    Args:
        load: Returns the entries of a chunk.
        cuts: First row of each chunk, then the number of rows.
    """

    def __init__(self, load: Callable[[int], Sequence[Entry]], cuts: Sequence[int]) -> None:
        largest = max(stop - start for start, stop in itertools.pairwise([0, *cuts, 1]))
        chunks = max(1, _HELD // max(1, largest))
        self._load = lru_cache(maxsize=chunks)(lambda chunk: as_packed(load(chunk)))
        self._cuts = cuts
        self._rows = range(cuts[-1])

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Entry: ...
    @overload
    def __getitem__(self, row: slice) -> StoredEntries: ...
    def __getitem__(self, row: int | slice) -> Entry | StoredEntries:
        if isinstance(row, slice):
            taken = object.__new__(StoredEntries)  # not copy.copy, which makes a list of entries
            taken._load = self._load
            taken._cuts = self._cuts
            taken._rows = self._rows[row]
            return taken
        position = self._rows[row]
        chunk = self._chunk(position)
        return self._load(chunk)[position - self._cuts[chunk]]

    def __iter__(self) -> Iterator[Entry]:
        return itertools.chain.from_iterable(self.chunks())

    def chunks(self) -> Iterator[PackedEntries]:
        """Yield the entries of each chunk."""
        first = self._chunk(self._rows.start)
        for chunk in range(first, bisect.bisect_left(self._cuts, self._rows.stop)):
            yield self._of_chunk(chunk)

    def divide(
        self, part_of: Callable[[Sequence[Entry]], Iterable[Any]]
    ) -> dict[Any, StoredEntries]:
        """Return the entries of each part, in order.

        Args:
            part_of: Returns the part of each of some entries, which depends on these alone. It is
                called again when entries are read.
        """
        chunks = len(self._cuts) - 1
        counts: dict[Any, array[int]] = {}
        for chunk in range(chunks):
            for part, count in Counter(part_of(self._of_chunk(chunk))).items():
                counts.setdefault(part, array("q", bytes(8 * chunks)))[chunk] = count

        def entries_of(part: Any) -> StoredEntries:
            def load(chunk: int) -> PackedEntries:
                entries = self._of_chunk(chunk)
                return entries.take(row for row, its in enumerate(part_of(entries)) if its == part)

            return StoredEntries(load, [0, *itertools.accumulate(counts[part])])

        return {part: entries_of(part) for part in counts}

    def _of_chunk(self, chunk: int) -> PackedEntries:
        first = self._cuts[chunk]
        rows = self._rows
        return self._load(chunk)[max(rows.start - first, 0) : max(rows.stop - first, 0)]

    def __reduce__(self) -> tuple[Callable[..., PackedEntries], tuple[bytes, bytes]]:
        return PackedEntries.joined(self.chunks()).__reduce__()

    def _chunk(self, row: int) -> int:
        return bisect.bisect_right(self._cuts, row) - 1


ReadTogether: TypeAlias = "list[Record | None] | RecordColumns"
"""Records that were read together; columns if all were."""

Comparison = Callable[[Record, Schema], str]
"""Returns how a record with a schema differs from Python values that it was made from, or ""."""


def _is_same(record: Record, schema: Schema) -> str:
    return ""


class Source(ABC):
    """A list of images and the bytes of each.

    A source is pickled to worker processes, so it holds paths and options but no open files.
    Abilities that not all sources have are methods with a default, and the subclasses
    `PartedSource` and `AttachableSource`.
    """

    kind: str
    """Name of its `SourceKind` in the registry; stored in the manifest."""

    @abstractmethod
    def __str__(self) -> str:
        """Return the name of the source in messages, such as its path."""

    @abstractmethod
    def paths(self) -> Sequence[Path]:
        """Return the files and folders that a dataset must not overlap."""

    @abstractmethod
    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images, in an order that depends only on the source and its options.

        Args:
            classes: Class names in the order of their labels, from an earlier conversion. New
                classes get the labels after these.

        Raises:
            UsageError: If the source is missing, unreadable or empty.
        """

    @abstractmethod
    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the description of a split for the manifest: JSON values, no absolute paths.

        ``name``, a string, is required. `SourceOptions.describe` returns the others, which
        `SourceKind.find` receives. Reserved names are ``kind``, ``images``, ``limit``, ``order``,
        ``seed`` and ``division``.
        """

    @abstractmethod
    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image: the encoded image, its label and its path.

        Several threads may call it at once. `shardkit.sources.images.image_record` builds the
        record from the bytes of an image file.

        Raises:
            BadImage: If it cannot be read, is not an image or has changed since the scan.
        """

    def read_together(self, split: str, entries: Sequence[Entry]) -> ReadTogether:
        """Return the records of images, None for each that only `read` returns, or refuses.

        Override this where many are read in less time.
        """
        return [None] * len(entries)

    def read_given(self, split: str, entry: Entry) -> tuple[Record, Comparison]:
        """Return the result of `read`, and a comparison with the values that it was made from.

        Sources of files have no such values.

        Raises:
            BadImage: As for `read`.
        """
        return self.read(split, entry), _is_same

    @abstractmethod
    def locate(self, split: str, entry: Entry) -> str:
        """Return the location of an image, for messages."""

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return the images of a split as the conversion listed them, in the same order.

        By default those of ``scan``, for sources that still list their bad images.

        Args:
            scan: The source today, scanned with the classes of the conversion.
            split: The split, which the source may no longer have.
            skipped: Bad images that the conversion left out. Those it had listed still affect
                order, keys and limit, even if they are gone.
        """
        return scan.splits[split].entries if split in scan.splits else ()

    def files(self, split: str, entries: Sequence[Entry]) -> Sequence[bytes] | None:
        """Return the path of each image's file, for the `os` module; None if `read` does more.

        Conversions read many files at once. A file's content is the image. If it is unchanged, its
        size is ``entry.bytes`` and its time of modification, in nanoseconds, is ``entry.stamp``.
        """
        return None

    chunk_bytes: int = 1 << 20
    """Bytes of images that one of several processes prepares at a time; more if reads overlap."""

    def ahead(self, split: str, entries: Sequence[Entry]) -> None:
        """Start to read images, in bounded memory.

        The same process then calls `read` in this order, perhaps not for each.
        """
        return

    def only(self, entries: Sequence[Entry]) -> Source:
        """Return a source with these images alone, if it holds them in memory, for a worker."""
        return self

    def column(self, entries: Sequence[Entry], name: str) -> Iterable[Any]:
        """Return a value of each entry by which images can be grouped: None where it is missing.

        By default those in `Entry.values`.

        Raises:
            UsageError: If there is no such column.
        """
        return (_value_in(entry.values, name) for entry in entries)


def _value_in(values: str, name: str) -> Any:
    try:
        return json.loads(values).get(name)
    except (ValueError, AttributeError):
        return None


class SourcePart(NamedTuple):
    """Neighboring images, which one process lists."""

    split: str
    """The split to which its problems and ignored files belong."""
    place: Any
    """Identifies the images, for the source's own use; it can be pickled and hashed."""


class PartListing(NamedTuple):
    """The content of a part of a source."""

    entries: Iterator[tuple[str, Entry]]
    """Split and entry of each image; the lists are complete after the last one."""
    problems: list[Problem]
    """Images and folders that cannot be listed."""
    ignored: list[Problem]
    """Files that are not images. The caller may clear it between two images."""


class PartedSource(Source):
    """A source that several processes can list, none of which holds all images in memory."""

    @abstractmethod
    def parts(
        self, most: int, classes: Sequence[str] | None = None
    ) -> tuple[Scan, Sequence[SourcePart]]:
        """Return a scan without images, and the parts of the source in the order of `scan`.

        The ignored files of the scan are those outside of all parts; `scan` lists them last.

        Args:
            most: Maximum number of parts of a split, roughly.
            classes: As for `Source.scan`.

        Raises:
            UsageError: If the source is missing or unreadable.
        """

    @abstractmethod
    def list_part(self, part: SourcePart) -> PartListing:
        """List the images of a part."""

    @abstractmethod
    def require_images(self, scan: Scan) -> None:
        """Refuse an empty source, given the scan of all parts.

        Raises:
            UsageError: If there are neither images nor problems.
        """

    in_order: bool = False
    """Whether images must be listed in the order of `scan`, for `complete`."""

    def complete(self, scan: Scan) -> Scan:
        """Return the scan of all parts, without images that only the whole shows to be unwanted.

        Raises:
            UsageError: If the source is empty.
        """
        self.require_images(scan)
        return scan


class Located(NamedTuple):
    """A record, and where its source stores the bytes of its fields."""

    record: Record
    """The record, as `Source.read` returns it."""
    offsets: Mapping[str, int]
    """The offset in the file of each field that the file contains as it is, by stored name."""


class AttachableSource(Source):
    """A source whose files contain the fields of its records as plain bytes.

    `shardkit.attaching.attach` indexes these files in place. Its kind has `SourceKind.attaching`.
    """

    @property
    def raw_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels if the files contain raw pixels; None for images."""
        return None

    @abstractmethod
    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return each file with its images, in order; also the files without images.

        Raises:
            UsageError: If the files do not contain the fields as plain bytes.
        """

    @abstractmethod
    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images of one file, or why it cannot be read or attached.

        Raises:
            BadImage: If the file cannot be read at all.
        """


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

    def read_together(self) -> ReadTogether:
        """Return all records; see `Source.read_together`."""
        return self.source.read_together(self.split, self.entries)

    def chunks(self) -> Iterator[PackedEntries]:
        """Yield the entries of all images as columns, one chunk in memory at a time."""
        entries = self.entries
        return (entries if isinstance(entries, StoredEntries) else as_packed(entries)).chunks()

    def packed(self) -> Images:
        """Return the images with their entries in memory."""
        return self.of(PackedEntries.joined(self.chunks()))

    def paths(self) -> Sequence[str]:
        """Return the path of each image."""
        return [path for chunk in self.chunks() for path in chunk.paths()]

    def numbers(self, name: str) -> Iterator[int]:
        """Yield ``label``, ``bytes``, ``stamp`` or ``place`` of each `Entry`."""
        return itertools.chain.from_iterable(chunk.numbers(name) for chunk in self.chunks())

    def facts(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield of each image path, size, stamp, and a checksum of label and `Entry.values`."""
        return itertools.chain.from_iterable(chunk.facts() for chunk in self.chunks())

    def digest(self) -> str:
        """Return the SHA-256 of all entries."""
        texts = hashlib.sha256()
        numbers = hashlib.sha256()
        for chunk in self.chunks():
            text, values = chunk.parts()
            values["start"] = 0
            texts.update(text)
            numbers.update(values.tobytes())
        return texts.hexdigest() + numbers.hexdigest()

    def files(self) -> Sequence[bytes] | None:
        """Return the file of each image; see `Source.files`."""
        return self.source.files(self.split, self.entries)

    def ahead(self) -> None:
        """Start to read the images; see `Source.ahead`."""
        self.source.ahead(self.split, self.entries)

    def take(self, rows: Iterable[int]) -> Images:
        """Return only the images of ``rows``, in that order."""
        if isinstance(self.entries, PackedEntries):
            return self.of(self.entries.take(rows))
        return self.of(PackedEntries(map(self.entries.__getitem__, rows)))

    def __reduce__(self) -> tuple[type[Images], tuple[Source, str, Sequence[Entry]]]:
        """Pickle only these images of a source that holds them in memory."""
        return Images, (self.source.only(self.entries), self.split, self.entries)

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


class OriginalPart(NamedTuple):
    """Rows of a dataset that were made from one source."""

    rows: int
    source: dict[str, Any]
    """The description of the source."""
    software: Mapping[str, str]
    """Versions of the libraries that wrote the images."""
    skipped: Sequence[Problem]
    """Bad files of the source that were left out."""


class Original(NamedTuple):
    """The conversion of a dataset, as it and a copy of all its records describe it."""

    content_digest: str
    """Digest of the dataset's records."""
    source: dict[str, Any]
    """The description of its source, or of all its sources."""
    recipe: dict[str, Any]
    """The changes made to the images."""
    parts: Sequence[OriginalPart]
    ignored: Collection[Problem]
    """Ignored files of the sources."""


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
    notes: Sequence[str] = ()
    """Sentences that the user should read after a conversion, with options by reference."""
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
    originals: Mapping[str, Original] = field(default_factory=dict)
    """The dataset that a split has all rows of, in order, if `records` are unchanged."""
    exact_sizes: bool = True
    """Whether `Entry.bytes` is the size of the record's image, unlike where the source encodes it
    from pixels."""

    @cached_property
    def schema(self) -> Schema:
        """The fields of all records."""
        return default_schema(self.classes) if self.fields is None else self.fields


def recorded(name: str) -> Any:
    """Return a field of `SourceOptions` that a source sets, not its user.

    Args:
        name: Its name in the description.
    """
    return field(default=None, metadata={"recorded": name})


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options of a source, each a field made by `shardkit.options.option`: see `SourceKind`.

    Manifests describe them, and what a source recorded, so that `restored` opens it again.
    """

    HEADING: ClassVar[str] = "Source"

    def describe(self) -> dict[str, Any]:
        """Return JSON values for the manifest."""
        described = {}
        for item in options_of(type(self)):
            value = getattr(self, item.name)
            stored = None if value is None else item.store(value)
            if stored is not None and item.stored != "":
                described[item.stored or item.name] = (
                    list(stored) if isinstance(stored, tuple) else stored
                )
        for name, stored_name in _recorded(type(self)):
            if (value := getattr(self, name)) is not None:
                described[stored_name] = value
        return described

    @classmethod
    def restored(cls, described: Mapping[str, Mapping[str, Any]]) -> Self:
        """Return the options of a dataset's source, given the description of each split.

        Raises:
            UsageError: If a description is damaged.
        """
        stored = next(iter(described.values()))
        values = {name: stored[its] for name, its in _recorded(cls) if its in stored}
        for item in options_of(cls):
            name = item.stored or item.name
            if item.stored == "" or stored.get(name) is None:
                continue
            # A manifest may be anybody's: `store` leaves no path of a file or code to run.
            value = item.store(stored[name]) if _fits(stored[name], item) else None
            if not _fits(value, item):
                raise UsageError(f"the description of the source is damaged: {name}")
            values[item.name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)


_PLAIN: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
}


def _fits(value: object, item: Option) -> bool:
    """Return whether an option may have a value of this type; True for types that are not plain."""
    written = item.type if isinstance(item.type, str) else inspect.formatannotation(item.type)
    names = {name.strip() for name in written.split("|")} - {"None", "Path"}
    types = {kind for name in names for kind in _PLAIN.get(name, ())}
    if item.store is bool:  # only a description has True
        types.add(bool)
    return not names <= _PLAIN.keys() or type(value) in types


def _recorded(kind: type[SourceOptions]) -> list[tuple[str, str]]:
    """Return each field made by `recorded`, and its name in descriptions."""
    return [
        (item.name, item.metadata["recorded"])
        for item in fields(kind)
        if "recorded" in item.metadata
    ]


@dataclass(frozen=True, kw_only=True)
class Attaching:
    """Command ``shardkit attach NAME`` of a kind of source, which is an `AttachableSource`.

    Or each image is a file of its own (``whole_files``), whose path is relative to `Source.paths`.
    """

    title: str
    """One line for help texts."""

    help: str
    """Help text, with ARCHIVES and INDEX_DIR for the arguments."""

    whole_files: bool = False


class Recognition(NamedTuple):
    """Why a path may be a source of some kind."""

    evidence: str
    """The evidence, in words."""
    certain: bool = True
    """Whether it is nothing else."""
    inside: str = ""
    """The source below the path; "" for the path itself."""
    words: tuple[str, ...] = ()
    """Options that the command needs. ``{}/`` at the start of one stands for the path."""

    def options(self, path: Path) -> list[str]:
        """Return the options for a path."""
        return [
            str(path / word[2:].lstrip("/")) if word.startswith("{}/") else word
            for word in self.words
        ]


@dataclass(frozen=True, kw_only=True)
class SourceKind:
    """A kind of source: how to open one, also from a dataset's manifest."""

    name: str
    """Name in the registry, on the command line and in the manifest."""

    title: str
    """One line for help texts."""

    help: str
    """Help text of ``shardkit convert NAME``, with SRC and DST for the arguments."""

    options: type[SourceOptions] = SourceOptions
    """The options: those of its command, and the keywords of `open`."""

    of_files: bool = False
    """Whether a path or pattern names all files, so they can be copied from URLs first."""

    reads_zip: bool = False
    """Whether the path, and that of the images, may be in a zip archive: ``photos.zip/train``."""

    reads_urls: bool = False
    """Whether it reads from object stores by itself, without a copy."""

    refuses_shards: bool = False
    """Whether shards of shardkit have its suffix, but it would take their records for images, or
    lose their class names."""

    attaching: Attaching | None = None
    """How to attach its files; None if they can only be converted."""

    recognize: Callable[[Overview], Iterable[Recognition]] | None = None
    """Returns the sources of this kind at or below a path, by names and the start of files."""

    source: Callable[[str | Path, Any], Source]
    """Opens a source: its class, which takes the path and an object of `options`."""

    def has_option(self, name: str) -> bool:
        """Return whether there is an option of this name."""
        return any(item.name == name for item in options_of(self.options))

    def open(self, path: str | Path, **options: Any) -> Source:
        """Open a source.

        Args:
            path: The path.
            **options: Those of `options`.

        Raises:
            UsageError: If the path is empty or one of a dataset, there is no such option, or the
                source cannot be opened.
        """
        if path == "":
            raise UsageError("the path of the source is empty")
        values = make(self.options, options)
        if options:
            names = ", ".join(item.name for item in options_of(self.options)) or "none"
            unknown = next(iter(options))
            raise UsageError(f"the source {self.name} has no option {unknown}; it has: {names}")
        with located(path):
            if self.refuses_shards:
                _refuse_shards(Path(path))
            return self.source(path, values)

    def find(self, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Source:
        """Open the source of a dataset.

        Args:
            path: The path.
            described: The description of each split in the manifests; see `Source.describe`.

        Raises:
            UsageError: If a description is damaged, or the source cannot be opened.
        """
        with located(path):
            return self.source(path, self.options.restored(described))


def _refuse_shards(path: Path) -> None:
    """Refuse a shardkit dataset, or a shard, as a file of another program."""
    folder = path.parent if path.name.startswith("shard-") else path
    if (folder / DATASET_FILE).is_file():
        raise UsageError(
            f"{path} belongs to a shardkit dataset",
            remedy="use `shardkit convert dataset`, or open it as it is",
        )


def scan_source(source: Source, classes: Sequence[str] | None = None) -> Scan:
    """Return the scan of a source; errors without another place name the source."""
    with located(source):
        return source.scan(classes)


class Range(NamedTuple):
    """A range of a file: ``length`` bytes from ``offset`` on."""

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

    @cached_property
    def headers(self) -> Mapping[str, tuple[bytes, int]]:
        """The .npy header and the bytes of each of these arrays, except for raw pixels."""
        return {
            name: (npy_header(field.shape or (), field.values), field.bytes)
            for name, field in self.arrays.items()
            if not is_raw(name)
        }


def stated_arrays(meta: Mapping[str, Any]) -> Mapping[str, Field]:
    """Return the arrays of one shape that a shard's metadata state, by stored name.

    Raw pixels of typed images are such arrays.

    Raises:
        ValueError: If the metadata are damaged.
    """
    if not meta.get("schema"):
        return {}
    raw_shape = meta.get("raw_shape")
    if raw_shape is not None:
        sides = raw_shape if isinstance(raw_shape, (list, tuple)) else ()
        if len(sides) != 3 or not all(type(side) is int and side > 0 for side in sides):
            raise ValueError(f"the size of its raw pixels is damaged: {str(raw_shape)[:40]}")
    return uniform_arrays(load_schema(meta["schema"], ()), raw_shape)


def _write_each(writer: ShardWriter, records: list[Record] | RecordColumns) -> None:
    for record in records:
        writer.write(record)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Functions to work on a part of a shard, for formats that store records one after another.

    Conversions use them to distribute one shard among several processes.
    """

    encode: Callable[[list[Record] | RecordColumns, ShardSpec], list[bytes]]
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

    write_all: Callable[[Any, list[Record] | RecordColumns], None] = _write_each
    """Writes several records as `ShardWriter.write` does, perhaps in less time."""

    read: Callable[[Path], ShardReader]
    """Opens a finished shard."""

    chunks: Chunks | None = None
    """Allows several processes to work on one shard; None if the format does not permit that."""

    def software(self) -> dict[str, str]:
        """Return the versions of all libraries that affect the bytes of a shard."""
        packages = ("pillow", "simplejpeg", *self.libraries)
        return {"shardkit": __version__} | {name: version_of(name) or "absent" for name in packages}


class Target(ABC):
    """Where a conversion publishes its dataset."""

    folder: Path
    """The local directory in which the dataset is built."""

    @abstractmethod
    def prepare(self) -> None:
        """Check the place before the work of a conversion, as far as reading shows.

        Raises:
            UsageError: If it cannot be written, or holds another dataset.
        """

    @abstractmethod
    def publish(self) -> bool:
        """Publish the dataset in `folder`; return whether the place did not have it before.

        Raises:
            UsageError: If the place holds another dataset by now.
            ShardkitError: If it cannot be written.
        """
