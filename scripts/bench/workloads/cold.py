"""Files that are not in the page cache: shuffled JPEGs of 30 KB, read by one reader."""

from __future__ import annotations

from pathlib import Path

from harness import Contender, Result, Table, start, time_rounds
from workloads.rows import Bench, Rows

from shardkit.measure.runner.page_cache import drop, resident
from shardkit.registry import format_names

_STORES = ("loose", "tar", "lmdb", "h5py")

_DROPPED = 0.02
"""Part of the pages that may be left: what somebody else holds for a moment."""


def run(bench: Bench) -> list[Table]:
    """Time reading of the stored bytes, and decoding of them."""
    one = {"num_workers": 1}
    stored = Rows("bytes", "jpeg256", "bytes")
    reading = [stored.other(f"{name}, one by one", "onebyone", store=name) for name in _STORES]
    for name in format_names():
        reading.append(stored.shardkit(f"{name}, __getitems__", format=name, plain=True))
        options = {"engine": "thread", "loader": one}
        reading.append(stored.shardkit(f"{name}, make_loader", format=name, **options))
    cropped = Rows("crop", "jpeg256", "crop")
    decoding = [
        cropped.ffcv("FFCV, os_cache", workers=1),
        cropped.ffcv("FFCV, process cache", workers=1, os_cache=False),
    ]
    for name in format_names():
        options = {"format": name, "engine": "thread", "loader": one}
        decoding.append(cropped.shardkit(f"{name}, make_loader", **options))
    return [
        _contend(
            Table(
                name="cold-bytes",
                title="cold JPEGs of 30 KB, shuffled, stored bytes, 1 reader",
                baseline="loose, one by one",
            ),
            reading,
            bench,
        ),
        _contend(
            Table(
                name="cold-crop",
                title="cold JPEGs of 30 KB, shuffled, center crop 224, 1 reader",
                baseline="FFCV, os_cache",
            ),
            decoding,
            bench,
        ),
    ]


def _contend(table: Table, contenders: list[Contender], bench: Bench) -> Table:
    """Start and check contenders and time them, each with its files dropped just before."""
    served, results, versions = start(contenders, bench.work)
    left: dict[str, float] = {}

    def make_cold(name: str) -> None:
        files = [Path(path) for path in served[name].ask("files")["files"]]
        for other, one in served.items():
            if not results[other].note.startswith("failed"):
                one.ask("forget", below=str(bench.work))
        drop(files)
        found = resident(files)
        if found is not None:  # else nothing is known, and nothing is noted
            left[name] = max(left.get(name, 0.0), found)

    try:
        time_rounds(served, results, bench.rounds, make_cold)
    finally:
        for one in served.values():
            one.close()
    for name, part in left.items():
        _note(results[name], part)
    table.results, table.versions, table.rounds = list(results.values()), versions, bench.rounds
    table.notes.append(
        "Pages were dropped with `posix_fadvise` before each run; by `mincore` "
        f"{100 * max(left.values(), default=0):.1f} % were left at the most. What lies below the "
        "kernel, such as a virtual machine's host, may still have cached them."
    )
    return table


def _note(result: Result, left: float) -> None:
    if left > _DROPPED:
        warm = f"not cold: {100 * left:.0f} % of its pages stayed in memory"
        result.note = "; ".join(filter(None, (result.note, warm)))
