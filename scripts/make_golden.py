"""Write tests/golden/: tiny datasets of format version 1, which later versions must read.

    python scripts/make_golden.py            write missing datasets
    python scripts/make_golden.py --force    rewrite all datasets, after a change of the layout

The images in tests/golden/source are drawn once and then only read: their encoded bytes depend on
the version of Pillow. For each format there is a labeled dataset of their bytes and one of raw
pixels; expected.json lists their content, computed without shardkit's readers.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.conversion.recipe import Recipe
from shardkit.dataset.manifest import load_manifest
from shardkit.record import make_keys
from shardkit.sources.imagefolder import scan_imagefolder

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
FORMATS = ("hdf5", "lmdb", "webdataset")
PICTURES = {
    "bird/größe ★ 1.v2.jpg": (7, 5),
    "bird/wren.jpg": (8, 8),
    "cat/__tabby__.png": (4, 6),
    "cat/tom.jpg": (8, 6),
    "cat/tom.png": (32, 32),
}
"""Path of each picture to its width and height; the classes are bird and cat. The last one is
noise, and with 3 KB too large for a leaf page of LMDB."""

RAW = Recipe(encode="raw", resize=(6, 4), resize_mode="stretch", enlarge=True, filter="box")
"""Height and width are those of the third picture, which therefore keeps its pixels."""

OPTIONS = {
    "labelled": Recipe(),
    "raw": RAW,
}


def options(storage: str, kind: str) -> ConvertOptions:
    """Return the options with which a golden dataset is made: two shards, of three and two."""
    return ConvertOptions(to=storage, recipe=OPTIONS[kind], shard_samples=3, seed=1)


def main(arguments: list[str]) -> None:
    """Make what is missing below `GOLDEN`."""
    source = GOLDEN / "source"
    for number, (path, size) in enumerate(PICTURES.items()):
        if not (source / path).exists():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            _draw(number, size).save(source / path)
    expected: dict[str, Any] = {"sources": {path: _describe(source / path) for path in PICTURES}}
    for storage in FORMATS:
        for kind in OPTIONS:
            target = GOLDEN / storage / kind
            if "--force" in arguments and target.exists():
                shutil.rmtree(target)
            if not target.exists():
                convert_scan(scan_imagefolder(source), target, options(storage, kind))
            expected[f"{storage}/{kind}"] = {
                shard.name: shard.sha256 for shard in load_manifest(target).shards
            }
    text = json.dumps(expected, indent=1, ensure_ascii=True)
    (GOLDEN / "expected.json").write_text(text + "\n", "ascii")


def _draw(number: int, size: tuple[int, int]) -> Image.Image:
    width, height = size
    if size == (32, 32):
        return Image.frombytes("RGB", size, random.Random(0).randbytes(32 * 32 * 3))
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    pixels = np.stack([across * 30, down * 30, (across + down + number) * 17 % 256], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def _describe(path: Path) -> dict[str, Any]:
    """Return what is expected of one picture, wherever it is stored."""
    name = path.relative_to(GOLDEN / "source").as_posix()
    with Image.open(path) as image:
        size, pixels = image.size, image.convert("RGB").tobytes()
    return {
        "key": make_keys(PICTURES)[list(PICTURES).index(name)],
        "label": sorted({path.split("/")[0] for path in PICTURES}).index(name.split("/")[0]),
        "size": size,
        "bytes": hashlib.sha256(path.read_bytes()).hexdigest(),
        # Only of what is lossless: decoders of JPEG may differ.
        "pixels": hashlib.sha256(pixels).hexdigest() if path.suffix == ".png" else None,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
