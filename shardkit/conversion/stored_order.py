"""The order in which images are stored, sorted on disk if they do not fit in memory.

Images are written in runs. A run is divided into buckets by the first bits of the rank that
determines the order. So the images in stored order are those of the first bucket of all runs,
sorted, then those of the second one, and so on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from shardkit.contracts import Entry, StoredEntries
from shardkit.conversion.entry_files import dump_entries, load_entries
from shardkit.system.temporary import TemporaryFolder, full_disk_named

RUN = 50_000
"""Images of a run: 25 MB in memory."""

_BUCKETS = 1024
"""Buckets of a run. Of 100 million images, one has 100,000, which take 50 MB in memory."""

_CHUNK = 20_000
"""Images to sort in memory, if buckets are smaller."""


def rank(path: str, seed: int) -> bytes:
    """Return the BLAKE2b-128 of seed and path, by which images are sorted in random order."""
    data = b"%d\0" % seed + path.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, digest_size=16).digest()


def stored_order(paths: Iterable[str], seed: int) -> list[int]:
    """Return the rows of ``paths`` in random order: sorted by `rank`.

    The order of two images depends only on their paths and the seed: not on the random numbers of a
    library, nor on the other images.
    """
    ranks = np.frombuffer(b"".join([rank(path, seed) for path in paths]), ">u8").reshape(-1, 2)
    order: list[int] = np.lexsort((ranks[:, 1], ranks[:, 0])).tolist()
    return order


class Run(NamedTuple):
    """Neighboring images of a source, in a file."""

    path: Path
    table: int
    """Offset of the table: the start of each bucket in the file, the end of the last one, and the
    images of each bucket."""
    images: int


def sort_entries(entries: Iterable[Entry], seed: int) -> StoredEntries:
    """Return entries in random order, which are read from a temporary folder."""
    folder = TemporaryFolder()
    rest = iter(entries)
    runs = list[Run]()
    path = folder.path / "runs"
    with full_disk_named(), path.open("xb") as file:
        while some := list(islice(rest, _CHUNK)):
            runs.append(write_run(file, path, some, seed))
            del some  # before the next ones are read
    return read_runs(runs, seed, folder)


def write_run(file: BinaryIO, path: Path, entries: list[Entry], seed: int | None) -> Run:
    """Write images to the file at ``path``; without a seed, they keep their order."""
    starts = array("q", [file.tell()])
    counts = array("q")
    for bucket in _buckets(entries, seed):
        if bucket:
            file.write(dump_entries(bucket) + b"\n")
        starts.append(file.tell())
        counts.append(len(bucket))
    file.write(starts.tobytes() + counts.tobytes())
    return Run(path, starts[-1], len(entries))


def _buckets(entries: list[Entry], seed: int | None) -> list[list[Entry]]:
    if seed is None:
        return [entries]
    buckets: list[list[Entry]] = [[] for _ in range(_BUCKETS)]
    for entry in entries:
        first = int.from_bytes(rank(entry.path, seed)[:2], "big")
        buckets[first * _BUCKETS >> 16].append(entry)
    return buckets


def read_runs(
    runs: Sequence[Run], seed: int | None, folder: TemporaryFolder | None = None
) -> StoredEntries:
    """Return the images of all runs, which were written with ``seed``, in stored order.

    Their ``folder``, if given, lasts as long as the result.
    """
    if seed is None:
        return StoredEntries(
            lambda chunk: _read(runs[chunk], 0, 1), [0, *accumulate(run.images for run in runs)]
        )
    buckets = [0]
    cuts = [0]
    for bucket, end in enumerate(np.cumsum(_bucket_sizes(runs)).tolist(), 1):
        if end - cuts[-1] > _CHUNK or bucket == _BUCKETS:
            buckets.append(bucket)
            cuts.append(end)

    def load(chunk: int, _kept: TemporaryFolder | None = folder) -> list[Entry]:
        first, last = buckets[chunk : chunk + 2]
        entries = [entry for run in runs for entry in _read(run, first, last)]
        return [entries[row] for row in stored_order([entry.path for entry in entries], seed)]

    return StoredEntries(load, cuts)


def _bucket_sizes(runs: Sequence[Run]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the images of each bucket, in all runs."""
    sizes = np.zeros(_BUCKETS, np.int64)
    for run in runs:
        with run.path.open("rb") as file:
            file.seek(run.table + 8 * (_BUCKETS + 1))
            sizes += np.frombuffer(file.read(8 * _BUCKETS), np.int64)
    return sizes


def _read(run: Run, first: int, last: int) -> list[Entry]:
    """Return the images of some neighboring buckets of a run."""
    with run.path.open("rb") as file:
        file.seek(run.table + 8 * first)
        starts = array("q", file.read(8 * (last - first + 1)))
        file.seek(starts[0])
        content = file.read(starts[-1] - starts[0])
    return [entry for line in content.splitlines() for entry in load_entries(line)]
