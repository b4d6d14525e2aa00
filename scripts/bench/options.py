"""What the loader's defaults rest on: each option tried beside its neighbours, interleaved.

    python scripts/bench/options.py PHOTOS [--copies 10] [--rounds 5] [--work DIR]

The work is that of loaders.py: 256-pixel JPEGs, centre crop 224, shuffled, batches of 64. The start
of worker processes is timed to the first batch, each method in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from folder import BATCH, SIDE, convert_once, copy_photos
from harness import Contender, contend, machine

from shardkit import CenterCrop, LoaderOptions, Recipe, ShardDataset, make_loader, open_dataset
from shardkit.torch.options import START_METHODS


def epoch(dataset: ShardDataset, options: LoaderOptions) -> int:
    """Read one epoch with a loader made for it."""
    loader = make_loader(dataset, BATCH, shuffle=True, options=options)
    images = sum(len(labels) for _, labels in loader)
    loader.close()
    return images


def bench_workers(dataset: ShardDataset, rounds: int) -> None:
    """Threads from none to four on this machine."""
    contend(
        "threads",
        {
            f"{workers} threads": partial(epoch, dataset, LoaderOptions(workers=workers))
            for workers in (0, 1, 2, 3, 4)
        },
        rounds=rounds,
        baseline="2 threads",
    )


def bench_prefetch(dataset: ShardDataset, rounds: int) -> None:
    """Batches under way, for a consumer whose own work is uneven."""

    def consume(options: LoaderOptions) -> int:
        loader = make_loader(dataset, BATCH, shuffle=True, options=options)
        work, images = np.ones(3_000_000, np.float32), 0
        for number, (_, labels) in enumerate(loader):
            images += len(labels)
            for _ in range(8 * (number % 4 == 0)):
                work.sum()
        loader.close()
        return images

    tried: dict[str, Contender] = {
        f"{engine}, prefetch {prefetch}": partial(
            consume, LoaderOptions(engine=engine, workers=2, prefetch=prefetch)
        )
        for engine in ("thread", "process")
        for prefetch in (2, 4, 8)
    }
    contend("prefetch, uneven consumer", tried, rounds=rounds, baseline="thread, prefetch 4")


_FIRST_BATCH = """
import sys, time
from shardkit import LoaderOptions, make_loader, open_dataset, CenterCrop

if __name__ == "__main__":
    dataset = open_dataset(sys.argv[1], decode=CenterCrop(224))
    for _ in range(2):
        options = LoaderOptions(engine="process", workers=2, start_method=sys.argv[2])
        loader = make_loader(dataset, 64, options=options)
        begun = time.perf_counter()
        next(iter(loader))
        print(time.perf_counter() - begun)
        loader.close()
"""


def bench_start(path: Path, rounds: int) -> None:
    """Seconds to the first batch, of the first loader in a process and of the second."""
    print(f"\n**seconds to the first batch of 2 worker processes**, median of {rounds}\n")
    print("| start method | first loader | second loader |")
    print("|---|---:|---:|")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(_FIRST_BATCH)
        script.flush()
        for method in START_METHODS[1:]:
            runs = [
                subprocess.run(
                    [sys.executable, script.name, str(path), method],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.split()
                for _ in range(rounds)
            ]
            first, second = (statistics.median(float(run[n]) for run in runs) for n in (0, 1))
            print(f"| {method} | {first:.2f} | {second:.2f} |")


def bench_order() -> None:
    """Time to look rows up, for the first batch of an epoch."""
    from shardkit import Blocks, Order

    print("\n**the order of 10 million rows**\n\n| asked for | ms |\n|---|---:|")
    for name, shuffle in (("shuffle=True", True), ("Blocks()", Blocks())):
        for count in (64, 8192):
            order = Order(size=10_000_000, shuffle=shuffle)
            times = []
            for number in range(20):
                begun = time.perf_counter()
                order.rows(number, np.arange(count))
                times.append(time.perf_counter() - begun)
            print(f"| {name}, {count} rows | {1000 * statistics.median(times):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="Where to put the data (default: temporary).")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.work) as place:
        work = Path(place)
        copy_photos(given.photos, work / "originals", given.copies)
        recipe = Recipe(resize=(256, 256))
        images = convert_once(work / "originals", work / "lmdb", to="lmdb", recipe=recipe)
        print(machine("torch", "pillow", "simplejpeg", "h5py", "lmdb"))
        print(f"{images} JPEG files.")
        dataset = open_dataset(work / "lmdb", decode=CenterCrop(SIDE))
        bench_workers(dataset, given.rounds)
        bench_prefetch(dataset, given.rounds)
        bench_start(work / "lmdb", given.rounds)
        bench_order()


if __name__ == "__main__":
    main()
