"""Ten million rows compared with ten thousand: opening, the first batch and random reads.

    python scripts/bench/scale.py [--format lmdb] [--rows 10000000] [--work DIR]

What is real: a whole shard of 10,000 records, JPEGs of 500 x 375 pixels and 30 KB, written by
the format's own writer, and an index, keys, paths, labels and a manifest of as many rows as stated,
written by the package's own functions. What is not: the shards are one file under many names (hard
links), so that 10 million rows name 300 GB and take 300 MB of disk and page cache; their keys and
paths are those of the one shard over and over; and there are 128 different pictures. ``shardkit
info`` and every reader take the dataset as it is.

So these are equal for both sizes: the file that is read, its records and its page cache. The page
cache is warm, and no disk is measured, unless a line says so. What differs is what size is about:
320 MB of index against 320 KB, 1,000 shards against one, and the order.

It takes 1.3 GB of disk, 2.5 GB of memory for a moment while the index is written, and 2 minutes, or
the double on a machine that others use.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import Memory, fresh, of_children, pictures, table, timed

from shardkit import (
    BlockShuffle,
    RandomResizedCrop,
    ShardDataset,
    make_loader,
    open_dataset,
)
from shardkit.contracts import ShardSpec
from shardkit.dataset.index import INDEX_DIRECTORY, IndexPart, save_index
from shardkit.dataset.index_builder import index_shard
from shardkit.dataset.manifest import FieldEntry, FileEntry, Manifest, ShardEntry, save_manifest
from shardkit.kinds.field import Field
from shardkit.measure.runner.page_cache import drop
from shardkit.recipe import Recipe
from shardkit.record import Record, dump_json
from shardkit.registry import format_names, get_format
from shardkit.reporting.describe import describe
from shardkit.sampling.order import Order
from shardkit.system.files import sha256_of, sync

BATCH = 64
WORKERS = 2
AREA_ROWS = 10_000
"""Records of the one shard, and rows of the small dataset."""

CLASSES = 1000
PICTURES = 128
STARTS = 3
"""Fresh processes in which each start is timed."""


# The datasets.


def records(rows: int) -> Iterator[Record]:
    """Give records as a conversion makes them; labels are even."""
    images = pictures(min(rows, PICTURES))
    for row in range(rows):
        key = f"{row % CLASSES:04d}/{row:08d}"
        meta = {"path": f"{key}.jpg", "width": 500, "height": 375}
        fields = {"jpg": images[row % len(images)], "cls": b"%d" % (row % CLASSES)}
        yield Record(key, {**fields, "json": dump_json(meta)})


def write_area(to: str, path: Path, rows: int) -> IndexPart:
    """Write the one shard, and return its index, read from it."""
    storage = get_format(to)
    writer = storage.write(path, ShardSpec(meta={"made": "for scripts/bench/scale.py"}))
    for record in records(rows):
        writer.write(record)
    writer.close()
    return index_shard(storage, path)


def write_dataset(to: str, directory: Path, area: Path, part: IndexPart, shards: int) -> Path:
    """Make a dataset whose shards are all the file ``area``; return ``directory``."""
    directory.mkdir()
    names = [f"shard-{number:06d}{area.suffix}" for number in range(shards)]
    for name in names:
        (directory / name).hardlink_to(area)
    each, sha256, size = len(part.rows), sha256_of(area), area.stat().st_size
    files = [directory / name for name in save_index([part] * shards, directory)]
    for file in files:  # pages that wait to be written would count as memory of whoever maps them
        sync(file)
    rows = each * shards
    labels = np.bincount(part.rows["label"], minlength=CLASSES) * shards
    manifest = Manifest(
        format=to,
        rows=rows,
        content_digest="0" * 64,
        shards=tuple(ShardEntry(name=name, rows=each, bytes=size, sha256=sha256) for name in names),
        files=tuple(
            FileEntry(
                name=f"{INDEX_DIRECTORY}/{file.name}",
                bytes=file.stat().st_size,
                sha256=sha256_of(file),
            )
            for file in files
        ),
        fields={"cls": rows, "jpg": rows, "json": rows},
        schema=(
            FieldEntry.of("image", Field("image"), rows),
            FieldEntry.of("label", Field("label", classes=("0000",)), rows),
        ),
        classes=tuple(f"{label:04d}" for label in range(CLASSES)),
        class_counts=tuple(labels.tolist()),
        raw_shape=None,
        recipe=Recipe().describe(),
        source={
            "kind": "imagefolder",
            "name": "scale",
            "images": rows,
            "order": "folder",
            "seed": None,
            "limit": None,
        },
    )
    save_manifest(manifest, directory)
    return directory


def write_both(to: str, work: Path, rows: int) -> dict[str, Path]:
    """Make both datasets of a format; return their places by the number of rows."""
    area = work / f"area{get_format(to).suffix}"
    part = write_area(to, area, AREA_ROWS)
    return {
        f"{AREA_ROWS * shards:,}": write_dataset(to, work / str(shards), area, part, shards)
        for shards in (1, rows // AREA_ROWS)
    }


# What is measured; each of these runs in a process of its own.


def open_once(path: Path) -> tuple[tuple[float, float, float], Memory, Memory]:
    """Open a dataset, open it again, and unpickle it as a worker does.

    Returns:
        Milliseconds of each; the memory that opening took; and what 100 random batches took too.
    """
    before = Memory.of()
    opening, *later = (timed(lambda: open_dataset(path, decode="bytes")) for _ in range(8))
    dataset = open_dataset(path, decode="bytes")
    opened = Memory.of().above(before)
    pickled = pickle.dumps(dataset)
    unpickling = timed(lambda: pickle.loads(pickled))
    for rows in batches(len(dataset), 100):
        dataset.__getitems__(rows)
    return (opening, statistics.median(later), unpickling), opened, Memory.of().above(before)


def batches(size: int, count: int, epoch: int = 0) -> Iterator[list[int]]:
    """Give the first batches of a shuffled epoch, as rows."""
    order = Order(size=size, shuffle=True)
    for number in range(count):
        positions = np.arange(number * BATCH, (number + 1) * BATCH) % size
        yield order.rows(epoch, positions).tolist()


def spread(rows: list[int], shards: int) -> list[int]:
    """Return rows of a large dataset that are the records ``rows``, ten in a row from each shard.

    So 10,000 rows lie in all of 1,000 shards, and are all records of the one: this tells what the
    number of rows costs from what the number of shards does.
    """
    return [row * shards // AREA_ROWS * AREA_ROWS + row for row in rows]


def first_batch(path: Path, options: dict[str, Any], *, cold: bool = False) -> float:
    """Return the seconds from `open_dataset` to the first batch."""
    if cold:
        drop([*path.glob("shard-000000.*"), *path.glob(f"{INDEX_DIRECTORY}/*")])
    begun = time.perf_counter()
    dataset = open_dataset(path, decode=RandomResizedCrop(224))
    loader = make_loader(dataset, BATCH, shuffle=True, **options)
    iterator = iter(loader)
    next(iterator)
    seconds = time.perf_counter() - begun
    loader.close()
    return seconds


def workers_memory(path: Path, start_method: str) -> Memory:
    """Return what a worker of the process engine has after 60 batches."""
    options: dict[str, Any] = {
        "engine": "process",
        "num_workers": WORKERS,
        "start_method": start_method,
    }
    dataset = open_dataset(path, decode=RandomResizedCrop(224))
    loader = make_loader(dataset, BATCH, shuffle=True, **options)
    for _ in itertools.islice(loader, 60):
        pass
    found = of_children()
    loader.close()
    return found


def read_interleaved(paths: dict[str, Path], decode: Any, rounds: int) -> list[float]:
    """Return the median milliseconds of batches that are read in turn, warm.

    They are of the small dataset, of it again (so much is noise), of as many rows of the large one,
    and of all of the large one. All of the index is mapped before.
    """
    small, large = (open_dataset(path, decode=decode) for path in paths.values())
    shards = len(large) // len(small)
    assert len(large.targets) == shards * len(small.targets)
    count, records = rounds + 5, len(small)
    orders: list[tuple[ShardDataset, list[list[int]]]] = [
        (small, list(batches(records, count, epoch=0))),
        (small, list(batches(records, count, epoch=1))),
        (large, [spread(rows, shards) for rows in batches(records, count, epoch=2)]),
        (large, list(batches(len(large), count, epoch=3))),
    ]
    spent: list[list[float]] = [[] for _ in orders]
    for number in range(count):
        for turn in range(len(orders)):
            place = (turn + number) % len(orders)
            dataset, each = orders[place]
            spent[place].append(timed(partial(dataset.__getitems__, each[number])))
    return [statistics.median(values[5:]) for values in spent]


def questions(path: Path) -> list[tuple[object, ...]]:
    """Return what single questions to a dataset cost in milliseconds: at first, and again."""
    dataset = open_dataset(path, decode=RandomResizedCrop(224))
    size = len(dataset)
    last = np.arange(size - BATCH, size)
    loaders = {
        name: make_loader(dataset, BATCH, shuffle=shuffle, engine="thread")
        for name, shuffle in (("full", True), ("blocks", BlockShuffle()))
    }
    state = loaders["full"].state_dict()
    asked: dict[str, Callable[[], object]] = {
        "`len(dataset)`": lambda: len(dataset),
        "`dataset.classes`": lambda: dataset.classes,
        "`dataset.keys[i]`": lambda: dataset.keys[size // 2],
        "`dataset.paths[i]`": lambda: dataset.paths[size // 3],
        "`dataset.targets`": lambda: dataset.targets,
        "`dataset.manifest.digest`": lambda: dataset.manifest.digest,
        "`pickle.dumps(dataset)`": lambda: pickle.dumps(dataset),
        "`len(loader)`": lambda: len(loaders["full"]),
        "`loader.state_dict()`": loaders["full"].state_dict,
        "`loader.load_state_dict(...)`": lambda: loaders["full"].load_state_dict(state),
        "order of the last batch, full shuffle": lambda: Order(size=size, shuffle=True).rows(
            0, last
        ),
        "order of the last batch, Blocks": lambda: Order(size=size, shuffle=BlockShuffle()).rows(
            0, last
        ),
    }
    lines: list[tuple[object, ...]] = []
    for name, call in asked.items():
        once = timed(call)
        again = statistics.median(timed(call) for _ in range(5))
        lines.append((name, once, again))
    return lines


# What is printed.


def show_opening(places: dict[str, Path]) -> None:
    """Opening: time and memory, in the main process and in workers."""
    lines: list[tuple[object, ...]] = []
    for name, path in places.items():
        found = [fresh(partial(open_once, path)) for _ in range(STARTS)]
        times = [
            statistics.median(column) for column in zip(*(one[0] for one in found), strict=True)
        ]
        opened, read = found[-1][1:]
        lines.append((name, *times, opened.own, read.own, read.rss))
    columns: tuple[str, ...] = (
        "rows",
        "`open_dataset`, ms",
        "again, ms",
        "unpickled, ms",
        "own MB when open",
        "own MB after 100 batches",
        "MB mapped then",
    )
    table(f"opening, in a process of its own; times are medians of {STARTS}", columns, lines)
    lines = []
    for method in ("fork", "forkserver"):
        small, large = (fresh(partial(workers_memory, path, method)) for path in places.values())
        more = large.above(small)
        lines.append((method, small.own, large.own, more.own, more.pss - more.shared_memory))
    columns = "start method", *(f"own MB, {name} rows" for name in places), "more own", "more PSS"
    table("a worker process of `make_loader` after 60 batches", columns, lines)


def show_first_batch(places: dict[str, Path]) -> None:
    """The first shuffled batch."""
    threads: dict[str, Any] = {"engine": "thread", "num_workers": WORKERS}
    forked, served = (
        {"engine": "process", "num_workers": WORKERS, "start_method": method}
        for method in ("fork", "forkserver")
    )
    kinds: dict[str, Callable[[Path], float]] = {
        "threads": partial(first_batch, options=threads),
        "threads, nothing of it in the page cache": partial(
            first_batch, options=threads, cold=True
        ),
        "processes, fork": partial(first_batch, options=forked),
        "processes, a fork server that has to begin": partial(first_batch, options=served),
    }
    lines: list[tuple[object, ...]] = []
    for name, call in kinds.items():
        times = ([fresh(partial(call, path)) for _ in range(STARTS)] for path in places.values())
        lines.append((name, *(statistics.median(values) for values in times)))
    table(
        f"`open_dataset`, `make_loader(shuffle=True)`, first batch: s, median of {STARTS}",
        ("engine", *(f"{name} rows" for name in places)),
        lines,
    )


def show_reads(places: dict[str, Path]) -> None:
    """Random reads, and what of their cost comes of rows, of shards and of noise."""
    lines: list[tuple[object, ...]] = []
    for title, decode, rounds in (
        ('`decode="bytes"`', "bytes", 600),
        ("`decode=RandomResizedCrop(224)`", RandomResizedCrop(224), 50),
    ):
        small, again, part, large = fresh(partial(read_interleaved, places, decode, rounds))
        lines.append((title, small, large, large / small, large / part, part / small))
        lines[-1] += (again / small,)
    table(
        "`__getitems__` of 64 shuffled rows, interleaved: ms, medians",
        (
            "",
            *(f"{name} rows" for name in places),
            "ratio",
            "of it rows",
            "of it shards",
            "noise",
        ),
        lines,
    )


def show(to: str, work: Path, rows: int) -> None:
    """Make the datasets of a format and print all about them."""
    begun = time.perf_counter()
    places = fresh(partial(write_both, to, work, rows))
    print(f"\n## {to}\n\nBoth datasets were made in {time.perf_counter() - begun:.0f} s.")
    for name, path in places.items():
        begun = time.perf_counter()
        told = describe(path)[""]
        print(
            f"`shardkit info` of {name} rows: {told['shards']:,} shards that name "
            f"{told['bytes'] / 1e9:,.2f} GB, {time.perf_counter() - begun:.2f} s."
        )
    show_opening(places)
    show_first_batch(places)
    show_reads(places)
    table(
        f"questions to a dataset of {list(places)[1]} rows: ms",
        ("", "at first", "again"),
        fresh(partial(questions, list(places.values())[1])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--format", choices=format_names(), default="lmdb")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--work", type=Path, help="Where to put the data (default: temporary).")
    given = parser.parse_args()
    cores, system = len(os.sched_getaffinity(0)), f"{platform.system()} {platform.release()}"
    print(f"{cores} cores, {system}, Python {platform.python_version()}, torch {torch.__version__}")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        show(given.format, Path(folder), given.rows)
    print(f"\n{time.perf_counter() - begun:.0f} s in all.")


if __name__ == "__main__":
    main()
