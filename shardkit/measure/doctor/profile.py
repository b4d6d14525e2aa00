"""Time of each stage of loading, per image; runs in the measurement process, in one thread.

The stages are parts of one measured total: fetching the samples of a batch and collating them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from shardkit.codecs.scaling import one_thread
from shardkit.errors import UsageError
from shardkit.measure.doctor.groups import Group, slowest_group
from shardkit.measure.doctor.pipeline import Pipeline
from shardkit.measure.doctor.stored import innermost, stored_images
from shardkit.measure.runner import page_cache
from shardkit.measure.runner.gil import held_share
from shardkit.measure.runner.session import Session
from shardkit.torch.data.collate import BatchView
from shardkit.torch.data.collate import count as count_images
from shardkit.torch.data.read_context import ReadContext, reading

STAGES = ("read", "decode", "dataset", "transform", "collate", "transport")
"""In the order in which an image passes them. ``dataset`` stands for read and decode if doctor
does not know the files of the images."""

_PASSES = 3
"""The sample is timed so often, if there is time."""

_HELD_SECONDS, _HELD_INPUTS = 0.4, 8
"""Duration of the test for the GIL, and the number of inputs that the stage gets meanwhile."""

_SPIN_PART, _SPIN_MOST = 0.05, 0.05
"""Duration of a busy loop after each batch: fraction of the batch's time, and maximum seconds."""

_Cost = npt.NDArray[np.float64]
"""Seconds of wall time and of CPU time."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Time of one stage."""

    seconds: float
    """Mean wall time per image."""
    busy: float
    """Fraction of it on a CPU, 0 to 1; the rest waits for a disk, a network or a sleep."""
    p50: float
    p95: float
    """Percentiles in seconds: over images; over batches for collate and transport."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Stages of loading, and the images of the sample that was timed."""

    rows: list[int]
    """The sample, drawn at random; empty for an iterable dataset."""
    stages: dict[str, Stage]
    """In the order of `STAGES`, without stages that do not occur."""
    held: float = 0.0
    """Fraction of the longest stage's time in which it holds the GIL."""
    group: Group | None = None
    """Few images that take most of the longest stage's time, if there are such."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Encoding to number of images, most frequent first; empty if unknown."""
    side: float = 0.0
    """Median of the shorter sides of the stored images, in pixels; 0 if unknown."""
    stored_bytes: float = 0.0
    """Mean stored size of an image; 0 if unknown."""
    shape: tuple[int, ...] = ()
    """Shape of the image of a sample; empty if it is not an array."""
    cold: bool = False
    """Whether ``read`` was timed without the page cache."""

    @property
    def total(self) -> float:
        """Seconds per image of all stages."""
        return sum(stage.seconds for stage in self.stages.values())

    @property
    def longest(self) -> str:
        """The stage that takes most time."""
        return max(self.stages, key=lambda name: self.stages[name].seconds)

    @property
    def busy(self) -> float:
        """Fraction of the total on a CPU, 0 to 1."""
        return sum(each.seconds * each.busy for each in self.stages.values()) / self.total

    def fraction(self, *names: str) -> float:
        """Return the fraction of the total that some stages take, 0 to 1."""
        return sum(self.stages[n].seconds for n in names if n in self.stages) / self.total


def profile(  # noqa: PLR0913 - a request
    session: Session,
    *,
    batch_size: int,
    workers: int | None,
    seconds: float,
    images: int,
    cold: bool,
) -> Profile:
    """Time the stages on a random sample.

    Args:
        session: The measurement process.
        batch_size: As for `Pipeline`.
        workers: As for `Pipeline`.
        seconds: Start no further batch after this time.
        images: Maximum size of the sample.
        cold: Whether to drop the files from the page cache before reading them.
    """
    pipeline = Pipeline(session, batch_size, workers)
    with one_thread(), reading(ReadContext(seed=0, epoch=0)), _probing(pipeline.dataset) as probe:
        timing = _Timing(pipeline, probe)
        if pipeline.mapped:
            timing.run(seconds, images, cold=cold)
        else:
            timing.run_stream(seconds)
        stages = timing.stages()
        longest = max(stages, key=lambda name: stages[name].seconds)
        held = held_share(timing.work(longest), _HELD_SECONDS)
    found = Profile(rows=timing.rows, stages=stages, held=held, shape=timing.shape, cold=cold)
    if timing.stored is None:
        return found
    headers, times = timing.stored.headers(timing.rows), timing.alone(longest)
    classes = getattr(innermost(pipeline.dataset)[0], "classes", None)
    return replace(
        found,
        group=slowest_group(times[:, 0].tolist(), headers, classes) if len(times) else None,
        kinds=dict(Counter(header.kind for header in headers).most_common()),
        side=statistics.median(min(header.width, header.height) for header in headers),
        stored_bytes=statistics.fmean(header.bytes for header in headers),
    )


class _Probe:
    """Wraps a transform and adds up its cost."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.takes_rng = getattr(function, "takes_rng", False)
        self._cost: _Cost = np.zeros(2)
        self.inputs: deque[tuple[Any, ...]] = deque(maxlen=_HELD_INPUTS)

    def __call__(self, *inputs: Any) -> Any:
        self.inputs.append(inputs)
        cost, value = _timed(lambda: self._function(*inputs))
        self._cost += cost
        return value

    def taken(self) -> _Cost:
        """Return the cost since the last call of this method."""
        cost, self._cost = self._cost, np.zeros(2)
        return cost


@contextmanager
def _probing(dataset: Any) -> Iterator[_Probe | None]:
    """Replace the dataset's transform by a probe for the duration of the block."""
    inner, _ = innermost(dataset)
    function = getattr(inner, "transform", None)
    if not callable(function):
        yield None
        return
    inner.transform = probe = _Probe(function)
    try:
        yield probe
    finally:
        inner.transform = function


class _Timing:
    """Times one batch after the other."""

    def __init__(self, pipeline: Pipeline, probe: _Probe | None) -> None:
        self._dataset = pipeline.dataset
        self._pipeline = pipeline
        self._probe = probe
        inner, _ = innermost(pipeline.dataset)
        self._whole = hasattr(pipeline.dataset, "__getitems__") and hasattr(inner, "__getitems__")
        self._sends = pipeline.setup().engine == "process"
        self._batches: list[dict[str, _Cost]] = []
        """Cost per image of each stage, of each batch."""
        self._alone: dict[int, list[dict[str, _Cost]]] = {}
        """Cost of each stage of an image that is read alone, by row."""
        self._spun: list[_Cost] = []
        """Cost of a busy loop after each batch: on a busy machine it waits for a CPU, too."""
        self._samples: Any = []
        self.stored = stored_images(pipeline.dataset) if pipeline.mapped else None
        self.rows: list[int] = []
        self.shape: tuple[int, ...] = ()

    def run(self, seconds: float, most: int, *, cold: bool) -> None:
        """Time the batches of a random sample, and again while there is time."""
        end = time.perf_counter() + seconds
        rows = np.random.default_rng(0).permutation(len(self._dataset))[:most].tolist()
        if not rows:
            raise UsageError("there is no image to read")
        size = min(self._pipeline.batch_size, len(rows))
        self._fetch([rows[0]], whole=False)  # imports, open files
        for number in range(_PASSES):
            if cold and self.stored is not None:
                page_cache.drop(self.stored.files(rows))
            for start in range(0, len(rows) - size + 1, size):
                if self._batches and time.perf_counter() > end:
                    return
                batch = rows[start : start + size]
                if not number:
                    self.rows += batch
                costs, samples = self._fetch_each(batch)
                if self._whole:
                    costs, samples = self._fetch(batch, whole=True)
                self._collate(costs, samples, size)

    def run_stream(self, seconds: float) -> None:
        """Time the batches of an iterable dataset, or of one whose items are batches."""
        end = time.perf_counter() + seconds
        items = iter(self._dataset)
        if not isinstance(self._dataset, IterableDataset):
            items = (self._dataset[row] for row in self._pipeline.sampler())
        size = self._pipeline.batch_size
        while not self._batches or time.perf_counter() < end:
            cost, samples = _timed(lambda: list(itertools.islice(items, size)))
            if not samples:
                return
            samples = samples if self._pipeline.collects else samples[0]
            self._collate(self._split(cost, None), samples, None)

    def _fetch_each(self, rows: list[int]) -> tuple[dict[str, _Cost], list[Any]]:
        """Return the cost of each stage of some images that are read one by one."""
        total: dict[str, _Cost] = {}
        samples = []
        for row in rows:
            costs, sample = self._fetch([row], whole=False)
            samples.append(sample)
            self._alone.setdefault(row, []).append(costs)
            for stage, cost in costs.items():
                total[stage] = total.get(stage, np.zeros(2)) + cost
        return total, samples

    def _fetch(self, rows: list[int], *, whole: bool) -> tuple[dict[str, _Cost], Any]:
        """Return the cost of each stage of one image or a whole batch, and the samples."""
        read, stored = None, self.stored
        if stored is not None:
            read, _ = _timed(lambda: stored.read(rows))
        dataset = self._dataset
        cost, samples = _timed(
            (lambda: dataset.__getitems__(rows)) if whole else (lambda: dataset[rows[0]])
        )
        return self._split(cost, read), samples

    def _split(self, fetch: _Cost, read: _Cost | None) -> dict[str, _Cost]:
        """Divide the cost of samples into stages, whose sum it is.

        Reading costs what the same bytes cost without decoding.
        """
        costs = {}
        if self._probe is not None:
            costs["transform"] = self._probe.taken()
            fetch = np.maximum(fetch - costs["transform"], 0.0)
        if read is None:
            return {**costs, "dataset": fetch}
        read = np.minimum(read, fetch)
        return {**costs, "read": read, "decode": fetch - read}

    def _collate(self, costs: dict[str, _Cost], samples: Any, images: int | None) -> None:
        """Collate samples, and add the costs of their batch."""
        costs["collate"], batch = _timed(lambda: self._pipeline.collate(samples))
        if self._sends and not isinstance(samples, BatchView):  # else it is in shared memory
            costs["transport"], _ = _timed(lambda: _share(batch))
        count = images or max(1, count_images(batch))
        self._batches.append({stage: cost / count for stage, cost in costs.items()})
        spent = float(sum(cost[0] for cost in costs.values()))
        self._spun.append(_timed(lambda: _spin(min(_SPIN_MOST, _SPIN_PART * spent)))[0])
        self._samples = samples
        first = batch[0] if isinstance(batch, (tuple, list)) and len(batch) else batch
        self.shape = tuple(getattr(first, "shape", ()))[1:]

    def stages(self) -> dict[str, Stage]:
        """Return the time of each stage."""
        spun = np.sum(self._spun, axis=0)
        found = {}
        for stage in (stage for stage in STAGES if stage in self._batches[0]):
            batches = np.array([costs[stage] for costs in self._batches])
            wall, cpu = batches.mean(axis=0)
            alone = self.alone(stage)
            images = alone if len(alone) else batches
            # One image alone may cost more than in a batch.
            times = images[:, 0] * (wall / max(images[:, 0].mean(), 1e-9))
            p50, p95 = np.percentile(times, (50, 95)).tolist()
            # A short operation is rarely interrupted; a long one is as often as the busy loop.
            usual = float(np.median(images[:, 1] / np.maximum(images[:, 0], 1e-9)))
            busy = min(1.0, max(usual, cpu / max(wall, 1e-9) * spun[0] / spun[1]))
            found[stage] = Stage(seconds=float(wall), busy=float(busy), p50=p50, p95=p95)
        return found

    def alone(self, stage: str) -> _Cost:
        """Return the cost of a stage of each image, of shape (images, 2); empty if unknown."""
        passes = [self._alone[row] for row in self.rows]
        if not passes or stage not in passes[0][0]:
            return np.zeros((0, 2))
        return np.array([np.median([each[stage] for each in one], axis=0) for one in passes])

    def work(self, stage: str) -> Callable[[], object]:
        """Return a function that does a stage once, or what contains it."""
        if stage == "transform" and self._probe is not None and self._probe.inputs:
            probe, inputs = self._probe, itertools.cycle(list(self._probe.inputs))
            return lambda: probe(*next(inputs))
        if stage in ("collate", "transport") or not self.rows:
            return lambda: self._pipeline.collate(self._samples)
        rows = itertools.cycle(self.rows[:_HELD_INPUTS])
        return lambda: self._dataset[next(rows)]


def _timed(work: Callable[[], _T]) -> tuple[_Cost, _T]:
    """Do something, and return its cost and result."""
    wall, cpu = time.perf_counter(), time.process_time()
    value = work()
    return np.array((time.perf_counter() - wall, time.process_time() - cpu)), value


def _spin(seconds: float) -> None:
    """Compute for some time."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _share(batch: Any) -> None:
    """Copy the tensors of a batch into shared memory, as a worker process does to send them."""
    if isinstance(batch, torch.Tensor):
        batch.clone().share_memory_()  # type: ignore[no-untyped-call]
    elif isinstance(batch, (tuple, list, Mapping)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            _share(value)
