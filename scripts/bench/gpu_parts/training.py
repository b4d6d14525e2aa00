"""Training of a ResNet fed in ten ways, over the same training with one batch that stays there.

How busy the CPUs are is measured, too: a machine with fewer of them than a loader keeps busy would
leave its GPU idle. Times on the GPU are those of events: one before a step and one after it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gpu_parts import peers
from gpu_parts.job import KINDS, Job, pause
from gpu_parts.resnet import ResNet
from isolation import Progress
from torch import nn

from shardkit import DevicePrefetcher, Normalize, RandomCrop
from shardkit.measure.runner.loaders import close_loader
from shardkit.measure.runner.timing import cpu_seconds
from shardkit.system.machine import usable_cpus

FEEDS = (
    ("photos", "ImageFolder"),
    ("photos", "thread"),
    ("jpeg", "thread"),
    ("jpeg", "ImageFolder"),
    ("photos", "process"),
    ("photos", "helper"),
    ("photos", "WebDataset"),
    ("planes", "thread"),
    ("raw", "thread"),
    ("raw", "resident"),
)
"""What is read, and by what: a peer, an engine, or from the device's memory."""

_BATCHES = {40: 256, 20: 128, 10: 64, 0: 32}
"""Largest batch by GiB that are free."""

_LONGEST = 5.0
"""Seconds of an epoch."""

_FEWEST = 2
"""Steps of an epoch, at least."""

CACHED = "one cached batch"


@dataclass
class Epoch:
    """Times of an epoch, in milliseconds."""

    seconds: float = 0.0
    images: int = 0
    launches: list[float] = field(default_factory=list)
    """Of each step: how long Python took to issue it."""
    steps: list[float] = field(default_factory=list)
    """Of each step on the device, gaps between its kernels included."""
    idle: list[float] = field(default_factory=list)
    """On the device between two steps, which includes waiting for a copy."""
    busy: float = 0.0
    """CPU time of this process and its workers, in seconds."""

    def compared(self, base: Epoch) -> dict[str, float]:
        """Return figures of this epoch, times as multiples of those of ``base``."""
        tail, base_tail = (float(np.percentile(one.launches, 95)) for one in (self, base))
        median, base_median = (statistics.median(one.launches) for one in (self, base))
        return {
            "images_per_second": self.images / self.seconds,
            "cores": self.busy / self.seconds,
            "idle": sum(self.idle) / (sum(self.idle) + sum(self.steps)),
            "step": statistics.median(self.steps) / statistics.median(base.steps),
            "launch_ms": median,
            "launch_median": median / base_median,
            "launch_tail": tail / base_tail,
        }


class Marks:
    """Points in the work of a device: events on CUDA, the time on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def add(self) -> None:
        """Add a point after all work that the device was given."""
        if not self._on_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def spans(self) -> list[float]:
        """Return the milliseconds between neighbors, once the device is done."""
        pairs = itertools.pairwise(self._marks)
        if self._on_cuda:
            return [before.elapsed_time(after) for before, after in pairs]
        return [1000 * (after - before) for before, after in pairs]


class Trainer:
    """Trains ResNet-50 in bfloat16, in channels-last memory."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        self.device = device
        self._model = model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Issue a step; on CUDA it does not wait for it."""
        self._optimizer.zero_grad()
        # Most CPUs emulate bfloat16.
        is_cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_cuda):
            loss = nn.functional.cross_entropy(self._model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def epoch(self, batches: Iterator[Any], seconds: float) -> Epoch:
        """Train for so many seconds, but at least for `_FEWEST` steps."""
        epoch, marks = Epoch(), Marks(self.device)
        pause(self.device)
        epoch.busy = -cpu_seconds()
        start = time.perf_counter()
        while len(epoch.launches) < _FEWEST or time.perf_counter() - start < seconds:
            images, labels = next(batches)
            marks.add()
            issued = time.perf_counter()
            self.step(images, labels)
            epoch.launches.append(1000 * (time.perf_counter() - issued))
            marks.add()
            epoch.images += len(labels)
        pause(self.device)
        epoch.seconds = time.perf_counter() - start
        epoch.busy += cpu_seconds()
        spans = marks.spans()
        epoch.steps, epoch.idle = spans[::2], spans[1::2]
        return epoch


def run(values: dict[str, Any], progress: Progress) -> None:
    """Measure all feeds; the ratio is images/s over one cached batch of the same size."""
    job = Job.of(values)
    job.limit_cores()
    trainer = _trainer(job)
    size = 2 if job.is_small else _largest(job.device)
    prefix = f"ResNet-{job.layers}, {usable_cpus()} cores, batches of {size}"
    base = _cached(trainer, job, size, job.seconds(_LONGEST, progress.left / (len(FEEDS) + 1)))
    _add(progress, f"{prefix}: {CACHED}", base, base)
    for number, (kind, feed) in enumerate(FEEDS):
        case = f"{prefix}: {KINDS[kind]}, {feed}"
        seconds = job.seconds(_LONGEST, progress.left / (len(FEEDS) - number) / 2)
        if not seconds:
            progress.add(case, remark="no time left")
            continue
        with progress.case(case):
            loader = _loader(job, kind, feed, size)
            _add(progress, case, _fed(trainer, loader, seconds), base)
            close_loader(loader)


def _trainer(job: Job) -> Trainer:
    return Trainer(job.device, ResNet(job.layers, 8 if job.is_small else 64))


def _loader(job: Job, kind: str, feed: str, size: int) -> Any:
    """Return an endless loader."""
    if feed in ("ImageFolder", "WebDataset"):
        make = peers.imagefolder if feed == "ImageFolder" else peers.webdataset
        folder = job.folder(kind) if feed == "ImageFolder" else job.work / "tar"
        return make(folder, job.side, size, pin_memory=job.device.type == "cuda")
    if feed == "resident":
        dataset = job.dataset(kind, RandomCrop(job.side, padding=16, flip=0.5))
        return job.loader(dataset, size, "auto", resident=job.device.type, endless=True)
    return job.loader(job.dataset(kind), size, feed, endless=True)


def _add(progress: Progress, case: str, epoch: Epoch, base: Epoch) -> None:
    figures = epoch.compared(base)
    remark = (
        f"GPU idle {figures['idle']:.1%}; {figures['cores']:.1f} cores busy; step on the GPU "
        f"{figures['step']:.2f}x; launches {figures['launch_ms']:.1f} ms, "
        f"{figures['launch_median']:.2f}x, 95th percentile {figures['launch_tail']:.2f}x"
    )
    rate = figures["images_per_second"]
    ratio = rate / (base.images / base.seconds)
    progress.add(case, rate, "images/s", ratio=ratio, remark=remark, details=figures)


def _cached(trainer: Trainer, job: Job, size: int, seconds: float) -> Epoch:
    """Train on one batch again and again; the first steps do not count."""
    images = torch.randint(0, 256, (size, 3, job.side, job.side), dtype=torch.uint8)
    images = images.contiguous(memory_format=torch.channels_last).to(job.device)
    batch = Normalize()(images), torch.arange(size, device=job.device) % 8
    trainer.epoch(itertools.repeat(batch), 0)  # memory is allocated, and algorithms are chosen
    return trainer.epoch(itertools.repeat(batch), seconds)


def _fed(trainer: Trainer, loader: Any, seconds: float) -> Epoch:
    """Train on the batches of a loader; the first steps do not count."""
    batches: Any = iter(DevicePrefetcher(loader, trainer.device, Normalize()))
    with closing(batches):
        trainer.epoch(batches, seconds / 4)  # workers start, and buffers fill
        return trainer.epoch(batches, seconds)


def _largest(device: torch.device) -> int:
    """Return the batch size for the memory that is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return next(size for least, size in _BATCHES.items() if free >= least * 2**30)
