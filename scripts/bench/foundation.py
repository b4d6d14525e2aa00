"""Convert and read: shardkit's formats against the folder itself, interleaved in one run.

    python scripts/bench/foundation.py PHOTOS [--copies 10] [--rounds 5] [--work DIR]

PHOTOS is an image folder of photographs (class folders). Each is taken ``--copies`` times, so that
a few hundred make a data set. All readers give batches of 64 uint8 images of 3 x 224 x 224,
shuffled, from a DataLoader with 2 worker processes; before anything is timed, all are shown to give
the same images and labels. The page cache is warm.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from folder import (
    BATCH,
    SIDE,
    WORKERS,
    PlainImageFolder,
    convert_once,
    copy_photos,
    crop_pil,
    resize,
    write_folder,
)
from harness import Contender, contend, machine
from PIL import Image
from torch.utils.data import DataLoader, Subset, default_collate

import shardkit
from shardkit import (
    Recipe,
    collate,
    open_dataset,
    verify,
)
from shardkit.registry import format_names


def crop_tensor(image: torch.Tensor) -> torch.Tensor:
    """CenterCrop(224) of uint8 CHW."""
    top, left = round((image.shape[1] - SIDE) / 2), round((image.shape[2] - SIDE) / 2)
    return image[:, top : top + SIDE, left : left + SIDE]


def resize_and_crop(image: Image.Image) -> torch.Tensor:
    """Resize(256, bicubic) and CenterCrop(224), from the original."""
    return crop_pil(resize(image))


def tar_once(source: Path, target: Path) -> int:
    """`tar cf` of the tree, by Python's tarfile: the least that any packing does."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    with tarfile.open(target, "w") as archive:
        for path in files:
            archive.add(path, arcname=str(path.relative_to(source)))
    return len(files)


def pillow_once(source: Path, target: Path) -> int:
    """The plain script: open, resize, save at quality 90."""
    shutil.rmtree(target, ignore_errors=True)
    files = sorted(path for path in source.rglob("*") if path.is_file())
    for path in files:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            resize(image.convert("RGB")).save(place, "JPEG", quality=90)
    return len(files)


def verify_once(directory: Path) -> int:
    """Verify at the level ``full`` with one process."""
    result = verify(directory)
    assert result.ok
    return result.records


def loader(dataset: Any, rows: list[int]) -> DataLoader[Any]:
    """The DataLoader that all readers get."""
    batches = collate if isinstance(dataset, shardkit.ShardDataset) else default_collate
    return DataLoader(Subset(dataset, rows), BATCH, num_workers=WORKERS, collate_fn=batches)


def read_once(dataset: Any, rows: list[int]) -> int:
    """Read one epoch."""
    return sum(len(labels) for _, labels in loader(dataset, rows))


def digests(dataset: Any, rows: list[int]) -> Iterator[tuple[int, list[int]]]:
    """A checksum of the pixels, and the labels, of each batch."""
    for images, labels in loader(dataset, rows):
        yield zlib.crc32(images.permute(0, 2, 3, 1).contiguous().numpy()), labels.tolist()


def bench_convert(originals: Path, work: Path, rounds: int) -> None:
    """Converting: bytes as they are, and resized."""
    copying: dict[str, Contender] = {
        "tarfile, no checks": partial(tar_once, originals, work / "x.tar")
    }
    for name in format_names():
        for check in ("decode", "none"):
            options = {"to": name, "recipe": Recipe(check=check)}
            target = work / f"copy-{name}"
            copying[f"shardkit {name}, --check {check}"] = partial(
                convert_once, originals, target, **options
            )
    contend("convert, bytes as they are", copying, rounds=rounds, baseline="tarfile, no checks")
    resizing: dict[str, Contender] = {
        "Pillow script": partial(pillow_once, originals, work / "pillow")
    }
    for name in format_names():
        target = work / f"resized-{name}"
        options = {"to": name, "recipe": Recipe(resize=(256, 256))}
        resizing[f"shardkit {name}, --resize 256"] = partial(
            convert_once, originals, target, **options
        )
    contend("convert, shorter side 256", resizing, rounds=rounds, baseline="Pillow script")
    verifying = {f"verify {n}": partial(verify_once, work / f"copy-{n}") for n in format_names()}
    contend("verify, level full", verifying, rounds=rounds, baseline="verify hdf5")


def bench_read(originals: Path, work: Path, rounds: int) -> None:
    """Reading: what is stored at shorter side 256, cropped to 224; and raw pixels."""
    resized = work / "resized-folder"
    write_folder(work / "resized-lmdb", resized)
    folder = PlainImageFolder(resized, crop_pil)
    of_path = {
        str(Path(path).relative_to(resized)): row for row, (path, _) in enumerate(folder.samples)
    }
    shard = {
        name: open_dataset(work / f"resized-{name}", crop_tensor, decode="torch")
        for name in format_names()
    }
    order = np.random.default_rng(0).permutation(len(folder)).tolist()
    folder_order = [of_path[shard["lmdb"].paths[row]] for row in order]
    expected = list(digests(folder, folder_order))
    for name, dataset in shard.items():
        if list(digests(dataset, order)) != expected:
            sys.exit(f"{name} gives other images or labels than the folder")
    print("\nAll readers give the same images and labels (checked before timing).")
    reading: dict[str, Contender] = {
        "ImageFolder-like, originals, Resize(256)": partial(
            read_once, PlainImageFolder(originals, resize_and_crop), order
        ),
        "ImageFolder-like, resized files": partial(read_once, folder, folder_order),
    }
    for name, dataset in shard.items():
        reading[f"shardkit {name}, decode='torch'"] = partial(read_once, dataset, order)
    pil = open_dataset(work / "resized-lmdb", crop_pil)
    reading["shardkit lmdb, decode='pil'"] = partial(read_once, pil, order)
    for name in format_names():
        recipe = Recipe(resize=(SIDE, SIDE), resize_mode="crop", encode="raw")
        convert_once(originals, work / f"raw-{name}", to=name, recipe=recipe)
        raw = open_dataset(work / f"raw-{name}", decode="torch")
        reading[f"shardkit {name}, raw 224x224"] = partial(read_once, raw, order)
    contend(
        "read, shuffled, batches of 64 x 3 x 224 x 224, 2 worker processes",
        reading,
        rounds=rounds,
        baseline="ImageFolder-like, resized files",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--work", type=Path, help="Where to put the data (default: a temporary folder)."
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        work = Path(folder)
        originals = work / "originals"
        copy_photos(given.photos, originals, given.copies)
        images = sum(1 for path in originals.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in originals.rglob("*") if path.is_file())
        print(machine("torch", "pillow", "simplejpeg", "h5py", "lmdb"))
        print(
            f"{images} JPEG files, {size / 1e6:.0f} MB; converting and verifying with one process."
        )
        bench_convert(originals, work, given.rounds)
        bench_read(originals, work, given.rounds)


if __name__ == "__main__":
    main()
