"""The reasons for the loader's defaults: each option compared with neighboring values.

The start of worker processes is timed to the first batch, each method in an interpreter of its own.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contenders.adapter import BATCH, SIDE, Task
from contenders.shardkit_ import Adapter
from harness import Result, Table, contend_here
from workloads.rows import Bench

from shardkit import BlockShuffle, ShardDataset, make_loader
from shardkit.sampling.order import Order
from shardkit.torch.engine.options import START_METHODS


def run(bench: Bench) -> list[Table]:
    """Time them all, on JPEGs of 256 pixels with a center crop of 224."""
    task = Task(
        kind="crop",
        folder=bench.work / "jpeg256",
        sets=bench.work / "sets",
        options={"format": "lmdb"},
    )
    adapter = Adapter(task)
    adapter.prepare()
    return [
        _workers(adapter.dataset, bench.rounds),
        _prefetch(adapter.dataset, bench.rounds),
        _start(adapter.path, bench.rounds),
        _order(bench.rounds),
    ]


def _workers(dataset: ShardDataset, rounds: int) -> Table:
    """Threads from none to four on this machine."""
    tried: dict[str, Callable[[], int]] = {
        f"{workers} threads": partial(_epoch, dataset, {"num_workers": workers})
        for workers in (0, 1, 2, 3, 4)
    }
    table = Table(name="options-workers", title="threads", baseline="2 threads")
    return contend_here(table, tried, rounds)


def _epoch(dataset: ShardDataset, options: dict[str, Any]) -> int:
    """Read one epoch with a loader made for it."""
    loader = make_loader(dataset, BATCH, shuffle=True, **options)
    images = sum(len(labels) for _, labels in loader)
    loader.close()
    return images


def _prefetch(dataset: ShardDataset, rounds: int) -> Table:
    """Batches under way, for a consumer whose own work is uneven."""
    tried: dict[str, Callable[[], int]] = {
        f"{engine}, prefetch {prefetch}": partial(
            _consume,
            dataset,
            {"engine": engine, "num_workers": 2, "prefetch_factor": prefetch // 2},
        )
        for engine in ("thread", "process")
        for prefetch in (2, 4, 8)
    }
    table = Table(
        name="options-prefetch", title="prefetch, uneven consumer", baseline="thread, prefetch 4"
    )
    return contend_here(table, tried, rounds)


def _consume(dataset: ShardDataset, options: dict[str, Any]) -> int:
    """Read one epoch, and work after every fourth batch."""
    loader = make_loader(dataset, BATCH, shuffle=True, **options)
    work, images = np.ones(3_000_000, np.float32), 0
    for number, (_, labels) in enumerate(loader):
        images += len(labels)
        for _ in range(8 * (number % 4 == 0)):
            work.sum()
    loader.close()
    return images


_FIRST_BATCH = """
import sys, time
from shardkit import make_loader, open_dataset, CenterCrop

if __name__ == "__main__":
    dataset = open_dataset(sys.argv[1], decode=CenterCrop(int(sys.argv[3])))
    for _ in range(2):
        options = dict(engine="process", num_workers=2, start_method=sys.argv[2])
        loader = make_loader(dataset, 64, **options)
        begun = time.perf_counter()
        next(iter(loader))
        print(time.perf_counter() - begun)
        loader.close()
"""


def _start(path: Path, rounds: int) -> Table:
    """Seconds to the first batch, of the first loader in a process and of the second."""
    table = Table(
        name="options-start",
        title="the first batch of 2 worker processes",
        baseline="fork, first loader",
        unit="s",
        rounds=rounds,
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(_FIRST_BATCH)
        script.flush()
        for method in START_METHODS[1:]:
            command = [sys.executable, script.name, str(path), method, str(SIDE)]
            runs = [
                subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                for _ in range(rounds)
            ]
            for number, which in enumerate(("first", "second")):
                seconds = [float(run[number]) for run in runs]
                table.results.append(Result(name=f"{method}, {which} loader", rates=seconds))
    return table


def _order(rounds: int) -> Table:
    """Milliseconds to look rows up, for the first batch of an epoch."""
    table = Table(
        name="options-order",
        title="rows of an epoch of 10 million",
        baseline="shuffle=True, 64 rows",
        unit="ms",
        rounds=rounds,
    )
    for name, shuffle in (("shuffle=True", True), ("BlockShuffle()", BlockShuffle())):
        for count in (64, 8192):
            order = Order(size=10_000_000, shuffle=shuffle)
            times = [_lookup(order, number, count) for number in range(rounds)]
            table.results.append(Result(name=f"{name}, {count} rows", rates=times))
    return table


def _lookup(order: Order, epoch: int, count: int, repeats: int = 4) -> float:
    """Return the median milliseconds of a few look-ups, each in an epoch of its own."""
    times = []
    for number in range(repeats):
        begun = time.perf_counter()
        order.rows(repeats * epoch + number, np.arange(count))
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)
