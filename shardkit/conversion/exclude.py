"""Leave out the images that lists name: one rule for every kind of source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardkit.contracts import (
    Entry,
    Images,
    PartedSource,
    PartListing,
    Scan,
    Source,
    SourcePart,
    StoredEntries,
)
from shardkit.dataset.reports import EXCLUDED
from shardkit.dataset.selection import Listed, read_list
from shardkit.errors import Problem, UsageError, setting
from shardkit.sources.divided import Divided
from shardkit.sources.wrapper import Wrapper
from shardkit.system.text import name_list


class Excluded(Wrapper):
    """A source without the images that lists name; see `exclude_listed`."""

    def __init__(self, source: Source, lists: Sequence[str | Path]) -> None:
        super().__init__(source)
        self._lists = lists

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the other images of the source."""
        return exclude_listed(self.source.scan(classes), self._lists)


class ExcludedParts(Excluded, PartedSource):
    """The same for a source of parts: only the whole shows which images a list means."""

    source: PartedSource
    in_order = True  # in which the report has the images that are left out

    def parts(
        self, most: int, classes: Sequence[str] | None = None
    ) -> tuple[Scan, Sequence[SourcePart]]:
        """Return the parts of the source."""
        return self.source.parts(most, classes)

    def list_part(self, part: SourcePart) -> PartListing:
        """List the images of a part of the source."""
        return self.source.list_part(part)

    def require_images(self, scan: Scan) -> None:
        """Refuse an empty source."""
        self.source.require_images(scan)

    def complete(self, scan: Scan) -> Scan:
        """Return the scan of all parts without the images that are listed."""
        return exclude_listed(self.source.complete(scan), self._lists)


def excluded(source: Source, *, exclude: str | Path | Sequence[str | Path], seed: int) -> Source:
    """Return a source without the images that files list."""
    lists = [exclude] if isinstance(exclude, (str, Path)) else exclude
    return (ExcludedParts if isinstance(source, PartedSource) else Excluded)(source, lists)


def exclude_listed(scan: Scan, lists: Sequence[str | Path]) -> Scan:
    """Return a scan without the images that text files list; it counts them as ignored.

    A line is a key or, if no image has this key, a path. For a dataset, it may also be a row: see
    `shardkit.dataset.selection.read_list`. If the source has splits, the name of one and ``=``
    precede each file, as in ``train=leak.txt``. If it was divided into them, a file alone holds for
    all.

    UsageError if a file cannot be read, names an image that the source lacks, or names all images
    of a split.
    """
    chosen: dict[str, set[str]] = {}
    for text in lists:
        names, path = _splits_of(scan, str(text))
        for split, key in _listed_keys(scan, names, read_list(path, "exclude")):
            chosen.setdefault(split, set()).add(key)
    splits = dict(scan.splits)
    ignored = dict(scan.ignored)
    for split, keys in chosen.items():
        images = splits[split]
        if len(keys) == len(images):
            raise UsageError(f"{setting('exclude')} leaves no images in {_location(scan, [split])}")
        paths = [entry.path for entry in images.entries if entry.key in keys]
        left_out = [Problem(path=path, reason=EXCLUDED) for path in paths]
        ignored[split] = [*ignored.get(split, ()), *left_out]
        splits[split] = _without(images, keys)
    return replace(scan, splits=splits, ignored=ignored)


def _without(images: Images, keys: set[str]) -> Images:
    """Return the images without those of some keys."""
    if isinstance(images.entries, StoredEntries):
        parts = images.entries.divide(lambda entries: [entry.key in keys for entry in entries])
        return images.of(parts[False])
    return images.take(row for row, entry in enumerate(images.entries) if entry.key not in keys)


def _splits_of(scan: Scan, text: str) -> tuple[Sequence[str], str]:
    """Return the splits and the file that an option names."""
    split, mark, path = text.partition("=")
    if mark and split and split in scan.splits:
        return [split], path
    if "" in scan.splits or isinstance(scan.source, Divided):
        return list(scan.splits), text
    named = f"{next(iter(scan.splits))}=FILE"
    raise UsageError(
        f"{setting('exclude', text)}: {scan.source} has the splits {name_list(scan.splits)};",
        remedy=f"specify the split of the list: {setting('exclude', named)}",
    )


def _listed_keys(scan: Scan, splits: Sequence[str], listed: Listed) -> Iterator[tuple[str, str]]:
    """Yield split and key of each listed image."""
    listed_names = set(listed.names)
    if listed.are_rows and scan.records:
        listed.require_digest(scan.source.describe(splits[0]).get("content_digest"))
        names: tuple[Callable[[Entry], str], ...] = (lambda entry: str(entry.place),)
    elif listed.are_rows and listed.digest is not None:
        raise UsageError(
            f"{listed.where} lists rows of a dataset; only `shardkit convert dataset` accepts it"
        )
    else:
        names = (lambda entry: entry.path, lambda entry: entry.key)  # a key overrides a path
    matches: list[dict[str, tuple[str, str]]] = [{} for _ in names]
    for split in splits:
        for entry in scan.splits[split].entries:
            for name_of, of_name in zip(names, matches, strict=True):
                if (name := name_of(entry)) in listed_names:
                    of_name[name] = split, entry.key
    by_name = {name: key for of_name in matches for name, key in of_name.items()}
    listed.require_known(by_name, _location(scan, splits))
    return (by_name[name] for name in listed_names)


def _location(scan: Scan, splits: Sequence[str]) -> str:
    return f"{scan.source}, {splits[0]}" if len(splits) == 1 and splits[0] else str(scan.source)
