"""`shardkit tune`: measure settings of `make_loader` and report the fastest."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath

import torch

from shardkit.errors import MeasurementFailed, MeasurementTimeout, UsageError
from shardkit.measure.runner import session
from shardkit.measure.runner.material import is_dataset
from shardkit.measure.runner.other_load import other_load
from shardkit.measure.runner.process import PATIENCE, MeasurementProcess
from shardkit.measure.runner.rounds import Watch
from shardkit.measure.runner.spec import LoadCost, LoaderSpec, StepSpec, StopCondition
from shardkit.measure.runner.workload import Workload
from shardkit.measure.tune.report import TuneReport
from shardkit.measure.tune.search import Plan, compare, loop_variants, search
from shardkit.options import option, takes
from shardkit.torch.engine.preflight import default_workers, suited_engine

_LIMIT = 2000
"""Images in the sample."""
_WARMING = 0.25
"""Fraction of the budget for reading the files once."""
_FIRST = 0.04
_MOST_OF_FIRST = 1.0
"""Fraction of the budget, and most seconds, for measuring what loading costs in one thread."""
_BATCH_SECONDS = 0.1
"""Longest batch of one worker that is measured: of a slow loader, smaller ones than the user's."""
_LOOP_PART = 0.35
_STEPS = 3
"""Fraction of the budget for the training loop with a model; least steps of a measurement."""
_LEAST_PATIENCE = 15.0
"""Seconds that a measurement may take even if the budget is used up."""


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

    With ``step_ms`` or ``model``, it chooses the cheapest settings that load fast enough. With
    ``model``, it then runs the training loop to decide about the priority, the helper and pinned
    memory.

    Args:
        dataset: A dataset or a plain folder of images.

    Raises:
        UsageError: If the dataset, the transform, the model or an option is invalid.
        MeasurementFailed: If nothing can be measured.
    """
    budget = options.budget
    batch_size = options.batch_size
    step = options.step
    if not 1 <= budget < 1e6:
        raise UsageError(f"the budget must be at least 1 s, not {budget:g} s")
    path = fspath(dataset)
    is_dataset(path)  # raises if it does not exist
    (subject,) = options.subjects([path], _LIMIT)
    load = other_load()
    with MeasurementProcess(subject) as process:
        trials = _Trials(process, budget)
        opened = process.open()
        cached = trials.warm()
        usual, _ = suited_engine(opened.processes or None)
        default = LoaderSpec(engine=usual, batch_size=batch_size, num_workers=default_workers())
        step_seconds = step.milliseconds / 1000 or None
        if step.model is not None:
            step_seconds = process.call(session.step_seconds, loader=default, step=step)
        cost = trials.cost(batch_size)
        for_loop = _LOOP_PART * budget * (step.model is not None)
        plan = Plan(
            default=default,
            engines=tuple(dict.fromkeys((usual, "process"))),
            needed=batch_size / step_seconds if step_seconds else None,
            budget=max(1.0, trials.remaining - for_loop),
            images=opened.total,
            cost=cost,
        )
        result = search(trials.rate, plan, watch=options.watch)
        loops = []
        if for_loop and step_seconds is not None:
            best = result.ranking[0].setting
            plan = dataclasses.replace(plan, default=best, needed=None, budget=trials.remaining)
            others = loop_variants(best, has_cuda=torch.cuda.is_available())
            rate = partial(trials.loop_rate, step=step, step_seconds=step_seconds)
            loops = compare(rate, plan, others, watch=partial(_watch_loop, options.watch))
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


def _watch_loop(watch: Watch, text: str, done: float, total: float) -> None:
    watch(f"training loop: {text}", done, total)


class _Trials:
    """Measurements within a budget, which starts now."""

    def __init__(self, process: MeasurementProcess, budget: float) -> None:
        self._process = process
        self._budget = budget
        self._start = time.monotonic()
        self.warnings: dict[LoaderSpec, tuple[str, ...]] = {}
        """Warnings of the loaders that were measured."""
        self._batch_size = 1

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def remaining(self) -> float:
        """Seconds until the budget ends."""
        return self._budget - self.elapsed

    def warm(self) -> bool:
        """Read the files once, or the settings measured first would be slower; return if done."""
        self._process.patience = max(_WARMING * self._budget, _LEAST_PATIENCE)
        try:
            self._process.call(session.warm)
        except MeasurementTimeout:  # a slow disk; the first measurement reports other problems
            return False
        return True

    def cost(self, batch_size: int) -> LoadCost:
        """Return what loading an image costs; the batches that `rate` loads depend on it."""
        seconds = min(_FIRST * self._budget, _MOST_OF_FIRST)
        self._process.patience = max(self.remaining, _LEAST_PATIENCE)
        cost = self._process.call(session.load_cost, seconds=seconds)
        self._batch_size = min(batch_size, max(1, round(_BATCH_SECONDS / cost.seconds)))
        return cost

    def rate(self, setting: LoaderSpec, seconds: float) -> float:
        """Return the images/s of a loader."""
        stop = StopCondition(seconds=seconds, turn=setting.workers)
        return self._measured(setting, stop, StepSpec(), self._batch_size)

    def loop_rate(
        self, setting: LoaderSpec, seconds: float, *, step: StepSpec, step_seconds: float
    ) -> float:
        """Return the images/s of a training loop."""
        stop = StopCondition(seconds=max(seconds, _STEPS * step_seconds))
        return self._measured(setting, stop, step, setting.batch_size)

    def _measured(
        self, setting: LoaderSpec, stop: StopCondition, step: StepSpec, batch_size: int
    ) -> float:
        self._process.patience = min(PATIENCE, max(self.remaining, _LEAST_PATIENCE))
        loader = dataclasses.replace(setting, batch_size=batch_size)
        measurement = self._process.measure(loader, stop, step)
        for warning in measurement.warnings:
            # Shared memory may be too small, for example.
            if warning.startswith(("loading may fail", "using threads")):
                raise MeasurementFailed(warning)
        self.warnings[setting] = measurement.warnings
        return measurement.rate
