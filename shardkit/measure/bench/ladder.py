"""`shardkit ladder`: improve a loader step by step, and measure what each step gains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.bench import tutorial
from shardkit.measure.runner import session
from shardkit.measure.runner.material import choose_decode, is_dataset
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import Candidate, Result, Spread, Watch, run_interleaved
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.steps import device
from shardkit.system.formatting import json_value
from shardkit.system.machine import OtherLoad, other_load, usable_cpus
from shardkit.system.text import printable

NO_ACCELERATOR = "no accelerator"

SECONDS = 6.0
"""Default length of a measurement of the baseline."""

_BATCH_SIZE, _PREFETCH = 32, 2
_EPOCHS = (3, 10)
"""Fewest and most epochs of a measurement: their boundaries count, but are not all."""

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
    missing: str = ""
    """Why it was not measured."""
    note: str = ""
    """Why it cannot gain here, or the engine that ``auto`` chose."""
    images_per_second: Spread | None = None
    speedup: Spread | None = None
    """Ratio to the baseline in the same rounds."""
    over_previous: Spread | None = None
    """The same, to the last rung above that was measured."""


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
        """Whether a rung that this machine supports could not be measured."""
        return any(rung.missing not in ("", NO_ACCELERATOR) for rung in self.rungs)

    @property
    def conclusion(self) -> str:
        """The result as a sentence."""
        gains = [(rung, rung.speedup.median) for rung in self.rungs if rung.speedup]
        steps = [(rung, rung.over_previous.median) for rung in self.rungs if rung.over_previous]
        best, gain = max(gains, key=lambda each: each[1], default=(None, 0.0))
        if best is None or gain < _SMALL_GAIN:
            text = "no improvement makes it faster"
        else:
            largest, step = max(steps, key=lambda each: each[1])
            text = f"{gain:.1f}x with {_plain(best)}; largest improvement: {_plain(largest)}, "
            text += f"{step:.1f}x"
        if self.step_seconds is not None:
            most = self.batch_size / self.step_seconds
            text += f"; the model alone trains {most:,.0f} images/s"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        told = {**dataclasses.asdict(self), "conclusion": self.conclusion}
        values: dict[str, Any] = json_value(told)
        for value, rung in zip(values["rungs"], self.rungs, strict=True):
            value["loader"] = str(rung.loader)
        return values

    def describe(self) -> str:
        """Return the report as text: the table, the conclusion and notes."""
        part = f" of {self.images:,}" if self.rows < self.images else ""
        step = f"training {printable(self.model)}" if self.model else "no training step"
        lines = [
            f"{printable(self.name)}: {self.rows:,}{part} images, {self.epochs} epochs, batches of "
            f"{self.batch_size}, {step}",
            f"    {'':<36}{'images/s':>10}{'speedup':>10}{'range':>14}{'x previous':>12}",
        ]
        for rung in self.rungs:
            name = f"{rung.name} ({rung.note})" if rung.note else rung.name
            lines.append(f"    {name:<36}{_cells(rung)}".rstrip())
        lines.append(f"  result    {self.conclusion}")
        return "\n".join([*lines, *(f"  note      {each}" for each in self._notes())])

    def _notes(self) -> list[str]:
        notes = [
            f"{_plain(rung)} failed: {printable(rung.missing)}"
            for rung in self.rungs
            if rung.missing not in ("", NO_ACCELERATOR)
        ]
        if self.interrupted:
            notes.append(f"interrupted: these are {self.rounds} complete rounds")
        if self.rows < self.images:
            notes.append("a full epoch is longer, so persistent workers gain less")
        if self.rounds < 2:
            notes.append("one round does not show chance variation: use --rounds 3")
        rates = [rung.images_per_second for rung in self.rungs if rung.images_per_second]
        widest = max((each.highest - each.lowest) / 2 / each.median for each in rates)
        if widest > _WIDE:
            notes.append(f"rates varied by up to ±{widest:.0%} between rounds")
        if self.load.disturbs:
            notes.append(f"{self.load}: rows without worker processes suffer most")
        return notes


def ladder(  # noqa: PLR0913 - the options of the command
    dataset: str | PathLike[str] | None = None,
    *,
    case: str | None = None,
    decode: str | None = None,
    transform: str | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    model: str | None = None,
    rounds: int = 3,
    seconds: float = SECONDS,
    watch: Watch = lambda text, done, total: None,
) -> LadderReport:
    """Measure the speedup of each improvement to data loading, one after the other.

    A measurement is several whole epochs, with the start of workers between them.

    Args:
        dataset: A dataset or a plain folder of images.
        case: ``tutorial`` measures the dataset of PyTorch's tutorial instead.
        decode: Image type, or an operation; None selects as the command does.
        transform: ``module:name`` of a transform for each image.
        batch_size: Samples per batch; None uses 32.
        workers: Workers per loader; None uses the number of CPUs, at least 2.
        model: ``module:name`` of a model to train on each batch, or ``small``; None measures
            loading alone.
        rounds: Interleaved rounds, after one warm-up round.
        seconds: Approximate length of a measurement of the baseline.
        watch: Called before each measurement.

    Raises:
        UsageError: If the dataset, the model or an option is invalid.
        MeasurementFailed: If the baseline cannot be measured.
        KeyboardInterrupt: If Ctrl-C comes before a round is complete.
    """
    load, accelerator = other_load(), device().type == "cuda"
    batch_size = batch_size or _BATCH_SIZE
    if case is not None:
        subject = Subject(dataset=f"{tutorial.__name__}:TutorialDataset")
        name, workers = case, workers or tutorial.WORKERS
    else:
        name = fspath(dataset or "")
        decode = choose_decode([name], decode, transform)
        subject = Subject(path=name, decode=decode, transform=transform)
        workers = workers or max(2, usable_cpus())
    rungs = make_rungs(workers, batch_size, accelerator=accelerator)
    if case is None and not is_dataset(name):
        rungs[-2].note = "a folder has none"
    with MeasurementProcess(subject) as process:
        images = process.open().images
        if not images:
            raise UsageError(f"{name}: there are no images in it")
        pilot = process.measure(rungs[0].loader, StopCondition(seconds=seconds / 5)).rate
        step = StepSpec(model=model) if model else StepSpec(arrive=accelerator)
        step_seconds = (
            process.call(session.step_seconds, loader=rungs[0].loader, step=step) if model else None
        )
    fewest, most = _EPOCHS
    fitting = min(most, max(fewest, round(pilot * seconds / images)))
    epochs = tutorial.EPOCHS if case else fitting
    # At least two batches per worker: otherwise their start would be all that is measured.
    batches = max(2 * workers, math.ceil(pilot * seconds / epochs / batch_size))
    rows = images if case else min(images, batches * batch_size)
    longest = rows * epochs * (1 / pilot + (step_seconds or 0.0) / batch_size)
    supported = [rung for rung in rungs if not rung.missing]
    candidates = [
        Candidate(
            subject=dataclasses.replace(subject, limit=rows),
            loader=rung.loader,
            step=step,
            stop=StopCondition(epochs=epochs, whole=True, seconds=_PATIENCE * longest),
        )
        for rung in supported
    ]
    results, interrupted = run_interleaved(candidates, rounds=rounds, watch=watch)
    compare(supported, results)
    return LadderReport(
        name=name,
        images=images,
        rows=rows,
        epochs=epochs,
        batch_size=batch_size,
        workers=workers,
        rounds=len(results[0].samples),
        model=model,
        step_seconds=step_seconds,
        rungs=rungs,
        load=load,
        interrupted=interrupted,
    )


def make_rungs(workers: int, batch_size: int, *, accelerator: bool) -> list[Rung]:
    """Return the rungs from the lowest; those that need a missing accelerator are marked."""
    spec = LoaderSpec(engine=PLAIN, batch_size=batch_size, options={"num_workers": 0})
    rungs = [Rung(name="no workers", loader=spec)]
    target = "cuda" if accelerator else None

    def add(name: str, changed: LoaderSpec, *, supported: bool = True) -> None:
        """Add a rung; later ones build on it only if this machine supports it."""
        nonlocal spec
        missing = "" if supported else NO_ACCELERATOR
        rungs.append(Rung(name=f"+ {name}", loader=changed, missing=missing))
        spec = changed if supported else spec

    in_workers = spec.changed(num_workers=workers, prefetch_factor=_PREFETCH)
    add(f"{workers} workers, prefetch {_PREFETCH}", in_workers)
    add("pinned memory", spec.changed(pin_memory=True), supported=accelerator)
    add("persistent workers", spec.changed(persistent_workers=True))
    add("device prefetcher", dataclasses.replace(spec, device=target), supported=accelerator)
    add("batched __getitems__", spec.changed(batched=True))
    options = {"num_workers": workers}
    add("shardkit's engine", LoaderSpec(batch_size=batch_size, options=options, device=target))
    return rungs


def compare(rungs: Sequence[Rung], results: Sequence[Result]) -> None:
    """Note the rates and speedups of rungs; the first is the baseline.

    Raises:
        MeasurementFailed: If the baseline was not measured.
    """
    baseline = previous = results[0]
    if baseline.problem:
        raise MeasurementFailed(f"the baseline failed: {baseline.problem}")
    for rung, result in zip(rungs, results, strict=True):
        rung.missing = result.problem
        if result.problem:
            continue
        last = result.samples[-1]
        rung.note = rung.note or (last.engine if last.reason else "")
        rung.images_per_second = Spread.of(result.rates)
        if result is not baseline:
            rung.speedup = Spread.paired(result.rates, baseline.rates)
            rung.over_previous = Spread.paired(result.rates, previous.rates)
        previous = result


def _plain(rung: Rung) -> str:
    return rung.name.removeprefix("+ ")


def _cells(rung: Rung) -> str:
    rate, speedup, previous = rung.images_per_second, rung.speedup, rung.over_previous
    if rate is None:
        return f"{NO_ACCELERATOR if rung.missing == NO_ACCELERATOR else 'failed':>10}"
    if speedup is None or previous is None:
        return f"{rate.median:>10,.0f}"
    ends = f"{speedup.lowest:.2f}..{speedup.highest:.2f}"
    return f"{rate.median:>10,.0f}{speedup.median:>9.2f}x{ends:>14}{previous.median:>11.2f}x"
