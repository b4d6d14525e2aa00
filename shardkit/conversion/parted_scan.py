"""Scan a source in parts, by several processes, with the images in files instead of memory."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from shardkit.contracts import PackedEntries, PartedSource, Scan, SourcePart
from shardkit.conversion.stored_order import RUN, Run, read_runs, write_run
from shardkit.dataset.reports import StoredReport, report_lines
from shardkit.errors import Problem
from shardkit.system.pool import Meter

_PARTS = 256
"""Parts of each split: enough to keep many workers busy to the end, few enough for full runs."""


class ListTask(NamedTuple):
    """A part of a source to list."""

    source: PartedSource
    part: SourcePart
    folder: Path
    """Folder for the file of the part."""
    seed: int | None
    """Seed of the stored order; None keeps that of the source."""


class Listed(NamedTuple):
    """The content of a part."""

    runs: dict[str, list[Run]]
    """The images, by split."""
    problems: list[Problem]
    ignored: StoredReport

    @property
    def images(self) -> int:
        """The number of images."""
        return sum(run.images for runs in self.runs.values() for run in runs)


def list_part(task: ListTask) -> Listed:
    """List a part of a source into a file."""
    listing = task.source.list_part(task.part)
    ignored = 0
    runs: dict[str, list[Run]] = defaultdict(list)
    path = task.folder / secrets.token_hex(8)  # a cluster may run a task twice
    report = path.with_suffix(".jsonl")
    meter = Meter()
    with path.open("xb") as file, report.open("xb") as lines:
        while batch := list(islice(listing.entries, RUN)):
            for split in dict.fromkeys(split for split, _ in batch):
                entries = [entry for of, entry in batch if of == split]
                runs[split].append(write_run(file, path, PackedEntries(entries), task.seed))
            meter.add(images=len(batch))
            lines.writelines(report_lines(listing.ignored))
            ignored += len(listing.ignored)
            listing.ignored.clear()
        lines.writelines(report_lines(listing.ignored))
        ignored += len(listing.ignored)
    meter.flush()
    return Listed(dict(runs), listing.problems, StoredReport(report, ignored, task.folder))


def scan_in_parts(
    source: PartedSource,
    folder: Path,
    seed_of: Callable[[Scan], int | None],
    run: Callable[[Sequence[ListTask]], Iterator[tuple[ListTask, Listed]]],
    classes: Sequence[str] | None = None,
) -> Scan:
    """Return the scan of a source, with images in stored order that are read from files.

    The files are in ``folder``, which is empty and must remain while the scan is used; OSError if
    they cannot be written. ``seed_of`` returns the seed of the stored order; None keeps that of the
    source. ``run`` applies `list_part` to tasks, and yields them with the results in any order.
    """
    scan, parts = source.parts(_PARTS, classes)
    seed = seed_of(scan)
    tasks = [ListTask(source, part, folder, seed) for part in parts]
    listings = {task.part: listed for task, listed in run(tasks)}
    splits = {}
    ignored = dict[str, Collection[Problem]]()
    for split, images in scan.splits.items():
        runs = [run for part in parts for run in listings[part].runs.get(split, ())]
        splits[split] = images.of(read_runs(runs, seed))
        of_split = [listings[part] for part in parts if part.split == split]
        for listing in of_split:
            scan.problems[split] += listing.problems
        others = scan.ignored.get(split, ())
        ignored[split] = _Joined([*(listing.ignored for listing in of_split), others])
    scan = replace(scan, splits=splits, ignored=ignored)
    return source.complete(scan)


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
