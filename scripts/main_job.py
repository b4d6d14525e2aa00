"""Prints the modules that the main job loads in a fresh process, with their lines.

python scripts/main_job.py

It converts a folder of photographs to each format with a resize, verifies, compares, damages and
repairs the datasets, and reads them with threads and with processes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import shardkit


def make_photos(folder: Path) -> Path:
    """Write four JPEG files of two classes."""
    random = np.random.default_rng(0)
    for number in range(4):
        path = folder / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (24, 32, 3), np.uint8)).save(path)
    return folder / "photos"


def do_main_job(folder: Path) -> None:
    """Convert, verify, repair and read."""
    photos = make_photos(folder)
    for to in ("lmdb", "hdf5", "webdataset"):
        out = folder / to
        shardkit.convert(photos, out, to=to, resize="16")
        assert shardkit.verify(out, against=photos).ok
        (shard,) = out.rglob("shard-*")
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        shardkit.repair(out, source=photos)
        assert shardkit.verify(out, against=photos).ok
        dataset = shardkit.open_dataset(out, decode="torch")
        for engine in ("thread", "process"):
            loader = shardkit.make_loader(dataset, 2, num_workers=1, engine=engine)
            assert len(list(loader)) == 2


def main() -> None:
    """Do it in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        do_main_job(Path(folder))
    root = Path(shardkit.__file__).parent
    total = 0
    for path in sorted(root.rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        if f"shardkit.{name.removesuffix('.__init__')}" in sys.modules:
            count = len(path.read_text("utf-8").splitlines())
            total += count
            print(f"{count:6} {name}")
    print(f"{total:6} all")


if __name__ == "__main__":
    main()
