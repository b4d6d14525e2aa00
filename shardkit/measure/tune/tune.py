"""`shardkit tune`: the search for a loader's best settings, with a process that measures them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from shardkit.errors import MeasurementFailed, UsageError
from shardkit.measure.runner.gil import HOLDS
from shardkit.measure.runner.process import PATIENCE, MeasurementProcess, Seen
from shardkit.measure.runner.spec import LoaderSpec, Subject
from shardkit.measure.runner.steps import StepSpec
from shardkit.measure.runner.timing import StopCondition
from shardkit.measure.tune.candidate import Candidate
from shardkit.measure.tune.ledger import IN_TURN, Rates, Ratio
from shardkit.measure.tune.limits import LeftOut, room_here
from shardkit.measure.tune.search import SearchResult, search
from shardkit.measure.tune.trials import Plan, Sight, Watch
from shardkit.system.machine import OtherLoad, other_load, usable_cpus
from shardkit.torch.engine.preflight import default_workers, local_ranks
from shardkit.torch.tuned import TUNED_FIELDS, Tuned

BATCH_SIZES = (32, 64, 128, 256)
"""That are tried if none is asked for."""

LIMIT = 2000
"""Images of a sample, unless workers or the time that there is ask for more."""
_WARMING = 0.25
"""Part of the budget in which the files are read once."""
_DISK = 20e6
"""Bytes a second that a disk is taken to give: slow ones give more."""
_LEAST_BATCHES = 8
"""That an epoch of a sample has for each worker of the defaults."""
_LEAST_PATIENCE = 5.0
_HELD_SECONDS = 0.3
_LEAST_BUDGET = 1.0
"""Seconds that a search takes at the least, however long its process took to start."""
_START_METHODS = ("forkserver", "spawn")
"""Beside ``auto``, which forks wherever that is safe: a fork is never advised where it is not."""


@dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What is to be tuned."""

    subject: Subject
    step: StepSpec = field(default_factory=StepSpec)
    """The training step that loading has to keep up with, if it is known."""
    budget: float = 60.0
    """Seconds that all may take."""
    batch_sizes: tuple[int, ...] = ()
    """Those to choose from; one is fixed; none leaves the choice open."""

    def __post_init__(self) -> None:
        if not 1 <= self.budget < 1e6:
            raise UsageError(f"a budget of {self.budget:g} s is out of range: 1 s is the least")
        if any(type(each) is not int or each < 1 for each in self.batch_sizes):
            raise UsageError(f"batch sizes {self.batch_sizes} are not integers from 1 on")
        if self.has_step and len(set(self.batch_sizes)) > 1:
            raise UsageError(
                "the time of a training step belongs to one batch size: name one, or leave the "
                "step out"
            )

    @property
    def has_step(self) -> bool:
        """Whether there is a training step to keep up with."""
        return bool(self.step.milliseconds or self.step.model)

    @property
    def first_size(self) -> int:
        """The batch size that is measured first, and stays unless another gains."""
        return 64 if not self.batch_sizes or 64 in self.batch_sizes else self.batch_sizes[0]

    @property
    def other_sizes(self) -> tuple[int, ...]:
        """Those that may be taken instead."""
        if self.has_step:
            return ()
        sizes = self.batch_sizes or BATCH_SIZES
        return tuple(sorted(set(sizes) - {self.first_size}))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One candidate that was measured."""

    candidate: Candidate
    rates: Rates


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What was seen of a training loop."""

    rate: float
    """Images/s."""
    waiting: float
    """Part of the time in which it waited for data, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """What was found; rates are images/s without a training step, if nothing else is said."""

    name: str
    split: str
    """Which split was measured, the largest; nothing if there are none."""
    images: int
    mean_bytes: float
    """Stored bytes of an image."""
    measured: int
    """Images of them that were read: a sample, if not all."""
    resident: float | None
    """Part of the files that was in memory when it began, 0 to 1; None if it cannot be known."""
    from_memory: bool
    """Whether what is measured was read once before; else rates may be those of the disk."""
    chosen: Tried
    default: Tried | None
    """What `make_loader` does by itself; None if that fails."""
    gain: Ratio | None
    """How much faster the choice is than the default."""
    first: float
    """Seconds to the first batch of the choice, the start of workers included."""
    batch_bytes: int
    """Of a batch of the choice."""
    held: float | None
    """Part of the time in which making a sample holds the interpreter's lock, 0 to 1."""
    has_transform: bool
    processes: str
    """What asks for worker processes, as a transform that may be unsafe in threads; or nothing."""
    step_seconds: float | None
    """The training step by itself."""
    in_loop: Loop | None
    """The choice with the training step after each batch."""
    starts: dict[str, float]
    """Seconds to the first batch by the start methods that were tried."""
    tried: list[Tried]
    """All that were measured, the fastest first."""
    left_out: list[LeftOut]
    warnings: list[str]
    load: OtherLoad
    """What others did when it began."""
    seconds: float
    """That all took."""
    budget: float
    out_of_time: bool
    """Whether something was not looked at, for want of time."""

    @property
    def is_default(self) -> bool:
        """Whether nothing needs to be set."""
        return self.default is not None and self.chosen.candidate == self.default.candidate

    @property
    def headroom(self) -> float | None:
        """How many times what the training step uses up could be loaded."""
        if self.step_seconds is None:
            return None
        return self.chosen.rates.median * self.step_seconds / self.chosen.candidate.batch_size

    @property
    def needs_processes(self) -> bool:
        """Whether making a sample holds the interpreter's lock, so that threads cannot share it."""
        return self.held is not None and self.held >= HOLDS

    def call(self) -> str:
        """Return the line to paste."""
        candidate = self.chosen.candidate
        start = f"make_loader(dataset, {candidate.batch_size}, shuffle=True"
        if self.is_default:
            return f"{start})"
        options = ", ".join(f"{name}={_quoted(v)}" for name, v in candidate.options().items())
        return f"{start}, options=LoaderOptions({options}))"

    def tuned(self) -> Tuned:
        """Return the choice as ``make_loader(tuned=)`` takes it."""
        options = {} if self.is_default else self.chosen.candidate.options()
        rates = self.chosen.rates
        measured = {
            "dataset": self.name,
            "processes": self.processes,
            "images_per_second": {"median": rates.median, "low": rates.low, "high": rates.high},
            "gain": self.gain and self.gain.middle,
            "headroom": self.headroom,
        }
        return Tuned(
            batch_size=self.chosen.candidate.batch_size,
            settings={name: options[name] for name in TUNED_FIELDS if name in options},
            processors=usable_cpus(),
            ranks=local_ranks(),
            measured=measured,
        )


def tune(request: TuneRequest, watch: Watch | None = None) -> TuneReport:
    """Find the settings of `make_loader` that are best here.

    Args:
        request: What is to be tuned.
        watch: Told after each look.

    Raises:
        UsageError: If the subject, the transform or the model is not what it should be.
        MeasurementFailed: If nothing can be measured.
    """
    with _Bench(request) as bench:
        return bench.run(watch or (lambda tick: None))


class _Bench:
    """The process that measures, begun anew whenever it ends."""

    def __init__(self, request: TuneRequest) -> None:
        self._request = request
        self._begun = time.monotonic()
        self._load = other_load()
        self._subject = request.subject
        self._served = MeasurementProcess(self._subject)
        self._warnings: dict[str, list[str]] = {}
        self._batch_bytes: dict[Candidate, int] = {}

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._served.close()

    def run(self, watch: Watch) -> TuneReport:
        """Look at the load, search, and tell what was found."""
        request = self._request
        whole = self._served.open()
        self._served.patience = max(self._left(), 2 * _LEAST_PATIENCE)
        resident = self._resident()
        subject, from_memory = self._warmed(whole)
        default = self._default()
        held = self._held()
        seconds = self._step_seconds(default)
        plan = Plan(
            default=default,
            batch_sizes=request.other_sizes,
            needed=default.batch_size / seconds if seconds else None,
            held=held,
            processes=subject["processes"],
            # What is left out is the time that is needed to measure with the step, in the end.
            budget=max(_LEAST_BUDGET, (0.85 if seconds else 0.97) * self._left()),
            room=room_here(subject["images"]),
            start_methods=_START_METHODS,
        )
        found = search(self._measure, plan, watch=watch)
        chosen = _tried(found, found.chosen)
        return TuneReport(
            name=request.subject.name,
            split=whole["split"],
            images=whole["images"],
            measured=subject["images"],
            mean_bytes=whole["mean_bytes"],
            resident=resident,
            from_memory=from_memory,
            chosen=chosen,
            default=_tried(found, default) if default in found.ledger else None,
            gain=found.gain,
            first=found.firsts[found.chosen],
            batch_bytes=self._batch_bytes[found.chosen],
            held=held,
            has_transform=request.subject.transform is not None,
            processes=subject["processes"],
            step_seconds=seconds,
            in_loop=self._in_loop(found.chosen),
            starts=_starts(found),
            tried=_all_tried(found),
            left_out=found.left_out,
            warnings=self._warnings.get(str(found.chosen.loading()), []),
            load=self._load,
            seconds=time.monotonic() - self._begun,
            budget=request.budget,
            out_of_time=found.out_of_time,
        )

    def _left(self) -> float:
        return self._begun + self._request.budget - time.monotonic()

    def _resident(self) -> float | None:
        with contextlib.suppress(MeasurementFailed):
            return self._served.resident()
        self._served.restart_if_ended()
        return None

    def _warmed(self, whole: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Have the files in memory before the first look, if all of them fit there.

        Fresh data would be slow for those that are looked at first. Of many images a sample is
        read, and measured from then on. It takes what is known of all, and returns what is known
        of those that are measured, and whether they are in memory.
        """
        if whole["bytes"] > (room_here(whole["images"]).memory or 0):
            return whole, False
        seconds = _WARMING * self._request.budget
        sample = max(
            LIMIT,
            _LEAST_BATCHES * default_workers() * self._request.first_size,
            int(seconds * _DISK / max(1.0, whole["mean_bytes"])),
        )
        try:
            if sample < whole["images"]:
                self._subject = dataclasses.replace(self._subject, limit=sample)
                self._served.subject = self._subject
                whole = self._served.open()
            self._served.patience = max(seconds, _LEAST_PATIENCE)
            self._served.warm()
        except MeasurementFailed:  # a slow disk; what makes no samples is told by the first look
            self._served.restart_if_ended()
            return whole, False
        finally:
            self._served.patience = max(self._left(), 2 * _LEAST_PATIENCE)
        return whole, True

    def _default(self) -> Candidate:
        """Return what `make_loader` does by itself."""
        size = self._request.first_size
        loading = LoaderSpec(batch_size=size)
        try:
            seen = self._look(loading, 0.1)
        except MeasurementFailed as error:
            # There may be no room for so many workers; what fails with one fails with all.
            with contextlib.suppress(MeasurementFailed):
                seen = self._look(loading.changed(num_workers=1), 0.1)
                return Candidate(engine=seen.engine, workers=default_workers(), batch_size=size)
            raise error from None
        return Candidate(engine=seen.engine, workers=max(1, seen.workers), batch_size=size)

    def _held(self) -> float | None:
        with contextlib.suppress(MeasurementFailed):
            return self._served.held(_HELD_SECONDS)
        self._served.restart_if_ended()
        return None

    def _step_seconds(self, default: Candidate) -> float | None:
        if not self._request.has_step:
            return None
        if self._request.step.milliseconds:
            return self._request.step.milliseconds / 1000
        return self._served.step_seconds(default.loading(), self._request.step)

    def _measure(self, candidate: Candidate, seconds: float) -> Sight:
        seen = self._look(candidate.loading(), seconds)
        found = seen.look
        self._batch_bytes[candidate] = found.batch_bytes
        return Sight(
            rate=found.rate,
            first=found.first,
            sample_bytes=found.batch_bytes / candidate.batch_size,
            worker_bytes=found.worker_unique or found.worker_peak,
        )

    def _look(self, loading: LoaderSpec, seconds: float, step: StepSpec | None = None) -> Seen:
        """Look at a loader, no longer than the budget lasts."""
        self._served.restart_if_ended()
        self._served.patience = min(PATIENCE, max(self._left(), _LEAST_PATIENCE))
        seen = self._served.look(loading, StopCondition(seconds=seconds), step)
        self._warnings[str(loading)] = seen.warnings
        return seen

    def _in_loop(self, candidate: Candidate) -> Loop | None:
        """Look at a training loop, if there is a step and time is left."""
        seconds = min(2.0, self._left() / 1.5)
        if not self._request.has_step or seconds < 0.05:
            return None
        with contextlib.suppress(MeasurementFailed):
            seen = self._look(candidate.loading(), seconds, self._request.step).look
            return Loop(rate=seen.rate, waiting=min(1.0, sum(seen.waits) / seen.seconds))
        return None


def _tried(found: SearchResult, candidate: Candidate) -> Tried:
    """Return a candidate with what was measured last, in turn."""
    return Tried(candidate=candidate, rates=found.ledger.rates(candidate, IN_TURN))


def _all_tried(found: SearchResult) -> list[Tried]:
    """Return all that were measured, the fastest first, with the rates that the report shows."""
    tried = [
        _tried(found, each)
        for each in found.ledger.candidates()
        if each.start_method == "auto"  # others had a look at their start alone
    ]
    return sorted(tried, key=lambda each: -each.rates.median)


def _starts(found: SearchResult) -> dict[str, float]:
    """Return the seconds to the first batch by each start method of the choice's kind."""
    ways = {
        each.start_method: seconds
        for each, seconds in found.firsts.items()
        if each.changed(start_method="auto") == found.chosen.changed(start_method="auto")
    }
    return ways if found.chosen.engine == "process" else {}


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
