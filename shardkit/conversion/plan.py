"""The plan of a conversion: the images of each shard, decided before anything is written.

The plan is a pure function of the source and the options, so neither the number of workers nor an
interruption changes the result.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from shardkit.contracts import Format, Images, Original, Scan, StoredEntries
from shardkit.conversion.fingerprint import COMMAND, ConversionFingerprint
from shardkit.conversion.stored_order import sort_entries, stored_order
from shardkit.dataset.manifest import CLASS_BYTES, FORMAT_VERSION
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Schema, describe_schema
from shardkit.options import about, option, require_integer, require_valid
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import IMAGE, LABEL, dump_json
from shardkit.registry import OWN_FORMATS, get_format
from shardkit.system.late import load
from shardkit.system.text import parse_bytes, printable
from shardkit.system.text import size as in_words

DEFAULT_SHARD_BYTES = 256 << 20
"""Large enough for sequential reading at full speed, small enough to verify and copy one by one."""

_TRIALS = 32
"""Images to encode, to estimate the size of the others; of few images, four and one in 32."""

_INDEX_BYTES = 150
"""Approximate bytes of a record in the index: a row, its key and its path."""


def spell_bytes(size: int) -> str:
    """Return the text that `parse_bytes` parses."""
    return f"{size}B" if size % (1 << 20) else f"{size >> 20}MiB"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion.

    Raises:
        UsageError: If an option is out of range or contradicts another.
    """

    HEADING: ClassVar[str] = "Shards"

    to: str = field(
        metadata=about("Shard format: lmdb, hdf5 or webdataset.", choices=OWN_FORMATS, is_open=True)
    )
    recipe: Recipe = field(default_factory=Recipe)
    shard_size: int | str = option(
        DEFAULT_SHARD_BYTES,
        help="Approximate size of the images in a shard, such as 256MiB.",
        metavar="SIZE",
        parse=partial(parse_bytes, option="shard_size"),
        spell=spell_bytes,
    )
    shard_samples: int | None = option(
        None, help=f"Images per shard, instead of {setting('shard_size')}.", metavar="N", minimum=1
    )
    shuffle: bool | None = option(
        None,
        help="Store images in random order, so that sequential reading is well mixed, or in the "
        "source's order.",
        shown="shuffle, unless the source is a dataset",
    )
    seed: int = option(
        0,
        help=f"Seed of the random order, and of {setting('val')} and {setting('test')}.",
        metavar="N",
    )
    limit: int | None = option(
        None, help="Convert only N images of each split, as a trial run.", metavar="N", minimum=1
    )
    on_error: str = option(
        "fail",
        help="fail: write nothing if an image is bad. skip: leave bad images out and record each.",
        choices=("fail", "skip"),
        heading="Images",
    )

    def __post_init__(self) -> None:
        require_valid(self)
        get_format(self.to)
        require_integer("seed", self.seed)
        if self.shard_bytes < 1:
            raise UsageError(f"the shard size must be at least one byte, not {self.shard_bytes}")
        if self.shard_samples is not None and self.shard_bytes != DEFAULT_SHARD_BYTES:
            raise UsageError(
                f"{setting('shard_size')} and {setting('shard_samples')} cannot be combined",
                remedy="choose one",
            )

    @property
    def shard_bytes(self) -> int:
        """The bytes of `shard_size`."""
        return parse_bytes(self.shard_size, "shard_size")


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
    """Description of the dataset that each shard stores; see `meta_of`."""
    original: Original | None = None
    """The dataset, if its records are copied unchanged."""

    @property
    def estimated_bytes(self) -> int:
        """Approximate bytes of the dataset."""
        return sum(self.shard_bytes)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return len(self.cuts) - 1

    @property
    def recipe(self) -> dict[str, Any]:
        """The changes made to the images, as the dataset states them."""
        return self.original.recipe if self.original else self.meta["recipe"]

    @property
    def starts(self) -> list[int]:
        """First row of each part of `original`, then the number of rows."""
        rows = [part.rows for part in self.original.parts] if self.original else [len(self.source)]
        return [0, *itertools.accumulate(rows)]

    @property
    def skipped_before(self) -> set[str]:
        """Paths of the bad files that the conversion of `original` left out."""
        parts = self.original.parts if self.original else ()
        return {problem.path for part in parts for problem in part.skipped}

    def meta_of(self, shard: int) -> dict[str, Any]:
        """Return the description of the dataset that a shard stores."""
        if self.original is None:
            return self.meta
        part = self.original.parts[bisect.bisect_right(self.starts, self.cuts[shard]) - 1]
        return {**self.meta, "recipe": self.recipe, "source": part.source}

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

    def split(self, name: str) -> SplitPlan:
        """Return the plan of a split."""
        return next(split for split in self.splits if split.name == name)

    def large_files(self) -> str:
        """Return a sentence that names files of over a tenth of all bytes, or ""."""
        tenth = sum(sum(split.source.numbers("bytes")) for split in self.splits) / 10
        entries = (entry for split in self.splits for entry in split.source.entries)
        large = sorted((-entry.bytes, entry.path) for entry in entries if entry.bytes > tenth)
        if not large:
            return ""
        named = ", ".join(f"{printable(path)} ({in_words(-count)})" for count, path in large[:3])
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
        values = {
            "to": options.to,
            "shard-size": options.shard_bytes,
            "shard-samples": options.shard_samples,
            "shuffle": options.shuffle,
            "seed": options.seed,
            "limit": options.limit,
            **options.recipe.scaling,  # the description has those that are not the defaults
            **options.recipe.describe(),
        }
        return {
            COMMAND: "convert",
            **{f"--{name.replace('_', '-')}": value for name, value in values.items()},
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
        counts = Counter(split.source.numbers("label"))
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
            for path, size, stamp, checksum in split.source.facts():
                yield prefix + path, f"{size} {stamp} {checksum}"


def make_plan(scan: Scan, options: ConvertOptions, *, sorted_already: bool = False) -> Plan:
    """Return the plan for converting the images of ``scan``.

    ``sorted_already`` states that the images of each split are in stored order. UsageError if a
    field has more classes than fit into a manifest.
    """
    options = _completed(options, scan)
    seed = None if sorted_already else _seed(options)
    sources = {
        name: as_stored(images, seed=seed, limit=options.limit)
        for name, images in scan.splits.items()
    }
    plan_pixels = load(_PIXEL_PLANS[options.recipe.pixels])
    scan, recipe = plan_pixels(scan, options.recipe, sources.values())
    options = replace(options, recipe=recipe)
    recipe.require_codecs()
    if not (options.recipe.keeps_bytes or any(f.type.is_picture for f in scan.schema.values())):
        raise UsageError(
            "the source has no images to change",
            remedy=f"leave out image options, such as {setting('resize')}",
        )
    _require_few_classes(scan.schema)
    storage = get_format(options.to)
    return Plan(
        storage=storage,
        options=options,
        scan=scan,
        splits=tuple(_plan_split(name, source, scan, options) for name, source in sources.items()),
        software=storage.software(),
    )


_PIXEL_PLANS = {
    "rgb": "shardkit.conversion.plan:plan_rgb",
    "gray": "shardkit.conversion.typed:plan_typed",
    "keep": "shardkit.conversion.typed:plan_typed",
}
"""Functions that choose channels and dtype of the stored images, by the recipe's ``pixels``."""


def plan_rgb(scan: Scan, recipe: Recipe, sources: Iterable[Images]) -> tuple[Scan, Recipe]:
    """Return scan and recipe unchanged: the images become RGB of 8 bits.

    ``sources`` are the images of each split in the order of rows. UsageError if they are of other
    types.
    """
    typed = [field.pixels for field in scan.schema.values() if field.pixels is not None]
    if typed:
        raise UsageError(
            f"the images of {scan.source} are {typed[0]}",
            remedy=f"to change them, use {setting('pixels', 'keep')} or "
            f"{setting('pixels', 'gray')}",
        )
    return scan, recipe


def _require_few_classes(schema: Schema) -> None:
    for name, schema_field in schema.items():
        count = len(schema_field.classes or ())
        if len(dump_json(schema_field.classes)) > CLASS_BYTES:
            raise UsageError(
                f"the {count:,} class names of {name} take more than {in_words(CLASS_BYTES)}",
                remedy="if each row has its own class, store the value as another field, for "
                f"example with {setting('keep')}",
            )


def _completed(options: ConvertOptions, scan: Scan) -> ConvertOptions:
    """Return the options with the defaults of a source: a dataset is copied."""
    recipe = options.recipe
    typed = any(field.pixels for field in scan.schema.values())
    if scan.records and recipe.keeps_bytes and (typed or recipe.pixels == "rgb"):
        recipe = copying(recipe, scan)
    shuffle = not scan.records if options.shuffle is None else options.shuffle
    return replace(options, recipe=recipe, shuffle=shuffle)


def copying(recipe: Recipe, scan: Scan) -> Recipe:
    """Return a recipe that stores the records of a dataset unchanged."""
    typed = any(field.pixels for field in scan.schema.values())
    recipe = replace(recipe, copy=True, check="none", pixels="keep" if typed else "rgb")
    if scan.raw_shape is None:
        return recipe
    return replace(recipe, encode="raw", resize=scan.raw_shape[:2], resize_mode="crop")


def seed_of(scan: Scan, options: ConvertOptions) -> int | None:
    """Return the seed of the order in which the images of a scan are stored; None is the scan's."""
    return _seed(_completed(options, scan))


def _seed(options: ConvertOptions) -> int | None:
    return options.seed if options.shuffle else None


def as_stored(source: Images, *, seed: int | None, limit: int | None) -> Images:
    """Return at most ``limit`` images of a source in the order of rows.

    A ``seed`` of None keeps the order of the source.
    """
    if seed is None:
        return source.of(source.entries[:limit])
    if isinstance(source.entries, StoredEntries):
        return source.of(sort_entries(source.entries, seed)[:limit])
    return source.take(stored_order(source.paths(), seed)[:limit])


def _plan_split(name: str, source: Images, scan: Scan, options: ConvertOptions) -> SplitPlan:
    images = scan.splits[name]
    original = scan.originals.get(name)
    if not options.recipe.copy or options.shuffle or len(source) != len(images):
        original = None
    elif original is not None and sum(part.rows for part in original.parts) != len(source):
        original = None  # only some rows are chosen
    starts = itertools.accumulate(part.rows for part in original.parts) if original else ()
    cuts, sizes = _cuts(_sizes(source, options.recipe, scan), options, frozenset(starts))
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
        original=original,
    )


def shard_meta(
    *, to: str, schema: Schema, recipe: Recipe, source: dict[str, Any]
) -> dict[str, Any]:
    """Return the description of a dataset that each of its shards stores."""
    described = recipe.describe()
    return {
        "shardkit": FORMAT_VERSION,
        "format": to,
        "classes": schema[LABEL].classes if LABEL in schema else None,
        "schema": describe_schema(schema),
        "raw_shape": recipe.raw_shape,
        "recipe": described,
        "source": source,
    }


def _sizes(source: Images, recipe: Recipe, scan: Scan) -> Iterable[int]:
    """Return the stored size of each record: exact, or estimated from a few converted records."""
    schema = scan.schema
    if recipe.keeps_bytes and scan.exact_sizes:
        return source.numbers("bytes")
    if recipe.raw_shape and schema.keys() <= {IMAGE, LABEL}:
        size = math.prod(recipe.raw_shape) * schema[IMAGE].image_type.values.itemsize
        return itertools.repeat(size, len(source))
    step = max(1, len(source) // min(_TRIALS, 4 + len(source) // 32))
    tried = [
        size for row in range(0, len(source), step) if (size := _try(source, recipe, row, schema))
    ]
    mean = sum(tried) // len(tried) if tried else 1
    return itertools.repeat(max(1, mean), len(source))


def _try(source: Images, recipe: Recipe, row: int, schema: Schema) -> int:
    try:
        (record,) = source.read([row])
        stored = convert_record(recipe, record, schema).record
    except (BadImage, MemoryError):
        return 0  # reported when its shard is built
    if IMAGE in schema and schema.keys() <= {IMAGE, LABEL}:
        return len(stored.fields[stored.image_field or ""])
    return sum(map(len, stored.fields.values()))


def _cuts(
    sizes: Iterable[int], options: ConvertOptions, starts: Collection[int]
) -> tuple[list[int], list[int]]:
    """Return the first row of each shard, then the number of rows; and the bytes of each shard."""
    cuts = [0]
    totals = list[int]()
    rows = total = 0
    limit = options.shard_samples
    most = options.shard_bytes
    for count in sizes:
        full = rows == limit if limit else total + count > most
        if (full or cuts[-1] + rows in starts) and rows:
            cuts.append(cuts[-1] + rows)
            totals.append(total)
            rows = total = 0
        rows += 1
        total += count
    return [*cuts, cuts[-1] + rows], [*totals, total]
