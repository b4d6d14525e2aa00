"""Combine datasets to one, by linking their shards: what `append` and `merge` share."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.conversion.assemble import file_entry, save_report, total
from shardkit.dataset.index import INDEX_DIRECTORY, Index, IndexPart, join_parts, save_index
from shardkit.dataset.manifest import (
    FACTS_NAME,
    AttachedManifest,
    FieldEntry,
    Manifest,
    ShardEntry,
    load_any_manifest,
    manifests_of,
)
from shardkit.dataset.parts import entries_of, source_of
from shardkit.dataset.reports import IGNORED, SKIPPED
from shardkit.errors import CorruptDataset, CorruptShard, UsageError
from shardkit.record import LABEL, Field, Schema, describe_schema
from shardkit.registry import get_format
from shardkit.system.files import has_sha256, open_regular, read_small, sync
from shardkit.system.safe_paths import LinkRefused, is_file
from shardkit.system.text import quoted

_CANNOT_LINK = (
    *(errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK),
    *(errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
)
"""Errors that mean that a file must be copied."""


class Piece(NamedTuple):
    """A dataset to combine with others."""

    place: Path
    manifest: Manifest
    first: int = 0
    """The number in the metadata of its first shard."""


def load_splits(directory: Path) -> dict[str, Manifest]:
    """Return the manifest of each split, or of the dataset as "".

    Raises:
        UsageError: If there is no dataset, or it has no shards of its own.
        CorruptDataset: If a manifest is damaged, or of another dataset.
    """
    top = load_any_manifest(directory)
    if isinstance(top, AttachedManifest):
        raise UsageError(
            f"{directory} reads archives of another program in place; first make a dataset with "
            "shards of its own: shardkit convert dataset"
        )
    return manifests_of(directory, top)


def common_schema(pieces: Sequence[Piece]) -> Schema:
    """Return the schema of the combined dataset, after checking that records can stay as they are.

    Raises:
        UsageError: If the datasets differ in anything but sources, and classes at the end.
    """
    first = pieces[0]
    for piece in pieces[1:]:
        names = f"{first.place} and {piece.place}"
        one, other = first.manifest, piece.manifest
        for what, stated, its in (
            ("formats", {"format": one.format}, {"format": other.format}),
            ("recipes", _recipe(one), _recipe(other)),
            ("fields", _fields(one), _fields(other)),
        ):
            if stated != its:
                wrong = [name for name in {**stated, **its} if stated.get(name) != its.get(name)]
                raise UsageError(
                    f"{names} have different {what} ("
                    + ", ".join(
                        f"{name}: {stated.get(name, 'none')} and {its.get(name, 'none')}"
                        for name in wrong
                    )
                    + "); convert one of them again with the options of the other"
                )
    classes = _common_classes(pieces)
    schema = dict(first.manifest.fields_by_name)
    if classes is not None:
        schema[LABEL] = Field("label", classes=classes)
    return schema


def _recipe(manifest: Manifest) -> dict[str, object]:
    return {**manifest.recipe, "size of raw pixels": manifest.raw_shape}


def _fields(manifest: Manifest) -> dict[str, object]:
    return {
        name: str(field) if field.classes is None else f"{field} {list(field.classes)}"
        for name, field in manifest.fields_by_name.items()
        if name != LABEL
    }


def other_fields(schema: Schema) -> dict[str, dict[str, Any]]:
    """Return all fields but the label, whose classes may grow, as JSON values by name."""
    return {each["name"]: each for each in describe_schema(schema) if each["name"] != LABEL}


def _common_classes(pieces: Sequence[Piece]) -> tuple[str, ...] | None:
    """Return the longest list of classes, with which all others must start."""
    longest = max(pieces, key=lambda piece: len(piece.manifest.classes or ()))
    classes = longest.manifest.classes
    for piece in pieces:
        own = piece.manifest.classes
        if (own is None) != (classes is None):
            raise UsageError(f"only one of {piece.place} and {longest.place} has labels")
        if own is None or classes is None or own == classes[: len(own)]:
            continue
        label = next(n for n, (a, b) in enumerate(zip(own, classes, strict=False)) if a != b)
        union = dict.fromkeys([*classes, *own])
        raise UsageError(
            f"label {label} is {quoted(own[label])} in {piece.place} and {quoted(classes[label])} "
            f"in {longest.place}. Records store labels, so they cannot be combined. Convert both "
            f"again with one list of all {len(union)} classes, such as with --class-order FILE"
        )
    return classes


def combine(folder: Path, pieces: Sequence[Piece]) -> Manifest:
    """Combine datasets in ``folder``, which is empty, and return the manifest to save there.

    Rows, and the shards, follow one another in the order of the datasets.

    Raises:
        UsageError: If records cannot stay as they are, or two have the same key.
        CorruptDataset: If a file differs in size from its manifest, or an index in content.
    """
    schema = common_schema(pieces)
    manifests = [piece.manifest for piece in pieces]
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[ShardEntry] = []
    suffix = get_format(manifests[0].format).suffix
    for piece in pieces:
        for entry in piece.manifest.shards:
            name = f"shard-{len(shards):06d}{suffix}"
            _link(piece.place, entry.name, folder / name, entry.bytes)
            shards.append(replace(entry, name=name))
    if is_file(pieces[0].place, FACTS_NAME):  # of the first rows, which stay as they are
        _link(pieces[0].place, FACTS_NAME, folder / FACTS_NAME)
    index = join_parts([_index(piece) for piece in pieces], schema)
    _require_distinct(pieces, index.keys)
    counts = index.counts(schema)
    names = save_index([index], folder, schema)
    skipped = tuple(problem for manifest in manifests for problem in manifest.skipped)
    names += save_report(SKIPPED, skipped, folder)
    if ignored := b"".join(map(_ignored, pieces)):
        (folder / IGNORED).write_bytes(ignored)
        names.append(IGNORED)
    lacking = {name for name, count in counts.items() if count < len(index.rows)}
    classes = schema[LABEL].classes if LABEL in schema else None
    entries = [entry for piece in pieces for entry in entries_of(piece.manifest, first=piece.first)]
    return Manifest(
        format=manifests[0].format,
        rows=len(index.rows),
        content_digest=Index(folder, len(index.rows)).content_digest(schema, lacking),
        shards=tuple(shards),
        files=tuple(file_entry(name, folder) for name in names),
        fields=_sorted_sum(manifest.fields for manifest in manifests),
        schema=tuple(FieldEntry.of(name, field, counts[name]) for name, field in schema.items()),
        classes=classes,
        class_counts=None if classes is None else _class_counts(manifests),
        raw_shape=manifests[0].raw_shape,
        recipe=manifests[0].recipe,
        source=source_of(entries),
        notes=_sorted_sum(manifest.notes for manifest in manifests),
        skipped=skipped,
        ignored=_sorted_sum(manifest.ignored for manifest in manifests),
        software=manifests[-1].software,
    )


def _link(place: Path, name: str, goal: Path, size: int | None = None) -> None:
    """Link a file, or copy it if the file system cannot link; `open_regular` refuses links."""
    path = place / name
    try:
        with open_regular(path) as file:
            if size is not None and os.fstat(file.fileno()).st_size != size:
                raise CorruptShard(f"{path} is damaged: run `shardkit verify {place}`")
            with contextlib.suppress(FileNotFoundError):
                goal.unlink()
            try:
                os.link(path, goal, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _CANNOT_LINK:
                    raise
                with goal.open("xb") as copy:
                    shutil.copyfileobj(file, copy, 1 << 20)
                sync(goal)
    except (FileNotFoundError, LinkRefused) as error:
        raise CorruptShard(
            f"{path}: {error.strerror}. For details, run `shardkit verify {place}`"
        ) from error


def _index(piece: Piece) -> IndexPart:
    """Return the index of a dataset, after comparing its files with the manifest."""
    for entry in piece.manifest.files:
        inside = entry.name.startswith(f"{INDEX_DIRECTORY}/")
        if inside and not has_sha256(piece.place / entry.name, entry.sha256, piece.place):
            raise CorruptDataset(
                f"{piece.place / entry.name} is damaged: run `shardkit index {piece.place}`"
            )
    schema = piece.manifest.fields_by_name
    return Index(piece.place, piece.manifest.rows).part(schema, lacking=piece.manifest.lacking)


def _ignored(piece: Piece) -> bytes:
    """Return the report of ignored files, if there is one."""
    for entry in piece.manifest.files:
        if entry.name == IGNORED:
            content = read_small(piece.place / IGNORED)
            if hashlib.sha256(content).hexdigest() != entry.sha256:
                raise CorruptDataset(
                    f"{piece.place / IGNORED} is damaged: run `shardkit verify {piece.place}`"
                )
            return content
    return b""


def _require_distinct(pieces: Sequence[Piece], keys: Sequence[str]) -> None:
    if len(set(keys)) == len(keys):
        return
    twice = [key for key, count in Counter(keys).items() if count > 1]
    raise UsageError(
        f"{len(twice)} keys are in more than one of {', '.join(str(p.place) for p in pieces)}: "
        f"{', '.join(map(quoted, twice[:3]))}{' ...' if len(twice) > 3 else ''}. Keys come from "
        "file names and must differ: leave these records out of one dataset with `shardkit convert "
        "dataset --exclude`, or rename the files and convert again"
    )


def _class_counts(manifests: Sequence[Manifest]) -> tuple[int, ...]:
    counts = (manifest.class_counts or () for manifest in manifests)
    return tuple(map(sum, itertools.zip_longest(*counts, fillvalue=0)))


def _sorted_sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    return dict(sorted(total(counts).items()))
