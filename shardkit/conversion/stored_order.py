"""The order in which images are stored, sorted on disk if they do not fit in memory.

Images are written in runs. A run is divided into buckets by the first bits of the rank that
determines the order. So the images in stored order are those of the first bucket of all runs,
sorted, then those of the second one, and so on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.contracts import NUMBERS, PackedEntries, StoredEntries, text_lengths
from shardkit.system.temporary import TemporaryFolder, full_disk_named

RUN = 50_000
"""Images of a run: 25 MB in memory before they are packed."""

_BUCKETS = 1024
_SHIFT = np.uint64(64 - 10)
"""Buckets of a run, by the first bits of the rank. Of 100 million images, one has 100,000, which
take 10 MB in memory."""

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
    order: list[int] = _order(_ranks(paths, seed)).tolist()
    return order


Ranks = npt.NDArray[np.uint64]
"""Two halves of the rank of each image, of shape (images, 2)."""


def _ranks(paths: Iterable[str], seed: int) -> Ranks:
    joined = b"".join([rank(path, seed) for path in paths])
    return np.frombuffer(joined, ">u8").reshape(-1, 2).astype(np.uint64)


def _order(ranks: Ranks) -> npt.NDArray[np.int64]:
    return np.lexsort((ranks[:, 1], ranks[:, 0]))


class Run(NamedTuple):
    """Neighboring images of a source, in a file: the images of each bucket, ranks, entries."""

    path: Path
    start: int
    """Offset in the file."""
    buckets: int
    images: int


def sort_entries(entries: StoredEntries, seed: int) -> StoredEntries:
    """Return entries in random order, which are read from a temporary folder."""
    folder = TemporaryFolder()
    runs = list[Run]()
    path = folder.path / "runs"
    with full_disk_named(), path.open("xb") as file:
        waiting = list[PackedEntries]()
        for chunk in entries.chunks():
            waiting.append(chunk)
            if sum(map(len, waiting)) >= _CHUNK:
                runs.append(write_run(file, path, PackedEntries.joined(waiting), seed))
                waiting.clear()
        runs.append(write_run(file, path, PackedEntries.joined(waiting), seed))
    return read_runs(runs, seed, folder)


def write_run(file: BinaryIO, path: Path, entries: PackedEntries, seed: int | None) -> Run:
    """Write images to the file at ``path``; without a seed, they keep their order."""
    ranks = np.zeros((len(entries), 2), np.uint64)
    counts = np.array([len(entries)])
    if seed is not None:
        ranks = _ranks(entries.paths(), seed)
        order = _order(ranks)
        ranks = ranks[order]
        entries = entries.take(order)
        counts = np.bincount((ranks[:, 0] >> _SHIFT).astype(np.int64), minlength=_BUCKETS)
    text, numbers = entries.parts()
    run = Run(path, file.tell(), len(counts), len(entries))
    file.write(b"".join([counts.tobytes(), ranks.tobytes(), numbers.tobytes(), text]))
    return run


def read_runs(
    runs: Sequence[Run], seed: int | None, folder: TemporaryFolder | None = None
) -> StoredEntries:
    """Return the images of all runs, which were written with ``seed``, in stored order.

    Their ``folder``, if given, lasts as long as the result.
    """
    if seed is None:
        return StoredEntries(
            lambda chunk: _read(runs[chunk], 0, 1)[0],
            [0, *accumulate(run.images for run in runs)],
        )
    buckets = [0]
    cuts = [0]
    sizes = sum((_bucket_sizes(run) for run in runs), np.zeros(_BUCKETS, np.int64))
    for bucket, end in enumerate(np.cumsum(sizes).tolist(), 1):
        if end - cuts[-1] > _CHUNK or bucket == _BUCKETS:
            buckets.append(bucket)
            cuts.append(end)

    def load(chunk: int, _kept: TemporaryFolder | None = folder) -> PackedEntries:
        read = [_read(run, *buckets[chunk : chunk + 2]) for run in runs]
        order = _order(np.concatenate([np.zeros((0, 2), np.uint64), *(chunk[1] for chunk in read)]))
        return PackedEntries.joined(chunk[0] for chunk in read).take(order)

    return StoredEntries(load, cuts)


def _bucket_sizes(run: Run) -> npt.NDArray[np.int64]:
    """Return the images of each bucket of a run."""
    with run.path.open("rb") as file:
        file.seek(run.start)
        return np.frombuffer(file.read(8 * run.buckets), np.int64)


def _read(run: Run, first: int, last: int) -> tuple[PackedEntries, Ranks]:
    """Return the images of some neighboring buckets of a run, and their ranks."""
    sizes = _bucket_sizes(run)
    start, stop = (int(sizes[:bucket].sum()) for bucket in (first, last))
    with run.path.open("rb") as file:

        def rows(offset: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
            size = np.dtype(dtype).itemsize
            file.seek(run.start + offset + start * size)
            return np.frombuffer(file.read((stop - start) * size), dtype)

        ranks = rows(8 * run.buckets, "2u8")
        numbers = rows(8 * run.buckets + 16 * run.images, NUMBERS)
        texts = 8 * run.buckets + (16 + NUMBERS.itemsize) * run.images
        file.seek(run.start + texts + (int(numbers["start"][0]) if len(numbers) else 0))
        text = file.read(int(text_lengths(numbers).sum()))
    return PackedEntries.of(text, numbers), ranks
