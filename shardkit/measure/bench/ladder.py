"""`shardkit ladder`: improve a loader step by step, and measure what each step gains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from shardkit.errors import MeasurementFailed
from shardkit.measure.bench import tutorial
from shardkit.measure.bench.report import aligned
from shardkit.measure.runner import session
from shardkit.measure.runner.material import choose_decode
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import Candidate, Result, Spread, Watch, run_interleaved
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.steps import device
from shardkit.system.formatting import json_value
from shardkit.system.machine import OtherLoad, other_load, usable_cpus
from shardkit.system.text import printable

SECONDS = 6.0
"""Default length of a measurement of the baseline."""

_BATCH_SIZE, _PREFETCH = 32, 2
_EPOCHS = 3
"""Epochs of a measurement: their boundaries count, but are not all."""

_PATIENCE = 3.0
"""A measurement may take this many times as long as the baseline and the model in sequence."""

_WIDE = 0.2
"""Minimum spread to report: other processes may have run."""

_SMALL_GAIN = 1.1
"""Minimum speedup to report in the conclusion."""


@dataclass(kw_only=True)
class Rung:
    """One row: everything above it, and one improvement."""

    name: str
    loader: LoaderSpec
    problem: str = ""
    """Why it could not be measured."""
    images_per_second: Spread | None = None
    speedup: Spread | None = None
    """Ratio to the baseline in the same rounds."""
    over_previous: Spread | None = None
    """The same, to the last rung above that was measured."""

    def cells(self) -> list[str]:
        """Return the table cells of a rung."""
        rate, speedup, previous = self.images_per_second, self.speedup, self.over_previous
        if speedup is None or previous is None:
            return [self.name, f"{rate.median:,.0f}" if rate else "failed", "", "", ""]
        return [
            f"+ {self.name}",
            f"{rate.median:,.0f}" if rate else "",
            f"{speedup.median:.2f}x",
            f"{speedup.lowest:.2f}..{speedup.highest:.2f}",
            f"{previous.median:.2f}x",
        ]


@dataclass(frozen=True, kw_only=True)
class LadderReport:
    """Result of `ladder`."""

    name: str
    images: int
    rows: int
    """Images that an epoch reads."""
    epochs: int
    """Epochs of a measurement."""
    batch_size: int
    workers: int
    accelerator: bool
    rounds: int
    model: str | None
    """Model that was trained with each batch; None measured loading alone."""
    step_seconds: float | None
    """Time of a training step on a batch that is ready; None without a model."""
    rungs: list[Rung]
    load: OtherLoad
    """CPU use of other processes at the start."""
    interrupted: bool

    @property
    def failed(self) -> bool:
        """Whether a rung could not be measured."""
        return any(rung.problem for rung in self.rungs)

    @property
    def conclusion(self) -> str:
        """The result as a sentence."""
        gains = [(each.speedup.median, each.name) for each in self.rungs if each.speedup]
        steps = [
            (each.over_previous.median, each.name) for each in self.rungs if each.over_previous
        ]
        (gain, best), (step, largest) = max(gains, default=(0, "")), max(steps, default=(0, ""))
        text = f"{gain:.1f}x with {best}; largest improvement: {largest}, {step:.1f}x"
        if gain < _SMALL_GAIN:
            text = "no improvement makes it faster"
        if self.step_seconds is not None:
            most = self.batch_size / self.step_seconds
            text += f"; the model alone trains {most:,.0f} images/s"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        values: dict[str, Any] = json_value(dataclasses.asdict(self))
        for value, rung in zip(values["rungs"], self.rungs, strict=True):
            value["loader"] = str(rung.loader)
        return {**values, "conclusion": self.conclusion}

    def describe(self) -> str:
        """Return the report as text: the table, the conclusion and notes."""
        part = f" of {self.images:,}" if self.rows < self.images else ""
        step = f"training {printable(self.model)}" if self.model else "no training step"
        columns = ["", "images/s", "speedup", "range", "x previous"]
        return "\n".join(
            [
                f"{printable(self.name)}: {self.rows:,}{part} images, {self.epochs} epochs, "
                f"batches of {self.batch_size}, {step}",
                *aligned([columns, *(rung.cells() for rung in self.rungs)]),
                f"  result    {self.conclusion}",
                *(f"  note      {each}" for each in self._notes()),
            ]
        )

    def _notes(self) -> list[str]:
        rates = [rung.images_per_second for rung in self.rungs if rung.images_per_second]
        widest = max((each.highest - each.lowest) / 2 / each.median for each in rates)
        notes = (
            (self.interrupted, f"interrupted: these are {self.rounds} complete rounds"),
            (not self.accelerator, "no accelerator: without pinned memory and device prefetcher"),
            (self.rows < self.images, "a full epoch is longer, so persistent workers gain less"),
            (self.rounds < 2, "one round does not show chance variation: use --rounds 3"),
            (widest > _WIDE, f"rates varied by up to ±{widest:.0%} between rounds"),
            (self.load.disturbs, f"{self.load}: rows without worker processes suffer most"),
        )
        failed = [(each.name, each.problem) for each in self.rungs if each.problem]
        problems = [f"{name} failed: {printable(problem)}" for name, problem in failed]
        return [*problems, *(text for applies, text in notes if applies)]


def ladder(  # noqa: PLR0913 - the options of the command
    dataset: str | PathLike[str] | None = None,
    *,
    case: str | None = None,
    decode: str | None = None,
    transform: str | None = None,
    batch_size: int = _BATCH_SIZE,
    workers: int | None = None,
    model: str | None = None,
    rounds: int = 3,
    seconds: float = SECONDS,
    watch: Watch = lambda text, done, total: None,
) -> LadderReport:
    """Measure the speedup of each improvement to data loading, one after the other.

    A measurement is several whole epochs, with the start of workers between them. The arguments are
    the options of the command.

    Raises:
        UsageError: If the dataset, the model or an option is invalid.
        MeasurementFailed: If the baseline cannot be measured.
        KeyboardInterrupt: If Ctrl-C comes before a round is complete.
    """
    load, accelerator = other_load(), device().type == "cuda"
    if case is not None:
        subject = Subject(dataset=f"{tutorial.__name__}:TutorialDataset")
        name, workers, epochs = case, workers or tutorial.WORKERS, tutorial.EPOCHS
    else:
        name, workers, epochs = fspath(dataset or ""), workers or max(2, usable_cpus()), _EPOCHS
        decode = choose_decode([name], decode, transform)
        subject = Subject(path=name, decode=decode, transform=transform)
    rungs = make_rungs(workers, batch_size, accelerator=accelerator)
    step = StepSpec(model=model) if model else StepSpec(arrive=accelerator)
    step_seconds = None
    with MeasurementProcess(subject) as process:
        images = process.open().images
        pilot = process.measure(rungs[0].loader, StopCondition(seconds=seconds / 5)).rate
        if model:
            step_seconds = process.call(session.step_seconds, loader=rungs[0].loader, step=step)
    # At least two batches per worker: otherwise their start would be all that is measured.
    batches = max(2 * workers, math.ceil(pilot * seconds / epochs / batch_size))
    rows = images if case else min(images, batches * batch_size)
    longest = rows * epochs * (1 / pilot + (step_seconds or 0.0) / batch_size)
    candidates = [
        Candidate(
            subject=dataclasses.replace(subject, limit=rows),
            loader=rung.loader,
            step=step,
            stop=StopCondition(epochs=epochs, whole=True, seconds=_PATIENCE * longest),
        )
        for rung in rungs
    ]
    results, interrupted = run_interleaved(candidates, rounds=rounds, watch=watch)
    compare(rungs, results)
    return LadderReport(
        name=name,
        images=images,
        rows=rows,
        epochs=epochs,
        batch_size=batch_size,
        workers=workers,
        accelerator=accelerator,
        rounds=len(results[0].samples),
        model=model,
        step_seconds=step_seconds,
        rungs=rungs,
        load=load,
        interrupted=interrupted,
    )


def make_rungs(workers: int, batch_size: int, *, accelerator: bool) -> list[Rung]:
    """Return the rungs that this machine supports, from the lowest."""
    plain = LoaderSpec(engine=PLAIN, batch_size=batch_size, num_workers=0)
    rungs = [Rung(name="no workers", loader=plain)]

    def add(name: str, **changed: Any) -> None:
        loader = dataclasses.replace(rungs[-1].loader, **changed)
        rungs.append(Rung(name=name, loader=loader))

    target = "cuda" if accelerator else None
    add(f"{workers} workers, prefetch {_PREFETCH}", num_workers=workers, prefetch_factor=_PREFETCH)
    if accelerator:
        add("pinned memory", pin_memory=True)
    add("persistent workers", persistent_workers=True)
    if accelerator:
        add("device prefetcher", device=target)
    add("batched __getitems__", batched=True)
    ours = LoaderSpec(batch_size=batch_size, num_workers=workers, device=target)
    return [*rungs, Rung(name="shardkit's engine", loader=ours)]


def compare(rungs: Sequence[Rung], results: Sequence[Result]) -> None:
    """Note the rates and speedups of rungs; the first is the baseline."""
    baseline = previous = results[0]
    if baseline.problem:
        raise MeasurementFailed(f"the baseline failed: {baseline.problem}")
    for rung, result in zip(rungs, results, strict=True):
        rung.problem = result.problem
        if result.problem:
            continue
        if rung.loader.engine == "auto":
            rung.name += f" ({result.samples[-1].engine})"
        rung.images_per_second = Spread.of(result.rates)
        if result is not baseline:
            rung.speedup = Spread.paired(result.rates, baseline.rates)
            rung.over_previous = Spread.paired(result.rates, previous.rates)
        previous = result
