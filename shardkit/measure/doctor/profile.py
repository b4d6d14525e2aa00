"""Time of each stage of loading, per image; runs in the measurement process, in one thread.

The stages are parts of one measured total: fetching the samples of a batch and collating them.
"""

from __future__ import annotations

import copy
import itertools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset

from shardkit.codecs.scaling import one_thread
from shardkit.errors import UsageError
from shardkit.measure.doctor.pipeline import Pipeline, Setup
from shardkit.measure.doctor.stored import Group, headers, innermost, slowest_group, stored_images
from shardkit.measure.runner import steps
from shardkit.measure.runner.gil import HOLDS, held_share
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import StepSpec
from shardkit.system.machine import usable_cpus
from shardkit.torch.data.collate import BatchView, count
from shardkit.torch.data.read_context import ReadContext, reading

STAGES = ("read", "decode", "dataset", "transform", "collate", "transport")
"""In the order in which an image passes them. ``dataset`` stands for read and decode if doctor
does not know the files of the images."""

OWN_CODE = ("dataset", "transform", "collate")
"""Stages that may run user code, and so hold the GIL."""

WAITS, MATTERS = 0.5, 0.25
"""A stage waits if it computes for less than the first fraction of its time, and is worth a remedy
from the second fraction of an image's time on."""

_IMAGES = 256
"""Maximum images in the sample."""

_HELD_SECONDS, _HELD_IMAGES = 0.4, 8
"""Duration of the test for the GIL, and the number of images that are loaded meanwhile."""

_Cost = npt.NDArray[np.float64]
"""Seconds as on an idle machine, and of these the seconds on a CPU."""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Time of one stage."""

    seconds: float
    """Mean time per image."""
    busy: float
    """Fraction of it that computes, 0 to 1; the rest waits for a disk, a network or a sleep."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The loader, the stages of loading, and the images of the sample that was timed."""

    setup: Setup
    cpus: int
    """CPUs that the process may use."""
    images: int
    """Images in the dataset; 0 if unknown."""
    rows: list[int]
    """The sample, drawn at random; empty for an iterable dataset."""
    stages: dict[str, Stage]
    """In the order of `STAGES`, without stages that do not occur."""
    p50: float
    p95: float
    """Percentiles of an image's time in all stages, in seconds."""
    held: float = 0.0
    """Fraction of the longest stage's time in which it holds the GIL."""
    group: Group | None = None
    """Few images that take most of the time, if there are such."""
    kind: str = ""
    """Most frequent encoding of the stored images, or of `group`; empty if unknown."""
    side: float = 0.0
    """Median of the shorter sides of the stored images, in pixels; 0 if unknown."""
    stored_bytes: float = 0.0
    """Mean stored size of an image; 0 if unknown."""
    crop: int = 0
    """Shorter side of the loaded images, in pixels; 0 if unknown."""
    step_seconds: float | None = None
    """Time of a training step; None if unknown."""

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
        """Fraction of the total that computes, 0 to 1."""
        return sum(each.seconds * each.busy for each in self.stages.values()) / self.total

    @property
    def decodes(self) -> bool:
        """Whether decoding encoded images takes a notable part of the time."""
        return self.kind not in ("", "raw") and self.fraction("read", "decode") >= MATTERS

    @property
    def holds_gil(self) -> bool:
        """Whether the longest stage is user code that holds the GIL."""
        return self.longest in OWN_CODE and self.held >= HOLDS

    def fraction(self, *names: str) -> float:
        """Return the fraction of the total that some stages take, 0 to 1."""
        return sum(self.stages[n].seconds for n in names if n in self.stages) / self.total


def profile(
    session: Session, *, batch_size: int, workers: int | None, seconds: float, step: StepSpec
) -> Profile:
    """Time the stages on a random sample, for about ``seconds``, and a step that is a model."""
    timing = _Timing(Pipeline(session, batch_size, workers))
    with one_thread(), reading(ReadContext(seed=0, epoch=0)):
        timing.run(time.perf_counter() + seconds)
        found = timing.profile()
    step_seconds = step.milliseconds / 1000 or None
    if step.model is not None:
        step_seconds = steps.step_seconds(steps.make_step(step), timing.batch)
    return replace(found, step_seconds=step_seconds)


class _Timing:
    """Times one batch after the other."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._dataset = pipeline, pipeline.dataset
        self._setup = pipeline.setup
        self._images = stored_images(self._dataset) if self._setup.mapped else None
        inner = innermost(self._dataset)
        self._layers = (
            {"dataset": self._dataset}
            if self._images is None
            else {"read": self._images, "decode": self._dataset}
        )
        """Stage to a dataset that ends with it."""
        if callable(getattr(inner, "transform", None)):
            last = [*self._layers][-1]
            self._layers |= {last: _without_transform(self._dataset), "transform": self._dataset}
        self._costs: list[dict[str, _Cost]] = []
        """Cost per image of each stage, of each batch."""
        self._alone: list[float] = []
        """Seconds to fetch each image of the sample alone."""
        self._rows: list[int] = []
        self._samples: Any = []
        self.batch: Any = None

    def run(self, end: float) -> None:
        """Time the batches of a random sample or of a stream, until a time."""
        size = self._setup.batch_size
        if self._setup.mapped:
            rows = np.random.default_rng(0).permutation(len(self._dataset))[:_IMAGES].tolist()
            for dataset in self._layers.values():
                _fetch(dataset, rows[:1])  # imports, open files
            for start in range(0, max(1, len(rows) - size + 1), size):
                if not self._costs or time.perf_counter() < end:
                    self._time_rows(rows[start : start + size])
            return
        items = self._pipeline.stream()
        while not self._costs or time.perf_counter() < end:
            cost, samples = _timed(lambda: list(itertools.islice(items, size)))
            if not samples:
                break
            self._add({"dataset": cost}, samples if self._pipeline.collects else samples[0])

    def _time_rows(self, rows: list[int]) -> None:
        """Time the stages of a batch, and each of its images alone.

        The first time, the images may be read from a disk. The stages are differences between
        datasets with one stage more each.
        """
        first, samples = _fetch(self._dataset, rows)
        layers = [_fetch(dataset, rows)[0] for dataset in self._layers.values()]
        costs = np.maximum(np.diff(layers, axis=0, prepend=0.0), 0.0)
        costs[0] += np.maximum(first - costs.sum(axis=0), 0.0)
        self._alone += [_fetch(self._dataset, [row])[0][0] for row in rows]
        self._rows += rows
        self._add(dict(zip(self._layers, costs, strict=True)), samples)

    def _add(self, costs: dict[str, _Cost], samples: Any) -> None:
        """Collate samples, and add the costs of their batch."""
        costs["collate"], batch = _timed(lambda: self._pipeline.collate(samples))
        if self._setup.engine == "process" and not isinstance(samples, BatchView):
            costs["transport"], _ = _timed(lambda: _share(batch))  # else it is shared already
        images = max(1, count(batch))
        self._costs.append({stage: cost / images for stage, cost in costs.items()})
        self._samples, self.batch = samples, batch

    def profile(self) -> Profile:
        """Return the time of each stage, and the properties of the sample."""
        if not self._costs:
            raise UsageError("there is no image to read")
        stages = {}
        for stage in (stage for stage in STAGES if stage in self._costs[0]):
            wall, busy = np.mean([costs[stage] for costs in self._costs], axis=0).tolist()
            stages[stage] = Stage(seconds=wall, busy=min(1.0, busy / max(wall, 1e-9)))
        times = np.array([sum(cost[0] for cost in costs.values()) for costs in self._costs])
        if self._alone:  # alone, each image costs as much more than in a batch
            alone = np.array(self._alone)
            rest = sum(stages[name].seconds for name in stages if name not in self._layers)
            times = np.maximum(alone - alone.mean() + times.mean() - rest, 0.0) + rest
        p50, p95 = np.percentile(times, (50, 95)).tolist()
        first = self.batch[0] if isinstance(self.batch, tuple | list) else self.batch
        found = Profile(
            setup=self._setup,
            cpus=usable_cpus(),
            images=len(self._dataset) if self._setup.mapped else 0,
            rows=self._rows,
            stages=stages,
            p50=p50,
            p95=p95,
            crop=_shorter_side(getattr(first, "shape", ())),
        )
        found = replace(found, held=self._held(found))
        if self._images is None:
            return found
        images = headers(self._dataset, self._rows)
        classes = getattr(innermost(self._dataset), "classes", None)
        group = slowest_group(times, images, classes)
        return replace(
            found,
            group=group,
            kind=group.kind
            if group
            else Counter(each.kind for each in images).most_common(1)[0][0],
            side=statistics.median(min(image.width, image.height) for image in images),
            stored_bytes=statistics.fmean(image.bytes for image in images),
        )

    def _held(self, found: Profile) -> float:
        """Return the fraction of its time in which the longest stage holds the GIL."""
        if found.longest not in self._layers or not self._rows:
            return held_share(lambda: self._pipeline.collate(self._samples), _HELD_SECONDS)
        rows = itertools.cycle(self._rows[:_HELD_IMAGES])
        part = found.fraction(found.longest) / found.fraction(*self._layers)
        return min(1.0, held_share(lambda: self._dataset[next(rows)], _HELD_SECONDS) / part)


def _timed(work: Callable[[], _T]) -> tuple[_Cost, _T]:
    """Do something, and return its cost and result."""
    start = _clock()
    value = work()
    return _clock() - start, value


def _clock() -> _Cost:
    """Return the time without that in which this thread waited for a CPU, and the CPU time."""
    file = _schedule()
    waited = 0 if file is None else int(os.pread(file, 64, 0).split()[1])
    return np.array((time.perf_counter() - waited / 1e9, time.process_time()))


@cache
def _schedule() -> int | None:
    """Return the file in which Linux states how long this thread waited; None elsewhere."""
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None


def _fetch(dataset: Any, rows: list[int]) -> tuple[_Cost, Any]:
    """Fetch samples as PyTorch does, and return their cost and the samples."""
    if hasattr(dataset, "__getitems__"):
        return _timed(lambda: dataset.__getitems__(rows))
    return _timed(lambda: [dataset[row] for row in rows])


def _without_transform(dataset: Any) -> Any:
    """Return a copy of a dataset whose transform does nothing."""
    if type(dataset) is Subset:
        return Subset(_without_transform(dataset.dataset), dataset.indices)
    dataset = copy.copy(dataset)
    dataset.transform = _unchanged
    return dataset


def _unchanged(image: Any) -> Any:
    return image


def _shorter_side(shape: Sequence[int]) -> int:
    """Return the shorter side of a batch's images of shape (N, C, H, W) or (N, H, W, C)."""
    sides = [side for side in shape[1:] if side > 4]  # not the channels
    return min(sides) if len(shape) == 4 and len(sides) == 2 else 0


def _share(batch: Any) -> None:
    """Copy the tensors of a batch into shared memory, as a worker process does to send them."""
    if isinstance(batch, torch.Tensor):
        batch.clone().share_memory_()  # type: ignore[no-untyped-call]
    elif isinstance(batch, tuple | list | Mapping):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            _share(value)
