"""Scan a source in parts, by several processes, with the images in files instead of memory.

Each process writes the images of its part in runs. A run is divided into buckets by the first bits
of the rank that determines the stored order. So the images of a split in stored order are those of
the first bucket of all runs, sorted, then those of the second one, and so on.
"""

from __future__ import annotations

import secrets
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import NamedTuple

from shardkit.contracts import Entry, PartedSource, Scan, SourcePart
from shardkit.conversion.entry_files import StoredEntries, dump_entries, load_entries
from shardkit.conversion.plan import rank, stored_order
from shardkit.dataset.reports import StoredReport, report_lines
from shardkit.errors import Problem
from shardkit.system.pool import Meter

_PARTS = 256
"""Parts of each split: enough to keep many workers busy to the end, few enough for full runs."""

_BUCKETS = 1024
"""Buckets of a run. Of 100 million images, one has 100,000, which take 50 MB in memory."""

_RUN = 50_000
"""Images of a run: 25 MB in memory."""

_PIECE = 50_000
"""Images to sort in memory, if buckets are smaller."""


class ListTask(NamedTuple):
    """A part of a source to list."""

    source: PartedSource
    part: SourcePart
    folder: Path
    """Folder for the file of the part."""
    seed: int | None
    """Seed of the stored order; None keeps that of the source."""


class _Run(NamedTuple):
    """Neighboring images of a part, in a file."""

    path: Path
    starts: array[int]
    """Start of each bucket in the file, then the end of the last one."""
    counts: array[int]
    """Images of each bucket."""


class Listed(NamedTuple):
    """What a part contains."""

    runs: dict[str, list[_Run]]
    """The images, by split."""
    problems: list[Problem]
    ignored: StoredReport

    @property
    def images(self) -> int:
        """The number of images."""
        return sum(sum(run.counts) for runs in self.runs.values() for run in runs)


def list_part(task: ListTask) -> Listed:
    """List a part of a source into a file."""
    listing, ignored = task.source.list_part(task.part), 0
    runs: dict[str, list[_Run]] = defaultdict(list)
    path = task.folder / secrets.token_hex(8)  # a cluster may run a task twice
    report = path.with_suffix(".jsonl")
    meter = Meter()
    with path.open("xb") as file, report.open("xb") as lines:
        while found := list(islice(listing.entries, _RUN)):
            for split in dict.fromkeys(split for split, _ in found):
                starts, counts = array("q", [file.tell()]), array("q")
                for bucket in _buckets([entry for of, entry in found if of == split], task.seed):
                    if bucket:
                        file.write(dump_entries(bucket) + b"\n")
                    starts.append(file.tell())
                    counts.append(len(bucket))
                runs[split].append(_Run(path, starts, counts))
            meter.add(images=len(found))
            lines.writelines(report_lines(listing.ignored))
            ignored += len(listing.ignored)
            listing.ignored.clear()
        lines.writelines(report_lines(listing.ignored))
        ignored += len(listing.ignored)
    meter.flush()
    return Listed(dict(runs), listing.problems, StoredReport(report, ignored, task.folder))


def _buckets(entries: list[Entry], seed: int | None) -> list[list[Entry]]:
    if seed is None:
        return [entries]
    buckets: list[list[Entry]] = [[] for _ in range(_BUCKETS)]
    for entry in entries:
        first = int.from_bytes(rank(entry.path, seed)[:2], "big")
        buckets[first * _BUCKETS >> 16].append(entry)
    return buckets


def scan_in_parts(
    source: PartedSource,
    folder: Path,
    seed_of: Callable[[Scan], int | None],
    run: Callable[[Sequence[ListTask]], Iterator[tuple[ListTask, Listed]]],
) -> Scan:
    """Return the scan of a source, with images in stored order that are read from files.

    Args:
        source: The source.
        folder: An empty folder for the files, which must remain while the scan is used.
        seed_of: Returns the seed of the stored order; None keeps that of the source.
        run: Applies `list_part` to tasks, and yields them with the results in any order.

    Raises:
        UsageError: If the source is missing, unreadable or empty.
        OSError: If the files cannot be written.
    """
    scan, parts = source.parts(_PARTS)
    seed = seed_of(scan)
    tasks = [ListTask(source, part, folder, seed) for part in parts]
    found = {task.part: listed for task, listed in run(tasks)}
    splits, ignored = {}, dict[str, Collection[Problem]]()
    for split, images in scan.splits.items():
        runs = [run for part in parts for run in found[part].runs.get(split, ())]
        splits[split] = images.of(_entries(runs, seed))
        listed = [found[part] for part in parts if part.split == split]
        for each in listed:
            scan.problems[split] += each.problems
        others = scan.ignored.get(split, ())
        ignored[split] = _Joined([*(each.ignored for each in listed), others])
    scan = replace(scan, splits=splits, ignored=ignored)
    source.require_images(scan)
    return scan


class _Joined(Collection[Problem]):
    """The ignored files of several parts."""

    def __init__(self, parts: Sequence[Collection[Problem]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[Problem]:
        return chain.from_iterable(self._parts)

    def __contains__(self, problem: object) -> bool:
        return any(problem in part for part in self._parts)


_last_kept = lru_cache(maxsize=1)
"""Keeps the last piece, since the next shard often starts in it."""


def _entries(runs: Sequence[_Run], seed: int | None) -> StoredEntries:
    """Return the images of a split in stored order."""
    if seed is None:
        counts = [run.counts[0] for run in runs]
        read = _last_kept(lambda piece: _read(runs[piece], 0, 1))
        return StoredEntries(read, [0, *accumulate(counts)])
    counts = [sum(run.counts[bucket] for run in runs) for bucket in range(_BUCKETS)]
    buckets, cuts = [0], [0]
    for bucket, end in enumerate(accumulate(counts), 1):
        if end - cuts[-1] > _PIECE or bucket == _BUCKETS:
            buckets.append(bucket)
            cuts.append(end)

    @_last_kept
    def load(piece: int) -> list[Entry]:
        entries = [entry for run in runs for entry in _read(run, *buckets[piece : piece + 2])]
        return [entries[row] for row in stored_order([entry.path for entry in entries], seed)]

    return StoredEntries(load, cuts)


def _read(run: _Run, start: int, stop: int) -> list[Entry]:
    """Return the images of some neighboring buckets."""
    with run.path.open("rb") as file:
        file.seek(run.starts[start])
        content = file.read(run.starts[stop] - run.starts[start])
    return [entry for line in content.splitlines() for entry in load_entries(line)]
