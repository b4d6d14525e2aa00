"""`ThroughputMonitor`: measure how long a training loop waits for data."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardkit.errors import UsageError
from shardkit.system.text import shell
from shardkit.torch.data.collate import count
from shardkit.torch.data.crops import OPERATIONS
from shardkit.torch.data.ops import ImageOp

_BAR_SECONDS = 0.3
"""Seconds between updates of a progress bar: drawing it takes about 0.1 ms."""

_WAITS = 0.1
_KEEPS_UP = 0.02
"""Fractions of time spent waiting: above the first, loading is the bottleneck; below the second, it
keeps up."""

_LONG_START = 0.1
"""Minimum fraction of time in first batches that is reported."""

_NO_STEP = 0.001
"""Seconds below which a training step counts as empty."""


@dataclass(frozen=True, kw_only=True)
class ThroughputReport:
    """Time that a training loop spent, in one epoch or in all."""

    batches: int
    images: int
    """Samples in the batches."""
    seconds: float
    """Total time from the start to the end of each epoch."""
    first: float
    """Seconds spent waiting for the first batch of each epoch, which includes starting workers."""
    waited: float
    """Seconds spent waiting for all other batches and the end of the epoch."""
    longest: float
    """Longest wait in seconds for one batch, without the first of each epoch."""
    longest_at: tuple[int, int]
    """Epoch and batch of the longest wait, from 0 on."""
    epochs: tuple[ThroughputReport, ...] = ()
    """Report of each epoch; empty in the report of one epoch."""

    @property
    def wait_fraction(self) -> float:
        """Fraction of time spent waiting, 0 to 1, without the first batch of each epoch."""
        counted = self.seconds - self.first
        return self.waited / counted if counted > 0 else 0.0

    @property
    def rate(self) -> float:
        """Images/s over the total time."""
        return self.images / self.seconds if self.seconds > 0 else 0.0

    @property
    def step(self) -> float:
        """Mean seconds that the loop took for a batch, without waiting."""
        spent = self.seconds - self.first - self.waited
        return max(0.0, spent) / self.batches if self.batches else 0.0


class ThroughputMonitor:
    """Yields the batches of any loader, and measures how long the loop waits for each.

    ::

        loader = ThroughputMonitor(make_loader(dataset, 64, shuffle=True))
        for epoch in range(epochs):
            for images, labels in loader:
                ...
        print(loader.summary())

    It wraps a shardkit loader, a PyTorch ``DataLoader``, a `DevicePrefetcher`, or any other
    iterable. All other attributes, such as ``set_epoch``, ``state_dict`` or ``batch_size``, are
    those of the loader. Monitoring takes a few microseconds per batch and keeps no batch alive.

    It measures the time from the request for a batch to its arrival, as seen by the loop. A GPU
    step often only queues its work and returns. Then the loop waits while the GPU still computes,
    so the fraction is only an upper bound of the GPU's idle time. It is exact if each step calls
    ``loss.item()`` or ``torch.cuda.synchronize()``. All other work in the loop, such as validation,
    counts as the step.
    """

    def __init__(self, loader: Any, bar: Any = None) -> None:
        """Create a monitor.

        Args:
            loader: Any iterable of batches.
            bar: A tqdm progress bar, or any object with ``set_postfix``, to show `postfix` a few
                times per second. You can also set it later, as the attribute ``bar``.

        Raises:
            UsageError: If ``loader`` is not a loader, or ``bar`` has no ``set_postfix``.
        """
        # Iterable datasets may yield batches: webdataset's loaders do.
        gives_samples = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
        if gives_samples or isinstance(loader, str) or not hasattr(loader, "__iter__"):
            raise UsageError(
                "ThroughputMonitor needs a loader, such as make_loader(...) or a DataLoader, "
                f"not {loader!r}"
            )
        if bar is not None and not hasattr(bar, "set_postfix"):
            raise UsageError(f"bar={bar!r} has no set_postfix method, unlike tqdm bars")
        self.loader = loader
        self.bar = bar
        self._tallies: list[_Tally] = []
        self._told = 0.0
        for name in ("state_dict", "load_state_dict"):  # protocols look here, not in __getattr__
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or name.startswith(
            "__"
        ):  # not initialized yet, or called by copy and pickle
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        tally = _Tally()
        self._tallies.append(tally)
        clock = time.perf_counter
        requested = clock()
        held: list[Any] = []
        try:
            for batch in self.loader:
                received = clock()
                held.append(batch)
                del batch
                tally.add(received - requested, count(held[0]))
                if self.bar is not None and received - self._told > _BAR_SECONDS:
                    self._told = received
                    self.bar.set_postfix(self.postfix)
                yield held.pop()  # keep no batch that its user has released
                requested = clock()
                tally.end_step(requested - received)
            tally.waited += clock() - requested
        except GeneratorExit:
            # The iterator may be closed long after the loop, which is not a step; or at the exit of
            # the interpreter, where modules such as `math` are gone.
            tally.end_step(min(clock() - received, tally.longest_step or float("inf")))
            raise

    @property
    def report(self) -> ThroughputReport:
        """Measurements so far, including the current epoch."""
        reports = tuple(tally.report(number) for number, tally in enumerate(self._tallies))
        slowest = max(reports, key=lambda report: report.longest, default=None)
        return ThroughputReport(
            batches=sum(report.batches for report in reports),
            images=sum(report.images for report in reports),
            seconds=sum(report.seconds for report in reports),
            first=sum(report.first for report in reports),
            waited=sum(report.waited for report in reports),
            longest=slowest.longest if slowest else 0.0,
            longest_at=slowest.longest_at if slowest else (0, 0),
            epochs=reports,
        )

    @property
    def postfix(self) -> dict[str, str]:
        """Images/s and fraction of waiting in this epoch, for ``set_postfix`` of a bar."""
        if not self._tallies:
            return {"img/s": "-", "waiting": "-"}
        now = self._tallies[-1].report(0)
        return {"img/s": f"{now.rate:,.0f}", "waiting": f"{now.wait_fraction:.0%}"}

    def summary(self) -> str:
        """Return a report as text: how time is spent, whether loading keeps up, what to do."""
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
            start += f", {report.first / report.seconds:.0%} of the total time: {self._on_starts()}"
        return "\n".join([*lines, start])

    def _on_starts(self) -> str:
        """Return advice to spend less time on first batches."""
        workers = getattr(self.loader, "num_workers", 0)
        if isinstance(self.loader, DataLoader) and workers and not self.loader.persistent_workers:
            return "persistent_workers=True saves most of that"
        return "longer epochs reduce it"

    def _verdict(self, report: ThroughputReport) -> str:
        verdict = f"the loop waited for data {_percent(report.wait_fraction)} of the time"
        if _starts_long(report):
            verdict = f"apart from the first batch of each epoch, {verdict}"
        if report.wait_fraction > _WAITS and report.step < _NO_STEP:
            return f"{verdict}: the training step is too short for a comparison"
        if report.wait_fraction <= _KEEPS_UP:
            return f"{verdict}: the loader keeps up"
        if report.wait_fraction < _WAITS:
            return f"{verdict}: the loader keeps up except for some batches; raise prefetch_factor"
        return (
            f"{verdict}: loading is the bottleneck, and without it training would be "
            f"{1 / max(1e-9, 1 - report.wait_fraction):.1f}x as fast; run "
            f"`{self._command(report)}` to find the cause"
        )

    def _command(self, report: ThroughputReport) -> str:
        """Return a `shardkit doctor` command for this loop."""
        loader = self.loader
        while hasattr(loader, "loader"):  # such as a DevicePrefetcher
            loader = loader.loader
        dataset: Any = getattr(loader, "dataset", None)
        while not hasattr(dataset, "path") and hasattr(dataset, "dataset"):  # such as a Subset
            dataset = dataset.dataset
        path = getattr(dataset, "path", None)
        words = [
            f"shardkit doctor {'DATASET' if path is None else shell(path)}",
            f"--step-ms {max(0.1, 1000 * report.step):.3g}",
            f"--batch-size {max(1, *(tally.largest for tally in self._tallies))}",
        ]
        workers = getattr(loader, "num_workers", None)
        if type(workers) is int and workers >= 0:
            words.append(f"--workers {workers}")
        decode: Any = getattr(dataset, "decode", None)
        if type(decode) in OPERATIONS:
            words.append(f"--decode {shell(_written(decode))}")
        return " ".join(words)


class _Tally:
    """Measurements of one epoch."""

    def __init__(self) -> None:
        self.batches = self.images = self.largest = self.longest_at = 0
        self.first = self.waited = self.steps = self.longest = self.longest_step = 0.0

    def add(self, wait: float, images: int) -> None:
        """Add a batch."""
        if not self.batches:
            self.first = wait
        else:
            self.waited += wait
            if wait > self.longest:
                self.longest = wait
                self.longest_at = self.batches
        self.batches += 1
        self.images += images
        self.largest = max(self.largest, images)

    def end_step(self, seconds: float) -> None:
        """Add the time of a step."""
        self.steps += seconds
        self.longest_step = max(self.longest_step, seconds)

    def report(self, number: int) -> ThroughputReport:
        """Return the report of epoch ``number``."""
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
    """Return whether first batches take a large fraction of the time."""
    return report.first >= _LONG_START * report.seconds


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}" if fraction < _WAITS else f"{fraction:.0%}"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _written(operation: ImageOp) -> str:
    """Return an operation in the syntax of the command line, without defaults."""
    chosen = [
        f"{option.name}={getattr(operation, option.name)!r}".replace("=inf", "=1e999")
        for option in dataclasses.fields(operation)
        if option.name != "size" and getattr(operation, option.name) != option.default
    ]
    size = getattr(operation, "size", None)
    return f"{type(operation).__name__}({', '.join([repr(size), *chosen])})"
