"""The result of `shardkit tune`: the choice, the reason for it, and all that was compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardkit.measure.runner.material import SubjectInfo
from shardkit.measure.runner.other_load import OtherLoad
from shardkit.measure.runner.spec import LoaderSpec
from shardkit.measure.tune.search import ENOUGH, GAIN, LEAST_ROUNDS, SearchResult, Tried, name_of
from shardkit.system.machine import usable_cpus
from shardkit.system.numbers import json_value
from shardkit.system.text import amount, printable
from shardkit.torch.engine.preflight import local_ranks
from shardkit.torch.tuned import Tuned

_ROWS = 6
"""LoaderSpecs in the table."""

_OVERRUN = 1.1
"""A run that exceeds its budget by this factor says so."""


@dataclass(frozen=True, kw_only=True)
class TuneReport(SearchResult):
    """Result of `tune`. Rates are images/s without a training step."""

    opened: SubjectInfo
    """The images that were read: all, or a sample."""
    cached: bool
    """Whether the files were read once beforehand; if not, the rates may be limited by the disk."""
    default: LoaderSpec
    """Default setting of `make_loader`."""
    step_seconds: float | None
    """Duration of the training step alone, if one was given."""
    load: OtherLoad
    """CPU use of other processes at the start."""
    seconds: float
    """Total duration."""
    budget: float
    """Time limit, in seconds; the first measurements may exceed it."""
    warnings: tuple[str, ...]
    """Warnings of the chosen loader."""
    loops: list[Tried] = field(default_factory=list)
    """Training loops with ``model``: the choice by loading, and others that load as fast but may
    disturb the loop less. Speedups are relative to the choice by loading; the first loop is the
    final choice. Empty without a model."""

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
        """Whether the defaults are kept."""
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
        coverage = f" (measured: {opened.images:,})" if opened.images < opened.total else ""
        return "\n".join(
            [
                f"{opened.title}{coverage}; took {self.seconds:.0f} s",
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
        best = self.loops[0].speedup if self.setting != self.chosen.setting else None
        return self._why_chosen() + (f"; the training loop: {best.describe()}" if best else "")

    def _why_chosen(self) -> str:
        speedup = self.chosen.speedup
        if speedup is None:
            return f"the defaults ({name_of(self.default)}) cannot be measured here"
        if self.headroom is not None and self.headroom >= ENOUGH:
            return f"the cheapest measured setting that loads at {ENOUGH}x the speed of the step"
        if self.chosen.setting == self.default:
            others = len(self.ranking) - 1
            none = (
                "the other setting is not" if others == 1 else f"none of {others} other settings is"
            )
            return f"{none} clearly faster (by {GAIN - 1:.0%} or more)"
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
            "the files were not cached: rates may be those of the disk": not self.cached,
            f"{self.load}: on an idle machine, another setting may be best": self.load.disturbs,
            f"the run took longer than its {self.budget:g} "
            "s budget: opening the data and the first two "
            "measurements are never cut short": self.seconds > _OVERRUN * self.budget,
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
