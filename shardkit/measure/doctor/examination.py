"""Time a loader's stages, measure remedies in rounds, and judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from shardkit.errors import MeasurementFailed, ShardkitError, UsageError
from shardkit.measure.doctor.checks import check_data, fits_in_memory
from shardkit.measure.doctor.judgement import (
    Diagnosis,
    LoopDiagnosis,
    Measured,
    Range,
    diagnose,
    judge_loop,
)
from shardkit.measure.doctor.pipeline import Loading, Remedy
from shardkit.measure.doctor.profile import OWN_CODE, Profile
from shardkit.measure.doctor.profiling import profile
from shardkit.measure.doctor.remedies import loop_changes, propose, together
from shardkit.measure.doctor.report import DoctorReport
from shardkit.measure.doctor.stored import convert_images, to_convert, write_images
from shardkit.measure.doctor.trials import Trial, measure_rate, measure_step, sample_lines
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import turn
from shardkit.measure.runner.spec import StepSpec

Watch = Callable[[str], None]
"""Receives what is done next."""

_PROFILE_PART = 0.12
_LINES_PART = 0.08
_FEWEST_ROUNDS = 3
_SECONDS = 0.25
_BATCHES = 6
"""Fractions of the budget for timing the stages and for sampling stacks; least rounds; duration of
a measurement, and the batches that it should see: of a slow loader, smaller ones are measured."""

_ALONE = Remedy(name="the training step alone")
_LEAST_RATE = 0.5
_STEPS = 2
_LONGEST = 2.0
"""Part of the step's rate from which the loop is measured; least steps of a measurement; and how
many budgets that may take."""

_CLEARLY = 1.3
"""A loader that is faster than the step by this factor needs no remedies."""


@dataclass
class Examination:
    """Asks a measurement process one thing after the other."""

    process: MeasurementProcess
    loading: Loading
    scratch: Path
    watch: Watch
    rows: list[int] = field(default_factory=list)
    """The only rows to load; empty loads all."""
    sample: list[int] = field(default_factory=list)
    """Rows of the images to convert."""
    files: Sequence[str] = ()
    """Their files, if only the user's dataset knows them."""

    def run(self, step: StepSpec, budget: float) -> DoctorReport:
        """Time the stages, measure the loader and what may help, and judge."""
        end = time.perf_counter() + budget
        loading = self.loading
        self.watch("opening the dataset")
        opened = self.process.open()
        findings = self.process.call(check_data, loading=self.loading)
        self.watch("timing the stages")
        seconds = _PROFILE_PART * budget
        stages = self.process.call_for(
            budget, profile, loading=self.loading, seconds=seconds, step=step
        )
        setup = stages.setup
        needed = setup.batch_size / stages.step_seconds if stages.step_seconds else None
        self.sample = stages.rows
        self.files = stages.files
        self.rows = stages.rows if fits_in_memory(opened.bytes) else []
        size = round(_SECONDS * max(1, setup.workers) / stages.total / _BATCHES)
        self.loading = replace(self.loading, batch_size=min(setup.batch_size, max(4, size)))
        if stages.setup.has_own_code:
            self.watch("sampling the stacks of the workers")
            stages = self._with_lines(stages, _LINES_PART * budget)
        self.watch("measuring the loader")
        fast = needed is not None and self._rate(Remedy()) >= _CLEARLY * needed
        start = time.perf_counter()
        remedies = []
        rates = self._rounds([Remedy()], 0.0) if fast else {}
        if not rates or Range.of(rates[""]).reaches(needed) != "yes":
            remedies = propose(stages)
            ready = [Remedy(), *(remedy for remedy in remedies if self._converted(remedy))]
            start = time.perf_counter()
            rates = self._rounds(ready, end - start)
        round_seconds = (time.perf_counter() - start) / len(rates[""])
        measured = [Measured(remedy, rates.get(remedy.name), rates[""]) for remedy in remedies]
        judge = partial(diagnose, stages, rates[""], needed=needed, round_seconds=round_seconds)
        diagnosis: Diagnosis = judge(measured)
        if (sum_of := self._sum(diagnosis)) is not None:
            both = self._rounds([Remedy(), sum_of], 0.0)
            diagnosis = judge([*measured, Measured(sum_of, both.get(sum_of.name), both[""])])
        loop = self._loop(stages, diagnosis, loading, step, _LONGEST * budget)
        command, hints = self._command(diagnosis)
        if not command and loop is not None and loop.recommended is not None:
            command = loop.recommended.remedy.code
        return DoctorReport(
            subject=self.process.subject,
            findings=findings,
            profile=stages,
            diagnosis=diagnosis,
            loop=loop,
            command=command,
            hints=hints,
        )

    def _sum(self, diagnosis: Diagnosis) -> Remedy | None:
        """Return the remedies that help as one, if each alone is not enough."""
        gains = [rated.remedy for rated in diagnosis.remedies if rated.verdict == "gain"]
        if diagnosis.needed is None or diagnosis.recommended is None or len(gains) < 2:
            return None
        if diagnosis.recommended.enough != "no":
            return None
        combined = gains[0]
        for remedy in gains[1:]:
            combined = together(combined, remedy) or combined
        return combined if combined is not gains[0] and self._converted(combined) else None

    def _loop(
        self, stages: Profile, diagnosis: Diagnosis, loading: Loading, step: StepSpec, most: float
    ) -> LoopDiagnosis | None:
        """Measure the training loop, if the loader gives it enough and ``most`` seconds will do."""
        needed = diagnosis.needed
        seconds = max(_SECONDS, _STEPS * (stages.step_seconds or 0.0))
        starves = not needed or diagnosis.delivered.high < _LEAST_RATE * needed
        if step.model is None or starves or 2 * _FEWEST_ROUNDS * 2 * seconds > most:
            return None

        def rate(remedy: Remedy) -> float:
            trial = Trial(remedy=remedy, rows=self.rows, seconds=seconds, step=step)
            function = measure_step if remedy is _ALONE else measure_rate
            return self.process.call_for(seconds, function, loading=loading, trial=trial)

        try:
            start = time.perf_counter()
            rates = self._rounds([Remedy(), _ALONE], 0.0, rate)
            alone = rates.get(_ALONE.name)
            if alone is None:
                return None
            loop = judge_loop(alone, rates[""])
            changes = loop_changes(stages)
            longer = (time.perf_counter() - start) * (1 + len(changes)) / 2
            if not changes or not loop.is_slower:
                return loop
            if longer > most:
                return replace(loop, needed_seconds=longer)
            again = self._rounds([Remedy(), *changes], 0.0, rate)
        except (MeasurementFailed, UsageError):  # the rest of the report stands without it
            return None
        measured = [Measured(remedy, again.get(remedy.name), again[""]) for remedy in changes]
        return judge_loop(alone, rates[""], measured)

    def _with_lines(self, stages: Profile, seconds: float) -> Profile:
        """Return the stages with the lines of code that take the time.

        Those of libraries count if user code is the longest stage.
        """
        for longer in (seconds, 4 * seconds):  # a busy machine gives few samples
            trial = Trial(remedy=Remedy(), rows=self.rows, seconds=longer)
            try:
                lines = self.process.call_for(
                    longer, sample_lines, loading=self.loading, trial=trial, scratch=self.scratch
                )
            except MeasurementFailed:  # measuring the loader will say why
                break
            if lines:
                named = [line for line in lines if line.is_own or stages.longest in OWN_CODE]
                return replace(stages, lines=named)
        return stages

    def _rate(self, remedy: Remedy) -> float:
        data = str(self.scratch / remedy.name) if remedy.recipe else ""
        trial = Trial(remedy=remedy, data=data, rows=self.rows, seconds=_SECONDS)
        return self.process.call(measure_rate, loading=self.loading, trial=trial)

    def _rounds(
        self,
        remedies: list[Remedy],
        seconds: float,
        rate: Callable[[Remedy], float] | None = None,
    ) -> dict[str, list[float]]:
        """Measure remedies in interleaved rounds; return the rates of those that do not fail."""
        rates: dict[str, list[float]] = {remedy.name: [] for remedy in remedies}
        start = time.perf_counter()
        number = 0
        while (
            number < _FEWEST_ROUNDS
            or (time.perf_counter() - start) * (1 + 1 / number) < seconds  # another round fits
        ):
            for remedy in turn(remedies, number):
                self.watch(f"round {number + 1}: {remedy.name or 'the loader as it is'}")
                try:
                    rates[remedy.name].append((rate or self._rate)(remedy))
                except (MeasurementFailed, UsageError):
                    if not remedy.name:
                        raise
                    remedies.remove(remedy)
                    del rates[remedy.name]
            number += 1
        return rates

    def _converted(self, remedy: Remedy) -> bool:
        """Convert a sample if the remedy is a conversion; return whether that succeeded."""
        if remedy.recipe is not None:
            source = self.scratch / "source"
            try:
                if not source.exists():
                    rows = self.sample
                    files = self.files
                    self.process.call(write_images, rows=rows, files=files, folder=source)
                convert_images(source, self.scratch / remedy.name, remedy.recipe)
            except ShardkitError:
                return False
        return True

    def _command(self, diagnosis: Diagnosis) -> tuple[str, list[str]]:
        """Return what to do next, and what that needs."""
        best = diagnosis.recommended
        if best is None or best.remedy.recipe is None:
            return (best.remedy.code if best else ""), []
        converted = self.process.call(to_convert, files=self.files)
        command, hints = converted.suggest(best.remedy.recipe, best.remedy.decode)
        return command, hints + ([f"with {best.remedy.code}"] if best.remedy.code else [])
