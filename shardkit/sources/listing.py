"""The list that a scan makes: what every source of records in files does with them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, Images, PackedEntries, Scan, Source, SourceOption
from shardkit.errors import Problem, UsageError
from shardkit.record import Schema, default_schema, make_keys
from shardkit.sources.inputs import MAX_IMAGE_BYTES, InputFiles, place_of
from shardkit.sources.labels import Labels, LabelValues
from shardkit.system.files import as_text


class Listing:
    """The images of one split, while they are found.

    Args:
        labels: The labels of all splits.
    """

    def __init__(self, labels: LabelValues) -> None:
        self.labels = labels
        self.problems: list[Problem] = []
        self.ignored: list[Problem] = []
        self._paths: dict[str, None] = {}
        self._codes = array("q")
        self._bytes = array("q")
        self._stamps = array("q")
        self._places = array("q")
        self._values: list[str] = []
        """The values of each image; empty if no image has any."""

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, path: object) -> bool:
        return path in self._paths

    def add(  # noqa: PLR0913, PLR0917 - the parts of an entry
        self, path: str, code: int, size: int, stamp: int, place: int, values: str = ""
    ) -> None:
        """Add an image; one whose path is already listed, or that is too large, is a problem.

        Args:
            path: Its name in the split.
            code: The code of its label in `labels`, or `NO_LABEL`.
            size: As `Entry.bytes`.
            stamp: As `Entry.stamp`.
            place: As `Entry.place`.
            values: As `Entry.values`; either all images have some, or none.
        """
        if path in self._paths:
            self.blame(f"{path} (again)", "another image has the same name")
        elif size > MAX_IMAGE_BYTES:
            self.blame(path, f"it is larger than the limit of {MAX_IMAGE_BYTES:,} bytes")
        else:
            self._paths[path] = None
            self._codes.append(code)
            self._bytes.append(size)
            self._stamps.append(stamp)
            self._places.append(place)
            if values:
                self._values.append(values)

    def blame(self, path: str, reason: str) -> None:
        """Report an image or file that cannot be listed."""
        self.problems.append(Problem(path=path, reason=reason))

    def blame_rest(self, name: str, reason: str) -> None:
        """Report a file that cannot be read to its end.

        The path differs from a folder of the file's images: those listed are good.
        """
        self.blame(f"{name} (rest)", reason)

    def ignore(self, path: str, reason: str) -> None:
        """Report something that is not used."""
        self.ignored.append(Problem(path=path, reason=reason))

    def entries(self, labels: Labels) -> PackedEntries:
        """Return the images as entries."""
        keys = make_keys(self._paths)
        columns = (self._codes, self._bytes, self._stamps, self._places)
        return PackedEntries(
            Entry(path, key, labels.of(code), size, stamp, place, values)
            for path, key, code, size, stamp, place, values in zip(
                self._paths, keys, *columns, self._values or [""] * len(keys), strict=True
            )
        )


def scan_of(  # noqa: PLR0913 - the parts of a scan
    source: Source,
    listings: Mapping[str, Listing],
    labels: Labels,
    understood: Mapping[str, str],
    *,
    exact_sizes: bool = True,
    more: Schema | None = None,
) -> Scan:
    """Return the scan of a source from the listing of each split.

    Args:
        source: The source.
        listings: Its images, by split.
        labels: Their classes and labels.
        understood: As `Scan.understood`.
        exact_sizes: As `Scan.exact_sizes`.
        more: Fields other than image and label.

    Raises:
        UsageError: If there are no images and no problems.
    """
    if not any(len(listing) or listing.problems for listing in listings.values()):
        raise UsageError(f"there are no images in {source}")
    return Scan(
        source=source,
        splits={
            name: Images(source, name, listing.entries(labels))
            for name, listing in listings.items()
        },
        classes=labels.classes,
        ignored={name: listing.ignored for name, listing in listings.items()},
        problems={name: listing.problems for name, listing in listings.items()},
        understood=understood,
        fields={**default_schema(labels.classes), **more} if more else None,
        exact_sizes=exact_sizes,
    )


class ListedSource:
    """What sources made of a few files share: all of `shardkit.contracts.Source` but the content.

    Args:
        pattern: The path that the user gave.
        options: Options that decide what is read, as JSON values; stored in the manifest.
    """

    kind: str

    def __init__(self, pattern: str | Path, options: Mapping[str, Any]) -> None:
        self.pattern = Path(pattern)
        self._options = {name: value for name, value in options.items() if value is not None}

    def __str__(self) -> str:
        return str(self.pattern)

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the last part of the path, and the options."""
        return {"name": as_text(self.pattern.resolve().name), **self._options}

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return the images of a split: bad ones stay in the files, so they are still listed."""
        return scan.splits[split].entries if split in scan.splits else ()


class FileSource(ListedSource):
    """A source made of all files that match a pattern."""

    _files: InputFiles
    """The files. The first part of an `Entry.place` is a position in them."""

    def paths(self) -> Sequence[Path]:
        """Return the files."""
        return [Path(path) for path in self._files.paths]

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file of an image, and the offset of its record."""
        number, offset = place_of(entry.place)
        return f"{self._files.paths[number]} at byte {offset}"

    def _listing(self) -> Listing:
        """Return a new listing, which names the files that do not match."""
        listing = Listing(LabelValues())
        listing.ignored += self._files.others
        return listing


SPLIT_OPTION = SourceOption(
    flags="--split",
    metavar="train|test",
    help="Convert only one split.  [default: both, one dataset each]",
)
"""The option of sources that have these two splits; see `split_names`."""


def split_names(chosen: str | None, known: Sequence[str]) -> dict[str, str]:
    """Return the name of each split in the dataset, and in the source: "" if one was chosen.

    Raises:
        UsageError: If the chosen one is unknown.
    """
    if chosen is None:
        return {name: name for name in known}
    if chosen not in known:
        raise UsageError(f"--split {chosen} is unknown; choose from {', '.join(known)}")
    return {"": chosen}
