"""`doctor`: measure a loader, find out why the GPU waits, and measure what helps."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shardkit.conversion.command import Made, command_words
from shardkit.errors import MeasurementFailed, ShardkitError, UsageError
from shardkit.measure.doctor.checks import Finding, run_checks
from shardkit.measure.doctor.judgement import Diagnosis, diagnose
from shardkit.measure.doctor.machine import Facts, fits_in_memory, gather, place_of
from shardkit.measure.doctor.pipeline import Setup, Variant, describe, step_seconds, variant_rate
from shardkit.measure.doctor.profile import Profile, profile
from shardkit.measure.doctor.remedies import Remedy, Situation, propose
from shardkit.measure.doctor.sample import convert_sample, made_as, write_images
from shardkit.measure.runner.material import choose_decode
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import turn
from shardkit.measure.runner.spec import StepSpec, Subject
from shardkit.system.machine import usable_cpus

Watch = Callable[[str], None]
"""Receives what is done next."""

IMAGES = 256
"""Maximum images in the sample."""

FEWEST_ROUNDS = 3
SECONDS = 0.25
"""Duration of one measurement of a loader."""

_QUICK_LOOKS, _CLEARLY = 2, 1.3
"""Measurements of the loader that must all be faster than the step by this factor, to skip the
remedies."""

_BATCHES = 6
"""Batches that a measurement should see; of a slow loader, smaller ones are measured."""

_PROFILE_PART, _CONVERSION_PART = 0.12, 0.1
"""Fractions of the budget for timing the stages, and for each converted sample."""

_CONVERSION_COST, _FEWEST_CONVERTED = 2.0, 32
"""Time to convert an image divided by the time to load it, roughly; and images at the least."""

_GIVE_UP = 0.9
"""A remedy below this fraction of the loader's rate in the first round is not measured again."""


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Result of `doctor`."""

    subject: Subject | None
    """None if only the machine was checked."""
    facts: Facts
    findings: list[Finding]
    """Results of the machine's checks, the worst first."""
    images: int = 0
    """Images in the dataset."""
    sample: int = 0
    """Images in the converted samples."""
    setup: Setup | None = None
    profile: Profile | None = None
    step_seconds: float | None = None
    """Time of a training step; None if unknown."""
    diagnosis: Diagnosis | None = None
    failed: list[str] = field(default_factory=list)
    """Names of remedies that could not be measured."""
    command: str = ""
    """What to do next: a command, or Python code; empty if nothing measured helps."""
    hints: list[str] = field(default_factory=list)
    """What the command needs, and how to use its result."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; times in seconds, rates in images/s."""
        found = asdict(self)
        if self.profile is not None:
            del found["profile"]["rows"]
        return found


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
    end = time.perf_counter() + budget
    watch = watch or (lambda _: None)
    step = StepSpec(milliseconds=step_ms or 0.0, model=model)
    only_path = {"--decode": decode, "--transform": transform}
    if loader is not None:
        extra = {"DATASET": dataset, "--workers": workers, **only_path}
        _refuse(extra, "cannot be combined with --loader")
        subject = Subject(loader=loader)
    elif dataset is not None:
        chosen = choose_decode([str(dataset)], decode, transform)
        subject = Subject(path=str(dataset), decode=chosen, transform=transform)
    else:
        _refuse({**only_path, "--step-ms": step_ms, "--model": model}, "requires DATASET")
        facts = gather(workers)
        return DoctorReport(subject=None, facts=facts, findings=run_checks(facts))
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(MeasurementProcess(subject))
        watch("checking the machine")  # while the process imports PyTorch
        facts = gather(workers)
        loading = {"batch_size": 1 << 30 if loader else batch_size, "workers": workers}
        examination = _Examination(process, loading, stack, watch)
        return examination.run(facts, step, budget, end)


def _refuse(given: Mapping[str, object], why: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} {why}")


class _Examination:
    """Asks a measurement process one thing after the other."""

    def __init__(
        self,
        process: MeasurementProcess,
        loading: dict[str, Any],
        stack: contextlib.ExitStack,
        watch: Watch,
    ) -> None:
        self._process = process
        self._loading = loading
        """Batch size and workers, arguments of each request."""
        self._stack = stack
        self._failed: list[str] = []
        self._watch = watch

    def run(self, facts: Facts, step: StepSpec, budget: float, end: float) -> DoctorReport:
        """Time the stages, measure the loader and what may help, and judge."""
        self._watch("opening the dataset")
        opened = self._process.open()
        facts = replace(facts, place=self._call(place_of))
        setup: Setup = self._call(describe)
        self._watch("timing the stages")
        cold = not fits_in_memory(opened.bytes, facts.memory)
        seconds = _PROFILE_PART * budget
        found: Profile = self._call(
            profile, patience=budget, seconds=seconds, images=IMAGES, cold=cold
        )
        seconds_of_step = step.milliseconds / 1000 or None
        if step.model is not None:
            self._watch("timing the step")
            seconds_of_step = self._call(step_seconds, step=step)
        needed = None if seconds_of_step is None else setup.batch_size / seconds_of_step
        rows = [] if cold else found.rows
        per_worker = SECONDS * max(1, setup.workers) / found.total
        size = max(4, round(per_worker / _BATCHES))
        self._loading["batch_size"] = min(setup.batch_size, size)
        remedies: list[Remedy] = []
        sample: list[int] = []
        if needed is None or not self._keeps_up(needed, rows):
            situation = Situation(
                setup=setup,
                profile=found,
                cpus=usable_cpus(),
                images=opened.total,
                memory=facts.memory,
            )
            most = _CONVERSION_PART * budget * usable_cpus() / (_CONVERSION_COST * found.total)
            sample = found.rows[: max(_FEWEST_CONVERTED, int(most))]
            remedies = self._convert(propose(situation), sample)
        start = time.perf_counter()
        delivered, measured = self._rounds(remedies, rows, end if remedies else start)
        round_seconds = (time.perf_counter() - start) / len(delivered)
        diagnosis = diagnose(found, delivered, measured, needed=needed, round_seconds=round_seconds)
        command, hints = self._command(diagnosis)
        return DoctorReport(
            subject=self._process.subject,
            facts=facts,
            findings=run_checks(facts),
            images=opened.total,
            sample=len(sample) if any(remedy.recipe for remedy in remedies) else 0,
            setup=setup,
            profile=found,
            step_seconds=seconds_of_step,
            diagnosis=diagnosis,
            failed=self._failed,
            command=command,
            hints=hints,
        )

    def _call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        return self._process.call(function, **self._loading, **arguments)

    def _keeps_up(self, needed: float, rows: list[int]) -> bool:
        """Return whether the loader is clearly faster than the step."""
        self._watch("measuring the loader")
        return all(self._rate(Variant(), rows) >= _CLEARLY * needed for _ in range(_QUICK_LOOKS))

    def _rate(self, variant: Variant, rows: list[int]) -> float:
        found = self._call(variant_rate, variant=variant, rows=rows, seconds=SECONDS)
        return float(found)

    def _convert(self, remedies: list[Remedy], rows: list[int]) -> list[Remedy]:
        """Convert a sample for each remedy that is a conversion; drop those that fail."""
        if not any(remedy.recipe for remedy in remedies):
            return remedies
        name = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shardkit-doctor-"))
        source = Path(name) / "source"
        self._watch(f"converting {len(rows)} images")
        self._process.call(write_images, rows=rows, folder=source)
        ready: list[Remedy] = []
        for number, remedy in enumerate(remedies):
            variant = remedy.variant
            if remedy.recipe is not None:
                target = Path(name) / str(number)
                try:
                    convert_sample(source, target, remedy.recipe)
                except ShardkitError:
                    self._failed.append(remedy.name)
                    continue
                variant = replace(variant, data=str(target))
            ready.append(replace(remedy, variant=variant))
        return ready

    def _rounds(
        self, remedies: list[Remedy], rows: list[int], end: float
    ) -> tuple[list[float], list[tuple[Remedy, list[float]]]]:
        """Measure the loader and the remedies in interleaved rounds, until ``end``."""
        variants = [Variant(), *(remedy.variant for remedy in remedies)]
        rates: list[list[float]] = [[] for _ in variants]
        running = list(range(len(variants)))
        for number in range(1 << 20):
            if number > FEWEST_ROUNDS and time.perf_counter() > end:
                break
            for which in turn(running, number):
                self._watch(f"round {number}: {remedies[which - 1].name if which else 'loader'}")
                try:
                    rates[which].append(self._rate(variants[which], rows))
                except MeasurementFailed:
                    if not which:
                        raise
                    running.remove(which)
                    self._failed.append(remedies[which - 1].name)
            if not number:  # it warms up, and shows what is hopeless
                running = [n for n in running if rates[n][0] >= _GIVE_UP * rates[0][0]]
                rates = [[] for _ in variants]
        measured = zip(remedies, rates[1:], strict=True)
        return rates[0], [
            (remedy, each if len(each) == len(rates[0]) else [])
            for remedy, each in measured
            if remedy.name not in self._failed
        ]

    def _command(self, diagnosis: Diagnosis) -> tuple[str, list[str]]:
        """Return what to do next, and what that needs."""
        best = diagnosis.recommended
        if best is None or best.remedy.recipe is None:
            return (best.remedy.code if best else ""), []
        made: Made = self._process.call(made_as)
        words = command_words(best.remedy.recipe, made)
        return shlex.join(words), made.hints(words[4])
