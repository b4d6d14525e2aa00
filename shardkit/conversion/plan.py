"""The plan of a conversion: which image goes into which shard, decided before anything is written.

It is a pure function of the source and the options, so that neither the number of workers nor an
interruption can change the result.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardkit import __version__
from shardkit.contracts import Format
from shardkit.conversion.terms import Terms
from shardkit.errors import BadImage, UsageError
from shardkit.manifest import FORMAT_VERSION
from shardkit.recipe import Recipe
from shardkit.registry import get_format
from shardkit.sources.imagefolder import ImageFolder, Scan

DEFAULT_SHARD_BYTES = 256 << 20
"""Large enough to read forwards at full speed, small enough to verify and copy one by one."""

_TRIALS = 32
"""Images that are encoded for trial to learn how large the others will become."""

_INDEX_BYTES = 150
"""What a record takes in the index, about: a row, its key and its path."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How a source becomes a dataset.

    Raises:
        UsageError: If an option is out of range or contradicts another.
    """

    to: str
    """Name of the storage format."""
    recipe: Recipe = field(default_factory=Recipe)
    shard_bytes: int = DEFAULT_SHARD_BYTES
    """Bytes of images in a shard, about."""
    shard_samples: int | None = None
    """Images in a shard, instead of ``shard_bytes``."""
    shuffle: bool = True
    """Whether rows are stored in a random order, or in the folder's."""
    seed: int = 0
    """Decides the random order."""
    limit: int | None = None
    """Convert only as many images of each split, the first in stored order."""
    on_error: str = "fail"
    """``fail`` commits nothing if any image is bad, ``skip`` leaves those out and records them."""

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
    """One dataset to be: its images in stored order, and where they are cut into shards."""

    name: str
    """The split, or "" where there are no splits."""
    source: ImageFolder
    images: int
    """Images of the source, of which a limit may take a part."""
    cuts: tuple[int, ...]
    """The first row of each shard, and at the end the number of rows."""
    shard_bytes: tuple[int, ...]
    """Bytes that each shard will take on the disk, with its part of the index: about, and less
    exactly where images are re-encoded."""
    meta: dict[str, Any]
    """What each shard says of itself."""

    @property
    def estimated_bytes(self) -> int:
        """Bytes of the dataset, about."""
        return sum(self.shard_bytes)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.cuts) - 1

    def shard_source(self, shard: int) -> ImageFolder:
        """Return the images of one shard, in stored order."""
        return self.source.take(range(self.cuts[shard], self.cuts[shard + 1]))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole conversion, decided."""

    storage: Format
    options: ConvertOptions
    scan: Scan
    splits: tuple[SplitPlan, ...]
    software: dict[str, str]

    def terms(self) -> Terms:
        """Return all that decides the result."""
        files = {}
        for split in self.splits:
            prefix = f"{split.name}/" if split.name else ""
            for problem in self.scan.problems.get(split.name, ()):
                files[prefix + problem.path] = problem.reason
            for entry in split.source.entries:
                files[prefix + entry.path] = f"{entry.bytes} {entry.mtime_ns}"
        return Terms(
            settings=self._settings(),
            images={split.name: split.images for split in self.splits},
            files=files,
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
            **options.recipe.describe(),
        }
        return {
            **{f"--{name.replace('_', '-')}": value for name, value in found.items()},
            **{f"the version of {name}": value for name, value in self.software.items()},
            "classes": self.scan.classes and list(self.scan.classes),
            "the source's name": ", ".join(split.meta["source"]["name"] for split in self.splits),
        }

    def class_counts(self, split: SplitPlan) -> dict[str, int]:
        """Return the number of images of each class in ``split``; empty if it has no labels."""
        counts = Counter(entry.label for entry in split.source.entries)
        return {name: counts[label] for label, name in enumerate(self.scan.classes or ())}


def make_plan(scan: Scan, options: ConvertOptions) -> Plan:
    """Return the plan of converting what ``scan`` found."""
    storage = get_format(options.to)
    return Plan(
        storage=storage,
        options=options,
        scan=scan,
        splits=tuple(
            _plan_split(name, source, scan, options) for name, source in scan.splits.items()
        ),
        software=software_of(storage, options.recipe),
    )


def stored_order(paths: Sequence[str], seed: int) -> list[int]:
    """Return the rows of ``paths`` in random order: sorted by BLAKE2b-128 of seed and path.

    The order of two images depends on nothing but them and the seed: not on a library's random
    numbers, nor on what other images there are.
    """
    prefix = b"%d\0" % seed

    def place(row: int) -> bytes:
        path = paths[row].encode("utf-8", "surrogateescape")
        return hashlib.blake2b(prefix + path, digest_size=16).digest()

    return sorted(range(len(paths)), key=place)


def as_stored(source: ImageFolder, *, seed: int | None, limit: int | None) -> ImageFolder:
    """Return the images of a source in the order of rows.

    Args:
        source: The images, in the folder's order.
        seed: Decides the random order; None keeps the folder's.
        limit: The number of rows, if they are not all.
    """
    order: Sequence[int] = range(len(source))
    if seed is not None:
        order = stored_order([entry.path for entry in source.entries], seed)
    return source.take(order[:limit])


def _plan_split(name: str, source: ImageFolder, scan: Scan, options: ConvertOptions) -> SplitPlan:
    total = len(source)
    seed = options.seed if options.shuffle else None
    source = as_stored(source, seed=seed, limit=options.limit)
    sizes = _sizes(source, options.recipe)
    cuts = _cuts(sizes, options)
    beside = get_format(options.to).overhead + _INDEX_BYTES
    return SplitPlan(
        name=name,
        source=source,
        images=total,
        cuts=tuple(cuts),
        shard_bytes=tuple(
            sum(sizes[start:stop]) + beside * (stop - start)
            for start, stop in itertools.pairwise(cuts)
        ),
        meta=shard_meta(
            to=options.to,
            classes=scan.classes,
            recipe=options.recipe,
            source={
                "kind": "imagefolder",
                "name": source.root.resolve().name,
                "images": total,
                "limit": options.limit,
                "order": "shuffled" if options.shuffle else "folder",
                "seed": seed,
            },
        ),
    )


def shard_meta(
    *, to: str, classes: Sequence[str] | None, recipe: Recipe, source: dict[str, Any]
) -> dict[str, Any]:
    """Return what each shard says of its dataset."""
    return {
        "shardkit": FORMAT_VERSION,
        "format": to,
        "classes": classes,
        "raw_shape": recipe.raw_shape,
        "recipe": recipe.describe(),
        "source": source,
    }


def _sizes(source: ImageFolder, recipe: Recipe) -> list[int]:
    """Return the size of each image as stored: known, or the mean of a trial on some of them."""
    if recipe.keeps_bytes:
        return [entry.bytes for entry in source.entries]
    if recipe.raw_shape:
        height, width, channels = recipe.raw_shape
        return [height * width * channels] * len(source)
    step = max(1, len(source) // _TRIALS)
    trial = replace(recipe, resizer="pillow")  # about as large; and so the cut is the same for both
    tried = [size for row in range(0, len(source), step) if (size := _try(source, trial, row))]
    mean = sum(tried) // len(tried) if tried else 1
    return [max(1, mean)] * len(source)


def _try(source: ImageFolder, recipe: Recipe, row: int) -> int:
    try:
        (record,) = source.read([row])
        stored = recipe.apply(record)
    except BadImage:
        return 0  # found and reported when its turn comes
    return len(stored.fields[stored.image_field or ""])


def _cuts(sizes: Iterable[int], options: ConvertOptions) -> list[int]:
    cuts, rows, room = [0], 0, options.shard_bytes
    for row, size in enumerate(sizes):
        full = rows == options.shard_samples if options.shard_samples else size > room
        if full and rows:
            cuts.append(row)
            rows, room = 0, options.shard_bytes
        rows += 1
        room -= size
    return [*cuts, cuts[-1] + rows]


def software_of(storage: Format, recipe: Recipe) -> dict[str, str]:
    """Return the versions of all that can change a byte of the result."""
    found = {"shardkit": __version__}
    packages = ("pillow", "simplejpeg", *storage.libraries)
    for package in dict.fromkeys((*packages, recipe.resizer)):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
