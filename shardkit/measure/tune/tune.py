"""`shardkit tune`: measure settings of `make_loader` and report the fastest."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from typing import Any

import torch

from shardkit.errors import MeasurementFailed, MeasurementTimeout, UsageError
from shardkit.measure.runner import session
from shardkit.measure.runner.material import SubjectInfo, is_dataset
from shardkit.measure.runner.other_load import OtherLoad, other_load
from shardkit.measure.runner.process import PATIENCE, MeasurementProcess
from shardkit.measure.runner.rounds import Watch
from shardkit.measure.runner.spec import LoaderSpec, StepSpec, StopCondition
from shardkit.measure.runner.timing import Measurement
from shardkit.measure.runner.workload import Workload
from shardkit.measure.tune.loop import compare_loops, variants
from shardkit.measure.tune.search import (
    ENOUGH,
    GAIN,
    LEAST_ROUNDS,
    Plan,
    SearchResult,
    Tried,
    name_of,
    search,
)
from shardkit.options import option, takes
from shardkit.system.machine import usable_cpus
from shardkit.system.text import amount, json_value, printable
from shardkit.torch.engine.preflight import default_workers, local_ranks, suited_engine
from shardkit.torch.tuned import Tuned

_ROWS = 6
"""LoaderSpecs in the table."""

_LIMIT = 2000
"""Images in the sample, unless the workers need more."""
_LEAST_BATCHES = 8
"""Batches per worker of the defaults in an epoch of the sample."""
_WARMING = 0.25
"""Fraction of the budget for reading the files once."""
_FIRST = 0.02
"""Fraction of the budget for finding out if the loader computes or waits."""
_LOOP_PART = 0.35
_STEPS = 3
"""Fraction of the budget for the training loop with a model; least steps of a measurement."""
_OVERRUN = 1.1
"""A run that exceeds its budget by this factor says so."""
_LEAST_PATIENCE = 15.0
"""Seconds that a measurement may take even if the budget is used up."""


@dataclass(frozen=True, kw_only=True)
class TuneReport(SearchResult):
    """Result of `tune`. Rates are images/s without a training step."""

    opened: SubjectInfo
    """The images that were read: all, or a sample."""
    cached: bool
    """Whether the files were read once before; otherwise the rates may be those of the disk."""
    default: LoaderSpec
    """Default setting of `make_loader`."""
    step_seconds: float | None
    """Time of the training step by itself, if one was given."""
    load: OtherLoad
    """CPU use of other processes at the start."""
    seconds: float
    """Duration in all."""
    budget: float
    """Time limit, in seconds; the first measurements may exceed it."""
    warnings: tuple[str, ...]
    """Warnings of the chosen loader."""
    loops: list[Tried] = field(default_factory=list)
    """Training loops with ``model``: the choice by loading, and others that load as fast but may
    disturb the loop less. Speedups are over that choice; the first is the final one. Empty without
    a model, or without time for them."""

    @property
    def chosen(self) -> Tried:
        """The choice by loading: the fastest, or the cheapest that is fast enough."""
        return self.ranking[0]

    @property
    def setting(self) -> LoaderSpec:
        """The choice: that of the training loop, if one was measured."""
        return (self.loops or self.ranking)[0].setting

    @property
    def is_default(self) -> bool:
        """Whether the defaults stay."""
        return self.setting == self.default

    @property
    def headroom(self) -> float | None:
        """Loading speed as a multiple of what the training step consumes; None without a step."""
        if self.step_seconds is None:
            return None
        chosen = self.chosen
        return chosen.images_per_second.median * self.step_seconds / chosen.setting.batch_size

    @property
    def options(self) -> dict[str, Any]:
        """The options of `make_loader` to change."""
        setting = self.setting
        return {} if self.is_default else {"engine": setting.engine, **setting.options}

    def call(self) -> str:
        """Return the line to paste."""
        texts = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        options = f", {texts}".replace("'", '"') if texts else ""
        return f"make_loader(dataset, {self.setting.batch_size}, shuffle=True{options})"

    def tuned(self) -> Tuned:
        """Return the choice for ``make_loader(tuned=)``."""
        rates = self.chosen.images_per_second
        speedup = self.chosen.speedup
        return Tuned(
            batch_size=self.setting.batch_size,
            settings=self.options,
            processors=usable_cpus(),
            ranks=local_ranks(),
            measured={
                "dataset": self.opened.path,
                "processes": self.opened.processes,
                "images_per_second": dataclasses.asdict(rates),
                "gain": speedup and speedup.median,
                "headroom": self.headroom,
            },
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        more = {"is_default": self.is_default, "headroom": self.headroom, "paste": self.call()}
        values: dict[str, Any] = json_value({**dataclasses.asdict(self), **more})
        return values

    def describe(self) -> str:
        """Return the report as text: the choice, why, all comparisons, and notes."""
        opened = self.opened
        part = f" (measured: {opened.images:,})" if opened.images < opened.total else ""
        return "\n".join(
            [
                f"{opened.title}{part}; took {self.seconds:.0f} s",
                f"  best      {name_of(self.setting)}{' (the defaults)' * self.is_default}",
                f"  why       {self._why()}",
                *self._step(),
                "  compared  speedup over the defaults in the same rounds; images/s",
                *self._table(),
                *self._loop_table(),
                *(f"  note      {printable(note)}" for note in self._notes()),
                f"  paste     {self.call()}",
            ]
        )

    def _why(self) -> str:
        best = self.loops[0].speedup if self.loops else None
        if best is not None:
            return f"{self._why_chosen()}; the training loop: {best.describe()}"
        return self._why_chosen()

    def _why_chosen(self) -> str:
        speedup = self.chosen.speedup
        if speedup is None:
            return f"the defaults ({name_of(self.default)}) cannot be measured here"
        if self.headroom is not None and self.headroom >= ENOUGH:
            return f"the cheapest of the measured settings with {ENOUGH}x the speed of the step"
        if self.chosen.setting == self.default:
            others = len(self.ranking) - 1
            none = (
                "the other setting is not" if others == 1 else f"none of {others} other settings is"
            )
            return f"{none} clearly faster, by {GAIN - 1:.0%} or more"
        doubt = "" if speedup.clear else "; not certain: other rounds may differ"
        return f"{speedup.describe()} the speed of the defaults{doubt}"

    def _step(self) -> list[str]:
        if self.step_seconds is None or self.headroom is None:
            return []
        room = self.headroom
        batch = self.chosen.setting.batch_size
        enough = "enough" if room >= ENOUGH else "little margin" if room >= 1 else "too slow"
        needed = amount(round(batch / self.step_seconds), "image")
        return [
            f"  step      {1000 * self.step_seconds:.1f} ms for a batch of {batch} needs "
            f"{needed}/s; loading has {room:.2f}x that: {enough}"
        ]

    def _table(self) -> list[str]:
        lines = _rows(self.ranking[:_ROWS], self.default, "the defaults")
        others = [tried.speedup.median for tried in self.ranking[_ROWS:] if tried.speedup]
        if others:
            lines.append(f"    and {len(others)} more, {min(others):.2f}x to {max(others):.2f}x")
        for reason in dict.fromkeys(self.left_out.values()):
            first, *more = [name for name, why in self.left_out.items() if why == reason]
            also = f" and {len(more)} more" if more else ""
            lines.append(f"    not measured: {first}{also}: {printable(reason)}")
        return lines

    @property
    def _loop_rounds(self) -> int:
        return min((tried.images_per_second.rounds for tried in self.loops), default=0)

    def _loop_table(self) -> list[str]:
        if not self.loops:
            return []
        title = "  loop      speedup of the training loop with the model; images/s"
        return [title, *_rows(self.loops, self.chosen.setting, "as chosen by loading")]

    def _notes(self) -> list[str]:
        excluded = (
            f"threads were not measured: {self.opened.processes}. Mark a transform with "
            "shardkit.with_rng if it is thread-safe and releases the GIL"
        )
        notes = {
            excluded: self.opened.processes,
            "the files were not read before: rates may be those of the disk": not self.cached,
            f"{self.load}: on an idle machine another setting may be best": self.load.disturbs,
            f"the run took longer than the budget of {self.budget:g} s: opening the data and the "
            "first two measurements are never cut short": self.seconds > _OVERRUN * self.budget,
            "the budget ended before the search: a longer --budget may find more": self.out_of_time,
            f"the training loop needs {LEAST_ROUNDS} rounds to change the choice: pass a longer "
            "--budget": 0 < self._loop_rounds < LEAST_ROUNDS,
        }
        return [*self.warnings, *(text for text, applies in notes.items() if applies)]


def _rows(shown: Sequence[Tried], base: LoaderSpec, name: str) -> list[str]:
    """Return the rows of a table; ``base`` is called ``name``."""
    width = max(len(name_of(tried.setting)) for tried in shown)
    lines = []
    for tried in shown:
        ratio = tried.speedup.describe() if tried.speedup else "-"
        ratio = name if tried.setting == base else ratio
        rate = f"{tried.images_per_second.median:>9,.0f}"
        lines.append(f"    {name_of(tried.setting):<{width}}  {ratio:<34}  {rate}")
    return lines


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Workload):
    """The options of `tune`."""

    budget: float = option(60.0, help="Time limit in seconds.", is_positive=True)
    watch: Watch = option(
        lambda text, done, total: None,
        help="Called before each measurement with its name, the time, and the budget.",
        is_keyword_only=True,
    )


@takes(TuneOptions)
def tune(options: TuneOptions, dataset: str | PathLike[str]) -> TuneReport:
    """Find the fastest settings of `make_loader` for a dataset on this machine.

    With ``step_ms`` or ``model``, the cheapest settings that load fast enough are chosen. With
    ``model``, the training loop then decides about the priority, the helper and pinned memory.

    Args:
        dataset: A dataset or a plain folder of images.

    Raises:
        UsageError: If the dataset, the transform or the model is invalid, or an option.
        MeasurementFailed: If nothing can be measured.
    """
    budget = options.budget
    batch_size = options.batch_size
    step = options.step
    if not 1 <= budget < 1e6:
        raise UsageError(f"a budget of {budget:g} s is out of range; it is at least 1 s")
    workers = default_workers()
    path = fspath(dataset)
    is_dataset(path)  # raises if it does not exist
    (subject,) = options.subjects([path], max(_LIMIT, _LEAST_BATCHES * workers * batch_size))
    load = other_load()
    with MeasurementProcess(subject) as process:
        trials = _Trials(process, budget, options.watch)
        opened = process.open()
        cached = trials.warm()
        usual, _ = suited_engine(opened.processes or None)
        default = LoaderSpec(engine=usual, batch_size=batch_size, num_workers=workers)
        step_seconds = step.milliseconds / 1000 or None
        if step.model is not None:
            step_seconds = process.call(session.step_seconds, loader=default, step=step)
        busy = trials.busy(default)
        for_loop = _LOOP_PART * budget * (step.model is not None)
        plan = Plan(
            default=default,
            engines=tuple(dict.fromkeys((usual, "process"))),
            needed=batch_size / step_seconds if step_seconds else None,
            budget=max(1.0, trials.remaining - for_loop),
            images=opened.images,
            busy=busy,
        )
        result = search(trials.rate, plan, watch=options.watch)
        loops = []
        if for_loop and step_seconds is not None:
            best = result.ranking[0].setting
            others = variants(best, has_cuda=torch.cuda.is_available())
            rate = partial(trials.loop_rate, step=step, seconds=_STEPS * step_seconds)
            loops = compare_loops(rate, best, others, end=trials.end)
    return TuneReport(
        **vars(result),
        loops=loops,
        opened=opened,
        cached=cached,
        default=default,
        step_seconds=step_seconds,
        load=load,
        seconds=trials.elapsed,
        budget=budget,
        warnings=trials.warnings[(loops or result.ranking)[0].setting],
    )


class _Trials:
    """Measurements within a budget, which starts now."""

    def __init__(self, process: MeasurementProcess, budget: float, watch: Watch) -> None:
        self._process = process
        self._budget = budget
        self._watch = watch
        self._start = time.monotonic()
        self.end = self._start + budget
        self.warnings: dict[LoaderSpec, tuple[str, ...]] = {}
        """Warnings of the loaders that were measured."""
        self._failed: dict[LoaderSpec, MeasurementFailed] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float:
        """Seconds until the budget ends."""
        return self.end - time.monotonic()

    def warm(self) -> bool:
        """Read the files once, or the settings measured first would be slower; return if done."""
        self._process.patience = max(_WARMING * self._budget, _LEAST_PATIENCE)
        try:
            self._process.call(session.warm)
        except MeasurementTimeout:  # a slow disk; the first measurement reports other problems
            return False
        return True

    def busy(self, default: LoaderSpec) -> float:
        """Return the fraction of the CPUs that the defaults use: little if their code waits."""
        try:
            first = self._measured(default, _FIRST * self._budget, StepSpec())
        except MeasurementFailed as error:
            self._failed[default] = error  # it took long, and the search gives the reason
            return 1.0
        return first.cpu / first.seconds / usable_cpus()

    def rate(self, setting: LoaderSpec, seconds: float) -> float:
        """Return the images/s of a loader."""
        if setting in self._failed:
            raise self._failed[setting]
        return self._measured(setting, seconds, StepSpec()).rate

    def loop_rate(self, setting: LoaderSpec, *, step: StepSpec, seconds: float) -> float:
        """Return the images/s of a training loop."""
        self._watch(f"training loop: {name_of(setting)}", self.elapsed, self._budget)
        return self._measured(setting, max(seconds, self._budget / 100), step).rate

    def _measured(self, setting: LoaderSpec, seconds: float, step: StepSpec) -> Measurement:
        self._process.patience = min(PATIENCE, max(self.remaining, _LEAST_PATIENCE))
        measurement = self._process.measure(setting, StopCondition(seconds=seconds), step)
        for warning in measurement.warnings:
            # Shared memory may be too small, for example.
            if warning.startswith(("loading may fail", "using threads")):
                raise MeasurementFailed(warning)
        self.warnings[setting] = measurement.warnings
        return measurement
