"""Facts of each image of a dataset, stored in its directory but not part of it."""

from __future__ import annotations

import contextlib
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.properties import properties
from shardkit.dataset.decode import decode_stored
from shardkit.dataset.located import EncodedImage
from shardkit.dataset.manifest import FACTS_NAME
from shardkit.dataset.parts import parts_of
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import BadImage
from shardkit.record import ABSENT, STORED_KINDS
from shardkit.reporting.measures import CROPS, SIDE, measure
from shardkit.system.files import published
from shardkit.system.npy import StoredValues, save_npy
from shardkit.system.pool import Meter, Report, run_tasks

VERSION = 1
"""Increased when measuring changes: facts of other versions are measured again."""

ABSENT_IMAGE, MEASURED, BROKEN = 0, 1, 2

FACT = np.dtype(
    [
        ("checksum", "<u4"),
        ("version", "u1"),
        ("state", "u1"),
        ("orientation", "u1"),
        ("quality", "u1"),
        ("frames", "<u2"),
        ("icc", "u1"),
        ("highlight", "u1"),
        ("mode", "S6"),
        ("content", "S16"),
        ("pixels", "S16"),
        ("hash", "<u8"),
        ("crops", "<u8", (CROPS,)),
        ("mean", "<f4", (3,)),
        ("std", "<f4", (3,)),
        ("brightness", "<f4"),
        ("contrast", "<f4"),
        ("sharpness", "<f4"),
    ]
)
"""Facts of a row. ``checksum`` is that of its record in the index, so facts of other records are
not used. ``state`` is `MEASURED`, `BROKEN` (it cannot be decoded) or `ABSENT_IMAGE`. ``content``
is a digest of the encoded image; of one that is broken, so is ``pixels``. The others are those of
`shardkit.codecs.properties.Properties` and `shardkit.reporting.measures.Measures`."""

Facts = npt.NDArray[Any]

_ROWS = 128
"""Rows measured in one task."""


def load_facts(shards: ShardSet, *, workers: int = 1, on_progress: Report | None = None) -> Facts:
    """Return the facts of all images, measuring those that are not stored yet.

    They are stored in the dataset's directory if it can be written. They do not depend on
    ``workers``.

    Raises:
        CorruptDataset: If a record is damaged.
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
    for task, found in run_tasks(_measure, tasks, workers=workers, on_progress=on_progress):
        facts[task.rows] = found
    path = shards.directory / FACTS_NAME
    # A dataset that cannot be written is measured each time.
    with contextlib.suppress(OSError), published(path) as temporary:
        save_npy(temporary, facts)
    return facts


def _stored(shards: ShardSet) -> Facts:
    """Return the stored facts, in which anything may be wrong; zeros without.

    Those of a dataset that was appended to may end where one of its parts begins.
    """
    path = shards.directory / FACTS_NAME
    facts = np.zeros(len(shards), FACT)
    for count in (len(shards), *(part.start for part in reversed(parts_of(shards.manifest)))):
        with contextlib.suppress(OSError, ValueError):
            facts[:count] = StoredValues(path, FACT, count)[:]
            break
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
    return ShardSet(directory)


def _measure(task: _Task) -> Facts:
    """Measure some images in a worker process."""
    return measure_rows(_opened(task.directory, task.digest), task.rows)


def measure_rows(shards: ShardSet, rows: npt.NDArray[np.int64]) -> Facts:
    """Return the facts of some rows, all of which have an image.

    Raises:
        CorruptDataset: If a record is damaged.
    """
    located = shards.find(rows)
    facts = np.zeros(len(located), FACT)
    facts["version"] = VERSION
    facts["checksum"] = shards.rows["checksum"][rows]
    buffer = memoryview(bytearray(located.longest))
    meter = Meter()
    for number in range(len(located)):
        image = located.read(number, buffer)
        _fill(facts[number], image)
        meter.add(images=1, size=len(image.data))
    meter.flush()
    return facts


def _fill(fact: Any, image: EncodedImage) -> None:
    fact["content"] = fact["pixels"] = hashlib.sha256(image.data).digest()[:16]
    try:
        header = properties(image.data, image.field)
        measured = measure(decode_stored(image, at_least=(SIDE, SIDE)), (image.width, image.height))
    except BadImage:
        fact["state"] = BROKEN
        return
    fact["state"] = MEASURED
    for name, value in (header._asdict() | measured._asdict()).items():
        fact[name] = value
