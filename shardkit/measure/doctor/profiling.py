"""Where the time of a sample goes: its stages, one after the other, timed in one thread.

It takes random rows, warm, and reads them cold too, so that the stages can be added up and held
against a loader of one thread. It runs in the measuring process.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from shardkit.codecs.scaling import one_thread
from shardkit.measure.doctor.stages import STAGES, Batch, Staged, identified, staged
from shardkit.measure.runner import page_cache as pages
from shardkit.measure.runner.folder import PlainFolder
from shardkit.measure.runner.gil import held_share
from shardkit.measure.runner.material import files_of
from shardkit.torch.data.collate import BatchView, collate
from shardkit.torch.data.read_context import ReadContext, new_block, reading
from shardkit.torch.engine.options import LoaderOptions
from shardkit.torch.engine.preflight import why_processes
from shardkit.torch.loader import make_loader

PASSES = 3
"""A batch is taken so many times, and the median counts: other work on the machine disturbs one."""

_TRANSPORTED, _LEAD = 24, 6
"""Batches that come from a worker process to be timed, and those that come before."""

_HELD_SECONDS = 0.4
"""How long the transform is watched for the interpreter's lock."""

_HELD_SAMPLES = 8
"""With so many samples."""

_COPIES = 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be timed."""

    rows: int = 256
    """Samples, at the most; chosen at random, each once."""
    batch_size: int = 64
    seconds: float = 3.0
    """No further batch is begun after this, and no further pass; reading cold has as long."""
    processes: bool = False
    """Whether batches come from worker processes, so that they have a way to go."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The seconds that a sample takes in each stage."""

    images: int
    """That were timed."""
    batch_size: int
    warm: dict[str, float]
    """Stage to seconds, for those that could be measured; its files in the kernel's memory."""
    cold_read: float | None
    """Seconds to read a sample whose pages were dropped; None if that could not be done."""
    resident: float | None
    """Part of the files that stayed in memory nevertheless, 0 to 1; None if it is not known."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Stage to the reason why it has no time."""
    held: float | None = None
    """Part of its time in which the transform holds the interpreter's lock; None without one."""
    stored_bytes: float = 0.0
    """Of an image, in the mean."""
    width: float = 0.0
    """Of a stored image in the mean, in pixels; 0 if it is not known."""
    height: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    """Encoding to the number of images that have it, such as jpg."""
    sample: tuple[int, ...] = ()
    """Shape of a sample, as it comes out; empty if it is no array."""
    dtype: str = ""
    """Of a sample."""

    @property
    def total(self) -> float:
        """Seconds that a sample takes in all stages of one thread, warm."""
        stages = ("transport", "copy to the device")
        return sum(value for name, value in self.warm.items() if name not in stages)


def profile(dataset: Any, plan: Plan) -> Profile:
    """Time the stages.

    Args:
        dataset: A dataset of shardkit, or an image folder.
        plan: How much of it.

    Raises:
        UsageError: If it has no stages.
        ShardkitError: If it cannot be read.
    """
    work = staged(dataset)
    rows = np.random.default_rng(plan.seed).permutation(len(dataset))[: plan.rows]
    size = min(plan.batch_size, len(rows))
    # A last batch that is not full would weigh as much as the others.
    chosen = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
    cold, resident = _read_cold(dataset, work, chosen, plan.seconds)
    alone = why_processes(dataset) is not None
    # Loaders keep PyTorch to one thread for each worker.
    with one_thread(), reading(ReadContext(seed=plan.seed, epoch=0, alone=alone)):
        timed = _time_batches(work, chosen, plan.seconds)
        held = None if work.transform is None else _held(work, timed.last)
    warm, skipped = timed.mean(), _left_out(dataset, work)
    for stage, found in (
        ("transport", _transport(timed.last, plan)),
        ("copy to the device", _copy(timed.last)),
    ):
        if isinstance(found, str):
            skipped[stage] = found
        else:
            warm[stage] = found
    sample = timed.last.samples[0] if timed.last.block is None else timed.last.view[0][0]
    return Profile(
        images=timed.images,
        batch_size=size,
        warm={stage: warm[stage] for stage in STAGES if stage in warm},
        cold_read=cold,
        resident=resident,
        skipped=skipped,
        held=held,
        stored_bytes=timed.bytes / timed.images,
        kinds=timed.kinds,
        width=timed.width / timed.images,
        height=timed.height / timed.images,
        sample=tuple(getattr(sample, "shape", ())),
        dtype=str(getattr(sample, "dtype", type(sample).__name__)),
    )


def _read_cold(
    dataset: Any, work: Staged, chosen: list[npt.NDArray[np.int64]], seconds: float
) -> tuple[float | None, float | None]:
    """Return the seconds that a sample takes from the disk, and what stayed in memory.

    No further batch is begun after ``seconds``.
    """
    files = files_of(dataset)
    if isinstance(dataset, PlainFolder):  # the others may be millions
        files = [files[row] for rows in chosen for row in rows.tolist()]
    work.read(Batch(rows=chosen[0][:1]))  # opens the shards and the index
    try:
        pages.drop(files)
        resident = pages.resident(files)
    except OSError:  # this file system has no such pages, or keeps them from us
        resident = None
    if resident is None:
        return None, None
    begun, count = time.perf_counter(), 0
    for rows in chosen:
        work.read(Batch(rows=rows))
        count += len(rows)
        if time.perf_counter() - begun > seconds:
            break
    return (time.perf_counter() - begun) / count, resident


@dataclass(kw_only=True)
class _Timed:
    """Times and sizes of the batches so far."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Of a sample, by stage; one for each batch."""
    images: int = 0
    bytes: int = 0
    width: int = 0
    height: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    last: Batch

    def mean(self) -> dict[str, float]:
        """Return the seconds that a sample takes in each stage."""
        return {stage: statistics.fmean(values) for stage, values in self.seconds.items()}

    def add(self, batch: Batch, passes: list[dict[str, float]]) -> None:
        """Add a batch that was timed several times."""
        self.last = batch
        self.images += len(batch.rows)
        for stage in passes[0]:
            median = statistics.median(each[stage] for each in passes)
            self.seconds.setdefault(stage, []).append(median / len(batch.rows))
        for image in map(identified, batch.stored):
            self.bytes += len(image.data)
            self.width += image.width
            self.height += image.height
            self.kinds[image.field] = self.kinds.get(image.field, 0) + 1


def _time_batches(work: Staged, chosen: list[npt.NDArray[np.int64]], seconds: float) -> _Timed:
    """Take one batch after the other through all stages, until the time is up."""
    first = Batch(rows=chosen[0][:2])
    for _, stage in _doing(work, first):  # imports, tables, the first touch of a library
        stage()
    timed = _Timed(last=first)
    end = time.perf_counter() + seconds
    for rows in chosen:
        batch = Batch(rows=rows)
        work.read(batch)
        passes = []
        for _ in range(PASSES):
            times = {}
            for name, stage in _doing(work, batch):
                begun = time.perf_counter()
                stage()
                times[name] = time.perf_counter() - begun
            passes.append(times)
            if time.perf_counter() > end:
                break
        timed.add(batch, passes)
        if time.perf_counter() > end:
            break
    return timed


def _doing(work: Staged, batch: Batch) -> list[tuple[str, Callable[[], object]]]:
    """Return the stages that this dataset has, in order."""

    def gather() -> None:
        batch.collated = collate(batch.view)

    doing: list[tuple[str, Callable[[], object]]] = [("read", lambda: work.read(batch))]
    if work.verifies:
        doing.append(("checksum", lambda: work.checksum(batch)))
    if work.decodes:
        doing.append(("decode", lambda: work.decode(batch)))  # or hands the bytes on
    if work.transform is not None:
        doing.append(("transform", lambda: work.apply(batch)))
    return [*doing, ("collate", gather)]


def _left_out(dataset: Any, work: Staged) -> dict[str, str]:
    """Return why some stages are none of this dataset's."""
    found = {}
    if not work.verifies:
        folder = isinstance(dataset, PlainFolder)
        found["checksum"] = "files have none" if folder else "not compared for raw pixels"
    if not work.decodes:
        found["decode"] = "none: pixels are read straight into the batch"
    if work.transform is None:
        found["transform"] = "none"
    return found


def _held(work: Staged, batch: Batch) -> float:
    """Return the share of time in which the transform holds the interpreter's lock."""
    few = Batch(rows=batch.rows[:_HELD_SAMPLES])
    work.read(few)
    work.decode(few)
    pending = itertools.cycle(few.samples)
    one = Batch(rows=few.rows[:1])

    def transform() -> None:
        one.samples = [next(pending)]
        work.apply(one)

    return held_share(transform, _HELD_SECONDS)


class _Ready(Dataset[Any]):
    """Gives one batch, which is there already, again and again."""

    def __init__(self, batch: Batch, size: int) -> None:
        self._shape = None if batch.block is None else tuple(batch.block.shape)
        self._labels = [image.label for image in batch.stored]
        self._collated = batch.collated if self._shape is None else None
        self._size = size

    def __len__(self) -> int:
        return self._size * (_TRANSPORTED + _LEAD)

    def __getitems__(self, rows: list[int]) -> Any:
        """Return the batch; a block lies in the memory that the loader lends, as always."""
        if self._shape is None:
            return self._collated
        block = new_block(self._shape, shared=True).permute(0, 3, 1, 2)
        return BatchView(block, self._labels, block)

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])


def _handed_on(samples: Any) -> Any:
    return samples.batch if isinstance(samples, BatchView) else samples


def _transport(batch: Batch, plan: Plan) -> float | str:
    """Return what it costs a sample to come from a worker process, in seconds, or why nothing."""
    if not plan.processes:
        return "not needed: threads share memory"
    size = len(batch.rows)
    options = LoaderOptions(engine="process", num_workers=1, collate_fn=_handed_on)
    loader = make_loader(_Ready(batch, size), size, options=options)
    times = []
    try:
        before = 0.0
        for number, _ in enumerate(loader):
            now = time.perf_counter()
            if number >= _LEAD:
                times.append(now - before)
            before = now
    finally:
        loader.close()
    return statistics.fmean(times) / size


def _copy(batch: Batch) -> float | str:
    """Return what it costs a sample to be copied to the accelerator, or why it is not known."""
    if not torch.cuda.is_available():
        return "no accelerator"
    images = batch.collated[0] if isinstance(batch.collated, (tuple, list)) else batch.collated
    if not isinstance(images, torch.Tensor):
        return "not a tensor"
    images = images.pin_memory()
    images.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(_COPIES):
        images.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / _COPIES / len(batch.rows)
