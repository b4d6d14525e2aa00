"""`doctor`: measure a loader, find out why the GPU waits, and measure what helps."""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardkit.conversion.command import Made, command_words
from shardkit.errors import MeasurementFailed, ShardkitError, UsageError
from shardkit.measure.doctor.checks import Finding, Plan, check_data, fits_in_memory, run_checks
from shardkit.measure.doctor.judgement import Diagnosis, Range, diagnose
from shardkit.measure.doctor.pipeline import Remedy, measure_rate
from shardkit.measure.doctor.profile import Profile, profile
from shardkit.measure.doctor.remedies import propose
from shardkit.measure.doctor.stored import convert_images, made_as, write_images
from shardkit.measure.runner.material import choose_decode
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import turn
from shardkit.measure.runner.spec import StepSpec, Subject
from shardkit.system.machine import CpuMeter, OtherLoad

Watch = Callable[[str], None]
"""Receives what is done next."""

_PROFILE_PART, _FEWEST_ROUNDS, _SECONDS, _BATCHES = 0.12, 3, 0.25, 6
"""Fraction of the budget for timing the stages; least rounds; duration of a measurement, and the
batches that it should see: of a slow loader, smaller ones are measured."""

_CLEARLY = 1.3
"""A loader that is faster than the step by this factor needs no remedies."""


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Result of `doctor`."""

    subject: Subject | None
    """None if only the machine was checked."""
    findings: list[Finding]
    """Results of the machine's checks, the worst first."""
    load: OtherLoad | None = None
    """CPU use of other processes during the run."""
    profile: Profile | None = None
    diagnosis: Diagnosis | None = None
    command: str = ""
    """What to do next: a command, or Python code; empty if nothing measured helps."""
    hints: list[str] = field(default_factory=list)
    """What the command needs, and how to use its result."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; times in seconds, rates in images/s."""
        return asdict(self)


def doctor(  # noqa: PLR0913 - the options of the command
    dataset: str | Path | None = None,
    *,
    loader: str | None = None,
    decode: str | None = None,
    transform: str | None = None,
    batch_size: int = 64,
    workers: int | None = None,
    step_ms: float | None = None,
    model: str | None = None,
    budget: float = 12.0,
    watch: Watch | None = None,
) -> DoctorReport:
    """Find out whether the GPU waits for data and why, and measure what helps.

    Args:
        dataset: A dataset or a plain folder of images. None, without ``loader``, checks only the
            machine.
        loader: ``module:callable`` that returns a ``torch.utils.data.DataLoader`` or a shardkit
            loader, to diagnose instead of ``dataset``.
        decode: Image type, or an operation such as ``"CenterCrop(224)"``. None selects as the
            command does.
        transform: ``module:name`` of a transform for each image.
        batch_size: Samples per batch, unless ``loader`` is given.
        workers: Workers that you plan to use; None uses as many as `make_loader` does.
        step_ms: Training step time per batch in ms, spent off the CPU.
        model: ``module:name`` of a model to train on each batch, or ``small``.
        budget: Approximate duration in seconds.
        watch: Called with a description of each step.

    Raises:
        UsageError: If ``dataset`` does not exist, or options are invalid or need it.
        MeasurementFailed: If the data cannot be loaded.
        ShardkitError: If the dataset is damaged.
    """
    step = StepSpec(milliseconds=step_ms or 0.0, model=model)
    if loader is None and dataset is None:
        if decode or transform or step_ms or model:
            raise UsageError("--decode, --transform, --step-ms and --model require DATASET")
        plan = Plan() if workers is None else Plan(workers=workers)
        return DoctorReport(subject=None, findings=run_checks(plan))
    if loader is not None and (dataset or decode or transform or workers is not None):
        raise UsageError("--loader excludes DATASET, --decode, --transform and --workers")
    subject = Subject(loader=loader)
    if dataset is not None:
        decode = choose_decode([str(dataset)], decode, transform)
        subject = Subject(path=str(dataset), decode=decode, transform=transform)
    meter = CpuMeter()
    with (
        MeasurementProcess(subject) as process,
        tempfile.TemporaryDirectory(prefix="shardkit-doctor-") as scratch,
    ):
        loading = {"batch_size": 1 << 30 if loader else batch_size, "workers": workers}
        examination = _Examination(process, loading, Path(scratch), watch or (lambda _: None))
        report = examination.run(step, budget)
    return replace(report, load=meter.other_load())


@dataclass
class _Examination:
    """Asks a measurement process one thing after the other."""

    process: MeasurementProcess
    loading: dict[str, Any]
    """Batch size and workers, arguments of each request."""
    scratch: Path
    watch: Watch
    rows: list[int] = field(default_factory=list)
    """The only rows to load; empty loads all."""
    sample: list[int] = field(default_factory=list)
    """Rows of the images to convert."""

    def run(self, step: StepSpec, budget: float) -> DoctorReport:
        """Time the stages, measure the loader and what may help, and judge."""
        end = time.perf_counter() + budget
        self.watch("opening the dataset")
        opened = self.process.open()
        findings = self._call(check_data)
        self.watch("timing the stages")
        seconds = _PROFILE_PART * budget
        found: Profile = self._call(profile, patience=budget, seconds=seconds, step=step)
        setup = found.setup
        needed = setup.batch_size / found.step_seconds if found.step_seconds else None
        self.sample = found.rows
        self.rows = found.rows if fits_in_memory(opened.bytes) else []
        size = round(_SECONDS * max(1, setup.workers) / found.total / _BATCHES)
        self.loading["batch_size"] = min(setup.batch_size, max(4, size))
        self.watch("measuring the loader")
        fast = needed is not None and self._rate(Remedy()) >= _CLEARLY * needed
        start = time.perf_counter()
        remedies, rates = [], self._rounds([Remedy()], 0.0) if fast else {}
        if not rates or Range.of(rates[""]).reaches(needed) != "yes":
            remedies = propose(found)
            ready = [Remedy(), *(remedy for remedy in remedies if self._converted(remedy))]
            start = time.perf_counter()
            rates = self._rounds(ready, end - start)
        round_seconds = (time.perf_counter() - start) / len(rates[""])
        measured = [(remedy, rates.get(remedy.name)) for remedy in remedies]
        diagnosis = diagnose(found, rates[""], measured, needed=needed, round_seconds=round_seconds)
        command, hints = self._command(diagnosis)
        return DoctorReport(
            subject=self.process.subject,
            findings=findings,
            profile=found,
            diagnosis=diagnosis,
            command=command,
            hints=hints,
        )

    def _call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        return self.process.call(function, **self.loading, **arguments)

    def _rate(self, remedy: Remedy) -> float:
        data = str(self.scratch / remedy.name) if remedy.recipe else ""
        arguments = {"remedy": remedy, "data": data, "rows": self.rows, "seconds": _SECONDS}
        return float(self._call(measure_rate, **arguments))

    def _rounds(self, remedies: list[Remedy], seconds: float) -> dict[str, list[float]]:
        """Measure remedies in interleaved rounds; return the rates of those that do not fail."""
        rates: dict[str, list[float]] = {remedy.name: [] for remedy in remedies}
        start, number = time.perf_counter(), 0
        while (
            number < _FEWEST_ROUNDS
            or (time.perf_counter() - start) * (1 + 1 / number) < seconds  # another round fits
        ):
            for each in turn(remedies, number):
                self.watch(f"round {number + 1}: {each.name or 'the loader as it is'}")
                try:
                    rates[each.name].append(self._rate(each))
                except MeasurementFailed:
                    if not each.name:
                        raise
                    remedies.remove(each)
                    del rates[each.name]
            number += 1
        return rates

    def _converted(self, remedy: Remedy) -> bool:
        """Convert a sample if the remedy is a conversion; return whether that succeeded."""
        if remedy.recipe is not None:
            source = self.scratch / "source"
            if not source.exists():
                self.process.call(write_images, rows=self.sample, folder=source)
            try:
                convert_images(source, self.scratch / remedy.name, remedy.recipe)
            except ShardkitError:
                return False
        return True

    def _command(self, diagnosis: Diagnosis) -> tuple[str, list[str]]:
        """Return what to do next, and what that needs."""
        best = diagnosis.recommended
        if best is None or best.remedy.recipe is None:
            return (best.remedy.code if best else ""), []
        made: Made = self.process.call(made_as)
        words = command_words(best.remedy.recipe, made)
        return shlex.join(words), made.hints(words[4])
