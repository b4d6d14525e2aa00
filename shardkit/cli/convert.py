"""``shardkit convert``: from a folder of images to a dataset."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import click
from PIL import ImageColor

from shardkit.cli.convert_report import (
    bad_as_json,
    made_as_json,
    plan_as_json,
    show_bad,
    show_made,
    show_plan,
)
from shardkit.cli.main import LazyGroup
from shardkit.cli.show import emit, progress_bar
from shardkit.conversion.plan import DEFAULT_SHARD_BYTES, ConvertOptions
from shardkit.errors import BadImages, UsageError
from shardkit.machine import processors
from shardkit.recipe import (
    CHECKS,
    DEFAULT_QUALITY,
    ENCODINGS,
    FILTERS,
    RESIZE_MODES,
    RESIZERS,
    Recipe,
    parse_size,
)
from shardkit.registry import format_names
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.verbs.convert import convert, dry_run

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
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"--shard-size {text[:40]!r} is not a size such as 256MiB, 1GB or 500000")
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
@click.option(
    "--resizer",
    type=click.Choice(RESIZERS),
    default="pillow",
    show_default=True,
    help="What scales images. torch: bicubic or bilinear, faster, but it takes a second and 200 MB "
    "in each process to load, so for large folders; few values differ from Pillow's, by 1 or 2.",
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
    help="Processors to use; the result does not depend on it.  [default: all]",
)
@click.option("--force", is_flag=True, help="Replace the dataset in DST once the new one is ready.")
@click.option("--dry-run", "dry", is_flag=True, help="Show what would be done, and write nothing.")
@click.option(
    "--quiet", is_flag=True, help="Show neither progress nor summary (--json is still printed)."
)
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
        plan = dry_run(scan, dst, options, force=given["force"])
        if as_json:
            emit(plan_as_json(plan))
        else:
            show_plan(src, dst, plan)
        return
    total = sum(min(len(source), options.limit or len(source)) for source in scan.splits.values())
    try:
        with progress_bar(total, "converting", quiet=quiet) as on_progress:
            made = convert(
                scan,
                dst,
                options,
                force=given["force"],
                workers=given["workers"] or processors(),
                on_progress=on_progress,
            )
    except BadImages as error:
        if as_json:
            emit(bad_as_json(error))
        else:
            show_bad(error)
        raise
    seconds = time.monotonic() - begun
    if as_json:
        emit(made_as_json(dst, made, seconds))
    elif not quiet:
        show_made(src, dst, scan, made, seconds)


def _options(given: dict[str, Any]) -> ConvertOptions:
    box, mode = (None, "shorter") if given["resize"] is None else parse_size(given["resize"])
    if box is None and given["resize_mode"]:
        raise UsageError("--resize-mode says how to --resize; give that too")
    if box is None and (given["enlarge"] or given["filter_"] != "bicubic"):
        raise UsageError("--enlarge and --filter say how to --resize; give that too")
    if box is None and given["resizer"] != "pillow":
        raise UsageError("--resizer needs --resize: it says what scales the images")
    return ConvertOptions(
        to=given["to"],
        recipe=Recipe(
            encode=given["encode"],
            quality=given["quality"],
            resize=box,
            resize_mode=given["resize_mode"] or mode,
            filter=given["filter_"],
            resizer=given["resizer"],
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
