"""Consistent datasets with wrong content, as from a buggy converter or a forger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers import FORMATS, jpeg, make_dataset, make_tree

from shardkit import verify
from shardkit.contracts import ShardSpec
from shardkit.dataset.index import join_segments, save_index
from shardkit.dataset.index_builder import index_shard
from shardkit.dataset.manifest import FileEntry, Manifest, ShardEntry, load_manifest, save_manifest
from shardkit.dataset.opened import OpenedDataset
from shardkit.record import Record, dump_json
from shardkit.registry import get_format
from shardkit.system.files import sha256_of
from shardkit.verification.source_comparison import SourceReport

Change = Callable[[list[Record]], list[Record]]


def make_jpegs(root: Path) -> Path:
    """Make a source of ten JPEG files in two classes."""
    return make_tree(
        root, {f"{c}/{n}.jpg": jpeg(20, 18, n) for c in ("cat", "dog") for n in range(5)}
    )


def make_truths(source: Path, root: Path) -> Path:
    """Make the dataset of ``source`` in each format, below ``root``; return that."""
    for to in FORMATS:
        make_dataset(source, root / to, to=to)
    return root


def forge(place: Path, change: Change = list, **entries: Any) -> None:
    """Write the dataset in ``place`` anew with other records; digests and counts follow.

    Args:
        place: The dataset.
        change: From all records, in the order of rows, to those to be stored.
        entries: Entries of the manifest to be replaced at the end.
    """
    manifest = load_manifest(place)
    storage = get_format(manifest.format)
    records, metas = [], []
    for shard in manifest.shards:
        reader = storage.read(place / shard.name)
        records += reader.read(range(len(reader)))
        metas.append(dict(reader.meta))
        reader.close()
    waiting = change(records)
    shards, parts = [], []
    for number, shard in enumerate(manifest.shards):
        last = number == len(manifest.shards) - 1
        part, waiting = (waiting, []) if last else (waiting[: shard.rows], waiting[shard.rows :])
        path = place / shard.name
        path.unlink()
        writer = storage.write(path, ShardSpec(meta=metas[number], raw_shape=manifest.raw_shape))
        for record in part:
            writer.write(record)
        writer.close()
        parts.append(index_shard(storage, path))
        shards.append(
            ShardEntry(
                name=shard.name, bytes=path.stat().st_size, sha256=sha256_of(path), rows=len(part)
            )
        )
    schema = manifest.fields_by_name
    names = save_index(parts, place, schema)
    counts = join_segments(parts, schema).counts(schema)
    labels = Counter(int(label) for part in parts for label in part.rows["label"])
    classes = entries.get("classes", manifest.classes)
    forged = replace(
        manifest,
        rows=sum(shard.rows for shard in shards),
        shards=tuple(shards),
        schema=tuple(replace(field, rows=counts[field.name]) for field in manifest.schema),
        files=tuple(
            FileEntry(name=n, bytes=(place / n).stat().st_size, sha256=sha256_of(place / n))
            for n in dict.fromkeys((*names, *(file.name for file in manifest.files)))
        ),
        class_counts=classes and tuple(labels[label] for label in range(len(classes))),
    )
    forged = replace(forged, **entries)
    opened = OpenedDataset(place)
    opened.manifest = forged
    save_manifest(replace(forged, content_digest=opened.index.content_digest()), place)


def restate(place: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Overwrite the manifest in ``place`` with another one and its correct digest."""
    save_manifest(change(load_manifest(place)), place)


def with_image(record: Record, image: bytes) -> Record:
    """Return the record with another image of the same kind."""
    return Record(record.key, {**record.fields, record.image_field or "": image})


def with_meta(record: Record, **meta: Any) -> Record:
    """Return the record with other metadata."""
    return Record(record.key, {**record.fields, "json": dump_json({**record.meta, **meta})})


def proved(place: Path, source: Path, **options: Any) -> SourceReport:
    """Return the report of a successful verification against the source."""
    result = verify(place, against=source, **options)
    assert result.findings == []
    assert result.source is not None
    assert result.source.files == result.source.same + result.source.alike == result.records
    return result.source


def blamed(place: Path, source: Path) -> dict[str, str]:
    """Return the last reason for each damaged file, or source path of a damaged record."""
    result = verify(place, against=source)
    assert not result.ok
    assert result.source is None
    return {finding.path or finding.file: finding.reason for finding in result.findings}


def with_other_pillow(place: Path) -> None:
    """Make the manifest state another version of Pillow."""
    restate(place, lambda m: replace(m, software={**m.software, "pillow": "1.0"}))


# Wrong values in JSON: manifests, plans, results.

WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**18,
    2.5,
    "",
    "../x",
    "a\ud800",
    [],
    [[[]]],
    {},
    {"a": 1},
    float("nan"),
    "x" * 100_000,
    2**63,
    [None],
    [10**6] * 3,
)
"""Values that may stand where none of their type or size belongs."""


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Give the place of each value, and of each list and object, in a JSON value."""
    if at:
        yield at
    names = (
        list(value)
        if isinstance(value, dict)
        else range(len(value) if isinstance(value, list) else 0)
    )
    for name, part in ((name, value[name]) for name in names):
        yield from leaves(part, (*at, name))


def changed(value: Any, at: tuple[Any, ...], new: object) -> Any:
    """Return a copy of a JSON value with another one at a place."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for name in at[:-1]:
        inner = inner[name]
    inner[at[-1]] = new
    return copy
