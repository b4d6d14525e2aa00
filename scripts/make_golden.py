"""Write tests/golden/: tiny datasets, which later versions must read.

    python scripts/make_golden.py            write missing datasets
    python scripts/make_golden.py --force    rewrite all datasets, after a change of the layout

The images in tests/golden/source, more and photos and the masks are only read. For each format
there is a labeled dataset of their bytes, the same after an append, one of raw pixels, one of
planes, one with fields of all kinds, and one whose fields were changed later; and an attached
archive. expected.json lists their content, computed without shardkit's readers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardkit.attaching.attach import attach
from shardkit.changes import fields
from shardkit.changes.append import append
from shardkit.conversion.convert import convert
from shardkit.dataset.manifest import load_manifest
from shardkit.kinds.field import Field
from shardkit.recipe import Recipe
from shardkit.record import make_keys

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
FORMATS = ("hdf5", "lmdb", "webdataset")
PICTURES = (
    "bird/größe ★ 1.v2.jpg",
    "bird/wren.jpg",
    "cat/__tabby__.png",
    "cat/tom.jpg",
    "cat/tom.png",
)
"""The pictures of the classes bird and cat. The last one is noise, and with 3 KB too large for a
leaf page of LMDB."""

MORE = ("cat/new.png", "fox/red.jpg")
"""What is appended. The class fox is new."""

PHOTOS = ("full/tall.jpg", "full/wide.jpg", "half/gray.jpg", "half/plain.png", "half/tall.jpg")
"""Pictures of the dataset of planes, in each sampling."""

ARCHIVE = "archive.tar"
ARCHIVE_TIME = 1_500_000_000
"""Modification time of the attached archive in seconds, which its manifest states."""

RAW = Recipe(encode="raw", resize=(6, 4), resize_mode="stretch", enlarge=True, filter="box")
"""Height and width are those of the third picture, which therefore keeps its pixels."""

OPTIONS = {"labelled": Recipe(), "raw": RAW, "planes": Recipe(encode="planes")}
SOURCES = {"labelled": "source", "raw": "source", "planes": "photos"}


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
    expected: dict[str, Any] = {
        "sources": {path: _describe("source", path) for path in PICTURES},
        "more": {path: _describe("more", path) for path in MORE},
        "photos": {path: _describe("photos", path) for path in PHOTOS},
    }
    for name, make in _makers().items():
        target = GOLDEN / name
        if "--force" in arguments and target.exists():
            shutil.rmtree(target)
        if not target.exists():
            make(target)
        expected[name] = _shards(target)
    text = json.dumps(expected, indent=1, ensure_ascii=True)
    (GOLDEN / "expected.json").write_text(text + "\n", "ascii")


def _makers() -> dict[str, Callable[[Path], object]]:
    """Return the function that makes each dataset, by its folder below `GOLDEN`."""
    makers: dict[str, Callable[[Path], object]] = {}
    for storage in FORMATS:
        for kind in OPTIONS:
            makers[f"{storage}/{kind}"] = partial(convert_pictures, storage, kind)
        makers[f"{storage}/fields"] = partial(convert_fields, storage)
        makers[f"{storage}/appended"] = partial(append_pictures, storage)
        makers[f"{storage}/layered"] = partial(change_fields, storage)
    return makers | {"attached": attach_pictures}


def convert_pictures(storage: str, kind: str, target: Path) -> None:
    """Make a golden dataset of pictures with one of `OPTIONS`: two shards, of three and two."""
    source = GOLDEN / SOURCES[kind]
    convert(source, target, to=storage, recipe=OPTIONS[kind], shard_samples=3, seed=1)


CAPTIONS = {path: f"größe of {path}" for path in PICTURES}
"""The text that `change_fields` adds to each picture."""

LABELS = {path: ("cat", "bird", "fox")[n % 3] for n, path in enumerate(PICTURES)}
"""The label that it gives each picture; the class fox is new."""


def change_fields(storage: str, target: Path) -> None:
    """Make the golden dataset to which fields were added, and whose labels were replaced."""
    convert_pictures(storage, "labelled", target)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.jsonl"
        rows = [{"path": p, "caption": CAPTIONS[p], "label": LABELS[p]} for p in PICTURES]
        table.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        fields.add(target, table, field=["caption"])
        fields.add(target, {"latent": np.arange(30, dtype="<f2").reshape(5, 3, 2)})
        fields.replace(target, table, field=["label"])


def append_pictures(storage: str, target: Path) -> None:
    """Make the golden dataset of `PICTURES` to which `MORE` were appended."""
    convert_pictures(storage, "labelled", target)
    append(target, GOLDEN / "more")


def attach_pictures(target: Path) -> None:
    """Make the attached golden dataset: an archive of pictures with captions, and its index."""
    target.mkdir()
    with tarfile.open(target / ARCHIVE, "w", format=tarfile.USTAR_FORMAT) as archive:
        for path in ("bird/wren.jpg", "cat/tom.png"):
            for name, content in (
                (path, (GOLDEN / "source" / path).read_bytes()),
                (f"{path[:-4]}.txt", f"größe of {path}".encode()),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    os.utime(target / ARCHIVE, (ARCHIVE_TIME, ARCHIVE_TIME))
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state  # where attach notes its result
        attach_archive(target)


def attach_archive(folder: Path) -> None:
    """Attach the archive in ``folder`` as ``folder/index``, by a relative path."""
    with contextlib.chdir(folder):
        attach(ARCHIVE, "index", label="folder", keep="txt", workers=1)


def convert_fields(storage: str, target: Path) -> None:
    """Make the golden dataset of records with several fields."""
    convert(samples(), target, to=storage, schema=SCHEMA, shard_samples=3, seed=1)


def _shards(target: Path) -> dict[str, str]:
    """Return the SHA-256 of each shard, by its path below ``target``."""
    if target.name == "attached":
        return {ARCHIVE: hashlib.sha256((target / ARCHIVE).read_bytes()).hexdigest()}
    return {shard.name: shard.sha256 for shard in load_manifest(target).shards}


def _describe(folder: str, name: str) -> dict[str, Any]:
    """Return what is expected of one picture, wherever it is stored."""
    path = GOLDEN / folder / name
    names = {"source": [*PICTURES], "more": [*MORE], "photos": [*PHOTOS]}[folder]
    classes = ["full", "half"] if folder == "photos" else ["bird", "cat", "fox"]
    with Image.open(path) as image:
        size, pixels = image.size, image.convert("RGB").tobytes()
    # Decoders of JPEG may differ. Planes may not: they are finished in exact arithmetic.
    exact = path.suffix == ".png" or folder == "photos"
    return {
        "key": make_keys(names)[names.index(name)],
        "label": classes.index(name.split("/", maxsplit=1)[0]),
        "size": size,
        "bytes": hashlib.sha256(path.read_bytes()).hexdigest(),
        "pixels": hashlib.sha256(pixels).hexdigest() if exact else None,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
