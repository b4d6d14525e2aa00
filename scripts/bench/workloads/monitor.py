"""The overhead of `ThroughputMonitor`: with the fastest loader, and with ready batches."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from contenders.adapter import BATCH, Task
from contenders.shardkit_ import Adapter
from harness import Result, Table, contend_here, show
from tqdm import tqdm
from workloads.rows import Bench

from shardkit import ShardDataset, ThroughputMonitor, make_loader

_BARE, _WATCHED, _SHOWN = "bare", "ThroughputMonitor", "ThroughputMonitor with a bar"

_BATCHES = 20_000
"""Of one run over batches that are there."""


def run(bench: Bench) -> list[Table]:
    """Time them on raw pixels, which take the least: the share of the monitor is largest there."""
    task = Task(
        kind="raw",
        folder=bench.work / "pixels224",
        sets=bench.work / "sets",
        options={"format": "lmdb"},
    )
    adapter = Adapter(task)
    adapter.prepare()
    epochs = _epochs(adapter.dataset, bench.rounds)
    alone = _alone(adapter.dataset, bench.rounds)
    alone.notes = [_note(epochs, alone)]
    return [epochs, alone]


def _epochs(dataset: ShardDataset, rounds: int) -> Table:
    """Epochs of raw pixels, images a second."""
    tried: dict[str, Callable[[], int]] = {
        name: partial(_epoch, dataset, watch) for name, watch in _ways().items()
    }
    table = Table(
        name="monitor-epochs", title="raw 224 x 224, 2 threads, an empty step", baseline=_BARE
    )
    return contend_here(table, tried, rounds)


def _ways() -> dict[str, Callable[[Any], Iterable[Any]]]:
    """Return how a loader is iterated over, by the name of the row."""
    return {
        _BARE: lambda loader: loader,
        _WATCHED: ThroughputMonitor,
        _SHOWN: lambda loader: ThroughputMonitor(loader, tqdm(file=io.StringIO())),
    }


def _epoch(dataset: ShardDataset, watch: Callable[[Any], Iterable[Any]]) -> int:
    loader = make_loader(dataset, BATCH, shuffle=True, num_workers=2)
    images = sum(len(labels) for _, labels in watch(loader))
    loader.close()
    return images


def _alone(dataset: ShardDataset, rounds: int) -> Table:
    """Microseconds for a batch that is there already."""
    batch = next(iter(make_loader(dataset, BATCH, num_workers=0)))
    batches = [batch] * _BATCHES
    table = Table(
        name="monitor-alone",
        title="batches that are there already",
        baseline=_BARE,
        unit="µs a batch",
        rounds=rounds,
    )
    table.results = [Result(name=name) for name in _ways()]
    for number in range(rounds + 1):
        show(f"round {number} of {rounds}, batches that are there")
        for result, watch in zip(table.results, _ways().values(), strict=True):
            begun = time.perf_counter()
            for _ in watch(batches):
                pass
            if number:
                result.rates.append(1e6 * (time.perf_counter() - begun) / _BATCHES)
    return table


def _note(epochs: Table, alone: Table) -> str:
    """Say which part of a batch's time the monitor takes where batches come quickest."""
    bare, _, shown = (statistics.median(result.rates) for result in alone.results)
    quickest = 1e6 * BATCH / statistics.median(epochs.results[0].rates)
    return (
        f"A monitor with a bar takes {shown - bare:.1f} µs of the {quickest:,.0f} µs between two "
        f"batches of raw pixels: {100 * (shown - bare) / quickest:.2f} %."
    )
