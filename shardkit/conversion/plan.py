"""The plan of a conversion: the images of each shard, decided before anything is written.

The plan is a pure function of the source and the options, so neither the number of workers nor an
interruption changes the result.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from shardkit._version import __version__
from shardkit.contracts import Format, Images, Scan
from shardkit.conversion.fingerprint import ConversionFingerprint
from shardkit.conversion.recipe import Recipe
from shardkit.dataset.manifest import FORMAT_VERSION
from shardkit.errors import BadImage, UsageError
from shardkit.record import IMAGE, LABEL, Schema, describe_schema
from shardkit.registry import get_format
from shardkit.system.formatting import size
from shardkit.system.text import printable

DEFAULT_SHARD_BYTES = 256 << 20
"""Large enough for sequential reading at full speed, small enough to verify and copy one by one."""

_TRIALS = 32
"""Images to encode, to estimate the size of the others."""

_INDEX_BYTES = 150
"""Approximate bytes of a record in the index: a row, its key and its path."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion.

    Raises:
        UsageError: If an option is out of range or contradicts another.
    """

    to: str
    """Name of the storage format."""
    recipe: Recipe = field(default_factory=Recipe)
    shard_bytes: int = DEFAULT_SHARD_BYTES
    """Approximate bytes of images in a shard."""
    shard_samples: int | None = None
    """Images in a shard, instead of ``shard_bytes``."""
    shuffle: bool | None = None
    """Whether to store images in random order instead of the source's; None means the source's
    for a dataset, else random. A `Plan` states which."""
    seed: int = 0
    """Seed of the random order."""
    limit: int | None = None
    """Convert only this many images of each split, the first in stored order."""
    on_error: str = "fail"
    """``fail`` writes nothing if any image is bad; ``skip`` leaves bad images out."""

    def __post_init__(self) -> None:
        get_format(self.to)
        if self.shard_bytes < 1:
            raise UsageError(f"shard size {self.shard_bytes} is not at least one byte")
        for option, value in (("shard_samples", self.shard_samples), ("limit", self.limit)):
            if value is not None and value < 1:
                raise UsageError(f"{option} {value} is not at least 1")
        if self.on_error not in ("fail", "skip"):
            raise UsageError(f"on_error={self.on_error!r} is neither 'fail' nor 'skip'")


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """Plan of one dataset: its images in stored order, and the first row of each shard."""

    name: str
    """The split, or "" where there are no splits."""
    source: Images
    images: int
    """Number of images in the source, before any limit."""
    cuts: tuple[int, ...]
    """First row of each shard, then the number of rows."""
    shard_bytes: tuple[int, ...]
    """Approximate bytes of each shard on disk, with its part of the index; an estimate from a trial
    where images are re-encoded."""
    meta: dict[str, Any]
    """Description of the dataset that each shard stores."""

    @property
    def estimated_bytes(self) -> int:
        """Approximate bytes of the dataset."""
        return sum(self.shard_bytes)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.cuts) - 1

    def shard_source(self, shard: int) -> Images:
        """Return the images of one shard, in stored order."""
        return self.source.of(self.source.entries[self.cuts[shard] : self.cuts[shard + 1]])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a conversion."""

    storage: Format
    options: ConvertOptions
    scan: Scan
    splits: tuple[SplitPlan, ...]
    software: dict[str, str]

    def large_files(self) -> str:
        """Return a sentence that names files of over a tenth of all bytes, or ""."""
        entries = [entry for split in self.splits for entry in split.source.entries]
        tenth = sum(entry.bytes for entry in entries) / 10
        large = sorted((-entry.bytes, entry.path) for entry in entries if entry.bytes > tenth)
        if not large:
            return ""
        named = ", ".join(f"{printable(path)} ({size(-count)})" for count, path in large[:3])
        return f" The largest files are {named}."

    def fingerprint(self) -> ConversionFingerprint:
        """Return everything that determines the result."""
        return ConversionFingerprint(
            settings=self._settings(),
            images={split.name: split.images for split in self.splits},
            files=_PlannedFiles(self.scan, self.splits),
            on_error=self.options.on_error,
        )

    def _settings(self) -> dict[str, Any]:
        options = self.options
        found = {
            "to": options.to,
            "shard-size": options.shard_bytes,
            "shard-samples": options.shard_samples,
            "shuffle": options.shuffle,
            "seed": options.seed,
            "limit": options.limit,
            "resizer": options.recipe.resizer,
            "dct-scaling": options.recipe.dct_scaling,
            **options.recipe.describe(),
        }
        return {
            **{f"--{name.replace('_', '-')}": value for name, value in found.items()},
            **{f"the version of {name}": value for name, value in self.software.items()},
            "classes": self.scan.classes and list(self.scan.classes),
            "the fields": describe_schema(self.scan.schema),
            "the source's name": ", ".join(
                dict.fromkeys(split.meta["source"]["name"] for split in self.splits)
            ),
        }

    def class_counts(self, split: SplitPlan) -> dict[str, int]:
        """Return the number of images of each class in ``split``; empty if that is unknown."""
        if not self.scan.known:
            return {}
        counts = Counter(entry.label for entry in split.source.entries)
        return {name: counts[label] for label, name in enumerate(self.scan.classes or ())}


@dataclass(frozen=True)
class _PlannedFiles:
    """The files of a plan, as its fingerprint lists them."""

    scan: Scan
    splits: tuple[SplitPlan, ...]

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield path and facts of each file; a dictionary would hold all names in memory."""
        for split in self.splits:
            prefix = f"{split.name}/" if split.name else ""
            for problem in self.scan.problems.get(split.name, ()):
                yield prefix + problem.path, problem.reason
            for path, *facts in split.source.facts():
                yield prefix + path, "{} {} {}".format(*facts)


def make_plan(scan: Scan, options: ConvertOptions, *, sorted_already: bool = False) -> Plan:
    """Return the plan for converting the images of ``scan``.

    Args:
        scan: The images.
        options: The options.
        sorted_already: Whether the images of each split are in stored order.
    """
    options = _completed(options, scan)
    storage = get_format(options.to)
    return Plan(
        storage=storage,
        options=options,
        scan=scan,
        splits=tuple(
            _plan_split(name, source, scan, options, sorted_already=sorted_already)
            for name, source in scan.splits.items()
        ),
        software=software_of(storage, options.recipe),
    )


def _completed(options: ConvertOptions, scan: Scan) -> ConvertOptions:
    """Return the options with the defaults of a source: a dataset is copied."""
    recipe = options.recipe
    if scan.records and recipe.keeps_bytes:
        recipe = replace(recipe, copy=True, check="none")
        if scan.raw_shape:
            size = scan.raw_shape[:2]
            recipe = replace(recipe, encode="raw", resize=size, resize_mode="crop")
    shuffle = not scan.records if options.shuffle is None else options.shuffle
    return replace(options, recipe=recipe, shuffle=shuffle)


def seed_of(scan: Scan, options: ConvertOptions) -> int | None:
    """Return the seed of the order in which the images of a scan are stored; None is the scan's."""
    return _seed(_completed(options, scan))


def _seed(options: ConvertOptions) -> int | None:
    return options.seed if options.shuffle else None


def rank(path: str, seed: int) -> bytes:
    """Return the BLAKE2b-128 of seed and path, by which images are sorted in random order."""
    data = b"%d\0" % seed + path.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=16).digest()


def stored_order(paths: Iterable[str], seed: int) -> list[int]:
    """Return the rows of ``paths`` in random order: sorted by `rank`.

    The order of two images depends only on their paths and the seed: not on the random numbers of a
    library, nor on the other images.
    """
    ranks = np.frombuffer(b"".join([rank(path, seed) for path in paths]), ">u8").reshape(-1, 2)
    order: list[int] = np.lexsort((ranks[:, 1], ranks[:, 0])).tolist()
    return order


def as_stored(source: Images, *, seed: int | None, limit: int | None) -> Images:
    """Return the images of a source in the order of rows.

    Args:
        source: The images, in the source's order.
        seed: Seed of the random order; None keeps the source's.
        limit: Maximum number of rows.
    """
    if seed is None:
        return source.of(source.entries[:limit])
    return source.take(stored_order(source.paths(), seed)[:limit])


def _plan_split(
    name: str, images: Images, scan: Scan, options: ConvertOptions, *, sorted_already: bool
) -> SplitPlan:
    seed = None if sorted_already else _seed(options)
    source = as_stored(images, seed=seed, limit=options.limit)
    cuts, sizes = _cuts(_sizes(source, options.recipe, scan), options)
    overhead = get_format(options.to).overhead + _INDEX_BYTES
    return SplitPlan(
        name=name,
        source=source,
        images=len(images),
        cuts=tuple(cuts),
        shard_bytes=tuple(
            size + overhead * (stop - start)
            for size, (start, stop) in zip(sizes, itertools.pairwise(cuts), strict=True)
        ),
        meta=shard_meta(
            to=options.to,
            schema=scan.schema,
            recipe=options.recipe,
            source={
                **scan.source.describe(name),
                "kind": scan.source.kind,
                "images": len(images),
                "limit": options.limit,
                "order": "shuffled" if options.shuffle else "folder",
                "seed": _seed(options),
            },
        ),
    )


def shard_meta(
    *, to: str, schema: Schema, recipe: Recipe, source: dict[str, Any]
) -> dict[str, Any]:
    """Return the description of a dataset that each of its shards stores."""
    return {
        "shardkit": FORMAT_VERSION,
        "format": to,
        "classes": schema[LABEL].classes if LABEL in schema else None,
        "schema": describe_schema(schema),
        "raw_shape": recipe.raw_shape,
        "recipe": recipe.describe(),
        "source": source,
    }


def _sizes(source: Images, recipe: Recipe, scan: Scan) -> Iterable[int]:
    """Return the stored size of each record: exact, or estimated from a few converted records."""
    schema = scan.schema
    if recipe.keeps_bytes and scan.exact_sizes:
        return source.sizes()
    if recipe.raw_shape and schema.keys() <= {IMAGE, LABEL}:
        height, width, channels = recipe.raw_shape
        return itertools.repeat(height * width * channels, len(source))
    step = max(1, len(source) // _TRIALS)
    # Sizes are similar with either resizer. With one of them, both give the same shards.
    trial = replace(recipe, resizer="pillow")
    tried = [
        found for row in range(0, len(source), step) if (found := _try(source, trial, row, schema))
    ]
    mean = sum(tried) // len(tried) if tried else 1
    return itertools.repeat(max(1, mean), len(source))


def _try(source: Images, recipe: Recipe, row: int, schema: Schema) -> int:
    try:
        (record,) = source.read([row])
        stored = recipe.apply(record, schema)
    except BadImage:
        return 0  # reported when its shard is built
    if schema.keys() <= {IMAGE, LABEL}:
        return len(stored.fields[stored.image_field or ""])
    return sum(map(len, stored.fields.values()))


def _cuts(sizes: Iterable[int], options: ConvertOptions) -> tuple[list[int], list[int]]:
    """Return the first row of each shard, then the number of rows; and the bytes of each shard."""
    cuts, totals, rows, total = [0], list[int](), 0, 0
    for count in sizes:
        limit = options.shard_samples
        full = rows == limit if limit else total + count > options.shard_bytes
        if full and rows:
            cuts.append(cuts[-1] + rows)
            totals.append(total)
            rows = total = 0
        rows += 1
        total += count
    return [*cuts, cuts[-1] + rows], [*totals, total]


def software_of(storage: Format, recipe: Recipe) -> dict[str, str]:
    """Return the versions of all libraries that affect the bytes of the result."""
    found = {"shardkit": __version__}
    packages = ("pillow", "simplejpeg", *storage.libraries)
    for package in dict.fromkeys((*packages, recipe.resizer)):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
