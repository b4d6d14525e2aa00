"""The facts of a dataset, one element for each image.

They are stored in the dataset's directory, but are not part of it. A conversion can measure the
images that it stores; a report measures all others.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.measures import MEASURES
from shardkit.dataset.located import EncodedImage
from shardkit.dataset.manifest import FACTS_NAME
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.record import ABSENT, STORED_KINDS
from shardkit.reporting.image_facts import FACT, VERSION, Facts, measure_images
from shardkit.system.files import published_file
from shardkit.system.npy import StoredValues, write_npy
from shardkit.system.pool import Meter, Report, run_tasks
from shardkit.system.user_files import remove_leftovers

_ROWS = 128
"""Rows measured in one task."""


def load_facts(shards: ShardSet, *, workers: int = 1, on_progress: Report | None = None) -> Facts:
    """Return the facts of all images, measuring those that are not stored yet.

    They are stored in the dataset's directory if it can be written. They do not depend on
    ``workers``.
    """
    rows = shards.rows
    facts = _stored(shards)
    fresh = (facts["checksum"] == rows["checksum"]) & (facts["version"] == VERSION)
    present = rows["field"] != STORED_KINDS.index(ABSENT)
    facts[~present] = 0
    missing = np.flatnonzero(present & ~fresh)
    if not len(missing):
        return facts
    tasks = [
        _Task(shards.directory, shards.manifest.digest, missing[start : start + _ROWS])
        for start in range(0, len(missing), _ROWS)
    ]
    for task, measured in run_tasks(_measure_task, tasks, workers=workers, on_progress=on_progress):
        facts[task.rows] = measured
    path = shards.directory / FACTS_NAME
    # A dataset that cannot be written is measured each time.
    with contextlib.suppress(OSError):
        remove_leftovers(path)
        with published_file(path) as file:
            write_npy(file, facts)
    return facts


def _stored(shards: ShardSet) -> Facts:
    """Return the stored facts, in which anything may be wrong; zeros without.

    Those of a dataset that was appended to may end where one of its parts begins.
    """
    path = shards.directory / FACTS_NAME
    facts = np.zeros(len(shards), FACT)
    for count in (len(shards), *(part.start for part in reversed(shards.dataset.parts))):
        with contextlib.suppress(OSError, ValueError):
            facts[:count] = StoredValues(path, FACT, count)[:]
            break
    facts["orientation"] = np.minimum(facts["orientation"], 8)  # EXIF has no others
    for name in ("mean", "std", "brightness", "contrast", "sharpness"):
        facts[name] = np.clip(np.nan_to_num(facts[name]), 0, 255)
    return facts


class _Task(NamedTuple):
    directory: Path
    digest: str
    rows: npt.NDArray[np.int64]


@lru_cache(maxsize=4)
def _opened(directory: Path, digest: str) -> ShardSet:
    """Return a dataset, opened once in each process; ``digest`` tells it from its successor."""
    return open_shards(directory)


def _measure_task(task: _Task) -> Facts:
    """Measure some images in a worker process."""
    return measure_rows(_opened(task.directory, task.digest), task.rows)


def measure_rows(shards: ShardSet, rows: npt.NDArray[np.int64]) -> Facts:
    """Return the facts of some rows, all of which have an image."""
    located = shards.find(rows)
    buffer = memoryview(bytearray(located.longest))
    meter = Meter()

    def read(number: int) -> EncodedImage:
        meter.add(images=1, size=located.lengths[number])
        return located.read(number, buffer)

    facts = measure_images(read, np.zeros(len(located), MEASURES))
    facts["checksum"] = shards.rows["checksum"][rows]
    meter.flush()
    return facts
