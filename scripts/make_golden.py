"""Write tests/golden/: tiny datasets of format version 1, which later versions must read.

    python scripts/make_golden.py            write missing datasets
    python scripts/make_golden.py --force    rewrite all datasets, after a change of the layout

The images in tests/golden/source and the masks in tests/golden/masks are drawn once and then only
read: their encoded bytes depend on the version of Pillow. For each format there is a labeled
dataset of their bytes, one of raw pixels, and one with fields of all kinds; expected.json lists
their content, computed without shardkit's readers.
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

from shardkit.conversion.convert import convert, convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.dataset.manifest import load_manifest
from shardkit.kinds.field import Field
from shardkit.recipe import Recipe
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


SCHEMA = {
    "label": Field("label", classes=("bird", "cat")),
    "tags": Field("labels", classes=("a", "b", "c")),
    "boxes": Field("boxes", classes=("beak", "paw")),
    "plain": Field("boxes"),
    "joints": Field("keypoints", classes=("left wing", "right wing")),
    "points": Field("keypoints"),
    "ragged": Field("array", "<i2"),
}
"""What the first of `samples` does not show."""


def samples() -> list[dict[str, Any]]:
    """Return samples with a field of each kind; some lack some fields."""
    made: list[dict[str, Any]] = []
    for n, path in enumerate(PICTURES):
        made.append(
            {
                "key": f"record/{n}",
                "image": GOLDEN / "source" / path,
                "mask": GOLDEN / "masks" / f"{n}.png",
                "label": n % 2,
                "tags": [each for each in range(3) if (n >> each) & 1],
                "score": (n - 1) / 8,
                "count": 200 + n,
                "caption": "größe ★\n" * n,
                "info": {"n": n, "list": [None, True, 0.5]},
                "boxes": [[0, 1, 2.5 + n, 3, n % 2]] * (n % 3),
                "plain": [[0.25, 0, n + 1, n + 1]],
                "joints": [[[n + 0.5, 1, 2], [2, n, 1]]] * (n % 3),
                "points": [[0.25, n, 2], [0, 0, 0]],
                "latent": np.arange(n, n + 12, dtype="<f2").reshape(3, 4),
                "bits": np.array([[n % 2 == 0, True]]),
                "ragged": np.arange(2 * n, dtype="<i2").reshape(n, 2),
                "blob": bytes(range(n)),
            }
        )
    for name in ("mask", "score", "caption", "info", "boxes", "joints", "ragged", "blob"):
        made[3][name] = None
    return made


def main(arguments: list[str]) -> None:
    """Make what is missing below `GOLDEN`."""
    source = GOLDEN / "source"
    for number, (path, size) in enumerate(PICTURES.items()):
        if not (source / path).exists():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            _draw(number, size).save(source / path)
        mask = GOLDEN / "masks" / f"{number}.png"
        if not mask.exists():
            mask.parent.mkdir(exist_ok=True)
            _draw(number, size).getchannel(0).point([each % 5 for each in range(256)]).save(mask)
    expected: dict[str, Any] = {"sources": {path: _describe(source / path) for path in PICTURES}}
    for storage in FORMATS:
        for kind in OPTIONS:
            target = GOLDEN / storage / kind
            if "--force" in arguments and target.exists():
                shutil.rmtree(target)
            if not target.exists():
                convert_scan(scan_imagefolder(source), target, options(storage, kind))
            expected[f"{storage}/{kind}"] = _shards(target)
        target = GOLDEN / storage / "fields"
        if "--force" in arguments and target.exists():
            shutil.rmtree(target)
        if not target.exists():
            convert_fields(storage, target)
        expected[f"{storage}/fields"] = _shards(target)
    text = json.dumps(expected, indent=1, ensure_ascii=True)
    (GOLDEN / "expected.json").write_text(text + "\n", "ascii")


def convert_fields(storage: str, target: Path) -> None:
    """Make the golden dataset of records with several fields."""
    convert(samples(), target, to=storage, schema=SCHEMA, shard_samples=3, seed=1)


def _shards(target: Path) -> dict[str, str]:
    return {shard.name: shard.sha256 for shard in load_manifest(target).shards}


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
