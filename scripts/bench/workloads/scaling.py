"""One thread and two: with the loader, and in the compiled module alone, which is the limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from contenders.adapter import BATCH, SIDE, Task
from contenders.shardkit_ import Adapter
from harness import Table, contend_here
from workloads.rows import Bench

from shardkit import CenterCrop, ShardDataset, make_loader
from shardkit.system.compiled import fill, fill_values
from shardkit.torch.data.ops import as_crop_table
from shardkit.torch.engine.preflight import sample_bytes

_FOLDERS = {"crop": "jpeg256", "raw": "pixels224", "latent": "latents"}
"""Kinds of tasks, and what they read."""

_THREADS = (1, 2)


def run(bench: Bench) -> list[Table]:
    """Time center crops of JPEGs, raw pixels and arrays, from LMDB."""
    tables = []
    for kind, folder in _FOLDERS.items():
        task = Task(
            kind=kind,
            folder=bench.work / folder,
            sets=bench.work / "sets",
            options={"format": "lmdb"},
        )
        adapter = Adapter(task)
        adapter.prepare()
        work: dict[str, Callable[[], int]] = {}
        for threads in _THREADS:
            work[f"loader, {threads} threads"] = partial(_load, adapter.dataset, threads)
            work[f"compiled module alone, {threads} threads"] = partial(
                _fill, adapter.dataset, kind, threads
            )
        table = Table(
            name=f"scaling-{kind}", title=f"{kind}, threads", baseline="loader, 1 threads"
        )
        tables.append(contend_here(table, work, bench.rounds))
    return tables


def _load(dataset: ShardDataset, threads: int) -> int:
    options: dict[str, Any] = {"engine": "thread", "num_workers": threads}
    return sum(len(batch[-1]) for batch in make_loader(dataset, BATCH, shuffle=True, **options))


def _fill(dataset: ShardDataset, kind: str, threads: int) -> int:
    """Fill a block for each thread, batch after batch."""
    order = np.random.default_rng(0).permutation(len(dataset))
    each = np.array_split(order, threads)
    workers = [threading.Thread(target=_fill_rows, args=(dataset, kind, rows)) for rows in each]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(order)


def _fill_rows(
    dataset: ShardDataset, kind: str, rows: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> None:
    op = CenterCrop(SIDE)
    size = sample_bytes(dataset) if kind == "latent" else 0
    block = np.empty((BATCH, size) if size else (BATCH, SIDE, SIDE, 3), np.uint8)
    for start in range(0, len(rows), BATCH):
        found = dataset.shards.find(rows[start : start + BATCH], dataset.fields[0])
        out = block[: len(found)]
        if size:
            left = fill_values(found, out)
        elif kind == "raw":
            left = fill(found, out)
        else:
            crops = op.crops(found.widths, found.heights, lambda _: None)  # type: ignore[arg-type, return-value]
            left = fill(found, out, as_crop_table(op, crops))
        if left:
            raise RuntimeError(f"the compiled module left {len(left)} samples to Python")
