"""Combine datasets to one, by linking their shards: what `append` and `merge` share."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.conversion.assemble import Assembly, ShardGroup
from shardkit.conversion.engine import Parts
from shardkit.dataset.index import IndexSegment
from shardkit.dataset.index_reader import IndexReader
from shardkit.dataset.manifest import FACTS_NAME, Manifest
from shardkit.dataset.opened import OpenedDataset, OpenedDirectory
from shardkit.dataset.parts import entries_of, source_of
from shardkit.errors import CorruptShard, UsageError, setting
from shardkit.kinds.field import Field, Schema
from shardkit.record import LABEL
from shardkit.system.files import open_regular, sync
from shardkit.system.safe_paths import LinkRefused, is_file
from shardkit.system.text import as_command, name_list, quoted

_CANNOT_LINK = (
    *(errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK),
    *(errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS),
)
"""Errors that mean that a file must be copied."""


class Shape(NamedTuple):
    """The properties that datasets must share to be combined."""

    path: Path
    """The dataset, for messages."""
    format: str
    recipe: dict[str, Any]
    raw_shape: tuple[int, int, int] | None
    schema: Schema

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The classes; None without labels."""
        return self.schema[LABEL].classes if LABEL in self.schema else None


def shape_of(dataset: OpenedDataset) -> Shape:
    """Return what other datasets must have in common with one."""
    manifest = dataset.manifest
    return Shape(
        dataset.path,
        manifest.format,
        manifest.recipe,
        manifest.raw_shape,
        manifest.fields_by_name,
    )


def open_splits(directory: Path) -> dict[str, OpenedDataset]:
    """Return the dataset of each split, or the only one as "".

    UsageError if there is no dataset, or it has no shards of its own.
    """
    opened = OpenedDirectory(directory).with_own_shards(
        f"{directory} reads files in place; first create a dataset with its own shards: shardkit "
        "convert dataset"
    )
    return opened.splits


def manifests_of(datasets: Mapping[str, OpenedDataset]) -> dict[str, Manifest]:
    """Return the manifest of each split."""
    return {split: dataset.manifest for split, dataset in datasets.items()}


def splits_in_words(names: Collection[str]) -> str:
    """Return which splits a dataset or a source has, for messages."""
    return "no splits" if "" in names else f"the splits {name_list(names)}"


def common_schema(shapes: Sequence[Shape]) -> Schema:
    """Return the schema of the combined dataset, after checking that records can stay as they are.

    UsageError if the datasets differ in anything but sources, and classes at the end.
    """
    first = shapes[0]
    for shape in shapes[1:]:
        again = "convert one of them again with the options of the other"
        alike = "make them equal with `shardkit fields`, or convert one of them again"
        for aspect, first_values, values, remedy in (
            ("formats", {"format": first.format}, {"format": shape.format}, again),
            ("recipes", _recipe(first), _recipe(shape), again),
            ("fields", _fields(first), _fields(shape), alike),
        ):
            differing = [
                name
                for name in {**first_values, **values}
                if first_values.get(name) != values.get(name)
            ]
            if differing:
                raise UsageError(
                    f"{first.path} and {shape.path} have different {aspect} ("
                    + ", ".join(
                        f"{name}: {first_values.get(name, 'none')} and {values.get(name, 'none')}"
                        for name in differing
                    )
                    + ");",
                    remedy=remedy,
                )
    classes = _common_classes(shapes)
    schema = dict(first.schema)
    if classes is not None:
        schema[LABEL] = Field("label", classes=classes)
    return schema


def _recipe(shape: Shape) -> dict[str, object]:
    return {**shape.recipe, "size of raw pixels": shape.raw_shape}


def _fields(shape: Shape) -> dict[str, object]:
    return {
        name: str(field) if field.classes is None else f"{field} {list(field.classes)}"
        for name, field in shape.schema.items()
        if name != LABEL
    }


def _common_classes(shapes: Sequence[Shape]) -> tuple[str, ...] | None:
    """Return the longest list of classes, with which all others must start."""
    longest = max(shapes, key=lambda shape: len(shape.classes or ()))
    classes = longest.classes
    for shape in shapes:
        names = shape.classes
        if (names is None) != (classes is None):
            raise UsageError(f"only one of {shape.path} and {longest.path} has labels")
        if names is None or classes is None or names == classes[: len(names)]:
            continue
        label = next(n for n, (a, b) in enumerate(zip(names, classes, strict=False)) if a != b)
        union = dict.fromkeys([*classes, *names])
        raise UsageError(
            f"label {label} is {quoted(names[label])} in {shape.path} but {quoted(classes[label])} "
            f"in {longest.path}. Records store labels, so the datasets cannot be combined",
            remedy=f"Convert both again with {setting('class_order')} and one list of all "
            f"{len(union)} classes",
        )
    return classes


def link_stores(
    stores: Sequence[OpenedDataset], folder: Path, schema: Schema, new: Parts | None = None
) -> Manifest:
    """Link the shards of stores one after another, before new ones; write the other files of all.

    The stores have one shape but for classes; ``folder`` has the new shards. Return the manifest to
    save with them. CorruptDataset if a file differs in size from its manifest, or an index in
    content; UsageError if records have the same key.
    """
    first = stores[0].manifest
    starts = accumulate((len(store.manifest.shards) for store in stores), initial=0)
    groups = [_link_shards(*pair, folder) for pair in zip(stores, starts, strict=False)]
    entries = [entry for store in stores for entry in entries_of(store.manifest)]
    paths = [store.path for store in stores]
    if new is not None:
        groups += new.groups
        entries += new.entries
        paths.append(folder)
    assembly = Assembly(
        folder=folder,
        format=first.format,
        schema=schema,
        raw_shape=first.raw_shape,
        recipe=first.recipe,
        source=source_of(entries),
        software=entries[-1].software,
    )
    return assembly.finish(groups, partial(_in_several, paths))


def _link_shards(dataset: OpenedDataset, first: int, folder: Path) -> ShardGroup:
    """Link the shards of a dataset, as those from a number on, and return what they contribute."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = dataset.manifest
    shards = [shard.renumbered(number) for number, shard in enumerate(manifest.shards, first)]
    for shard, linked in zip(manifest.shards, shards, strict=True):
        link_file(dataset.path, shard.name, folder / linked.name, shard.bytes)
    if not first and is_file(dataset.path, FACTS_NAME):  # of the first rows, which stay
        link_file(dataset.path, FACTS_NAME, folder / FACTS_NAME)
    return ShardGroup(
        shards=shards,
        index=_index(dataset),
        notes=manifest.notes,
        skipped=manifest.skipped,
        ignored=dataset.intact_ignored(),
    )


def link_file(folder: Path, name: str, goal: Path, size: int | None = None) -> None:
    """Link a file, or copy it if the file system cannot link; `open_regular` refuses links."""
    path = folder / name
    try:
        with open_regular(path) as file:
            if size is not None and os.fstat(file.fileno()).st_size != size:
                raise CorruptShard(
                    f"{path} is damaged", remedy=f"run {as_command('verify', folder)}"
                )
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
            f"{path}: {error.strerror}", remedy=f"For details, run {as_command('verify', folder)}"
        ) from error


def _index(dataset: OpenedDataset) -> Iterator[IndexSegment]:
    """Yield the index of a dataset in segments, after comparing its files with the manifest."""
    yield from IndexReader(dataset, verify=True).complete().segments()


def _in_several(paths: Sequence[Path], keys: Sequence[str]) -> UsageError:
    """Return the error that datasets have the same keys."""
    return UsageError(
        f"{len(keys)} keys are in more than one of {', '.join(map(str, paths))}: "
        f"{', '.join(map(quoted, keys[:3]))}{' ...' if len(keys) > 3 else ''}. Keys come from "
        "file names and must differ",
        remedy="leave these records out of one dataset with `shardkit convert dataset "
        "--exclude`, or rename the files and convert again",
    )
