"""Feed training: `make_loader` with both engines against plain DataLoaders, interleaved in one run.

    python scripts/bench/loaders.py PHOTOS [--copies 10] [--rounds 5] [--work DIR]

PHOTOS is an image folder of photographs (class folders). Each is taken ``--copies`` times. All give
uint8 batches of 64 x 3 x 224 x 224, shuffled, with 2 workers and a warm page cache. Where samples
are defined to be the same, that is shown by checksums before anything is timed.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import zlib
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
    write_folder,
)
from harness import Contender, contend, machine
from PIL import Image
from torch.utils.data import DataLoader

import shardkit
from shardkit import (
    CenterCrop,
    EpochBatchSampler,
    LoaderOptions,
    RandomResizedCrop,
    Recipe,
    collate,
    make_loader,
    open_dataset,
)
from shardkit.registry import format_names

ENGINES = ("thread", "process")


def random_resized_crop(image: Image.Image) -> torch.Tensor:
    """RandomResizedCrop(224) and RandomHorizontalFlip, as torchvision does them with Pillow."""
    width, height = image.size
    box = (0, 0, width, height)
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = random.randint(0, width - across), random.randint(0, height - down)
            box = (left, top, left + across, top + down)
            break
    image = image.crop(box).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def plain(dataset: Any, **options: Any) -> DataLoader[Any]:
    """A DataLoader as most people make it, with persistent workers."""
    return DataLoader(
        dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, **options
    )


def sampled(dataset: Any) -> DataLoader[Any]:
    """A plain DataLoader with our order and collate function."""
    return DataLoader(
        dataset,
        batch_sampler=EpochBatchSampler(dataset, BATCH, shuffle=True),
        num_workers=WORKERS,
        persistent_workers=True,
        collate_fn=collate,
    )


def loader(dataset: Any, engine: str, **options: Any) -> Any:
    """Our loader."""
    options = {"engine": engine, "workers": WORKERS, **options}
    return make_loader(dataset, BATCH, shuffle=True, options=LoaderOptions(**options))


def epoch(batches: Any) -> int:
    """Read one epoch."""
    return sum(len(labels) for _, labels in batches)


def digests(batches: Any) -> list[tuple[int, list[int]]]:
    """A checksum of the pixels, and the labels, of each batch of epoch 0."""
    batches.set_epoch(0)
    return [
        (zlib.crc32(i.permute(0, 2, 3, 1).contiguous().numpy()), n.tolist()) for i, n in batches
    ]


def contenders(datasets: dict[str, Any], reuse: bool = False) -> dict[str, Contender]:
    """Both engines over each data set, shown to give the same batches."""
    found: dict[str, Contender] = {}
    expected = None
    for name, dataset in datasets.items():
        for engine in ENGINES:
            made = loader(dataset, engine)
            seen = digests(made)
            expected = expected or seen
            if seen != expected:
                sys.exit(f"{name} with the engine {engine} gives other batches")
            found[f"make_loader, {engine}, {name}"] = partial(epoch, made)
        if reuse:
            made = loader(dataset, "thread", reuse_buffers=True)
            found[f"make_loader, thread, reuse_buffers, {name}"] = partial(epoch, made)
    return found


def bench_crop(work: Path, rounds: int) -> None:
    """256-pixel JPEGs, centre crop: what the foundation's table reads, and now the loaders."""
    folder = PlainImageFolder(work / "resized-folder", crop_pil)
    op = CenterCrop(SIDE)
    shard = {name: open_dataset(work / f"resized-{name}", decode=op) for name in format_names()}
    some = shard["lmdb"]
    of_path = {
        str(Path(p).relative_to(work / "resized-folder")): r
        for r, (p, _) in enumerate(folder.samples)
    }
    for row in range(0, len(some), 97):
        image, label = some[row]
        other, expected = folder[of_path[some.paths[row]]]
        if label != expected or not torch.equal(image, other):
            sys.exit(f"row {row} differs from the folder's")
    contend(
        "centre crop of 256-pixel JPEGs, shuffled, 64 x 3 x 224 x 224, 2 workers",
        {
            "ImageFolder-like, plain DataLoader": partial(epoch, plain(folder)),
            "ShardDataset, plain DataLoader, default collate": partial(epoch, plain(some)),
            "ShardDataset, plain DataLoader, shardkit.collate": partial(epoch, sampled(some)),
            **contenders(shard, reuse=True),
        },
        rounds=rounds,
        baseline="ImageFolder-like, plain DataLoader",
    )


def bench_raw(work: Path, rounds: int) -> None:
    """Raw pixels."""
    shard = {name: open_dataset(work / f"raw-{name}", decode="torch") for name in format_names()}
    contend(
        "raw 224 x 224, shuffled, batches of 64, 2 workers",
        {
            "ShardDataset, plain DataLoader, shardkit.collate": partial(
                epoch, sampled(shard["lmdb"])
            ),
            **contenders(shard, reuse=True),
        },
        rounds=rounds,
        baseline="ShardDataset, plain DataLoader, shardkit.collate",
    )


def bench_random(originals: Path, work: Path, rounds: int) -> None:
    """Random crops of originals."""
    folder = PlainImageFolder(originals, random_resized_crop)
    dataset = open_dataset(work / "originals-lmdb", decode=RandomResizedCrop(SIDE))
    whole = open_dataset(work / "originals-lmdb", random_resized_crop)
    contend(
        "RandomResizedCrop(224) and flip of originals, 2 workers",
        {
            "ImageFolder-like with Pillow, plain DataLoader": partial(epoch, plain(folder)),
            "ShardDataset, the same transform, make_loader": partial(epoch, loader(whole, "auto")),
            **contenders({"lmdb": dataset}),
        },
        rounds=rounds,
        baseline="ImageFolder-like with Pillow, plain DataLoader",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="Where to put the data (default: temporary).")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as place:
        work = Path(place)
        originals = work / "originals"
        copy_photos(given.photos, originals, given.copies)
        raw = Recipe(resize=(SIDE, SIDE), resize_mode="crop", encode="raw")
        for name in format_names():
            convert_once(
                originals, work / f"resized-{name}", to=name, recipe=Recipe(resize=(256, 256))
            )
            convert_once(originals, work / f"raw-{name}", to=name, recipe=raw)
        images = convert_once(originals, work / "originals-lmdb", to="lmdb")
        write_folder(work / "resized-lmdb", work / "resized-folder")
        print(machine("torch", "pillow", "simplejpeg", "h5py", "lmdb"))
        print(f"{images} JPEG files.")
        print(f"shardkit {shardkit.__version__}; all loaders of a table give the same batches.")
        bench_crop(work, given.rounds)
        bench_raw(work, given.rounds)
        bench_random(originals, work, given.rounds)


if __name__ == "__main__":
    main()
