"""Which images of a source a dataset lacks, and whether they go with it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from shardkit.changes.appended_source import first_sources
from shardkit.changes.combine import splits_in_words
from shardkit.contracts import Images, Scan
from shardkit.dataset.index import Index
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import UsageError, setting
from shardkit.kinds.field import Field, Schema
from shardkit.record import LABEL
from shardkit.sources.divided import is_divided
from shardkit.sources.samples import FIRST, Samples
from shardkit.system.text import amount, name_list, quoted
from shardkit.system.text_hashes import TextHashes

_NAMED = 3
"""Maximum images that a message names; it counts all."""


@dataclass(frozen=True)
class NewImages:
    """The images of a source that a dataset lacks."""

    scan: Scan
    left_out: list[str]

    @property
    def images(self) -> int:
        """Number of images."""
        return sum(map(len, self.scan.splits.values()))


def new_images(
    directory: Path, datasets: Mapping[str, OpenedDataset], scan: Scan, *, skip_existing: bool
) -> NewImages:
    """Divide the images of a scan into new and existing ones."""
    source = scan.source
    splits = dict[str, Images]()
    left_out = list[str]()
    changed = list[str]()
    problems = dict(scan.problems)
    ignored = dict(scan.ignored)
    by_key = scan.records or source.kind == Samples.kind  # paths may be numbers of samples
    existing = _existing(datasets, scan)
    for split, dataset in datasets.items():
        manifest = dataset.manifest
        images = scan.splits.get(split, Images(source, split, ()))
        prefix = dataset.prefix
        sizes, keys = existing[split]
        bad = {problem.path for problem in manifest.skipped}
        bad |= dataset.excluded or set()
        exact = scan.exact_sizes and manifest.made_with.keeps_bytes
        rows = array("q")
        for row, entry in enumerate(images.entries):
            path = "" if by_key else entry.path
            if path not in sizes and entry.key not in keys and path not in bad:
                rows.append(row)
                continue
            left_out.append(prefix + (path or entry.key))
            if path and exact and sizes.get(path, entry.bytes) != entry.bytes:
                changed.append(prefix + entry.path)
        splits[split] = images if len(rows) == len(images) else images.take(rows)
        if skip_existing:
            problems[split] = [
                bad_file for bad_file in problems.get(split, ()) if bad_file.path not in bad
            ]
            ignored[split] = []  # most are those that the dataset lists already
    new = NewImages(replace(scan, splits=splits, problems=problems, ignored=ignored), left_out)
    if changed:
        raise UsageError(
            f"{source} and {directory} have different content for {amount(len(changed), 'image')} "
            f"with the same name ({_some(changed)})",
            remedy="rename them, or convert everything again",
        )
    remedy = f"{setting('skip_existing', True)} leaves these out"
    if source.kind == Samples.kind:
        remedy += "; to append other samples, use unique keys (key=)"
    if left_out and not skip_existing and (new.images or not _is_last(datasets, left_out, scan)):
        raise UsageError(
            f"{directory} already has {len(left_out)} of the images of {source} by path or key "
            f"({_some(left_out)})",
            remedy=remedy,
        )
    return new


def _existing(
    datasets: Mapping[str, OpenedDataset], scan: Scan
) -> dict[str, tuple[Mapping[str, int], Set[str]]]:
    """Return the sizes, by path, and the keys of all images of each split that a scan may name.

    If the dataset was divided, an image on any side is one of each: it must not be on two.
    """
    existing = dict[str, tuple[Mapping[str, int], Set[str]]]()
    is_one = is_divided(first_sources(datasets))
    for group in [list(datasets)] if is_one else [[split] for split in datasets]:
        indexes = [Index(datasets[name].path, datasets[name].manifest.rows) for name in group]
        paths = TextHashes()
        keys = TextHashes()
        for split in group:
            for entry in scan.splits[split].entries if split in scan.splits else ():
                paths.add(entry.path)
                keys.add(entry.key)
        for segment in chain.from_iterable(index.segments() for index in indexes):
            paths.add_all(segment.paths)
            keys.add_all(segment.keys)
        same_paths = paths.repeated()
        same_keys = keys.repeated()
        sizes = dict[str, int]()
        stored_keys = set[str]()
        searched = indexes if same_paths or same_keys else ()
        for segment in chain.from_iterable(index.segments() for index in searched):
            lengths = zip(segment.paths, segment.rows["length"].tolist(), strict=True)
            sizes.update((path, size) for path, size in lengths if hash(path) in same_paths)
            stored_keys.update(key for key in segment.keys if hash(key) in same_keys)
        existing |= dict.fromkeys(group, (sizes, stored_keys))
    return existing


def _is_last(datasets: Mapping[str, OpenedDataset], left_out: list[str], scan: Scan) -> bool:
    """Return whether an earlier run has appended exactly these images."""
    count = 0
    for split, dataset in datasets.items():
        original = scan.originals.get(split)
        described = {**scan.source.describe(split), "kind": scan.source.kind}
        described.pop(FIRST, None)  # an earlier run has added to that number
        sources = [part.source for part in original.parts] if original else [described]
        last = [part.manifest for part in dataset.parts[-len(sources) :]]
        if len(last) < len(sources) or not all(
            source.items() <= part.source.items()
            for part, source in zip(last, sources, strict=True)
        ):
            return False
        count += sum(part.rows + (0 if original else len(part.skipped)) for part in last)
    return count == len(left_out)


def require_alike(
    directory: Path, datasets: Mapping[str, OpenedDataset], scan: Scan, *, missing: str
) -> None:
    """Refuse images whose splits or fields are not those of the dataset."""
    unknown = sorted(scan.splits.keys() - datasets.keys())
    if unknown and is_divided(first_sources(datasets)):
        raise UsageError(
            f"{directory} was divided with {setting('stratify')}, and dividing again would move "
            "its images",
            remedy=f"put the new images into folders {' and '.join(datasets)}",
        )
    if unknown:
        raise UsageError(
            f"{scan.source} has {splits_in_words(scan.splits)}, but {directory} has "
            f"{splits_in_words(datasets)};",
            remedy="append a source whose folders or splits have these names",
        )
    manifest = next(iter(datasets.values())).manifest
    schema = manifest.fields_by_name
    is_empty = not any(map(len, scan.splits.values()))
    incoming = {
        name: field
        for name, field in scan.schema.items()
        if name in schema or name not in manifest.removed
    }
    lacking = [name for name in schema if name not in incoming and not (is_empty and name == LABEL)]
    if all(
        _fits(name, field, schema) or (is_empty and name == LABEL)
        for name, field in incoming.items()
    ):
        if not lacking or missing == "skip":
            return
        remedy = f"{setting('missing', 'skip')} appends images without {', '.join(lacking)}"
    else:
        remedy = "the fields of all records must be the same"
    before, now = (
        name_list(f"{name} ({field})" for name, field in fields.items())
        for fields in (schema, scan.schema)
    )
    raise UsageError(
        f"{scan.source} has the fields {now}, but {directory} has {before}", remedy=remedy
    )


def _fits(name: str, field: Field, schema: Schema) -> bool:
    """Return whether a field is one of a schema; the classes of labels may grow."""
    return name in schema and (name == LABEL or schema[name] == field)


def _some(names: list[str]) -> str:
    more = " ..." if len(names) > _NAMED else ""
    return ", ".join(quoted(name) for name in names[:_NAMED]) + more
