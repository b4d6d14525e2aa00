"""`shardkit tune`: measure settings of `make_loader` and report the fastest."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any

import torch

from shardkit.errors import MeasurementFailed, MeasurementTimeout, UsageError
from shardkit.measure.runner import session
from shardkit.measure.runner.material import SubjectInfo, is_dataset
from shardkit.measure.runner.process import PATIENCE, MeasurementProcess
from shardkit.measure.runner.rounds import Watch
from shardkit.measure.runner.spec import LoaderSpec, StopCondition
from shardkit.measure.runner.timing import Measurement
from shardkit.measure.runner.workload import Workload
from shardkit.measure.tune.search import (
    ENOUGH,
    GAIN,
    Plan,
    SearchResult,
    Tried,
    name_of,
    search,
)
from shardkit.options import about, option, takes
from shardkit.system.formatting import amount, json_value
from shardkit.system.machine import OtherLoad, other_load, usable_cpus
from shardkit.system.text import printable
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

    @property
    def chosen(self) -> Tried:
        """The choice."""
        return self.ranking[0]

    @property
    def is_default(self) -> bool:
        """Whether the defaults stay."""
        return self.chosen.setting == self.default

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
        setting = self.chosen.setting
        return {} if self.is_default else {"engine": setting.engine, **setting.options}

    def call(self) -> str:
        """Return the line to paste."""
        texts = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        options = f", {texts}".replace("'", '"') if texts else ""
        return f"make_loader(dataset, {self.chosen.setting.batch_size}, shuffle=True{options})"

    def tuned(self) -> Tuned:
        """Return the choice for ``make_loader(tuned=)``."""
        rates, speedup = self.chosen.images_per_second, self.chosen.speedup
        return Tuned(
            batch_size=self.chosen.setting.batch_size,
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
                f"  best      {name_of(self.chosen.setting)}{' (the defaults)' * self.is_default}",
                f"  why       {self._why()}",
                *self._step(),
                "  compared  speedup over the defaults in the same rounds; images/s",
                *self._table(),
                *(f"  note      {printable(note)}" for note in self._notes()),
                f"  paste     {self.call()}",
            ]
        )

    def _why(self) -> str:
        speedup = self.chosen.speedup
        if speedup is None:
            return f"the defaults ({name_of(self.default)}) cannot be measured here"
        if self.headroom is not None and self.headroom >= ENOUGH:
            return f"the cheapest of the measured settings with {ENOUGH}x the speed of the step"
        if self.is_default:
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
        room, batch = self.headroom, self.chosen.setting.batch_size
        enough = "enough" if room >= ENOUGH else "little margin" if room >= 1 else "too slow"
        needed = amount(round(batch / self.step_seconds), "image")
        return [
            f"  step      {1000 * self.step_seconds:.1f} ms for a batch of {batch} needs "
            f"{needed}/s; loading has {room:.2f}x that: {enough}"
        ]

    def _table(self) -> list[str]:
        shown = self.ranking[:_ROWS]
        width = max(len(name_of(tried.setting)) for tried in shown)
        lines = []
        for tried in shown:
            ratio = tried.speedup.describe() if tried.speedup else "-"
            ratio = "the defaults" if tried.setting == self.default else ratio
            rate = f"{tried.images_per_second.median:>9,.0f}"
            lines.append(f"    {name_of(tried.setting):<{width}}  {ratio:<34}  {rate}")
        others = [tried.speedup.median for tried in self.ranking[_ROWS:] if tried.speedup]
        if others:
            lines.append(f"    and {len(others)} more, {min(others):.2f}x to {max(others):.2f}x")
        for reason in dict.fromkeys(self.left_out.values()):
            first, *more = [name for name, why in self.left_out.items() if why == reason]
            also = f" and {len(more)} more" if more else ""
            lines.append(f"    not measured: {first}{also}: {printable(reason)}")
        return lines

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
        }
        return [*self.warnings, *(text for text, applies in notes.items() if applies)]


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Workload):
    """The options of `tune`."""

    budget: float = option(60.0, help="Time limit in seconds.", is_positive=True)
    watch: Watch = option(
        lambda text, done, total: None,
        help="Called before each measurement with its name, the time, and the budget.",
        is_keyword_only=True,
    )


@dataclass(frozen=True)
class TuneArguments(TuneOptions):
    """The arguments of `tune`."""

    dataset: str | PathLike[str] = field(metadata=about("A dataset or a plain folder of images."))


@takes(TuneArguments)
def tune(options: TuneArguments) -> TuneReport:
    """Find the fastest settings of `make_loader` for a dataset on this machine.

    With ``step_ms`` or ``model``, the cheapest settings that load fast enough are chosen.

    Raises:
        UsageError: If the dataset, the transform or the model is invalid, or an option.
        MeasurementFailed: If nothing can be measured.
    """
    budget, batch_size, step = options.budget, options.batch_size, options.step
    if not 1 <= budget < 1e6:
        raise UsageError(f"a budget of {budget:g} s is out of range; it is at least 1 s")
    setting = LoaderSpec(batch_size=batch_size, num_workers=default_workers())
    path = fspath(options.dataset)
    is_dataset(path)  # raises if it does not exist
    limit = max(_LIMIT, _LEAST_BATCHES * setting.workers * batch_size)
    (subject,) = options.subjects([path], limit)
    load, start, warnings = other_load(), time.monotonic(), {}
    with MeasurementProcess(subject) as process:

        def measured(setting: LoaderSpec, seconds: float) -> Measurement:
            remaining = start + budget - time.monotonic()
            process.patience = min(PATIENCE, max(remaining, _LEAST_PATIENCE))
            measurement = process.measure(setting, StopCondition(seconds=seconds))
            for warning in measurement.warnings:
                # Shared memory may be too small, for example.
                if warning.startswith(("loading may fail", "using threads")):
                    raise MeasurementFailed(warning)
            warnings[setting] = measurement.warnings
            return measurement

        failed: dict[LoaderSpec, MeasurementFailed] = {}

        def measure(setting: LoaderSpec, seconds: float) -> float:
            if setting in failed:  # a failure takes long, and need not be repeated
                raise failed[setting]
            return measured(setting, seconds).rate

        opened = process.open()
        process.patience, cached = max(_WARMING * budget, _LEAST_PATIENCE), True
        try:  # otherwise the settings that are measured first would be slower
            process.call(session.warm)
        except MeasurementTimeout:  # a slow disk; the first measurement reports other problems
            cached = False
        usual, _ = suited_engine(
            opened.processes or None, launches_kernels=torch.cuda.is_available()
        )
        here = ("thread",) if usual == "helper" else ()
        engines = tuple(dict.fromkeys((usual, *here, "process")))
        default = replace(setting, engine=usual)
        step_seconds = step.milliseconds / 1000 or None
        if step.model is not None:
            step_seconds = process.call(session.step_seconds, loader=default, step=step)
        try:
            first = measured(default, _FIRST * budget)
            busy = first.cpu / first.seconds / usable_cpus()
        except MeasurementFailed as error:
            busy, failed[default] = 1.0, error  # the search gives the reason
        plan = Plan(
            default=default,
            engines=engines,
            needed=batch_size / step_seconds if step_seconds else None,
            budget=max(1.0, start + budget - time.monotonic()),
            images=opened.images,
            busy=busy,
        )
        result = search(measure, plan, watch=options.watch)
    return TuneReport(
        **vars(result),
        opened=opened,
        cached=cached,
        default=default,
        step_seconds=step_seconds,
        load=load,
        seconds=time.monotonic() - start,
        budget=budget,
        warnings=warnings[result.ranking[0].setting],
    )
