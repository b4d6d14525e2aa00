"""Flip bytes of datasets, thousands of times, and count the outcomes in verify and readers.

Each flip changes one byte of one file of a small dataset. This process then verifies the dataset
and reads all rows: encoded images with default options, raw pixels with ``verify=True``. Each row
must be correct or refused. A wrong row counts as WRONG, and so does a flip that verify misses.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from shardkit import open_dataset, verify
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.dataset import handles
from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.errors import CorruptDataset, UsageError
from shardkit.recipe import Recipe
from shardkit.registry import format_names
from shardkit.sources.imagefolder import scan_imagefolder

IMAGES = 6
RECIPES = {
    "encoded": Recipe(),
    "raw": Recipe(resize=(8, 9), resize_mode="stretch", encode="raw", enlarge=True),
}
COLUMNS = ("flips", "found by verify", "rows right", "rows refused", "rows WRONG")


class Target(NamedTuple):
    """A dataset whose bytes are flipped."""

    place: Path
    name: str
    samples: list[tuple[bytes, int]]
    files: dict[str, list[Path]]
    """Kind to the files of that kind, which take turns."""


def main() -> None:
    options = _options()
    rng = random.Random(options.seed)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        table = campaign(make_targets(Path(folder)), options.flips, rng)
    show(table)
    total: Counter[str] = sum(table.values(), Counter())
    print(f"\nseed {options.seed}, {time.perf_counter() - begun:.0f} s")
    missed = total["flips"] - total["found by verify"]
    if missed or total["rows WRONG"] or total["other errors"]:
        sys.exit(f"{missed} missed, {total['rows WRONG']} wrong, {total['other errors']} others")


def make_targets(root: Path) -> list[Target]:
    """Make one dataset of each format and recipe, two shards each."""
    for number in range(IMAGES):
        path = root / f"photos/{'ab'[number % 2]}/{number}.{'jpg' if number % 3 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 256, (12, 11, 3), np.uint8)
        Image.fromarray(values).save(path)
    (root / "photos/notes.txt").write_text("no image")  # gives a report
    scan = scan_imagefolder(root / "photos")
    targets = []
    for to in format_names():
        for kind, recipe in RECIPES.items():
            place = root / f"{to}-{kind}"
            convert_scan(scan, place, ConvertOptions(to=to, shard_samples=3, recipe=recipe))
            files = {
                "shards": sorted(place.glob("shard-*")),
                "index": sorted((place / "index").iterdir()),
                "manifest": [place / MANIFEST_NAME],
                "reports": sorted(place.glob("*.jsonl")),
            }
            targets.append(Target(place, f"{to} {kind}", samples_of(place), files))
    return targets


def samples_of(place: Path) -> list[tuple[bytes, int]]:
    return list(open_dataset(place, decode="bytes", verify=True)[:])


def campaign(
    targets: list[Target], flips: int, rng: random.Random
) -> dict[tuple[str, str], Counter[str]]:
    """Flip bytes: of each kind of file of each dataset as many, but of shards more."""
    turns = [(target, kind) for target in targets for kind in target.files]
    turns += 4 * [(target, "shards") for target in targets]
    table: dict[tuple[str, str], Counter[str]] = {}
    for number in range(flips):
        target, kind = turns[number % len(turns)]
        count = table.setdefault((target.name, kind), Counter())
        path = rng.choice(target.files[kind])
        good = path.read_bytes()
        at, mask = rng.randrange(len(good)), rng.randrange(1, 256)
        path.write_bytes(good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :])
        try:
            try_one(target, count)
        except Exception as error:
            count["other errors"] += 1
            print(f"{path.name}: byte {at} ^ {mask}: {type(error).__name__}: {error}")
        path.write_bytes(good)
        handles._POOL.reset()
    return table


def try_one(target: Target, count: Counter[str]) -> None:
    count["flips"] += 1
    try:
        count["found by verify"] += not verify(target.place).ok
    except UsageError:  # the manifest is that of a newer version
        count["found by verify"] += 1
    try:
        dataset: Any = open_dataset(target.place, decode="bytes", verify=True)
    except (CorruptDataset, UsageError):
        count["rows refused"] += len(target.samples)
        return
    for row, sample in enumerate(target.samples):
        try:
            right = dataset[row] == sample
        except CorruptDataset:
            count["rows refused"] += 1
        else:
            count["rows right" if right else "rows WRONG"] += 1


def show(table: dict[tuple[str, str], Counter[str]]) -> None:
    """Print a line for each dataset and kind of file, and their sum."""
    total: Counter[str] = sum(table.values(), Counter())
    lines: list[tuple[str, ...]] = [("dataset", "files", *COLUMNS)]
    for (name, kind), count in [*sorted(table.items()), (("all", ""), total)]:
        lines.append((name, kind, *(f"{count[column]:,}" for column in COLUMNS)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, kind, *cells in lines:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[2:], strict=True))
        print(name.ljust(widths[0]), kind.ljust(widths[1]), *right, sep="  ")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=2000, help="how many [2000]")
    parser.add_argument("--seed", type=int, default=0, help="chooses bytes and bits [0]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
