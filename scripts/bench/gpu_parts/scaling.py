"""Loading alone: images/s of each engine with more and more workers."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

from gpu_parts.job import ENGINES, Job
from isolation import Progress

from shardkit.system.machine import usable_cpus

WORKERS = (1, 2, 4, 8, 16)
BATCH = 64

_LONGEST = 4.0
"""Seconds of one measurement."""


def run(values: dict[str, Any], progress: Progress) -> None:
    """Measure all engines with all numbers of workers; the ratio is the efficiency over one.

    Of JPEGs and planes, random crops are read. Batches are pinned if there is a GPU, as in
    training.
    """
    job = Job.of(values)
    dataset = job.dataset(job.kind)
    workers = WORKERS[:2] if job.is_small else WORKERS
    batch_size = 8 if job.is_small else BATCH
    # Interleaved: if time runs out, all engines lack the same numbers of workers.
    cells = [(count, engine) for count in workers for engine in ENGINES]
    single: dict[str, float] = {}
    for number, (count, engine) in enumerate(cells):
        case = f"{engine}, {count} worker{'s' * (count > 1)}"
        # Workers take the other half to start, and to fill their buffers.
        seconds = job.seconds(_LONGEST, progress.left / (len(cells) - number) / 2)
        if not seconds:
            progress.add(case, remark="no time left")
            continue
        with progress.case(case):
            loader = job.loader(dataset, batch_size, engine, num_workers=count, endless=True)
            with closing(loader):
                speed = _rate(loader, 2 * count + 2, seconds)
            single.setdefault(engine, speed / count)
            progress.add(
                case,
                speed,
                "images/s",
                ratio=speed / (count * single[engine]),
                remark=f"more workers than the {usable_cpus()} cores"
                if count > usable_cpus()
                else "",
            )


def _rate(loader: Any, warm_up: int, seconds: float) -> float:
    """Return images/s, after some batches that do not count: a loader starts with empty buffers."""
    counts = (len(labels) for _, labels in loader)
    for _ in range(warm_up):
        next(counts)
    start = time.perf_counter()
    images = next(counts)
    while time.perf_counter() - start < seconds:
        images += next(counts)
    return images / (time.perf_counter() - start)
