"""The tail: few images that take most of the time, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.errors import BadImage
from shardkit.measure.doctor.opened_files import only_image, opened_paths
from shardkit.measure.doctor.stored import Files, Header, headers, innermost, stored_images
from shardkit.measure.runner.clock import timed
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.nested import dataset_rows

_SLOW = 4.0
_MOST_IMAGES = 0.25
_LEAST_TIME = 0.3
"""Times the median, from which an image is slow; most of them, and least of the time they take."""

_SHARED = 0.8
"""Fraction of the slow images that share a property, and of those that have it that are slow."""

_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Few images that take most of the time."""

    images: float
    """Their fraction of all images."""
    time: float
    """Their fraction of the time."""
    median: float
    """Median seconds of one of them."""
    common: str
    """A property that they share and others lack; empty if there is none."""
    examples: list[str]
    """The slowest: keys, paths or rows."""
    passing: bool
    """Whether they were fast when they were read again."""

    @property
    def speedup(self) -> float:
        """The rate without them, over the rate with them."""
        return (1 - self.images) / (1 - self.time)


@dataclass(frozen=True)
class Sample:
    """Samples that were read alone, drawn at random."""

    dataset: Any
    rows: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    labels: list[int | None] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """The image file that was opened for each; empty if there was none, or several."""

    def read(self, row: int) -> None:
        """Read another."""
        with opened_paths() as paths:
            (seconds, _), value = timed(lambda: self.dataset[row])
        self.rows.append(row)
        self.seconds.append(float(seconds))
        self.labels.append(label_of(value))
        self.files.append(only_image(paths))

    def headers(self, count: int) -> list[Header]:
        """Return the properties of the first ``count`` stored images; none if unknown."""
        try:
            if stored_images(self.dataset) is not None:
                return headers(self.dataset, self.rows[:count])
            files = self.files[:count]
            if len({*files}) == count and all(files):  # each row has a file of its own
                labels = [label or 0 for label in self.labels]
                return headers(Files(list(zip(files, labels, strict=False))), range(count))
        except (BadImage, OSError):  # of another kind than seemed, or a temporary file
            pass
        return []

    def name(self, number: int) -> str:
        """Return what a user knows a sample by: a key, a path or a row."""
        inner = innermost(self.dataset)
        (row,) = dataset_rows(self.dataset, np.array([self.rows[number]])).tolist()
        if isinstance(inner, ShardDataset):
            return str(inner.keys[row])
        samples = getattr(inner, "samples", None)
        if isinstance(samples, list) and row < len(samples) and isinstance(samples[row], tuple):
            return str(samples[row][0])
        return (self.files[number] if self.files else "") or f"row {row}"


def find_tail(sample: Sample) -> Tail | None:
    """Return the slow images of a sample, or None if all take about the same time."""
    dataset = sample.dataset
    rows = sample.rows
    times = np.array(sample.seconds)
    if not rows:
        return None
    slow = times > _SLOW * np.median(times)
    if not slow.any() or slow.mean() > _MOST_IMAGES:
        return None
    fraction = float(times[slow].sum() / times.sum())
    if fraction < _LEAST_TIME:
        return None
    worst = [int(n) for n in np.argsort(-times)[: min(_EXAMPLES, int(slow.sum()))]]
    again = [float(timed(partial(dataset.__getitem__, rows[n]))[0][0]) for n in worst]
    shared = (name for name, has in _properties(sample, slow) if _explains(has, slow))
    return Tail(
        images=float(slow.mean()),
        time=fraction,
        median=float(np.median(times[slow])),
        common=next(shared, ""),
        examples=[sample.name(n) for n in worst],
        passing=max(again) < _SLOW * float(np.median(times)),
    )


def _explains(has: npt.NDArray[np.bool_], slow: npt.NDArray[np.bool_]) -> bool:
    both = int((has & slow).sum())
    return bool(both >= max(2, _SHARED * slow.sum()) and both >= _SHARED * has.sum())


def _properties(
    sample: Sample, slow: npt.NDArray[np.bool_]
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Yield what slow images may have in common, the most telling first, and which have it."""
    dataset = sample.dataset
    rows = sample.rows
    files = sample.headers(len(rows))
    names = getattr(innermost(dataset), "classes", None)
    labels = sample.labels if None not in sample.labels else ()
    yield from _equal(labels, slow, lambda n: f"class {_class(names, n)}")
    yield from _equal([file.kind for file in files], slow, lambda kind: f"{kind.upper()} files")
    for values, unit, scale in (
        ([file.width * file.height for file in files], "megapixels", 1e6),
        ([file.bytes for file in files], "MB", 1e6),
    ):
        if values:
            sizes = np.array(values) / scale
            least = float(sizes[slow].min())
            yield f"over {least:.2g} {unit}", sizes >= least
    yield from _equal(_shards(dataset, rows), slow, lambda n: f"shard {n}")


def _equal(values: Sequence[Any], slow: npt.NDArray[np.bool_], name: Any) -> Iterator[Any]:
    if values:
        of_slow = [value for value, is_slow in zip(values, slow, strict=True) if is_slow]
        most = max(of_slow, key=of_slow.count)
        yield name(most), np.array([value == most for value in values])


def _class(names: Any, label: int) -> str:
    named = isinstance(names, Sequence) and 0 <= label < len(names)
    return repr(str(names[label])) if named else str(label)


def label_of(sample: Any) -> int | None:
    """Return the label of a sample that is a pair of something and an integer."""
    label = sample[1] if isinstance(sample, tuple | list) and len(sample) == 2 else None
    return int(label) if isinstance(label, int | np.integer) else None


def _shards(dataset: Any, rows: Sequence[int]) -> list[int]:
    """Return the shard of each row of a whole shardkit dataset."""
    inner = innermost(dataset)
    if not isinstance(inner, ShardDataset):
        return []
    ends = [*accumulate(shard.rows for shard in inner.manifest.shards)]
    if len(ends) < 2 or ends[-1] != len(inner):
        return []
    shards = np.searchsorted(ends, dataset_rows(dataset, np.array(rows)), side="right")
    numbers: list[int] = shards.tolist()
    return numbers
