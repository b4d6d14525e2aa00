"""`shardkit tune`: measure settings of `make_loader` and report the fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from shardkit.errors import MeasurementFailed, MeasurementTimeout, UsageError
from shardkit.measure.runner import session
from shardkit.measure.runner.material import Opened, choose_decode, is_dataset
from shardkit.measure.runner.process import PATIENCE, MeasurementProcess
from shardkit.measure.runner.rounds import Watch
from shardkit.measure.runner.spec import LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.timing import Measurement
from shardkit.measure.tune.search import (
    ENOUGH,
    GAIN,
    LEAST_ROUNDS,
    Plan,
    SearchResult,
    Tried,
    search,
)
from shardkit.measure.tune.setting import LeftOut, Setting
from shardkit.system.formatting import json_value, size
from shardkit.system.machine import OtherLoad, other_load, usable_cpus
from shardkit.system.text import printable
from shardkit.torch.engine.preflight import default_workers, local_ranks
from shardkit.torch.tuned import Tuned

_LIMIT = 2000
"""Images in the sample, unless the workers need more."""
_LEAST_BATCHES = 8
"""Batches per worker of the defaults in an epoch of the sample."""
_WARMING = 0.25
"""Fraction of the budget for reading the files once."""
_LEAST_PATIENCE = 15.0
"""Seconds that a measurement may take even if the budget is used up."""


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """Result of `tune`. Rates are images/s without a training step."""

    name: str
    split: str
    """Split that was measured, the largest; empty without splits."""
    images: int
    measured: int
    """Images that were read: all, or a sample."""
    mean_bytes: float
    """Mean stored bytes of an image."""
    cached: bool
    """Whether the files were read once before; otherwise the rates may be those of the disk."""
    default: Setting
    """What `make_loader` uses by itself."""
    ranking: list[Tried]
    """Settings that were compared with the defaults; the first is the choice."""
    stopped: list[Tried]
    """Settings that left after fewer rounds."""
    left_out: list[LeftOut]
    """Settings that could not be measured."""
    threads_excluded: str
    """Why no threads were measured, such as an unmarked transform; empty if they were."""
    step_seconds: float | None
    """Time of the training step by itself, if one was given."""
    load: OtherLoad
    """CPU use of other processes at the start."""
    seconds: float
    """Duration in all."""
    budget: float
    out_of_time: bool
    """Whether the budget ended before the search did."""
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

    def call(self) -> str:
        """Return the line to paste."""
        start = f"make_loader(dataset, {self.chosen.setting.batch_size}, shuffle=True"
        if self.is_default:
            return f"{start})"
        options = self.chosen.setting.options().items()
        texts = ", ".join(f"{name}={value!r}" for name, value in options).replace("'", '"')
        return f"{start}, options=LoaderOptions({texts}))"

    def tuned(self) -> Tuned:
        """Return the choice for ``make_loader(tuned=)``."""
        rates, speedup = self.chosen.images_per_second, self.chosen.speedup
        return Tuned(
            batch_size=self.chosen.setting.batch_size,
            settings={} if self.is_default else self.chosen.setting.options(),
            processors=usable_cpus(),
            ranks=local_ranks(),
            measured={
                "dataset": self.name,
                "processes": self.threads_excluded,
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
        split = f", split {printable(self.split)}" if self.split else ""
        part = f" (measured: {self.measured:,})" if self.measured < self.images else ""
        lines = [
            f"{printable(self.name)}{split}: {self.images:,} images{part}, "
            f"{size(self.mean_bytes)} each; took {self.seconds:.0f} s",
            f"  best      {self.chosen.setting}{' (the defaults)' if self.is_default else ''}",
            f"  why       {self._why()}",
        ]
        if self.step_seconds is not None:
            lines.append(f"  step      {self._step_words()}")
        lines += [
            "  compared  speedup over the defaults in the same rounds; images/s",
            *self._table(),
        ]
        lines += [f"  note      {printable(each)}" for each in self._notes()]
        return "\n".join([*lines, f"  paste     {self.call()}"])

    def _why(self) -> str:
        speedup, default = self.chosen.speedup, self.default
        if speedup is None:
            return f"the defaults ({default}) cannot be measured here"
        if self.headroom is not None and self.headroom >= ENOUGH:
            return f"the cheapest of the measured settings with {ENOUGH}x the speed of the step"
        if self.is_default:
            others = len(self.ranking) + len(self.stopped) - 1
            return f"none of {others} other settings is clearly faster, by {GAIN - 1:.0%} or more"
        text = f"{speedup.describe()} the speed of the defaults"
        if speedup.rounds < LEAST_ROUNDS:
            return f"{text}; too few rounds for a precise speedup"
        return text if speedup.clear else f"{text}; faster in most rounds, not in all"

    def _step_words(self) -> str:
        headroom, batch = self.headroom or 0.0, self.chosen.setting.batch_size
        needed = batch / (self.step_seconds or 1.0)
        enough = (
            "enough" if headroom >= ENOUGH else "little margin" if headroom >= 1 else "too slow"
        )
        return (
            f"{1000 * (self.step_seconds or 0.0):.1f} ms for a batch of {batch} needs "
            f"{needed:,.0f} images/s; loading has {headroom:.2f}x that: {enough}"
        )

    def _table(self) -> list[str]:
        width = max(len(str(each.setting)) for each in self.ranking)
        lines = []
        for each in self.ranking:
            ratio = "the defaults" if each.setting == self.default else ""
            if not ratio:
                ratio = each.speedup.describe() if each.speedup else "-"
            rate = each.images_per_second
            name = f"{each.setting!s:<{width}}"
            lines.append(f"    {name}  {ratio:<34}  {rate.median:>9,.0f}")
        if self.stopped:
            ratios = [each.speedup.median for each in self.stopped if each.speedup]
            span = f", at {min(ratios):.2f}x to {max(ratios):.2f}x" if ratios else ""
            others = f"{len(self.stopped)} other{'s' * (len(self.stopped) > 1)}"
            lines.append(f"    {others} stopped after fewer rounds{span}")
        reasons: dict[str, list[str]] = {}
        for left in self.left_out:
            reasons.setdefault(left.reason, []).append(str(left.setting))
        for reason, (first, *more) in reasons.items():
            also = f" and {len(more)} more" if more else ""
            lines.append(f"    not measured: {first}{also}: {printable(reason)}")
        return lines

    def _notes(self) -> list[str]:
        notes = list(self.warnings)
        if self.threads_excluded:
            notes.append(
                f"threads were not measured: {self.threads_excluded}. Mark a transform with "
                "shardkit.with_rng if it is thread-safe and releases the GIL"
            )
        if self.default.batch_size != self.chosen.setting.batch_size:
            notes.append("the batch size also affects training")
        if not self.cached:
            notes.append("the files were not read before: rates may be those of the disk")
        if self.load.disturbs:
            notes.append(f"{self.load}: on an idle machine another setting may be best")
        if self.out_of_time:
            notes.append("the budget ended before the search: a longer --budget may find more")
        return notes


def tune(  # noqa: PLR0913 - the options of the command
    dataset: str | PathLike[str],
    *,
    decode: str | None = None,
    transform: str | None = None,
    batch_sizes: Sequence[int] = (64,),
    step_ms: float | None = None,
    model: str | None = None,
    budget: float = 60.0,
    watch: Watch | None = None,
) -> TuneReport:
    """Find the fastest settings of `make_loader` for a dataset on this machine.

    Args:
        dataset: A dataset or a plain folder of images.
        decode: Image type, or an operation such as ``"CenterCrop(224)"``; None selects as the
            command does.
        transform: ``module:name`` of a transform for each image.
        batch_sizes: Samples per batch; the first is the default, others are alternatives.
        step_ms: Training step time per batch in ms, spent off the CPU. With a step, the cheapest
            settings that load fast enough are chosen.
        model: ``module:name`` of a model to train on each batch, or ``small``.
        budget: Time limit in seconds.
        watch: Called before each measurement with its name, the time, and the budget.

    Raises:
        UsageError: If the dataset, the transform or the model is invalid, or an option.
        MeasurementFailed: If nothing can be measured.
    """
    path = fspath(dataset)
    is_dataset(path)  # raises if it does not exist
    subject = Subject(
        path=path, decode=choose_decode([path], decode, transform), transform=transform
    )
    step = StepSpec(milliseconds=step_ms or 0.0, model=model)
    if not 1 <= budget < 1e6:
        raise UsageError(f"a budget of {budget:g} s is out of range; it is at least 1 s")
    if not batch_sizes or any(type(each) is not int or each < 1 for each in batch_sizes):
        raise UsageError(f"batch sizes {tuple(batch_sizes)} are not positive integers")
    if (step_ms or model) and len(set(batch_sizes)) > 1:
        raise UsageError("a training step belongs to one batch size: give one --batch-size")
    with _Tuning(subject, step, tuple(batch_sizes), budget) as tuning:
        return tuning.run(watch or (lambda text, done, total: None))


class _Tuning:
    """The process that measures, and the time that is left."""

    def __init__(
        self, subject: Subject, step: StepSpec, batch_sizes: tuple[int, ...], budget: float
    ) -> None:
        self._start, self._budget = time.monotonic(), budget
        self._load = other_load()
        self._step, self._batch_sizes = step, batch_sizes
        self._process = MeasurementProcess(subject)
        self._warnings: dict[Setting, tuple[str, ...]] = {}

    def __enter__(self) -> _Tuning:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def run(self, watch: Watch) -> TuneReport:
        """Open and cache the dataset, search, and report."""
        whole = self._process.open()
        sample, cached = self._cache(whole)
        default = self._default()
        seconds = self._step_seconds(default)
        excluded = sample.processes if default.engine == "process" else ""
        plan = Plan(
            default=default,
            engines=("process",) if excluded else ("thread", "process"),
            batch_sizes=self._batch_sizes[1:],
            needed=default.batch_size / seconds if seconds else None,
            budget=max(1.0, self._left()),
            images=sample.images,
        )
        found: SearchResult = search(self._measure, plan, watch=watch)
        return TuneReport(
            name=self._process.subject.name,
            split=whole.split,
            images=whole.images,
            measured=sample.images,
            mean_bytes=whole.bytes / max(1, whole.total),
            cached=cached,
            default=default,
            ranking=found.ranking,
            stopped=found.stopped,
            left_out=found.left_out,
            threads_excluded=excluded,
            step_seconds=seconds,
            load=self._load,
            seconds=time.monotonic() - self._start,
            budget=self._budget,
            out_of_time=found.out_of_time,
            warnings=self._warnings.get(found.ranking[0].setting, ()),
        )

    def _left(self) -> float:
        return self._start + self._budget - time.monotonic()

    def _cache(self, whole: Opened) -> tuple[Opened, bool]:
        """Read all images, or a sample of many, once; return what is measured, and if it worked.

        Otherwise the settings that are measured first would be slower.
        """
        limit = max(_LIMIT, _LEAST_BATCHES * default_workers() * self._batch_sizes[0])
        opened = whole
        if limit < whole.images:
            opened = self._process.open(dataclasses.replace(self._process.subject, limit=limit))
        self._process.patience = max(_WARMING * self._budget, _LEAST_PATIENCE)
        try:
            self._process.call(session.warm)
        except MeasurementTimeout:  # a slow disk; the first measurement reports other problems
            return opened, False
        return opened, True

    def _default(self) -> Setting:
        """Return what `make_loader` uses by itself."""
        size = self._batch_sizes[0]
        spec = LoaderSpec(batch_size=size)
        try:
            found = self._look(spec, 0.1)
        except MeasurementFailed as error:
            # There may be no memory for so many workers; what fails with one fails with all.
            with contextlib.suppress(MeasurementFailed):
                found = self._look(spec.changed(num_workers=1), 0.1)
                return Setting(engine=found.engine, workers=default_workers(), batch_size=size)
            raise error from None
        return Setting(engine=found.engine, workers=max(1, found.workers), batch_size=size)

    def _step_seconds(self, default: Setting) -> float | None:
        if self._step.milliseconds:
            return self._step.milliseconds / 1000
        if self._step.model is None:
            return None
        return float(
            self._process.call(session.step_seconds, loader=default.loader(), step=self._step)
        )

    def _measure(self, setting: Setting, seconds: float) -> float:
        found = self._look(setting.loader(), seconds)
        for warning in found.warnings:
            if warning.startswith("loading may fail"):  # too little shared memory, for example
                raise MeasurementFailed(warning)
        if not found.images:
            raise MeasurementFailed(f"it returned no batch in {seconds:.1f} s")
        self._warnings[setting] = found.warnings
        return found.rate

    def _look(self, spec: LoaderSpec, seconds: float) -> Measurement:
        """Measure a loader, no longer than the budget lasts."""
        self._process.patience = min(PATIENCE, max(self._left(), _LEAST_PATIENCE))
        return self._process.measure(spec, StopCondition(seconds=seconds))
