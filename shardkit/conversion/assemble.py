"""Make the files of a dataset from its shards: index, reports and manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.conversion.build import repeated_key, repeated_keys
from shardkit.dataset.index import Index, IndexSegment, save_index
from shardkit.dataset.manifest import (
    AttachedManifest,
    FieldEntry,
    FileEntry,
    Manifest,
    ShardEntry,
    SplitsManifest,
    save_manifest,
)
from shardkit.dataset.reports import IGNORED, SKIPPED, report_lines
from shardkit.errors import Problem, UsageError, damaged_index
from shardkit.kinds.field import Schema
from shardkit.record import ABSENT, IMAGE, LABEL, LABEL_FIELD, META_FIELD, STORED_KINDS, image_name
from shardkit.system.files import as_name, sha256_of, sync
from shardkit.system.text import quoted


@dataclass(frozen=True, kw_only=True)
class ShardGroup:
    """Neighboring shards of a dataset to assemble."""

    shards: Sequence[ShardEntry]
    index: Iterable[IndexSegment]
    """The segments of their index, in order. One is in memory at a time."""
    notes: Mapping[str, int]
    skipped: Sequence[Problem]
    ignored: Iterable[Problem]


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """A dataset whose shards exist. All others of its files are made from this."""

    folder: Path
    """The folder of the dataset, which has none of these files yet."""
    format: str
    schema: Schema
    raw_shape: tuple[int, int, int] | None
    recipe: dict[str, Any]
    source: dict[str, Any]
    software: dict[str, str]
    archives: str | None = None
    """The folder of the shards if they are archives of another program."""
    others: Sequence[str] = ()
    """Files of the index that are in the folder already."""

    def finish(
        self,
        groups: Sequence[ShardGroup],
        repeated: Callable[[list[str]], UsageError] | None = None,
    ) -> Manifest:
        """Write index and reports of all shards, in order; return the manifest to save with them.

        ``repeated`` returns the UsageError for keys of several records; None is a general one.
        """
        counts = Counter[str]()
        stored = Counter[str]()
        labels = Counter[int]()

        def counted() -> Iterator[IndexSegment]:
            for segment in chain.from_iterable(group.index for group in groups):
                present = segment.counts(self.schema)
                counts.update(present)
                stored.update(_stored_names(segment, self.schema, present))
                values, times = np.unique(segment.rows["label"], return_counts=True)
                labels.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
                yield segment

        names = [*save_index(counted(), self.folder, self.schema), *self.others]
        bad = [problem for group in groups for problem in group.skipped]
        skipped = _save_report(SKIPPED, bad, self.folder)
        ignored = _save_report(
            IGNORED, chain.from_iterable(group.ignored for group in groups), self.folder
        )
        notes = sum((Counter(group.notes) for group in groups), Counter[str]())
        names += [SKIPPED] * bool(skipped) + [IGNORED] * bool(ignored)
        shards = [shard for group in groups for shard in group.shards]
        rows = sum(shard.rows for shard in shards)
        lacking = {name for name in self.schema if counts[name] < rows}
        index = Index(self.folder, rows, self.schema, lacking)
        if keys := repeated_keys(index.keys()):
            raise (repeated or repeated_key)(keys)
        classes = self.schema[LABEL].classes if LABEL in self.schema else None
        manifest = Manifest(
            format=self.format,
            rows=rows,
            content_digest=index.content_digest(),
            shards=tuple(shards),
            files=tuple(_file_entry(name, self.folder) for name in names),
            fields={name: count for name, count in sorted(stored.items()) if count},
            schema=tuple(
                FieldEntry.of(name, field, counts[name]) for name, field in self.schema.items()
            ),
            classes=classes,
            class_counts=None
            if classes is None
            else tuple(labels[label] for label in range(len(classes))),
            raw_shape=self.raw_shape,
            recipe=self.recipe,
            source=self.source,
            notes=dict(sorted(notes.items())),
            skipped=tuple(bad),
            ignored=dict(sorted(ignored.items())),
            software=self.software,
        )
        if self.archives is None:
            return manifest
        return AttachedManifest(**vars(manifest), folder=self.archives)


def _stored_names(
    segment: IndexSegment, schema: Schema, present: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of records with each stored name, given those with each field."""
    counts = {META_FIELD: len(segment.keys)}
    for name, field in schema.items():
        stored = field.stored_name(name)
        if stored is not None:
            counts[LABEL_FIELD if name == LABEL else stored] = present[name]
        elif field.type.is_picture:
            entries = segment.rows if name == IMAGE else segment.apart[name]
            codes = np.bincount(entries["field"], minlength=len(STORED_KINDS)).tolist()
            if len(codes) > len(STORED_KINDS):
                raise damaged_index(f"it declares an unknown kind for {quoted(name)}")
            for kind, count in zip(STORED_KINDS, codes, strict=True):
                if kind != ABSENT:
                    counts[image_name(name, kind)] = count
    return counts


def _save_report(name: str, problems: Iterable[Problem], folder: Path) -> Counter[str]:
    """Write a report, unless there is nothing to report; return the number by reason."""
    reasons = Counter[str]()

    def counted() -> Iterator[Problem]:
        for problem in problems:
            reasons[problem.reason] += 1
            yield problem

    with (folder / name).open("wb") as file:
        file.writelines(report_lines(counted()))
    if not reasons:
        (folder / name).unlink()
    return reasons


def _file_entry(name: str, folder: Path) -> FileEntry:
    """Return the entry of a finished file, after syncing it."""
    path = folder / name
    sync(path)
    return FileEntry(name=name, bytes=path.stat().st_size, sha256=sha256_of(path, folder))


def save_manifests(manifests: Mapping[str, Manifest], folder: Path) -> None:
    """Write the manifest of a dataset, or those of splits and then that of all."""
    for name, manifest in manifests.items():
        save_manifest(manifest, folder / as_name(name))
    if "" not in manifests:
        digests = {name: manifest.digest for name, manifest in manifests.items()}
        save_manifest(SplitsManifest(splits=digests), folder)
