"""``shardkit convert``: from a folder of images to a dataset."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click
from PIL import ImageColor

from shardkit.cli.main import LazyGroup
from shardkit.cli.show import amount, emit, line, printable, progress_bar, size, some, table
from shardkit.conversion.plan import DEFAULT_SHARD_BYTES, ConvertOptions, Plan
from shardkit.errors import UsageError
from shardkit.manifest import Manifest, Problem
from shardkit.pool import available_workers
from shardkit.recipe import (
    CHECKS,
    DEFAULT_QUALITY,
    ENCODINGS,
    FILTERS,
    RESIZE_MODES,
    Recipe,
    parse_size,
)
from shardkit.registry import format_names
from shardkit.sources.imagefolder import Scan, scan_imagefolder
from shardkit.verbs.convert import BadImages, Converted, convert, dry_run

_LISTED = 50
"""Bad files and classes that are shown; --json gives all."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


@click.group(
    "convert",
    cls=LazyGroup,
    table={
        "imagefolder": (
            "shardkit.cli.convert:imagefolder",
            "From a folder of images, one folder for each class.",
        )
    },
)
def convert_group() -> None:
    """Make a dataset of shards; the kind of source is the next word."""


def _parse_bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"--shard-size {text!r} is not a size such as 256MiB, 1GB or 500000")
    return int(float(match[1]) * _UNITS[match[2]])


def _parse_colour(text: str) -> tuple[int, int, int]:
    try:
        return ImageColor.getrgb(text)[:3]
    except ValueError:
        raise UsageError(
            f"--background {text!r} is not a colour such as white, #808080 or rgb(124,116,104)"
        ) from None


@click.command("imagefolder")
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--to", required=True, type=click.Choice(format_names()), help="Format of the shards."
)
@click.option("--resize", metavar="N|HxW", help="Scale images to N pixels or to height x width.")
@click.option(
    "--resize-mode",
    type=click.Choice(RESIZE_MODES),
    help="What --resize means: the shorter or longer side (or: cover or fit into HxW), fill HxW "
    "and crop the rest, fit and pad, or stretch.  [default: shorter for N, crop for HxW]",
)
@click.option(
    "--filter",
    "filter_",
    type=click.Choice(list(FILTERS)),
    default="bicubic",
    show_default=True,
    help="How pixels are interpolated; all are antialiased.",
)
@click.option("--enlarge", is_flag=True, help="Let images become larger than they are.")
@click.option(
    "--encode",
    type=click.Choice(ENCODINGS),
    default="keep",
    show_default=True,
    help="Encoding of stored images. keep: bytes stay as they are unless a pixel must change. raw: "
    "pixels without any encoding, of one size.",
)
@click.option(
    "--quality",
    type=int,
    metavar="1-100",
    help="Quality of JPEG and WebP; if given, these are encoded anew.  "
    f"[default: {DEFAULT_QUALITY} where an image has to be encoded]",
)
@click.option(
    "--background",
    default="white",
    show_default=True,
    metavar="COLOUR",
    help="Under transparent pixels and around padded images.",
)
@click.option(
    "--orient",
    is_flag=True,
    help="Turn images as their EXIF orientation asks, even if nothing else changes.",
)
@click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="decode",
    show_default=True,
    help="How far images are read to prove them whole.",
)
@click.option(
    "--on-error",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="fail: list all bad images and write nothing. skip: leave them out, and record each.",
)
@click.option(
    "--class-order",
    default="plain",
    show_default=True,
    metavar="plain|natural|FILE",
    help="Order of the labels: as torchvision sorts, numbers by value, or one class a line.",
)
@click.option(
    "--splits/--no-splits",
    default=None,
    help="Whether SRC holds splits (train, val, ...), each to be a dataset.  [default: by name]",
)
@click.option(
    "--shard-size",
    default=f"{DEFAULT_SHARD_BYTES >> 20}MiB",
    show_default=True,
    metavar="SIZE",
    help="Bytes of images in a shard, about.",
)
@click.option("--shard-samples", type=int, metavar="N", help="Images in a shard, instead.")
@click.option(
    "--shuffle/--no-shuffle",
    default=True,
    show_default=True,
    help="Store in random order, so that reading forwards is well mixed, or in the folder's.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Decides the random order.")
@click.option(
    "--limit", type=int, metavar="N", help="Take only N images of each split, for a trial."
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Processes; the result does not depend on it.  [default: one for each processor]",
)
@click.option("--force", is_flag=True, help="Replace the dataset in DST once the new one is ready.")
@click.option("--dry-run", "dry", is_flag=True, help="Show what would be done, and write nothing.")
@click.option("--quiet", is_flag=True, help="Show neither progress nor summary.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def imagefolder(src: Path, dst: Path, **given: Any) -> None:
    """Convert the images in SRC to a dataset in DST.

    SRC has one folder for each class, or images alone, or folders train, val, test of either, which
    become one dataset each. A conversion that is interrupted goes on when the same command is given
    again; readers see nothing of it before it is complete.

    \b
    Examples:
      shardkit convert imagefolder photos dataset --to lmdb
      shardkit convert imagefolder photos dataset --to webdataset --resize 256 --quality 90
      shardkit convert imagefolder photos dataset --to hdf5 --resize 224x224 --encode raw --enlarge
    """
    options = _options(given)
    quiet, as_json = given["quiet"], given["as_json"]
    begun = time.monotonic()
    scan = scan_imagefolder(src, class_order=given["class_order"], splits=given["splits"])
    if given["dry"]:
        _show_plan(src, dst, dry_run(scan, dst, options, force=given["force"]), as_json=as_json)
        return
    total = sum(min(len(source), options.limit or len(source)) for source in scan.splits.values())
    try:
        with progress_bar(total, "converting", quiet=quiet) as on_progress:
            made = convert(
                scan,
                dst,
                options,
                force=given["force"],
                workers=given["workers"] or available_workers(),
                on_progress=on_progress,
            )
    except BadImages as error:
        _show_bad(error, as_json=as_json)
        raise
    seconds = time.monotonic() - begun
    if as_json:
        emit({"seconds": round(seconds, 3), "datasets": _as_json(dst, made)})
    elif not quiet:
        _show_made(src, dst, scan, made, seconds)


def _options(given: dict[str, Any]) -> ConvertOptions:
    box, mode = parse_size(given["resize"]) if given["resize"] else (None, "shorter")
    if box is None and given["resize_mode"]:
        raise UsageError("--resize-mode says how to --resize; give that too")
    return ConvertOptions(
        to=given["to"],
        recipe=Recipe(
            encode=given["encode"],
            quality=given["quality"],
            resize=box,
            resize_mode=given["resize_mode"] or mode,
            filter=given["filter_"],
            enlarge=given["enlarge"],
            background=_parse_colour(given["background"]),
            orient=given["orient"],
            check=given["check"],
        ),
        shard_bytes=_parse_bytes(given["shard_size"]),
        shard_samples=given["shard_samples"],
        shuffle=given["shuffle"],
        seed=given["seed"],
        limit=given["limit"],
        on_error=given["on_error"],
    )


def _show_plan(src: Path, dst: Path, plan: Plan, *, as_json: bool) -> None:
    if as_json:
        emit(_plan_as_json(plan))
        return
    click.echo(f"would convert {src} to {dst} ({plan.storage.title}); nothing was written")
    for split in plan.splits:
        images = amount(len(split.source), "image")
        click.echo(
            f"  {split.name + ': ' if split.name else ''}{images}, "
            f"{amount(split.shards, 'shard')}, about {size(split.estimated_bytes)}"
        )
        counts = plan.class_counts(split)
        if counts:
            table(
                [(printable(name), f"{count:,}") for name, count in counts.items()], limit=_LISTED
            )
        _show_left_out(
            plan.scan.ignored.get(split.name, []), plan.scan.problems.get(split.name, [])
        )


def _plan_as_json(plan: Plan) -> dict[str, Any]:
    return {
        split.name: {
            "images": len(split.source),
            "shards": split.shards,
            "estimated_bytes": split.estimated_bytes,
            "classes": plan.class_counts(split),
            "recipe": split.meta["recipe"],
            "ignored": _problems_as_json(plan.scan.ignored.get(split.name, [])),
            "problems": _problems_as_json(plan.scan.problems.get(split.name, [])),
        }
        for split in plan.splits
    }


def _show_left_out(ignored: list[Problem], problems: list[Problem]) -> None:
    if ignored:
        line("ignored", _by_reason(ignored))
    for problem in problems[:_LISTED]:
        line("bad", f"{printable(problem.path)}: {problem.reason}")


def _by_reason(problems: list[Problem]) -> str:
    reasons = {problem.reason for problem in problems}
    return "; ".join(
        f"{reason}: {some([p.path for p in problems if p.reason == reason])}"
        for reason in sorted(reasons)
    )


def _show_bad(error: BadImages, *, as_json: bool) -> None:
    if as_json:
        emit({"bad": _problems_as_json(error.problems)})
        return
    for problem in error.problems:
        click.echo(f"  bad: {printable(problem.path)}: {problem.reason}", err=True)


def _show_made(src: Path, dst: Path, scan: Scan, made: Converted, seconds: float) -> None:
    images = sum(manifest.rows for manifest in made.manifests.values())
    stored = sum(manifest.bytes for manifest in made.manifests.values())
    click.echo(f"converted {src} to {dst}")
    for name, manifest in made.manifests.items():
        _show_dataset(name, manifest, scan)
    if made.reused_shards:
        line("resumed", f"{amount(made.reused_shards, 'shard')} of an earlier run were kept")
    line(
        "time",
        f"{seconds:.1f} s, {images / seconds:,.0f} images/s, {stored / 1e6 / seconds:,.1f} MB/s",
    )
    line("next", f"shardkit verify {dst}")


def _show_dataset(name: str, manifest: Manifest, scan: Scan) -> None:
    classes = (
        "without labels"
        if manifest.classes is None
        else (f"in {amount(len(manifest.classes), 'class')}")
    )
    line(
        name or "dataset",
        f"{amount(manifest.rows, 'image')} {classes}, {amount(len(manifest.shards), 'shard')} of "
        f"{manifest.format}, {size(manifest.bytes)}",
    )
    empty = [
        name
        for name, count in zip(manifest.classes or (), manifest.class_counts or (), strict=True)
        if not count
    ]
    if empty:
        line("empty", f"classes without images: {some(empty)}")
    if turned := manifest.notes.get("orientation"):
        line(
            "noted",
            f"{amount(turned, 'image')} with an EXIF orientation that readers will not "
            "apply; --orient stores them upright",
        )
    if moving := manifest.notes.get("frames"):
        line("noted", f"{amount(moving, 'image')} with several frames; readers take the first")
    if manifest.skipped:
        line("skipped", f"{amount(len(manifest.skipped), 'bad file')}, listed in skipped.jsonl")
    if scan.ignored.get(name):
        line("ignored", _by_reason(scan.ignored[name]))


def _as_json(dst: Path, made: Converted) -> dict[str, Any]:
    return {
        name: {
            "path": str(dst / name),
            "format": manifest.format,
            "digest": manifest.digest,
            "rows": manifest.rows,
            "shards": len(manifest.shards),
            "bytes": manifest.bytes,
            "fields": manifest.fields,
            "notes": manifest.notes,
            "skipped": _problems_as_json(manifest.skipped),
            "ignored": manifest.ignored,
        }
        for name, manifest in made.manifests.items()
    }


def _problems_as_json(problems: tuple[Problem, ...] | list[Problem]) -> list[dict[str, str]]:
    return [{"path": problem.path, "reason": problem.reason} for problem in problems]
