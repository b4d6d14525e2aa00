"""`ThroughputMonitor`: how much of its time a training loop waits for data."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardkit.errors import UsageError
from shardkit.torch.collate import count
from shardkit.torch.ops import CenterCrop, ImageOp, RandomResizedCrop, Resize

_BAR_SECONDS = 0.3
"""How often a bar is told: drawing it takes 0.1 ms or so."""

_WAITS, _KEEPS_UP = 0.1, 0.02
"""Shares of waiting: from the first on loading is the bottleneck, up to the second it is none."""

_LONG_START = 0.1
"""From this share of the time on, what the first batches take is spoken of."""

_NO_STEP = 0.001
"""Seconds of a step below which a loop does nothing with its batches."""


@dataclass(frozen=True, kw_only=True)
class ThroughputReport:
    """What a training loop's time went to, in one epoch or in all."""

    batches: int
    images: int
    """Samples in them, by the labels of each."""
    seconds: float
    """From the beginning of each epoch to its end, steps and waiting."""
    first: float
    """Seconds that the first batch of each epoch was waited for: workers start, and read."""
    waited: float
    """Seconds that all other batches, and the end of the epoch, were waited for."""
    longest: float
    """The longest that one batch was waited for, without the first of each epoch."""
    longest_at: tuple[int, int]
    """The number of its epoch and its own in it, from 0 on."""
    epochs: tuple[ThroughputReport, ...] = ()
    """Each epoch by itself; empty in the report of one."""

    @property
    def share(self) -> float:
        """Part of the time, 0 to 1, that was waited, without the first batch of each epoch."""
        counted = self.seconds - self.first
        return self.waited / counted if counted > 0 else 0.0

    @property
    def rate(self) -> float:
        """Images a second, of all the time."""
        return self.images / self.seconds if self.seconds > 0 else 0.0

    @property
    def step(self) -> float:
        """Seconds that the loop took for a batch in the mean, without waiting."""
        spent = self.seconds - self.first - self.waited
        return max(0.0, spent) / self.batches if self.batches else 0.0


class ThroughputMonitor:
    """Gives the batches of any loader, and notes how long each was waited for.

    ::

        loader = ThroughputMonitor(make_loader(dataset, 64, shuffle=True))
        for epoch in range(epochs):
            for images, labels in loader:
                ...
        print(loader.summary())

    It may wrap a loader of shardkit, a PyTorch ``DataLoader``, a `DevicePrefetcher`, or any other
    iterable. Whatever else is asked of it, such as ``set_epoch``, ``state_dict`` or ``batch_size``,
    the loader answers. It takes some microseconds for a batch, and keeps none alive.

    What it measures is the time between asking for a batch and having it, on the clock of the loop.
    A step on a GPU often only queues its work and returns: then the loop waits for data while the
    GPU still computes, and the share is the most that the GPU may have been idle, not what it was.
    With a ``.item()`` of the loss in each step, or ``torch.cuda.synchronize()``, it is both.
    What a loop does beside training, such as validation in its midst, counts as its step.
    """

    def __init__(self, loader: Any, bar: Any = None) -> None:
        """Make a monitor.

        Args:
            loader: Whatever gives batches.
            bar: A progress bar of tqdm, or anything with its ``set_postfix``, that shows `postfix`
                a few times a second. It may also be set later, as the attribute ``bar``.

        Raises:
            UsageError: If ``loader`` does not give batches, or ``bar`` has no ``set_postfix``.
        """
        # An iterable dataset may give batches, as webdataset's loaders do, which are such datasets.
        gives_samples = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
        if gives_samples or isinstance(loader, str) or not hasattr(loader, "__iter__"):
            raise UsageError(
                "ThroughputMonitor needs a loader, such as make_loader(...) or a DataLoader, "
                f"not {loader!r}"
            )
        if bar is not None and not hasattr(bar, "set_postfix"):
            raise UsageError(f"bar={bar!r} has no set_postfix, as bars of tqdm have")
        self.loader = loader
        self.bar = bar
        self._tallies: list[_Tally] = []
        self._told = 0.0

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith("__"):  # not made yet, or asked by copy and pickle
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        tally = _Tally()
        self._tallies.append(tally)
        clock = time.perf_counter
        asked = clock()
        held: list[Any] = []
        try:
            for batch in self.loader:
                given = clock()
                held.append(batch)
                del batch
                tally.add(given - asked, count(held[0]))
                if self.bar is not None and given - self._told > _BAR_SECONDS:
                    self._told = given
                    self.bar.set_postfix(self.postfix)
                yield held.pop()  # nothing here keeps a batch that its user let go
                asked = clock()
                tally.end_step(asked - given)
            tally.waited += clock() - asked
        except GeneratorExit:
            # Whoever holds the iterator may end it long after the loop: that was no step.
            tally.end_step(min(clock() - given, tally.longest_step or math.inf))
            raise

    @property
    def report(self) -> ThroughputReport:
        """What was seen so far, the epoch under way included."""
        parts = tuple(each.report(number) for number, each in enumerate(self._tallies))
        slowest = max(parts, key=lambda part: part.longest, default=None)
        return ThroughputReport(
            batches=sum(part.batches for part in parts),
            images=sum(part.images for part in parts),
            seconds=sum(part.seconds for part in parts),
            first=sum(part.first for part in parts),
            waited=sum(part.waited for part in parts),
            longest=slowest.longest if slowest else 0.0,
            longest_at=slowest.longest_at if slowest else (0, 0),
            epochs=parts,
        )

    @property
    def postfix(self) -> dict[str, str]:
        """Images a second and the share of waiting in this epoch, for a bar's ``set_postfix``."""
        if not self._tallies:
            return {"img/s": "-", "waiting": "-"}
        now = self._tallies[-1].report(0)
        return {"img/s": f"{now.rate:,.0f}", "waiting": f"{now.share:.0%}"}

    def summary(self) -> str:
        """Return in words what the time went to, whether that is good, and what to do next."""
        report = self.report
        if not report.batches:
            return "no batch was read"
        count_of = len(report.epochs)
        lines = [
            f"{report.images:,} images in {report.seconds:.1f} s, {report.rate:,.0f} images/s, "
            f"{count_of} {'epoch' if count_of == 1 else 'epochs'}",
            self._verdict(report),
        ]
        if report.longest > 0:
            epoch, batch = report.longest_at
            lines.append(
                f"the longest wait was {_time(report.longest)}, for batch {batch} of epoch {epoch}"
            )
        start = f"the first batch of an epoch took {_time(report.first / count_of)}"
        if _starts_long(report) and count_of > 1:
            start += f", {report.first / report.seconds:.0%} of all the time: {self._on_starts()}"
        return "\n".join([*lines, start])

    def _on_starts(self) -> str:
        """Return what makes the first batches weigh less."""
        workers = getattr(self.loader, "num_workers", 0)
        if isinstance(self.loader, DataLoader) and workers and not self.loader.persistent_workers:
            return "persistent_workers=True saves most of that"
        return "the more batches an epoch has, the less that is"

    def _verdict(self, report: ThroughputReport) -> str:
        found = f"the loop waited for data {_share(report.share)} of the time"
        if _starts_long(report):
            found = f"apart from the first batch of each epoch, {found}"
        if report.share > _WAITS and report.step < _NO_STEP:
            return f"{found}: there is next to no training step that it could be compared with"
        if report.share <= _KEEPS_UP:
            return f"{found}: the loader keeps up"
        if report.share < _WAITS:
            return f"{found}: the loader keeps up but for some batches; prefetch more"
        return (
            f"{found}: loading is the bottleneck, and without it training would be "
            f"{1 / max(1e-9, 1 - report.share):.1f} x as fast; `{self._command(report)}` tells "
            "what limits it"
        )

    def _command(self, report: ThroughputReport) -> str:
        """Return the command that looks into it, with all that is known of this loop."""
        loader = self.loader
        while hasattr(loader, "loader"):  # such as a DevicePrefetcher
            loader = loader.loader
        dataset: Any = getattr(loader, "dataset", None)
        while not hasattr(dataset, "path") and hasattr(dataset, "dataset"):  # such as a Subset
            dataset = dataset.dataset
        path = getattr(dataset, "path", None)
        words = [
            f"shardkit doctor {'DST' if path is None else shlex.quote(str(path))}",
            f"--step-ms {max(0.1, 1000 * report.step):.3g}",
            f"--batch-size {max(1, *(each.largest for each in self._tallies))}",
        ]
        workers = getattr(loader, "num_workers", None)
        if type(workers) is int and workers >= 0:
            words.append(f"--workers {workers}")
        decode: Any = getattr(dataset, "decode", None)
        if type(decode) in (CenterCrop, RandomResizedCrop, Resize):
            words.append(f"--decode {shlex.quote(_written(decode))}")
        return " ".join(words)


class _Tally:
    """One epoch, as it goes on."""

    def __init__(self) -> None:
        self.batches = self.images = self.largest = self.longest_at = 0
        self.first = self.waited = self.steps = self.longest = self.longest_step = 0.0

    def add(self, wait: float, images: int) -> None:
        """Note a batch."""
        if not self.batches:
            self.first = wait
        else:
            self.waited += wait
            if wait > self.longest:
                self.longest, self.longest_at = wait, self.batches
        self.batches += 1
        self.images += images
        self.largest = max(self.largest, images)

    def end_step(self, seconds: float) -> None:
        """Note what was done with the batch."""
        self.steps += seconds
        self.longest_step = max(self.longest_step, seconds)

    def report(self, number: int) -> ThroughputReport:
        """Return it as the epoch of the given number."""
        return ThroughputReport(
            batches=self.batches,
            images=self.images,
            seconds=self.first + self.waited + self.steps,
            first=self.first,
            waited=self.waited,
            longest=self.longest,
            longest_at=(number, self.longest_at),
        )


def _starts_long(report: ThroughputReport) -> bool:
    """Tell whether what the first batches take is much of all the time."""
    return report.first >= _LONG_START * report.seconds


def _share(share: float) -> str:
    return f"{share:.1%}" if share < _WAITS else f"{share:.0%}"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _written(operation: ImageOp) -> str:
    """Return an operation as the command line takes it: its size, and what is not the default."""
    chosen = [
        f"{each.name}={getattr(operation, each.name)!r}".replace("=inf", "=1e999")
        for each in dataclasses.fields(operation)
        if each.name != "size" and getattr(operation, each.name) != each.default
    ]
    size = getattr(operation, "size", None)
    return f"{type(operation).__name__}({', '.join([repr(size), *chosen])})"
