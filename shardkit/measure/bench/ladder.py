"""The ladder: one improvement of loading after the other, and what each of them brings."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from dataclasses import dataclass, field

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.runner.cases import CASES
from shardkit.measure.runner.material import is_dataset
from shardkit.measure.runner.process import MeasurementProcess, Seen
from shardkit.measure.runner.rounds import Watch
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, Subject
from shardkit.measure.runner.steps import StepSpec, device
from shardkit.measure.runner.timing import StopCondition
from shardkit.system.machine import OtherLoad, other_load, usable_cpus

ALONE, TRAINED = "alone", "trained"
"""The two columns: an empty step, and a training step of a model."""

NO_ACCELERATOR = "needs an accelerator"

PREFETCH = 2
"""Batches that each worker of PyTorch's loader makes ahead: its default."""

SECONDS = 6.0
"""Default length of a measurement of the baseline."""

_BATCH_SIZE = 32
_EPOCHS = (3, 10)
"""The least and the most epochs of a look: the borders between them count, and are not all."""

_PATIENCE = 3.0
"""What a look may take of the time that the baseline and the model take, one after the other."""

_PILOT = 0.2
"""Part of a look's time in which the baseline is tried, to choose how much is read."""


@dataclass(frozen=True, kw_only=True)
class LadderRequest:
    """What is climbed, and for how long.

    Raises:
        UsageError: If a number is out of range.
    """

    subject: Subject
    batch_size: int | None = None
    """None takes the case's own, or 32."""
    workers: int | None = None
    """None takes the case's own, or the processors of this machine, two at the least."""
    model: str | None = "small"
    """As in `StepSpec`; None leaves the column with a model out."""
    rounds: int = 3
    """That count; one comes first that does not."""
    epochs: int | None = None
    """In a look; None takes the case's own, or 3 to 10."""
    seconds: float = SECONDS
    """How long the baseline reads: it decides how many images an epoch has; a case has its own."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "workers", "rounds", "epochs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{name}={value!r} is not an integer from 1 on")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"seconds={self.seconds!r} is not a time above 0")

    def resolved(self) -> LadderRequest:
        """Return the request with numbers for what was left open, but for a folder's epochs."""
        case = CASES.get(self.subject.case or "")
        return dataclasses.replace(
            self,
            batch_size=self.batch_size or (case.BATCH_SIZE if case else _BATCH_SIZE),
            workers=self.workers or (case.WORKERS if case else max(2, usable_cpus())),
            epochs=self.epochs or (case.EPOCHS if case else None),
        )


@dataclass(kw_only=True)
class Rung:
    """One line: everything above it, and one thing more."""

    name: str
    loading: LoaderSpec
    missing: str = ""
    """Why it is not measured here, if it is not."""
    note: str = ""
    """Why it can bring nothing here, if that is known before."""
    rates: dict[str, list[float]] = field(default_factory=lambda: {ALONE: [], TRAINED: []})
    """Images/s of each round that counts, by the column."""
    engine: str = ""
    """What the loader chose, and why."""
    reason: str = ""

    def rate(self, column: str) -> float | None:
        """Return the median of the rates; None if it was not measured."""
        return statistics.median(self.rates[column]) if self.rates[column] else None


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much a look reads."""

    images: int
    """In the dataset."""
    rows: int
    """Images that an epoch reads."""
    epochs: int
    seconds: float
    """How long the baseline takes for all epochs, about."""


@dataclass(frozen=True, kw_only=True)
class LadderReport:
    """What was found."""

    request: LadderRequest
    """With numbers for all that was left open."""
    extent: Extent
    device: str
    """Where the model is trained: ``cpu`` or ``cuda``."""
    step_seconds: float | None
    """How long a step of the model takes on a batch that is there already; None without one."""
    model_problem: str
    """Why there is no column with the model, if there is none."""
    rungs: list[Rung]
    load: OtherLoad
    """What others did when it began."""

    def gain(self, rung: Rung, column: str, *, before: bool = False) -> float | None:
        """Return how many times as fast as the baseline, or as the rung before, a rung is.

        The rung before is the last one that was measured. None if there is nothing to compare.
        """
        measured = [each for each in self.rungs if each.rate(column) is not None]
        if rung not in measured or rung is measured[0]:
            return None
        other = measured[measured.index(rung) - 1 if before else 0]
        return (rung.rate(column) or 0.0) / (other.rate(column) or math.inf)

    def largest(self, column: str) -> Rung | None:
        """Return the rung that gains most over the one before it."""
        gains = [(self.gain(each, column, before=True), each) for each in self.rungs]
        known = [(gain, number) for number, (gain, _) in enumerate(gains) if gain is not None]
        return gains[max(known)[1]][1] if known else None


def ladder(request: LadderRequest, watch: Watch = lambda text, done, total: None) -> LadderReport:
    """Measure what each improvement of loading brings, with its epochs' borders and workers' start.

    Args:
        request: What is climbed.
        watch: Told before each look.

    Raises:
        UsageError: If the subject or the model cannot be opened.
        MeasurementFailed: If the baseline cannot be measured.
    """
    request, load = request.resolved(), other_load()
    accelerator = device().type == "cuda"
    rungs = make_rungs(request, accelerator=accelerator)
    baseline = rungs[0].loading
    with contextlib.ExitStack() as stack:
        pair = _Pair(request.subject, stack)
        extent = _extent(request, pair.open(), pair.process(baseline), baseline)
        step_seconds, problem = _try_model(request, pair.process(baseline), baseline)
        steps = {ALONE: StepSpec(arrive=accelerator)}
        if step_seconds is not None:
            steps[TRAINED] = StepSpec(model=request.model)
        batches = extent.epochs * extent.rows / baseline.batch_size
        climb = _Climb(
            pair=pair,
            extent=extent,
            steps=steps,
            patience=_PATIENCE * (extent.seconds + batches * (step_seconds or 0.0)),
        )
        climb.all_rounds(rungs, request.rounds, watch)
    if not rungs[0].rates[ALONE]:
        raise MeasurementFailed(f"{rungs[0].name}: {rungs[0].missing}")
    return LadderReport(
        request=request,
        extent=extent,
        device=device().type,
        step_seconds=step_seconds,
        model_problem=problem,
        rungs=rungs,
        load=load,
    )


def make_rungs(request: LadderRequest, *, accelerator: bool) -> list[Rung]:
    """Return the rungs, from below; those that this machine cannot do say so.

    Args:
        request: One that was `LadderRequest.resolved`.
        accelerator: Whether this machine has one.
    """
    workers = request.workers or 0
    loading = LoaderSpec(
        engine=PLAIN, batch_size=request.batch_size or 0, options={"num_workers": 0}
    )
    rungs = [Rung(name="no workers", loading=loading)]
    target = "cuda" if accelerator else None

    def add(name: str, loading: LoaderSpec, *, accelerated: bool = False) -> LoaderSpec:
        missing = NO_ACCELERATOR if accelerated and not accelerator else ""
        rungs.append(Rung(name=name, loading=loading, missing=missing))
        return loading if not missing else rungs[-2].loading

    loading = add(
        f"+ {workers} workers, prefetch {PREFETCH}",
        loading.changed(num_workers=workers, prefetch_factor=PREFETCH),
    )
    loading = add("+ pinned memory", loading.changed(pin_memory=True), accelerated=True)
    loading = add("+ persistent workers", loading.changed(persistent_workers=True))
    on_device = dataclasses.replace(loading, device=target)
    loading = add("+ device prefetcher", on_device, accelerated=True)
    add("+ batched __getitems__", loading.changed(batched=True))
    if request.subject.case is None and not is_dataset(request.subject.path):
        rungs[-1].note = "a folder has none"
    add(
        "+ shardkit's engine",
        LoaderSpec(batch_size=loading.batch_size, options={"num_workers": workers}, device=target),
    )
    return rungs


def _extent(
    request: LadderRequest, images: int, process: MeasurementProcess, baseline: LoaderSpec
) -> Extent:
    """Choose how much is read, so that the baseline takes about the time that was asked for."""
    if not images:
        raise UsageError(f"{request.subject.name}: there is no image in it")
    rate = process.look(baseline, StopCondition(seconds=_PILOT * request.seconds)).look.rate
    if request.subject.case is not None:
        rows, epochs = images, request.epochs or 1
    else:
        budget = rate * request.seconds
        least, most = _EPOCHS
        epochs = request.epochs or min(most, max(least, round(budget / images)))
        # Each worker has two batches to make at the least: else its start is all that is measured.
        size = baseline.batch_size
        batches = max(2 * (request.workers or 1), math.ceil(budget / epochs / size))
        rows = min(images, batches * size)
    return Extent(images=images, rows=rows, epochs=epochs, seconds=rows * epochs / rate)


def _try_model(
    request: LadderRequest, process: MeasurementProcess, baseline: LoaderSpec
) -> tuple[float | None, str]:
    """Return the time of a step by itself; or None, and why the model does not take the batch."""
    if request.model is None:
        return None, "not asked for"
    try:
        return process.step_seconds(baseline, StepSpec(model=request.model)), ""
    except MeasurementFailed as error:
        return None, str(error)


class _Pair:
    """The process for PyTorch's own loader, and the one for ours.

    So threads and workers of shardkit stay out of the process in which PyTorch's loader forks.
    """

    def __init__(self, subject: Subject, stack: contextlib.ExitStack) -> None:
        """Start both; they end with the stack."""
        self._subject = subject
        self._stack = stack
        self._served = {plain: self._start() for plain in (True, False)}

    def open(self) -> int:
        """Open the subject in both; return the number of its images."""
        return min(int(each.open()["images"]) for each in self._served.values())

    def process(self, loading: LoaderSpec) -> MeasurementProcess:
        """Return the process that measures a loading, begun anew if another rung ended it."""
        plain = loading.engine == PLAIN
        self._served[plain].restart_if_ended()
        return self._served[plain]

    def _start(self) -> MeasurementProcess:
        return self._stack.enter_context(MeasurementProcess(self._subject))


@dataclass(frozen=True, kw_only=True)
class _Climb:
    """Looks at rungs, by what all looks have in common."""

    pair: _Pair
    extent: Extent
    steps: dict[str, StepSpec]
    """By the column."""
    patience: float
    """Seconds that a look may take."""

    def all_rounds(self, rungs: list[Rung], rounds: int, watch: Watch) -> None:
        """Look at all rungs once in each round, in turning order; the first does not count."""
        order = [(rung, column) for rung in rungs if not rung.missing for column in self.steps]
        for number in range(rounds + 1):
            shift = number % len(order)
            for place, (rung, column) in enumerate(order[shift:] + order[:shift]):
                watch(rung.name, number * len(order) + place, (rounds + 1) * len(order))
                seen = self._look(rung, column, self.extent.epochs if number else 1)
                if number and seen is not None:
                    rung.rates[column].append(seen.look.rate)

    def _look(self, rung: Rung, column: str, epochs: int) -> Seen | None:
        """Return what is seen, or None if it fails, now or before."""
        if rung.missing:
            return None
        span = StopCondition(
            seconds=self.patience, epochs=epochs, whole=True, rows=self.extent.rows
        )
        try:
            seen = self.pair.process(rung.loading).look(rung.loading, span, self.steps[column])
        except MeasurementFailed as error:
            rung.missing, rung.rates = str(error), {ALONE: [], TRAINED: []}
            return None
        rung.engine, rung.reason = seen.engine, seen.reason
        return seen
