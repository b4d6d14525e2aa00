"""Times the stages of loading, as fractions of a total; runs in the measurement process."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from shardkit.errors import UsageError
from shardkit.measure.doctor.pipeline import Loading, Pipeline
from shardkit.measure.doctor.profile import Profile, Stage
from shardkit.measure.doctor.stored import innermost, stored_images
from shardkit.measure.doctor.tail import Sample, Tail, find_tail
from shardkit.measure.runner import steps
from shardkit.measure.runner.clock import Cost, timed
from shardkit.measure.runner.gil import held_fraction
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import StepSpec
from shardkit.system.machine import usable_cpus
from shardkit.torch.data.collate import count
from shardkit.torch.data.read_context import ReadContext, reading

_IMAGES = 256
_FEWEST = 32
_PART = 0.1
"""Most images in the sample; a batch of more than the second takes this fraction of the time."""

_TAIL_PART = 0.5
_MOST_OF_TAIL = 2048
"""Time for further images of the tail's sample, over that of the stages; most images in it."""

_HELD_SECONDS = 0.4
"""Duration of the test for the GIL."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch from starting threads; their number is restored at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def profile(session: Session, *, loading: Loading, seconds: float, step: StepSpec) -> Profile:
    """Time the stages on a random sample, for about ``seconds``, and the training step."""
    pipeline = Pipeline(session, loading)
    dataset = pipeline.dataset
    setup = pipeline.setup
    costs: list[dict[str, Cost]] = []
    counts = []
    rows = list[int]()
    batch = None
    sample = Sample(dataset)
    with _one_thread(), reading(ReadContext(seed=0, epoch=0)):
        for batch_rows, cost, samples in _fetches(pipeline, seconds):
            cost["collate"], batch = timed(lambda: pipeline.collate(samples))  # noqa: B023 - now
            costs.append(cost)
            counts.append(max(1, count(batch)))
            for row in batch_rows:
                sample.read(row)
            rows += batch_rows
        if not costs:
            raise UsageError("there is no image to read")
        if not pipeline.collects:  # its batches are those of the dataset
            setup = replace(setup, batch_size=round(statistics.fmean(counts)))
        stages = _stages(costs, sum(counts))
        if rows:  # alone, each image costs as much more than in a batch
            alone = np.array(sample.seconds)
            usual = sum(stage.seconds for stage in stages.values())
            times = np.maximum(alone - np.mean(alone) + usual, 0.0)
        else:
            times = np.array([sum(wall for wall, _ in cost.values()) for cost in costs]) / counts
        crop = _shorter_side(batch)
        p50, p95 = np.percentile(times, (50, 95)).tolist()
        measured = Profile(
            setup=setup,
            cpus=usable_cpus(),
            images=len(dataset) if setup.mapped else 0,
            rows=rows,
            stages=stages,
            p50=p50,
            p95=p95,
            crop=crop,
            resident_bytes=pipeline.resident_bytes(crop) if setup.mapped else 0,
            tail=_tail(sample, _TAIL_PART * seconds),
        )
        if measured.longest == "collate" or not rows:
            held = held_fraction(lambda: pipeline.collate(samples), _HELD_SECONDS)
        else:
            again = itertools.cycle(rows)
            # Of all stages of an image but the batch's; only the longest may hold the GIL.
            fraction = measured.fraction(measured.longest) / (1 - measured.fraction("collate"))
            held = min(1.0, held_fraction(lambda: dataset[next(again)], _HELD_SECONDS) / fraction)
        measured = replace(measured, held=held)
    if step.milliseconds or step.model:
        training = step.model and steps.step_seconds(steps.make_step(step), batch)
        measured = replace(measured, step_seconds=training or step.milliseconds / 1000)
    images = sample.headers(len(rows))
    if not images:
        return measured
    kinds = Counter[str]()
    for image, taken in zip(images, times.tolist(), strict=True):
        kinds[image.kind] += taken
    ((kind, _),) = kinds.most_common(1)
    return replace(
        measured,
        files=[] if "read" in stages else sample.files[: len(rows)],
        kind=kind,
        side=statistics.median(min(image.width, image.height) for image in images),
        pixels=statistics.fmean(image.width * image.height for image in images),
        stored_bytes=statistics.fmean(image.bytes for image in images),
    )


def _tail(sample: Sample, seconds: float) -> Tail | None:
    """Return the tail of a sample, which goes on for some time: slow images may be rare."""
    taken = set(sample.rows)
    end = time.perf_counter() + seconds
    order = np.random.default_rng(0).permutation(len(sample.dataset) if taken else 0)
    for row in order[:_MOST_OF_TAIL].tolist():
        if time.perf_counter() > end:
            break
        if row not in taken:
            sample.read(row)
    return find_tail(sample)


def _stages(costs: Sequence[Mapping[str, Cost]], images: int) -> dict[str, Stage]:
    """Return the stages of batches with ``images`` in all."""
    stages = {}
    for name in costs[0]:
        wall, busy = np.sum([cost[name] for cost in costs], axis=0).tolist()
        stages[name] = Stage(wall / images, min(1.0, busy / max(wall, 1e-9)))
    return stages


def _fetches(
    pipeline: Pipeline, seconds: float
) -> Iterator[tuple[list[int], dict[str, Cost], Any]]:
    """Yield the rows, the cost of each stage, and the samples of batches for about ``seconds``."""
    end = time.perf_counter() + seconds
    size = pipeline.setup.batch_size
    dataset = pipeline.dataset
    if not pipeline.setup.mapped:
        items = pipeline.stream()
        while True:  # at least once, even if the stream took all the time to start
            cost, samples = timed(lambda: list(itertools.islice(items, size)))
            if not samples:
                return
            yield [], {"dataset": cost}, samples if pipeline.collects else samples[0]
            if time.perf_counter() > end:
                return
    images = stored_images(dataset)
    # A stage is the difference between two datasets. Only the first time, images are on a disk.
    layers = {"dataset": dataset} if images is None else {"read": images, "decode": dataset}
    if callable(getattr(innermost(dataset), "transform", None)):
        layers |= {[*layers][-1]: _without_transform(dataset), "transform": dataset}
    rows = np.random.default_rng(0).permutation(len(dataset))[:_IMAGES].tolist()
    for layer in [*layers.values(), dataset] if rows else []:
        (once, _), _ = _fetch(layer, rows[:1])  # first, imports and open files
        size = min(size, max(_FEWEST, int(_PART * seconds / max(once, 1e-9))))
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        reads = [_fetch(layers["read"], batch)[0]] if images is not None else []
        fetched = [_fetch(layer, batch) for layer in layers.values()]
        costs = np.maximum(np.diff([cost for cost, _ in fetched], axis=0, prepend=0.0), 0.0)
        yield batch, dict(zip(layers, [*reads, *costs[len(reads) :]], strict=True)), fetched[-1][1]
        if time.perf_counter() > end:
            return


def _fetch(dataset: Any, rows: list[int]) -> tuple[Cost, Any]:
    """Fetch samples as PyTorch does, and return their cost and the samples."""
    if hasattr(dataset, "__getitems__"):
        return timed(lambda: dataset.__getitems__(rows))
    return timed(lambda: [dataset[row] for row in rows])


def _without_transform(dataset: Any) -> Any:
    """Return a copy of a dataset whose transform does nothing."""
    if type(dataset) is Subset:
        return Subset(_without_transform(dataset.dataset), dataset.indices)
    dataset = copy.copy(dataset)
    dataset.transform = lambda image: image
    return dataset


def _shorter_side(batch: Any) -> int:
    """Return the shorter side of a batch's images of shape (N, C, H, W) or (N, H, W, C)."""
    shape = getattr(batch[0] if isinstance(batch, tuple | list) else batch, "shape", ())
    sides = [side for side in shape[1:] if side > 4]  # not the channels
    return min(sides) if len(shape) == 4 and len(sides) == 2 else 0
